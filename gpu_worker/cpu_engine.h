// The cpu device as a WindowEngine: forward pass and lanes run layer by layer on this process's
// threads. Assembled by gpu_worker.cc; thread: the worker loop's.
#pragma once

#include "gpu_worker/cpu_device.h"
#include "gpu_worker/cpu_lanes.h"
#include "gpu_worker/forward.h"
#include "gpu_worker/window_engine.h"

namespace lode {

class CpuEngine final : public WindowEngine {
 public:
  // All outlive the engine.
  CpuEngine(CpuDevice& device, Forward& forward, CpuLanes& lanes)
      : device_(device), forward_(forward), lanes_(lanes) {}

  void ApplyTunables(const Tunables& tunables, const KernelTable* table) override;
  WindowOutcome Run(const StepParams& params, const LanesWindow& window,
                    uint64_t* stage_ns) override;
  WindowOutcome Fold(const StepParams& params, uint64_t* stage_ns) override {
    return forward_.Run(params, lanes_, stage_ns);
  }
  const LaneCounts& counts() const override { return lanes_.counts(); }
  const float* logits(uint32_t row) const override { return forward_.logits(row); }
  const RoutedRow& routed(uint32_t layer, uint32_t row) const override {
    return forward_.routed(layer, row);
  }
  HostPool& pool() override { return device_.pool(); }
  void WorkerReplaced(uint32_t worker) override { lanes_.WorkerReplaced(worker); }

 private:
  CpuDevice& device_;
  Forward& forward_;
  CpuLanes& lanes_;
  const KernelTable* table_ = nullptr;
};

}  // namespace lode
