// The state of all sequences on the device, by slot: DeltaNet state, rings of recent rows, KV
// blocks, index keys. Allocated once. Also the host's knowledge of each slot: which sequence life
// (epoch) it holds, how many of its tokens are accepted, which positions the last finished window
// computed, and the last token ids.
//
// How a rejected draft leaves no trace: the recurrent state S of a layer holds accepted rows only,
// counted per slot and layer; new rows run on a copy, and what they would do to S waits in rings
// addressed by position. The next window says how many rows count; each layer folds exactly those
// before it steps its new rows. An aborted window has folded some layers and not others: the
// counters know, so the relaunch computes the same bits. Thread: the worker loop's.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "gpu_worker/device.h"
#include "gpu_worker/sequence_layout.h"
#include "gpu_worker/step_params.h"
#include "shared/base/status.h"
#include "shared/model/model_config.h"
#include "shared/wire/window_plan.h"

namespace lode {

struct StateOptions {
  uint32_t slots = 1;      // <= kSequenceSlotsMax
  uint32_t kv_blocks = 1;  // ids in plans are below this
  uint32_t context = 0;    // longest sequence in tokens
  KvType kv_type = KvType::kQ8;
  bool drafts = false;  // one more attention layer: the draft head's
};

class SequenceState {
 public:
  static StatusOr<std::unique_ptr<SequenceState>> Create(const ModelConfig& config, Device& device,
                                                         const StateOptions& options);
  // Device bytes that Create would take.
  static uint64_t Bytes(const ModelConfig& config, const StateOptions& options);

  // Window border: turns a checked plan into the parameters of the window. kv_blocks[i] lists the
  // blocks of plan.seqs[i]. A new epoch empties the slot. row_of[r] (r < params->n_rows) is the
  // plan row that computes as row r; flush rows get none. Errors (nothing is changed then): a slot,
  // block, position or commit count that does not fit the slot's history.
  Status Stage(const WindowPlan& plan, const uint32_t* const* kv_blocks, StepParams* params,
               uint32_t* row_of);
  // The window of `params` ended well: its rows may be accepted by the next plan.
  void WindowDone(const StepParams& params);

  // Tokens at position and before it, as the n-gram hash wants them: out[0] is the row's own token,
  // -1 before the sequence.
  void TokenContext(const StepParams& params, uint32_t row, uint32_t n, int32_t* out) const;

  const DeltaState& delta(uint32_t layer) const { return delta_[layer]; }
  const AttentionState& attention(uint32_t layer) const { return attention_[layer]; }
  // The draft head's cells, in the same blocks. Its row of the pair (residual of position t, token at
  // t + 1) stands at position t.
  const AttentionState& draft_attention() const { return draft_attention_; }
  const PleState& ple(uint32_t index) const { return ple_[index]; }
  const StateOptions& options() const { return options_; }

  // Hash of everything a later row of the slot can read, and of nothing else; without the draft
  // head's cells, which decide no token. Slow; for tests and state comparison.
  uint64_t Hash(uint32_t slot) const;

 private:
  // Recent token ids by position; holds a window and the longest n-gram.
  static constexpr uint32_t kTokenRing = 16;
  static_assert(kTokenRing >= kWindowRowsMax + kNgramMax);

  struct Slot {
    uint64_t epoch = 0;
    bool used = false;
    uint32_t committed = 0;  // as of the last staged plan
    uint32_t end = 0;        // positions below are computed by windows that ended well
    std::array<int32_t, kTokenRing> tokens = {};
    std::vector<uint32_t> blocks;  // host copy of the device's block table
  };

  SequenceState(const ModelConfig& config, Device& device, const StateOptions& options);
  Status AllocateAll();
  Status AllocateAttention(uint32_t layer, AttentionState* a);
  Status AllocateFloats(const char* what, uint32_t layer, size_t count, float** out);
  Status CheckSequence(const WindowPlan& plan, uint32_t seq, const uint32_t* kv_blocks) const;
  void ResetSlot(uint32_t slot);
  void UpdateBlocks(uint32_t slot, const uint32_t* kv_blocks, uint32_t count);
  void HashDelta(uint32_t slot, void* hash) const;
  void HashAttention(uint32_t slot, void* hash) const;

  const ModelConfig config_;
  Device& device_;
  const StateOptions options_;
  uint32_t blocks_per_sequence_;
  uint32_t* block_tables_ = nullptr;       // device
  std::vector<DeltaState> delta_;          // [layer], empty entries for attention layers
  std::vector<AttentionState> attention_;  // [layer], empty entries for DeltaNet layers
  AttentionState draft_attention_ = {};
  std::vector<PleState> ple_;              // [n-gram layer]
  std::vector<Slot> slots_;
};

}  // namespace lode
