// PageSystem on Linux: one system call (or one look into /proc) per function. See page_placement.h.
#include <fcntl.h>
#include <linux/magic.h>
#include <numa.h>
#include <numaif.h>
#include <sys/mman.h>
#include <sys/vfs.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <set>
#include <string>

#include "cpu_worker/page_placement.h"
#include "shared/shm/memory_lock.h"

namespace lode {
namespace {

// From the kernel's ABI; older headers lack them.
constexpr int kMadvPopulateWrite = 23;  // Linux 5.14
constexpr int kMadvCollapse = 25;       // Linux 6.1
constexpr size_t kNodesMax = 1024;      // the kernel's own limit (MAX_NUMNODES)

class Linux : public PageSystem {
 public:
  bool NumaAvailable() override { return numa_available() >= 0; }

  int SetPolicy(uint8_t* data, size_t bytes, const std::vector<uint32_t>& nodes) override {
    constexpr size_t kBits = 8 * sizeof(unsigned long);
    unsigned long mask[kNodesMax / kBits] = {};
    for (const uint32_t node : nodes) {
      if (node >= kNodesMax) return EINVAL;
      mask[node / kBits] |= 1ul << (node % kBits);
    }
    const int mode = nodes.size() == 1 ? MPOL_PREFERRED : MPOL_INTERLEAVE;
    return mbind(data, bytes, mode, mask, kNodesMax, 0) == 0 ? 0 : errno;
  }

  int Populate(int fd, uint8_t* data, size_t at, size_t n) override {
    if (madvise(data + at, n, kMadvPopulateWrite) == 0) return 0;
    if (errno != EINVAL) return errno;
    // An older kernel: allocating through the file also says no instead of raising SIGBUS at the
    // first touch.
    return fallocate(fd, 0, static_cast<off_t>(at), static_cast<off_t>(n)) == 0 ? 0 : errno;
  }

  size_t HugeTlbPageBytes(int fd) override {
    struct statfs fs = {};
    const bool huge = fstatfs(fd, &fs) == 0 && fs.f_type == HUGETLBFS_MAGIC;
    return huge ? static_cast<size_t>(fs.f_bsize) : 0;
  }

  int Collapse(uint8_t* data) override {
    return madvise(data, kHugePageBytes, kMadvCollapse) == 0 ? 0 : errno;
  }

  // /proc/self/smaps: a head line per mapping, then its counters, in kB for the whole mapping.
  size_t HugeMapped(uint8_t* data, size_t bytes) override {
    const auto begin = reinterpret_cast<uintptr_t>(data), end = begin + bytes;
    std::ifstream smaps("/proc/self/smaps");
    size_t huge = 0;
    bool ours = false;
    for (std::string line; std::getline(smaps, line);) {
      unsigned long from = 0, to = 0;
      size_t kib = 0;
      if (std::sscanf(line.c_str(), "%lx-%lx ", &from, &to) == 2) {
        ours = from < end && begin < to;
      } else if (ours && (std::sscanf(line.c_str(), "ShmemPmdMapped: %zu kB", &kib) == 1 ||
                          std::sscanf(line.c_str(), "FilePmdMapped: %zu kB", &kib) == 1)) {
        huge += kib << 10;
      }
    }
    return std::min(huge, bytes);
  }

  int NodesOf(const std::vector<void*>& pages, std::vector<int>* nodes) override {
    nodes->assign(pages.size(), -1);
    std::vector<void*> copy = pages;  // the prototype wants them writable
    return move_pages(0, copy.size(), copy.data(), nullptr, nodes->data(), 0) == 0 ? 0 : errno;
  }

  int Lock(uint8_t* data, size_t bytes) override { return LockPages(data, bytes); }
};

}  // namespace

PageSystem& LinuxPages() {
  static Linux system;
  return system;
}

std::vector<uint32_t> NumaNodesOfCpus(const std::vector<uint32_t>& cpus) {
  if (cpus.empty() || numa_available() < 0 || numa_num_configured_nodes() < 2) return {};
  std::set<uint32_t> nodes;
  for (const uint32_t cpu : cpus) {
    const int node = numa_node_of_cpu(static_cast<int>(cpu));
    if (node >= 0) nodes.insert(static_cast<uint32_t>(node));
  }
  return {nodes.begin(), nodes.end()};
}

}  // namespace lode
