// See local_slots.h.
#include "gpu_worker/local_slots.h"

namespace lode {

LocalSlots::LocalSlots(uint32_t slots, uint32_t context)
    : blocks_per_slot_((context + kKvBlockCells - 1) / kKvBlockCells),
      epochs_(slots, 1),
      committed_(slots, 0),
      kv_blocks_(slots) {
  // Blocks of the slots interleave, so that a mistake in the block table cannot hide behind
  // contiguous memory.
  for (uint32_t b = 0; b < blocks_per_slot_; ++b) {
    for (uint32_t s = 0; s < slots; ++s) kv_blocks_[s].push_back(b * slots + (slots - 1 - s));
  }
}

void LocalSlots::AddSequence(uint32_t slot, WindowPlan* plan) const {
  SequencePlan& q = plan->seqs[plan->n_seqs++];
  q.epoch = epochs_[slot];
  q.slot = slot;
  q.committed = committed_[slot];
  q.block_count = blocks_per_slot_;
}

StatusOr<StepParams> LocalSlots::Stage(const WindowPlan& plan, SequenceState* state) const {
  const uint32_t* blocks[kWindowRowsMax] = {};
  for (uint32_t i = 0; i < plan.n_seqs; ++i) blocks[i] = kv_blocks_[plan.seqs[i].slot].data();
  StepParams params;
  uint32_t row_of[kWindowRowsMax];
  LODE_RETURN_IF_ERROR(state->Stage(plan, blocks, &params, row_of));
  return params;
}

StatusOr<StepParams> LocalSlots::Stage(std::span<const LocalRow> rows, SequenceState* state) const {
  if (rows.size() > kWindowRowsMax)
    return InvalidArgument("{} rows do not fit one window of {}", rows.size(), kWindowRowsMax);
  WindowPlan plan = {};
  for (const LocalRow& r : rows) {
    if (r.slot >= epochs_.size()) return InvalidArgument("slot {} of {}", r.slot, epochs_.size());
    if (plan.n_seqs == 0 || plan.seqs[plan.n_seqs - 1].slot != r.slot) AddSequence(r.slot, &plan);
    RowPlan& row = plan.rows[plan.n_rows++];
    row.seq_index = plan.n_seqs - 1;
    row.position = r.position;
    row.token = r.token;
    row.kind = RowKind::kPrompt;
    row.needs_logits = r.needs_logits;
  }
  return Stage(plan, state);
}

StatusOr<StepParams> LocalSlots::StageFlush(uint32_t slot, SequenceState* state) const {
  WindowPlan plan = {};
  AddSequence(slot, &plan);
  return Stage(plan, state);
}

StepParams DraftParams(std::span<const LocalDraftRow> rows) {
  StepParams params = {};
  for (const LocalDraftRow& r : rows) {
    if (params.n_seqs == 0 || params.seqs[params.n_seqs - 1].slot != r.slot) {
      params.seqs[params.n_seqs++] = {
          .slot = r.slot, .committed = r.position, .first_row = params.n_rows, .n_rows = 0};
    }
    ++params.seqs[params.n_seqs - 1].n_rows;
    params.rows[params.n_rows++] = {params.n_seqs - 1, r.position, r.token,
                                    r.needs_logits ? 1u : 0u, r.source};
  }
  return params;
}

}  // namespace lode
