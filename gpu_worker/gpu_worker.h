// A GPU worker as one object: load plan and segments in, a loop that answers window plans out.
// main.cc runs it as a process; tests run it beside CPU workers in one process. Lifecycle: Load
// once, then Run; Statistics and CpuWorkerReplaced at any time, any thread. Load's order: model,
// segments, device, dense weights, state, arenas (bounded wait until the CPU workers filled them),
// expert slots.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "gpu_worker/cpu_device.h"
#include "gpu_worker/cpu_lanes.h"
#include "gpu_worker/cuda_stack.h"
#include "gpu_worker/forward.h"
#include "gpu_worker/local_expert_lanes.h"
#include "gpu_worker/pulse.h"
#include "gpu_worker/worker_loop.h"
#include "shared/base/fd.h"
#include "shared/control/load_plan.h"
#include "shared/shm/segment.h"

namespace lode {

// A CPU worker that does not finish one more expert for this long while it fills its arena is
// stuck: slow disks still deliver one.
inline constexpr uint64_t kArenaIdleNsMax = 120'000'000'000;

struct GpuSegments {
  Fd window, exchange;
  std::vector<Fd> arenas;  // [node]
};

class GpuWorker {
 public:
  using ProgressFn =
      std::function<void(const std::string& phase, uint64_t done_bytes, uint64_t total_bytes)>;

  GpuWorker(uint32_t index, uint32_t generation) : index_(index), generation_(generation) {}
  ~GpuWorker();

  // Returns Cancelled soon after `stop` becomes true. When it returns ok, plans are answered as
  // soon as Run is called.
  StatusOr<ReadyReport> Load(const LoadPlan& plan, GpuSegments segments, const ProgressFn& progress,
                             const std::atomic<bool>& stop);
  // Until `stop` (the one given to Load) is true; then writes the learned ranking where the plan
  // says.
  void Run();
  std::map<std::string, double> Statistics() const;
  void CpuWorkerReplaced(uint32_t worker);

 private:
  Status OpenModel(const LoadPlan& plan);
  Status AttachSegments(const LoadPlan& plan, GpuSegments segments);
  Status MakeDevice(const LoadPlan& plan);
  Status BuildDevice(const LoadPlan& plan, const ProgressFn& progress);
  Status BuildDrafter(const LoadPlan& plan);
  Status WaitForArenas(const ProgressFn& progress);
  Status FillTier(const LoadPlan& plan, const ProgressFn& progress);
  Status BuildEngine(const LoadPlan& plan);
  void BuildLoop(const LoadPlan& plan);
  ReadyReport Report(const LoadPlan& plan) const;
  void SaveProfile() const;

  // Const after the constructor.
  const uint32_t index_, generation_;
  // Loading thread; const after Load. Destroyed in reverse order.
  const std::atomic<bool>* stop_ = nullptr;
  std::string save_profile_;
  std::unique_ptr<ModelSource> source_;
  std::unique_ptr<ModelSource> head_;  // separate draft head, or null
  bool drafts_ = false;                // a head is there and wanted
  std::unique_ptr<Segment> window_, exchange_;
  std::unique_ptr<Pulse> pulse_;  // writes into window_
  std::vector<std::unique_ptr<Segment>> arena_segments_;
  std::vector<ArenaLayout> layouts_;
  std::unique_ptr<ArenaSet> arenas_;
  std::unique_ptr<CpuDevice> cpu_device_;  // one of the two is there
  std::unique_ptr<CudaStack> cuda_;
  Device* device_ = nullptr;
  ModelWeights weights_;
  std::unique_ptr<SequenceState> state_;
  std::unique_ptr<PleReader> ple_;
  std::unique_ptr<Forward> forward_;
  std::unique_ptr<ExpertTier> tier_;
  std::unique_ptr<CpuLanes> lanes_;  // cpu device only
  std::unique_ptr<WindowEngine> engine_;
  DraftWeights draft_weights_ = {};
  std::unique_ptr<LocalExpertLanes> draft_lanes_;  // cpu device only
  uint64_t draft_expert_bytes_ = 0;
  std::unique_ptr<DraftEngine> drafter_;
  std::unique_ptr<DraftLoop> draft_loop_;
  mutable std::mutex mutex_;  // guards the pointer: statistics may be asked for while loading
  std::unique_ptr<GpuWorkerLoop> loop_;
};

}  // namespace lode
