// See page_placement.h. The order is forced: a policy acts on pages that do not exist yet,
// MADV_COLLAPSE works on a memfd only once its pages exist, verification needs the final pages, and
// locking before collapsing would pin the small ones.
#include "cpu_worker/page_placement.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <numa.h>
#include <numaif.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace lode {
namespace {

// From the kernel's ABI; older headers lack them.
constexpr int kMadvPopulateWrite = 23;  // Linux 5.14
constexpr int kMadvCollapse = 25;       // Linux 6.1
constexpr size_t kSliceBytes = size_t{256}
                               << 20;  // between two looks at `stop`: some 100 ms of page clearing
constexpr size_t kHugeBytes = size_t{2} << 20;
constexpr size_t kSamplesMax =
    512;  // pages asked about: one percent steps need 100, half a thousand cost nothing

void BindToNode(uint8_t* data, size_t bytes, int node, PlacementReport* report) {
  report->numa = "no policy";
  if (node < 0 || numa_available() < 0) return;
  unsigned long mask[16] = {};
  constexpr unsigned long kBits = 8 * sizeof(unsigned long);
  if (static_cast<size_t>(node) >= sizeof(mask) * 8) return;
  mask[static_cast<size_t>(node) / kBits] |= 1ul << (static_cast<size_t>(node) % kBits);
  // Preferred, not bound: a node that is short of memory makes the worker slower, which the
  // verification reports; it does not kill it.
  if (mbind(data, bytes, MPOL_PREFERRED, mask, sizeof(mask) * 8, 0) != 0) {
    report->warnings.push_back(
        fmt::format("mbind to NUMA node {} failed: {}; pages go where the kernel puts them", node,
                    std::strerror(errno)));
  }
}

Status Populate(int fd, uint8_t* data, size_t bytes,
                const std::function<void(uint64_t, uint64_t)>& progress,
                const std::atomic<bool>& stop) {
  for (size_t at = 0; at < bytes; at += kSliceBytes) {
    if (stop.load(std::memory_order_relaxed))
      return Error(StatusCode::kCancelled, "asked to end while memory was populated");
    const size_t n = std::min(kSliceBytes, bytes - at);
    int error = madvise(data + at, n, kMadvPopulateWrite) == 0 ? 0 : errno;
    // An older kernel: allocating through the file also says no instead of raising SIGBUS at the
    // first touch.
    if (error == EINVAL)
      error = fallocate(fd, 0, static_cast<off_t>(at), static_cast<off_t>(n)) == 0 ? 0 : errno;
    if (error != 0) {
      return ResourceExhausted(
          "memory for the expert arena ran out at {} of {} MiB ({}); lower ram_budget, free "
          "memory, or raise the memory limit of the service (MemoryMax)",
          at >> 20, bytes >> 20, std::strerror(error));
    }
    progress(at + n, bytes);
  }
  return OkStatus();
}

// Transparent huge pages, 2 MiB at a time; reports the share that worked.
Status Collapse(int fd, uint8_t* data, size_t bytes, const PlacementOptions& options,
                PlacementReport* report, const std::atomic<bool>& stop) {
  struct statfs fs = {};
  if (fstatfs(fd, &fs) == 0 && fs.f_type == HUGETLBFS_MAGIC) {  // the pool's own pages
    report->pages = fmt::format("{} KiB (hugetlb)", fs.f_bsize >> 10);
    return OkStatus();
  }
  report->pages = "4 KiB";
  const uintptr_t begin =
      (reinterpret_cast<uintptr_t>(data) + kHugeBytes - 1) / kHugeBytes * kHugeBytes;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kHugeBytes * kHugeBytes;
  if (!options.collapse || begin >= end) return OkStatus();
  size_t done = 0;
  const size_t total = (end - begin) / kHugeBytes;
  for (uintptr_t at = begin; at < end; at += kHugeBytes) {
    if (stop.load(std::memory_order_relaxed))
      return Error(StatusCode::kCancelled, "asked to end while huge pages were made");
    const int rc = madvise(reinterpret_cast<void*>(at), kHugeBytes, kMadvCollapse);
    if (rc == 0) ++done;
    if (rc != 0 && errno == EINVAL && at == begin)
      break;  // kernel without it, or huge pages are off for shared memory
  }
  if (done > 0) report->pages = fmt::format("2 MiB ({} %)", done * 100 / total);
  if (done == 0)
    report->warnings.push_back(
        "no huge pages for the arena; reading weights is slower (kernel older than 6.1, or no free "
        "2 MiB blocks)");
  return OkStatus();
}

// Asks the kernel where sampled pages lie.
void VerifyNode(uint8_t* data, size_t bytes, int node, PlacementReport* report) {
  if (node < 0 || numa_available() < 0) return;
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t count = std::min(kSamplesMax, (bytes + page - 1) / page);
  std::vector<void*> pages(count);
  std::vector<int> where(count, -1);
  for (size_t i = 0; i < count; ++i) pages[i] = data + (bytes / count * i) / page * page;
  if (move_pages(0, count, pages.data(), nullptr, where.data(), 0) != 0) {
    report->numa = fmt::format("not verified: {}", std::strerror(errno));
    return;
  }
  const size_t right = static_cast<size_t>(std::count(where.begin(), where.end(), node));
  report->numa = fmt::format("node {}: {} % of {} sampled pages", node, right * 100 / count, count);
  if (right * 10 < count * 9) {  // below 90 % the missing share is felt
    report->warnings.push_back(fmt::format(
        "only {} of {} sampled pages lie on NUMA node {}; free memory there and restart", right,
        count, node));
  }
}

void Lock(uint8_t* data, size_t bytes, PlacementReport* report) {
  if (mlock(data, bytes) == 0) {
    report->locked = true;
    return;
  }
  const int error = errno;
  rlimit limit = {};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  report->warnings.push_back(
      fmt::format("cannot lock {} MiB of expert weights ({}); the limit is {} KiB: set "
                  "LimitMEMLOCK=infinity in the unit or run `ulimit -l unlimited`",
                  bytes >> 20, std::strerror(error),
                  limit.rlim_cur == RLIM_INFINITY ? UINT64_MAX >> 10 : limit.rlim_cur >> 10));
}

}  // namespace

StatusOr<PlacementReport> PlacePages(int fd, uint8_t* data, size_t bytes,
                                     const PlacementOptions& options,
                                     const std::function<void(uint64_t, uint64_t)>& progress,
                                     const std::atomic<bool>& stop) {
  PlacementReport report;
  BindToNode(data, bytes, options.numa_node, &report);
  LODE_RETURN_IF_ERROR(Populate(fd, data, bytes, progress, stop));
  LODE_RETURN_IF_ERROR(Collapse(fd, data, bytes, options, &report, stop));
  VerifyNode(data, bytes, options.numa_node, &report);
  if (options.lock) Lock(data, bytes, &report);
  return report;
}

}  // namespace lode
