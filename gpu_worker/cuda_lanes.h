// The expert lanes on the cuda device: what Forward::Record enqueues between router and combination.
// Nothing here decides anything about a window; the kernels do (cuda_lane_kernels.h). This object
// owns their memory and, at window borders, tells them what changed: the window's settings, the
// residency tables. Owned by the engine; thread: the worker loop's.
#pragma once

#include <memory>
#include <optional>

#include "gpu_worker/arena_set.h"
#include "gpu_worker/bench_routing.h"
#include "gpu_worker/cuda_device.h"
#include "gpu_worker/cuda_lane_kernels.h"
#include "gpu_worker/expert_lanes.h"
#include "gpu_worker/expert_tier.h"
#include "shared/wire/exchange_layout.h"

namespace lode {

// How the pull lane works. Nothing here changes a bit.
struct PullOptions {
  // Device memory for pulled experts on their way. As many of a layer's pulls as fit are copied there
  // in a branch of the graph and computed from there; the rest, or with 0 all, is read straight from
  // host memory by the kernels that compute.
  uint64_t staging_bytes = 0;
  cuda::CopyShape copy = {32, 256, 4};
};

class CudaLanes final : public ExpertLanes {
 public:
  // `exchange`: the checked segment, registered; arenas: mapped from registered memory. All outlive
  // the lanes. Allocates on the device.
  static StatusOr<std::unique_ptr<CudaLanes>> Create(CudaDevice& device, const ArenaSet& arenas,
                                                     uint32_t experts_used, uint8_t* exchange,
                                                     const PullOptions& pull);
  ~CudaLanes() override;

  uint64_t expert_bytes() const;  // of one expert, mean over layers
  uint32_t staged_max() const { return c_.staging.experts; }  // of a layer's pulls
  uint32_t branch_nodes() const;  // of a window's graph: launches beside the trunk

  // ---- enqueued once per graph
  // The settings of the window, then a clean report. First of all in a window.
  void EnqueueBegin();
  WindowOutcome Start(uint32_t layer, const float* x, uint32_t n_rows,
                      const RoutedRow* routed) override;
  WindowOutcome Finish(uint32_t layer) override;
  bool Combine(uint32_t layer, const RoutedRow* routed, const float* shared, float* y) override;
  const float* Result(uint32_t layer, uint32_t row, uint32_t order) const override;

  // ---- window border, nothing of a window running
  // Benchmarks: recorded layers take drawn ids instead of the router's choice. Before the engine is
  // made. The three calls behind it do nothing without it: the next window's draws go to the device;
  // those of the window behind it are made, while one runs; `routed` [layer][row] gets the ids that
  // the window used.
  Status ForceRouting();
  void SendForced();
  void DrawForced();
  void PutForced(RoutedRow* routed, uint32_t n_rows) const;

  cuda::LaneWindow* window() { return host_window_; }  // pinned; read when the next window starts
  // Residency and slots, when the tier changed them.
  void UploadTables(const ExpertTier& tier);

  const cuda::LaneConstants& constants() const { return c_; }
  ExchangeHeader* header() const { return reinterpret_cast<ExchangeHeader*>(c_.exchange); }

 private:
  CudaLanes(CudaDevice& device, const ArenaSet& arenas, uint32_t experts_used,
            const PullOptions& pull)
      : device_(device),
        arenas_(arenas),
        pull_(pull),
        layout_{{arenas.hidden(), arenas.width(), experts_used, arenas.nodes()}} {}
  Status Allocate();
  Status AllocateStaging();
  cuda::ExpertFormats FormatsOf(uint32_t layer) const;
  void RecordStaged(uint32_t layer, const float* x);
  void FillConstants(uint8_t* exchange);
  void FillPlaces();
  size_t ForcedBytes() const;

  CudaDevice& device_;
  const ArenaSet& arenas_;
  const PullOptions pull_;
  const ExchangeLayout layout_;
  cuda::LaneConstants c_ = {};
  // Pinned.
  cuda::LaneWindow* host_window_ = nullptr;
  cuda::LayerPlace* host_places_ = nullptr;  // [layers]
  uint16_t* host_residency_ = nullptr;       // [layers][experts]
  // [of the window at hand, of the next][layer][row][kExpertsUsedMax], null: the router decides.
  uint16_t* host_forced_[2] = {};
  uint16_t* forced_ = nullptr;  // device, one of them
  std::optional<BenchRouting> bench_;
  // Branches of the graph, null without staging: copies; the products of what has come.
  CUstream_st *copies_ = nullptr, *staged_ = nullptr;
  uint32_t n_rows_ = 0;  // of the window that is being recorded
  uint64_t table_version_ = ~uint64_t{0};
};

// The driver or the device failed: nothing of this process can go on, and the daemon starts another.
[[noreturn]] void DeviceFault(const Status& status);

}  // namespace lode
