// How fast the card reads experts out of the CPU workers' arenas, measured before "ready": alone, and
// beside host threads that read the same arenas as fast as they can. The second rate is what the pull
// lane gets beside a busy CPU lane (no job runs here: at start nobody has tokens). Called by
// cuda_stack.cc on the loading thread; some 100 ms at flagship size.
#pragma once

#include <cstdint>
#include <vector>

#include "gpu_worker/arena_set.h"
#include "gpu_worker/cuda_device.h"

namespace lode {

// Bytes per second; 0: too little to measure.
struct LinkRates {
  double idle = 0;  // the link, host idle
  double busy = 0;  // the link, beside the readers
  double host = 0;  // all readers together, beside the link
};

// [node]. Random experts over all layers; `threads` readers (0: busy is idle). Allocates on the device
// what it needs and leaves it there (kilobytes).
StatusOr<std::vector<LinkRates>> ProbeLinks(CudaDevice& device, const ArenaSet& arenas,
                                            uint32_t threads);

// Of an expert, whose rows are shared out evenly over all nodes.
LinkRates OverAllNodes(const std::vector<LinkRates>& nodes);

}  // namespace lode
