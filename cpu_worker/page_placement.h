// Where the pages of an arena come from: memory policy, population, huge pages, verification, lock.
// Everything here is about speed and about failing early; a step that this machine does not offer
// is a warning with its remedy, except for memory that is not there. Called by weight_store.cc
// before an arena is filled, and by the kernel benchmark. (The sixth step, registration with a GPU,
// is the GPU worker's: it comes after all of these, since a registered page can neither move nor
// become part of a larger one.)
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "shared/base/status.h"
#include "shared/shm/segment.h"

namespace lode {

inline constexpr size_t kHugePageBytes = Segment::kHugePageBytes;

// What placing asks of the kernel. Tests put another one in its place: machines with several nodes,
// without huge pages, with a small lock limit. Errors are errno values, 0 is success.
class PageSystem {
 public:
  virtual ~PageSystem() = default;
  virtual bool NumaAvailable() = 0;
  // One node: preferred, not bound, since a node that is short of memory makes a worker slower,
  // which the verification reports, and does not kill it. Several nodes: interleaved.
  virtual int SetPolicy(uint8_t* data, size_t bytes, const std::vector<uint32_t>& nodes) = 0;
  virtual int Populate(int fd, uint8_t* data, size_t at, size_t n) = 0;
  virtual size_t HugeTlbPageBytes(int fd) = 0;  // 0: not of the reserved pool
  virtual int Collapse(uint8_t* data) = 0;      // kHugePageBytes at an aligned address
  virtual size_t HugeMapped(uint8_t* data, size_t bytes) = 0;  // bytes that huge pages map now
  virtual int NodesOf(const std::vector<void*>& pages, std::vector<int>* nodes) = 0;
  virtual int Lock(uint8_t* data, size_t bytes) = 0;
};
PageSystem& LinuxPages();

struct PlacementOptions {
  std::vector<uint32_t> numa_nodes;  // where the readers are; empty: no policy
  bool collapse = true;              // ask for transparent huge pages
  bool lock = false;
  PageSystem* system = nullptr;  // null: the kernel
};
struct PlacementReport {
  std::string pages;  // "4 KiB", "2 MiB (98 %)", "2048 KiB (hugetlb)"
  std::string numa;   // "node 1: 100 % of 512 sampled pages", "no policy"
  bool locked = false;
  std::vector<std::string> warnings;
};

// `data`..`data + bytes`: a shared mapping of memfd `fd`. Fails with ResourceExhausted when memory
// is missing, Cancelled on `stop`.
StatusOr<PlacementReport> PlacePages(
    int fd, uint8_t* data, size_t bytes, const PlacementOptions& options,
    const std::function<void(uint64_t done, uint64_t total)>& progress,
    const std::atomic<bool>& stop);

// NUMA nodes of these CPUs, ascending, each once; empty without NUMA, with one node, or without
// CPUs.
std::vector<uint32_t> NumaNodesOfCpus(const std::vector<uint32_t>& cpus);

}  // namespace lode
