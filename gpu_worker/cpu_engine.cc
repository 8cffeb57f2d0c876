// See cpu_engine.h.
#include "gpu_worker/cpu_engine.h"

#include <algorithm>

#include "shared/base/log.h"

namespace lode {

void CpuEngine::ApplyTunables(const Tunables& tunables, const KernelTable* table) {
  if (tunables.split_policy == static_cast<uint32_t>(SplitPolicy::kBalanced)) {
    spdlog::warn(
        "split policy 'balanced' is not there on the cpu device; the fixed pull share {} is used",
        tunables.pull_share);
  }
  device_.SetKernels(table);
  device_.pool().SetActive(tunables.device_threads);
  table_ = table;
}

WindowOutcome CpuEngine::Run(const StepParams& params, const LanesWindow& window,
                             uint64_t* stage_ns) {
  LanesWindow lanes_window = window;
  lanes_window.kernels = table_;
  lanes_.BeginWindow(lanes_window);
  WindowOutcome outcome;
  if (lanes_.Aborted()) {
    outcome.status = WindowStatus::kAborted;
    outcome.error.detail = static_cast<uint32_t>(LaneError::kAbortWord);
  } else {
    outcome = forward_.Run(params, lanes_, stage_ns);
  }
  lanes_.EndWindow();
  // The forward pass times hits and pulls together; the lanes know them apart.
  if (stage_ns != nullptr) {
    const uint64_t pull = std::min(lanes_.counts().lane_ns[static_cast<uint32_t>(Lane::kPull)],
                                   stage_ns[static_cast<uint32_t>(Stage::kHit)]);
    stage_ns[static_cast<uint32_t>(Stage::kPull)] += pull;
    stage_ns[static_cast<uint32_t>(Stage::kHit)] -= pull;
  }
  return outcome;
}

}  // namespace lode
