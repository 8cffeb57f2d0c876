// The three lanes on the cpu device. Start: activations into the exchange, plan, job and bell for
// the CPU workers, then pulls and hits on the device's own threads. Finish: the bounded wait for
// the workers. Steps 5 to 8 of the life of a token.
//
// Where results lie: the workers write theirs into the exchange; hits and pulls have a buffer of
// their own, so that a worker that still computes a job of an aborted window can never write over
// them. Result() hides the difference. Both alternate by layer parity. Bits: every vector is
// computed by the kernel table from the same bytes in the same order, whichever lane does it.
// Thread: the worker loop's; uses `pool` inside. No allocation after construction.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "gpu_worker/arena_set.h"
#include "gpu_worker/expert_lanes.h"
#include "gpu_worker/expert_tier.h"
#include "gpu_worker/host_pool.h"
#include "gpu_worker/lane_types.h"
#include "shared/wire/exchange_layout.h"

namespace lode {

class CpuLanes : public ExpertLanes {
 public:
  // exchange: the checked segment, shape = (arenas.hidden, arenas.width, experts_used,
  // arenas.nodes). tier may be null (no slots). All outlive this object.
  CpuLanes(const LanesOptions& options, const ArenaSet& arenas, ExpertTier* tier, uint8_t* exchange,
           HostPool* pool);
  ~CpuLanes() override;

  // Wakes the workers' pools (window_epoch odd) unless the CPU lane is down; EndWindow lets them
  // sleep again. Every BeginWindow has its EndWindow, whatever happened between.
  void BeginWindow(const LanesWindow& window);
  void EndWindow();
  // True once the daemon has declared the window void.
  bool Aborted() const;

  WindowOutcome Start(uint32_t layer, const float* x, uint32_t n_rows,
                      const RoutedRow* routed) override;
  WindowOutcome Finish(uint32_t layer) override;
  const float* Result(uint32_t layer, uint32_t row, uint32_t order) const override;

  const LaneCounts& counts() const { return counts_; }
  // A worker's line has a new owner: forget what was remembered of its counters.
  void WorkerReplaced(uint32_t worker);

 private:
  struct Vector;   // one (expert, row) pair of the lane that is being computed
  struct Scratch;  // buffers of hits and pulls

  uint32_t VectorIndex(uint32_t row, uint32_t order) const {
    return row * options_.experts_used + order;
  }
  uint8_t* ActSlot(uint32_t parity, uint32_t row) const;
  float* WorkerResult(uint32_t parity, uint32_t index) const;
  WindowOutcome FillActivations(uint32_t layer, const float* x, uint32_t n_rows);
  void Publish(uint32_t layer, uint32_t n_rows);
  WindowOutcome RunLane(uint32_t layer, Lane lane);
  void CollectVectors(uint32_t layer, Lane lane);
  void Multiply(uint32_t layer, const PlannedExpert& expert, Matrix matrix, RowRange rows,
                const ActRow* acts, float* const* out);
  void CountPlan(uint32_t layer);
  WindowOutcome WaitForWorker(uint32_t layer, uint32_t worker);
  WindowOutcome WorkerOutcome(uint32_t layer, uint32_t worker) const;
  WindowOutcome Failure(WindowStatus status, uint32_t layer, uint32_t row, uint32_t worker,
                        uint32_t detail) const;

  const LanesOptions options_;
  const ArenaSet& arenas_;
  ExpertTier* const tier_;
  ExchangeHeader* const header_;
  uint8_t* const exchange_;
  const ExchangeLayout layout_;
  HostPool* const pool_;
  std::vector<uint16_t> none_resident_;  // [experts] kNotResident, for a missing tier

  LanesWindow window_;
  LaneCounts counts_;
  uint64_t worker_busy_ns_[kCpuWorkersMax] = {};  // at the window's start
  ExpertPlan plans_[2];                           // by layer parity
  uint64_t tags_[2] = {0, 0};                     // of the parity's job; 0: no job was published
  std::vector<const float*> results_[2];          // [vector index]
  std::unique_ptr<Scratch> scratch_;
};

}  // namespace lode
