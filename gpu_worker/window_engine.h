// What the worker loop needs of a device: windows in, outcomes and logits out. Two implementations:
// cpu_engine.h (host threads, lanes driven layer by layer) and cuda_engine.h (one captured graph
// per row count). Everything before and after a window (plan check, tier border, sampling, result)
// is the loop's and the same for both. Thread: the worker loop's.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>

#include "gpu_worker/expert_lanes.h"
#include "gpu_worker/host_pool.h"
#include "gpu_worker/lane_types.h"
#include "gpu_worker/row_pick.h"
#include "gpu_worker/step_params.h"

namespace lode {

class WindowEngine {
 public:
  virtual ~WindowEngine() = default;

  // Window border: new tunables. `table`: the host kernel table that device_isa names.
  virtual void ApplyTunables(const Tunables& tunables, const KernelTable* table) = 0;

  // What the next window's rows want, [n_rows], and the lists that they name (kChangeBytesMax at
  // most); before Run. Engines whose logits are in host memory anyway need not know.
  virtual void SetWants(const RowWants* /*wants*/, uint32_t /*n_rows*/,
                        std::span<const uint8_t> /*changes*/) {}

  // Computes the staged window. Between the tier's Border and its WindowDone. Rows may be run again
  // after any failure, with the same bits. stage_ns: null, or kStages counters to add to.
  virtual WindowOutcome Run(const StepParams& params, const LanesWindow& window,
                            uint64_t* stage_ns) = 0;
  // A window without rows: folds accepted rows into the states; no lane is touched.
  virtual WindowOutcome Fold(const StepParams& params, uint64_t* stage_ns) = 0;

  // ---- of the last window that Run; valid until the next one
  virtual const LaneCounts& counts() const = 0;
  // Host memory, [vocab]; defined for rows with needs_logits, and, where pick() knows the row, `whole`.
  virtual const float* logits(uint32_t row) const = 0;
  // What the device made of a row with needs_logits; false: it did not, ask logits().
  virtual bool pick(uint32_t /*row*/, RowPick* /*out*/) const { return false; }
  virtual const RoutedRow& routed(uint32_t layer, uint32_t row) const = 0;

  // Host threads for the sampler.
  virtual HostPool& pool() = 0;
  // A CPU worker's line has a new owner. At a window border.
  virtual void WorkerReplaced(uint32_t worker) = 0;
  // Any thread.
  virtual void AddStatistics(std::map<std::string, double>* /*values*/) const {}
};

}  // namespace lode
