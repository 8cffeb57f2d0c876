// The sequences of an engine inside one process, as its caller names them (LocalRow): which slot
// stands where, which KV blocks it has, and the plans and parameters that a window of rows becomes.
// What the daemon does for the real engine, in its smallest form. Used by LocalEngine and by the
// tests' engine on the cuda device, which differ in everything else. Thread: one caller.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "gpu_worker/sequence_state.h"
#include "shared/base/limits.h"
#include "shared/base/status.h"
#include "shared/wire/window_plan.h"

namespace lode {

// One row to compute: the sequence in `slot` gets `token` at `position`. Rows of a slot are
// adjacent and ascending.
struct LocalRow {
  uint32_t slot;
  uint32_t position;
  int32_t token;
  bool needs_logits = true;
};

// One row of the draft head: the residual of `position` (row `source` of the buffer given to Draft)
// with the token at position + 1. Rows as in LocalRow.
struct LocalDraftRow {
  uint32_t slot;
  uint32_t position;
  int32_t token;
  uint32_t source;
  bool needs_logits = true;
};

class LocalSlots {
 public:
  LocalSlots() = default;
  LocalSlots(uint32_t slots, uint32_t context);
  uint32_t kv_blocks() const { return static_cast<uint32_t>(epochs_.size()) * blocks_per_slot_; }

  // Empties the slot: the next row stands at position 0.
  void Restart(uint32_t slot) {
    ++epochs_[slot];
    committed_[slot] = 0;
  }
  // Rows of the slot below `position` are accepted, all others are rejected.
  void Commit(uint32_t slot, uint32_t position) { committed_[slot] = position; }

  // A window of at most kWindowRowsMax rows, and what the device gets of it.
  StatusOr<StepParams> Stage(std::span<const LocalRow> rows, SequenceState* state) const;
  // A window without rows, which folds what was accepted into the slot's state.
  StatusOr<StepParams> StageFlush(uint32_t slot, SequenceState* state) const;

 private:
  void AddSequence(uint32_t slot, WindowPlan* plan) const;
  StatusOr<StepParams> Stage(const WindowPlan& plan, SequenceState* state) const;

  uint32_t blocks_per_slot_ = 0;
  std::vector<uint64_t> epochs_;                  // [slot]
  std::vector<uint32_t> committed_;               // [slot]
  std::vector<std::vector<uint32_t>> kv_blocks_;  // [slot]
};

// A pass of the draft head; at most kWindowRowsMax rows.
StepParams DraftParams(std::span<const LocalDraftRow> rows);

}  // namespace lode
