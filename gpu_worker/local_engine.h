// A whole engine inside one process: model source, cpu device, weights, state, forward pass, all
// experts in memory. For tests and offline tools (evaluation, golden comparison); no daemon, no
// workers, no shared memory. Same bits as the daemon's engine. Thread: one caller.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gpu_worker/cpu_device.h"
#include "gpu_worker/drafter.h"
#include "gpu_worker/forward.h"
#include "gpu_worker/local_expert_lanes.h"
#include "gpu_worker/local_slots.h"
#include "gpu_worker/model_weights.h"
#include "gpu_worker/ple_rows.h"
#include "gpu_worker/sequence_state.h"
#include "shared/model/model_source.h"

namespace lode {

struct LocalEngineOptions {
  uint32_t threads = 1;
  std::string isa = "auto";
  bool float_reference = false;  // unquantised activations; then kv_type is usually kF32
  KvType kv_type = KvType::kQ8;
  uint32_t slots = 1;
  uint32_t context = 1024;  // tokens per sequence; every slot has its own KV blocks
  bool drafts = false;      // load the model's draft block, or the head in `mtp`
  std::string mtp = {};     // separate draft-head file
  bool mtp_full_width_norm = true;
  std::vector<int32_t> draft_vocabulary = {};  // empty: all tokens
};

class LocalEngine {
 public:
  static StatusOr<std::unique_ptr<LocalEngine>> Create(const std::string& model,
                                                       const LocalEngineOptions& options);

  // Empties the slot: the next row stands at position 0.
  void Restart(uint32_t slot) { slots_.Restart(slot); }
  // Rows of the slot below `position` are accepted, all others are rejected. Takes effect with the
  // slot's next rows or flush.
  void Commit(uint32_t slot, uint32_t position) { slots_.Commit(slot, position); }
  // One window, at most kWindowRowsMax rows; a slot's first row stands at its committed position.
  // `lanes` null: the engine's own.
  StatusOr<WindowOutcome> Run(std::span<const LocalRow> rows, ExpertLanes* lanes = nullptr);
  // Folds accepted rows into the slot's state without computing anything.
  StatusOr<WindowOutcome> Flush(uint32_t slot);

  // One pass of the draft head; REQUIRES the option drafts and a window behind it whose blocks hold
  // the positions. `chained`: start from the last pass's residual instead of the last window's.
  StatusOr<WindowOutcome> Draft(std::span<const LocalDraftRow> rows, bool chained);
  const float* draft_residual() const { return drafter_->wide(); }  // of the last pass
  std::span<const float> draft_logits(uint32_t row) const {
    return {drafter_->logits(row), drafter_->logits_size()};
  }

  std::span<const float> logits(uint32_t row) const {
    return {forward_->logits(row), source_->config().vocab};
  }
  const RoutedRow& routed(uint32_t layer, uint32_t row) const {
    return forward_->routed(layer, row);
  }
  const ModelConfig& config() const { return source_->config(); }
  CpuDevice& device() { return *device_; }
  SequenceState& state() { return *state_; }
  ExpertLanes& lanes() { return *lanes_; }
  uint64_t* stage_ns() { return stage_ns_.data(); }  // [kStages], sums over all windows

 private:
  LocalEngine() = default;
  WindowOutcome RunWindow(const StepParams& params, ExpertLanes* lanes);
  Status LoadDrafter(const LocalEngineOptions& options);

  std::unique_ptr<ModelSource> source_;
  std::unique_ptr<CpuDevice> device_;
  ModelWeights weights_;
  std::unique_ptr<SequenceState> state_;
  std::unique_ptr<PleReader> ple_;
  std::unique_ptr<LocalExpertLanes> lanes_;
  std::unique_ptr<Forward> forward_;
  DraftWeights draft_weights_ = {};
  std::unique_ptr<LocalExpertLanes> draft_lanes_;
  std::unique_ptr<Drafter> drafter_;
  LocalSlots slots_;
  std::vector<uint64_t> stage_ns_;
};

}  // namespace lode
