// See page_placement.h. The order is forced: a policy acts on pages that do not exist yet,
// MADV_COLLAPSE works on a memfd only once its pages exist, verification needs the final pages, and
// locking before collapsing would pin the small ones.
#include "cpu_worker/page_placement.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "shared/shm/memory_lock.h"

namespace lode {
namespace {

constexpr size_t kSliceBytes = size_t{256}
                               << 20;  // between two looks at `stop`: some 100 ms of page clearing
constexpr size_t kSamplesMax =
    512;  // pages asked about: one percent steps need 100, half a thousand cost nothing
constexpr int kCollapseTries = 3;  // the kernel says EAGAIN when a page was busy for a moment

void SetPolicy(PageSystem& system, uint8_t* data, size_t bytes, const std::vector<uint32_t>& nodes,
               PlacementReport* report) {
  report->numa = "no policy";
  if (nodes.empty() || !system.NumaAvailable()) return;
  if (const int error = system.SetPolicy(data, bytes, nodes); error != 0) {
    report->warnings.push_back(
        fmt::format("no memory policy for NUMA node {}: {}; pages go where the kernel puts them",
                    fmt::join(nodes, "+"), std::strerror(error)));
  }
}

Status Populate(PageSystem& system, int fd, uint8_t* data, size_t bytes,
                const std::function<void(uint64_t, uint64_t)>& progress,
                const std::atomic<bool>& stop) {
  for (size_t at = 0; at < bytes; at += kSliceBytes) {
    if (stop.load(std::memory_order_relaxed))
      return Error(StatusCode::kCancelled, "asked to end while memory was populated");
    const size_t n = std::min(kSliceBytes, bytes - at);
    if (const int error = system.Populate(fd, data, at, n); error != 0) {
      return ResourceExhausted(
          "memory for the expert arena ran out at {} of {} MiB ({}); lower ram_budget, free "
          "memory, or raise the memory limit of the service (MemoryMax)",
          at >> 20, bytes >> 20, std::strerror(error));
    }
    progress(at + n, bytes);
  }
  return OkStatus();
}

// Transparent huge pages, 2 MiB at a time; reports the share that is really mapped by them.
Status Collapse(PageSystem& system, int fd, uint8_t* data, size_t bytes,
                const PlacementOptions& options, PlacementReport* report,
                const std::atomic<bool>& stop) {
  if (const size_t page = system.HugeTlbPageBytes(fd); page > 0) {
    report->pages = fmt::format("{} KiB (hugetlb)", page >> 10);
    return OkStatus();
  }
  report->pages = "4 KiB";
  const uintptr_t begin =
      (reinterpret_cast<uintptr_t>(data) + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  const uintptr_t end =
      (reinterpret_cast<uintptr_t>(data) + bytes) / kHugePageBytes * kHugePageBytes;
  if (!options.collapse || begin >= end) return OkStatus();
  int first_error = 0;
  for (uintptr_t at = begin; at < end; at += kHugePageBytes) {
    if (stop.load(std::memory_order_relaxed))
      return Error(StatusCode::kCancelled, "asked to end while huge pages were made");
    int error = EAGAIN;
    for (int i = 0; i < kCollapseTries && error == EAGAIN; ++i)
      error = system.Collapse(reinterpret_cast<uint8_t*>(at));
    if (error != 0 && first_error == 0) first_error = error;
    // A kernel without it, or huge pages are off for shared memory: no piece will fare better.
    if (error == EINVAL && at == begin) break;
  }
  const size_t huge =
      system.HugeMapped(reinterpret_cast<uint8_t*>(begin), static_cast<size_t>(end - begin));
  const size_t percent = huge * 100 / static_cast<size_t>(end - begin);  // 100 means all
  if (huge > 0) report->pages = fmt::format("2 MiB ({} %)", percent);
  if (percent < 90) {  // below this the missing share is felt
    report->warnings.push_back(fmt::format(
        "{} % of the memory is in 2 MiB pages, reading it is slower ({}); needs Linux 6.1 and free "
        "2 MiB blocks: compact memory (echo 1 > /proc/sys/vm/compact_memory), or reserve pages "
        "(vm.nr_hugepages) and set huge_pages = \"hugetlb\"",
        percent, first_error != 0 ? std::strerror(first_error) : "the kernel split them again"));
  }
  return OkStatus();
}

// Asks the kernel where sampled pages lie.
void VerifyNodes(PageSystem& system, uint8_t* data, size_t bytes,
                 const std::vector<uint32_t>& nodes, PlacementReport* report) {
  if (nodes.empty() || !system.NumaAvailable()) return;
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t count = std::min(kSamplesMax, (bytes + page - 1) / page);
  std::vector<void*> pages(count);
  std::vector<int> where(count, -1);
  for (size_t i = 0; i < count; ++i) pages[i] = data + (bytes / count * i) / page * page;
  if (const int error = system.NodesOf(pages, &where); error != 0) {
    report->numa = fmt::format("not verified: {}", std::strerror(error));
    return;
  }
  const size_t right = static_cast<size_t>(std::count_if(where.begin(), where.end(), [&](int node) {
    return node >= 0 &&
           std::find(nodes.begin(), nodes.end(), static_cast<uint32_t>(node)) != nodes.end();
  }));
  const std::string name = fmt::format("{}", fmt::join(nodes, "+"));
  report->numa = fmt::format("node {}: {} % of {} sampled pages", name, right * 100 / count, count);
  if (right * 10 < count * 9) {  // below 90 % the missing share is felt
    report->warnings.push_back(fmt::format(
        "only {} of {} sampled pages lie on NUMA node {}; free memory there and restart", right,
        count, name));
  }
}

}  // namespace

StatusOr<PlacementReport> PlacePages(int fd, uint8_t* data, size_t bytes,
                                     const PlacementOptions& options,
                                     const std::function<void(uint64_t, uint64_t)>& progress,
                                     const std::atomic<bool>& stop) {
  PageSystem& system = options.system != nullptr ? *options.system : LinuxPages();
  PlacementReport report;
  SetPolicy(system, data, bytes, options.numa_nodes, &report);
  LODE_RETURN_IF_ERROR(Populate(system, fd, data, bytes, progress, stop));
  LODE_RETURN_IF_ERROR(Collapse(system, fd, data, bytes, options, &report, stop));
  VerifyNodes(system, data, bytes, options.numa_nodes, &report);
  if (options.lock) {
    const int error = system.Lock(data, bytes);
    report.locked = error == 0;
    if (!report.locked) report.warnings.push_back(LockWarning("expert weights", bytes, error));
  }
  return report;
}

}  // namespace lode
