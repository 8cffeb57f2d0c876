// The loop of the GPU worker after "ready": take a plan, check it, run it, publish the result.
// Steps 4 to 10 of the life of a token.
//
//   plan taken | validated | tunables applied | tier border | staged | forward (lanes inside) |
//   picked | drafts | result published
//
// A window either ends ok, or leaves nothing behind: the daemon may send the same rows again under
// a new number. Thread: Run owns the calling thread. Counters may be read, and WorkerReplaced
// called, from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gpu_worker/draft_loop.h"
#include "gpu_worker/expert_tier.h"
#include "gpu_worker/plan_check.h"
#include "gpu_worker/sampler.h"
#include "gpu_worker/sequence_state.h"
#include "gpu_worker/window_engine.h"
#include "shared/wire/exchange_layout.h"
#include "shared/wire/window_segment.h"

namespace lode {

struct GpuLoopOptions {
  PlanLimits limits;
  uint64_t spin_ns = 0;  // busy polling of the plan ring before sleeping
};

// What the loop drives; all outlive it.
struct GpuLoopParts {
  const ModelConfig* config;
  WindowEngine* engine;
  SequenceState* state;
  ExpertTier* tier;
  DraftLoop* drafts;  // null: the model has no draft head, or the device does not run it
  const float* wide;  // Forward::wide(), device memory: where drafts start
  ExchangeHeader* exchange;
  WindowSegment* window;
};

class GpuWorkerLoop {
 public:
  GpuWorkerLoop(const GpuLoopOptions& options, const GpuLoopParts& parts);

  // Returns when `stop` becomes true, within some 50 ms plus the window that runs.
  void Run(const std::atomic<bool>& stop);
  // One plan, without rings: Run's body. Tests call it directly.
  void RunWindow(const WindowPlan& plan, WindowResult* result);

  // The CPU worker's line has a new owner.
  void WorkerReplaced(uint32_t worker);
  uint64_t windows_ok() const {
    return windows_by_status_[static_cast<uint32_t>(WindowStatus::kOk)].load();
  }
  // Windows by status, resident experts and bytes.
  std::map<std::string, double> Statistics() const;

 private:
  bool Publish(const WindowResult& result, const std::atomic<bool>& stop);
  WindowOutcome Check(const WindowPlan& plan);
  WindowOutcome ApplyTunables(const Tunables& tunables);
  WindowOutcome RunRows(const WindowPlan& plan, const StepParams& params, const uint32_t* row_of,
                        WindowResult* result);
  void FillRows(const WindowPlan& plan, const StepParams& params, const uint32_t* row_of,
                WindowResult* result);
  void FillCounts(const StepParams& params, const uint32_t* row_of, WindowResult* result) const;
  void WriteTrace(const WindowPlan& plan, const StepParams& params, const uint32_t* row_of);

  const GpuLoopOptions options_;
  const GpuLoopParts parts_;
  std::unique_ptr<PlanAreas> areas_;
  std::vector<SamplerScratch> scratch_;  // [row]
  std::vector<uint8_t> changes_;         // of the window's logits, see row_pick.h
  // Tunables in force.
  bool tunables_known_ = false;
  Tunables tunables_ = {};
  LanesWindow lanes_window_;
  std::atomic<uint32_t> replaced_{
      0};  // bit per CPU worker, set by any thread, taken at a window border

  static constexpr uint32_t kStatuses = 4;
  std::atomic<uint64_t> windows_by_status_[kStatuses] = {};
  std::atomic<uint64_t> resident_experts_{0}, resident_bytes_{0};
};

// Rows of each sequence that hold under "a draft equals the row before's pick". Pure; exposed for
// tests.
void ProposeAccepts(const WindowPlan& plan, WindowResult* result);

}  // namespace lode
