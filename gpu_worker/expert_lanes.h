// The routed experts of one layer on the cpu device: hits from the emulated VRAM tier, pulls straight from the pinned arenas,
// the rest through the CPU workers. Forward calls Start, does the shared expert meanwhile, then Finish; every expert's output
// stays one vector per (row, routed expert), which Forward combines in routing order. Steps 5 to 8.
// Thread: the worker loop's; uses the device's thread pool inside.
#pragma once

#include <cstdint>

#include "gpu_worker/expert_plan.h"
#include "kernels/kernel_table.h"
#include "shared/wire/window_result.h"

namespace lode {

// How a window or a layer ended; the first failure wins.
struct WindowOutcome {
  WindowStatus status = WindowStatus::kOk;
  WindowError error = {};
  bool ok() const { return status == WindowStatus::kOk; }
};

class ExpertLanes {
 public:
  virtual ~ExpertLanes() = default;
  // x: [n_rows][hidden] float activations (the HC read's output). Plans, publishes the CPU job, computes hits and pulls.
  virtual WindowOutcome Start(uint32_t layer, const float* x, uint32_t n_rows, const RoutedRow* routed) = 0;
  // Waits (bounded) for the CPU workers.
  virtual WindowOutcome Finish(uint32_t layer) = 0;
  // Output of the expert at place `order` in row's routing order, [hidden]; valid until Start of layer + 2.
  virtual const float* Result(uint32_t layer, uint32_t row, uint32_t order) const = 0;
  // y = the layer's experts, combined. False: the lanes leave it to Device::Combine, which asks Result.
  virtual bool Combine(uint32_t /*layer*/, const RoutedRow* /*routed*/, const float* /*shared*/, float* /*y*/) {
    return false;
  }
};

}  // namespace lode
