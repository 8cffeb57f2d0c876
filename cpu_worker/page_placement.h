// Where the pages of an arena come from: memory policy, population, huge pages, verification, lock.
// Everything here is about speed and about failing early; a step that this machine does not offer
// is a warning with its remedy, except for memory that is not there. Called once by
// weight_store.cc.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "shared/base/status.h"

namespace lode {

struct PlacementOptions {
  int numa_node = -1;    // preferred node; -1: no policy
  bool collapse = true;  // ask for transparent huge pages
  bool lock = false;
};
struct PlacementReport {
  std::string pages;  // "4 KiB", "2 MiB (98 %)"
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

}  // namespace lode
