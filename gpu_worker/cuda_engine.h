// The cuda device as a WindowEngine: one captured graph per row count, launched once per window;
// between the launch and the end of the window the host only looks at one word. Replay order:
//
//   settings to the device | embedding | layers: mixer, router, plan and doorbell, experts, shared
//   expert, wait, combine | head | logits, routing and report to pinned memory | done
//
// A second set of graphs has a stamp kernel behind every stage: windows that ask for stage times
// use it. Design and figures: docs/design/cuda.md. Thread: the worker loop's.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gpu_worker/cuda_api.h"
#include "gpu_worker/cuda_device.h"
#include "gpu_worker/cuda_lanes.h"
#include "gpu_worker/forward.h"
#include "gpu_worker/lane_costs.h"
#include "gpu_worker/thread_pool.h"
#include "gpu_worker/window_engine.h"
#include "kernels/cuda/sampling.h"

namespace lode {

struct CudaEngineOptions {
  uint32_t generation = 0;
  uint32_t host_threads = 1;  // of the sampler
  uint64_t wait_ns = 200'000'000, wait_max_ns = 500'000'000;
  double link_bytes_per_second = 0;  // as probed, beside a busy host; 0: not known
};

class CudaEngine final : public WindowEngine {
 public:
  // Captures all graphs. All references outlive the engine; `lanes` are complete but have no
  // tables.
  static StatusOr<std::unique_ptr<CudaEngine>> Create(const CudaEngineOptions& options,
                                                      const ModelConfig& config, CudaDevice& device,
                                                      const ArenaSet& arenas, Forward& forward,
                                                      std::unique_ptr<CudaLanes> lanes);
  ~CudaEngine() override;

  // Before the first window.
  void SetTier(ExpertTier* tier) { tier_ = tier; }

  void ApplyTunables(const Tunables& tunables, const KernelTable* table) override;
  void SetWants(const RowWants* wants, uint32_t n_rows,
                std::span<const uint8_t> changes) override;
  WindowOutcome Run(const StepParams& params, const LanesWindow& window,
                    uint64_t* stage_ns) override;
  WindowOutcome Fold(const StepParams& params, uint64_t* stage_ns) override;
  const LaneCounts& counts() const override { return counts_; }
  const float* logits(uint32_t row) const override {
    return host_logits_ + static_cast<size_t>(row) * config_.vocab;
  }
  bool pick(uint32_t row, RowPick* out) const override;
  const RoutedRow& routed(uint32_t layer, uint32_t row) const override {
    return host_routed_[layer * kWindowRowsMax + row];
  }
  HostPool& pool() override { return pool_; }
  void WorkerReplaced(uint32_t) override {}  // busy times are read anew in every window
  void AddStatistics(std::map<std::string, double>* values) const override;

#if defined(LODE_TEST_HOOKS)
  // ms of the window's graph with kernels that do nothing: the floor of its launches. Median of
  // several.
  StatusOr<double> EmptyGraphMs(uint32_t n_rows);
#endif
  size_t nodes(uint32_t n_rows) const { return graphs_[0][n_rows]->nodes(); }
  size_t branch_nodes() const { return lanes_->branch_nodes(); }  // of them, beside the trunk

 private:
  class StampSink;

  CudaEngine(const CudaEngineOptions& options, const ModelConfig& config, CudaDevice& device,
             const ArenaSet& arenas, Forward& forward, std::unique_ptr<CudaLanes> lanes);
  Status Allocate();
  Status CaptureAll();
  void EnqueueWindow(uint32_t n_rows, bool timed);
  bool VoidAlready(uint64_t window) const;
  void Launch(const StepParams& params, bool timed);
  void AwaitEnd();
  WindowOutcome OutcomeOf() const;
  void Collect(const StepParams& params, const uint64_t* busy_before);
  void ReadBusy(uint64_t* busy) const;
  void AddStages(uint32_t n_rows, uint64_t* stage_ns) const;
  void SetEpoch(bool odd);

  const CudaEngineOptions options_;
  const ModelConfig config_;
  CudaDevice& device_;
  const ArenaSet& arenas_;
  Forward& forward_;
  std::unique_ptr<CudaLanes> lanes_;
  ExpertTier* tier_ = nullptr;
  ThreadPool pool_;

  // [timed][rows]; rows 0: a fold.
  std::unique_ptr<cuda::Graph> graphs_[2][kWindowRowsMax + 1];
  std::vector<Stage> stages_[kWindowRowsMax + 1];  // [rows]: stage behind each stamp
  uint64_t* stamps_ = nullptr;                     // device
  uint32_t* arrived_ = nullptr;                    // device
  uint8_t* pick_scratch_ = nullptr;                // device
  uint8_t* changes_ = nullptr;                     // device, copy of host_changes_
  // Pinned.
  RowWants* wants_ = nullptr;          // [row]
  uint8_t* host_changes_ = nullptr;    // [kChangeBytesMax]
  cuda::PickReport* picks_ = nullptr;  // [row]
  float* host_logits_ = nullptr;       // [row][vocab]
  RoutedRow* host_routed_ = nullptr;   // [layer][row]
  cuda::LaneReport* report_ = nullptr;
  uint64_t* host_stamps_ = nullptr;
  uint64_t* words_ = nullptr;  // kWordDone, kWordNotFinite

  StepParams current_ = {};  // of the window that is enqueued
  LaneCounts counts_;
  LaneCosts costs_;
  // Copies of the costs that any thread may read, [rows - 1].
  std::atomic<uint32_t> shown_pull_ns_[kWindowRowsMax] = {}, shown_cpu_ns_[kWindowRowsMax] = {};
  uint64_t sequence_ = 0;
  uint64_t launched_ns_ = 0;                     // host clock
  uint64_t usual_ns_[kWindowRowsMax + 1] = {};   // [rows]: launch to end, a moving average
};

}  // namespace lode
