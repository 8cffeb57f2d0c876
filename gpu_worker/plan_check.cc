// Checks in the order of dependence: header, tunables, sequences (their slots and blocks), rows
// (which refer to sequences), lists.
#include "gpu_worker/plan_check.h"

#include <cmath>
#include <cstring>

namespace lode {
namespace {

constexpr uint32_t kKnownDraftFlags = kDraftFollow | kDraftCoupled;
constexpr uint32_t kKnownFlags = kHashLogits | kTraceRouting | kCpuLaneDown | kTimeStages;

PlanError CheckTunables(const Tunables& t) {
  const bool ok = t.pull_share >= 0.0f && t.pull_share <= 1.0f &&
                  t.split_policy <= static_cast<uint32_t>(SplitPolicy::kBalanced) &&
                  t.tier_policy <= static_cast<uint32_t>(TierPolicy::kDecayedLfu);
  return ok ? PlanError::kNone : PlanError::kTunables;
}

PlanError CheckSampling(const SamplingPlan& s) {
  const bool ok = std::isfinite(s.temperature) && s.temperature >= 0 && s.top_p > 0 &&
                  s.top_p <= 1 && s.min_p >= 0 && s.min_p < 1 &&
                  std::isfinite(s.repetition_penalty) && s.repetition_penalty > 0 &&
                  std::isfinite(s.presence_penalty) && std::isfinite(s.frequency_penalty);
  return ok ? PlanError::kNone : PlanError::kSampling;
}

PlanError CheckSequence(const WindowPlan& plan, uint32_t index, const PlanLimits& limits,
                        const SequenceArea* areas, PlanAreas* copy) {
  const SequencePlan& seq = plan.seqs[index];
  if (seq.slot >= limits.sequence_slots) return PlanError::kSlot;
  for (uint32_t i = 0; i < index; ++i) {
    if (plan.seqs[i].slot == seq.slot) return PlanError::kSlot;
  }
  if (seq.committed > limits.context || seq.accepted > kWindowRowsMax ||
      seq.accepted > seq.committed) {
    return PlanError::kCommitted;
  }
  if (seq.block_count > kKvBlocksPerSequenceMax) return PlanError::kBlocks;
  uint32_t* blocks = copy->seqs[index].kv_blocks;
  std::memcpy(blocks, areas[seq.slot].kv_blocks, seq.block_count * sizeof(uint32_t));
  for (uint32_t b = 0; b < seq.block_count; ++b) {
    if (blocks[b] >= limits.kv_blocks) return PlanError::kBlocks;
  }
  if (seq.draft_max > kDraftsMax || (seq.draft_flags & ~kKnownDraftFlags) != 0 ||
      !(seq.draft_min_p >= 0 && seq.draft_min_p <= 1)) {
    return PlanError::kDrafts;
  }
  // Cells of decided tokens must be there even when no row follows (a flush reads them).
  if (static_cast<uint64_t>(seq.block_count) * kKvBlockCells < seq.committed)
    return PlanError::kBlocks;
  return CheckSampling(seq.sampling);
}

// A flush row says "this sequence is in the window only to fold its accepted rows" (a sequence
// without rows says the same): it stands alone and wants nothing.
PlanError CheckFlushRow(const WindowPlan& plan, uint32_t index) {
  const RowPlan& row = plan.rows[index];
  for (uint32_t i = 0; i < index; ++i) {
    if (plan.rows[i].seq_index == row.seq_index) return PlanError::kKind;
  }
  const bool wants = row.needs_logits || row.pick || row.top_logprobs > 0 || row.target >= 0 ||
                     row.mask_offset != kNoMask || row.bias_count > 0 || row.penalty_count > 0;
  return wants ? PlanError::kOutputs : PlanError::kNone;
}

// Adjacency, order, kind and bounds of a row; `row` > 0 looks back at its neighbour.
PlanError CheckRow(const WindowPlan& plan, uint32_t index, const PlanLimits& limits) {
  const RowPlan& row = plan.rows[index];
  if (row.seq_index >= plan.n_seqs) return PlanError::kRowOrder;
  const SequencePlan& seq = plan.seqs[row.seq_index];
  const bool follows = index > 0 && plan.rows[index - 1].seq_index == row.seq_index;
  if (row.kind == RowKind::kFlush) return CheckFlushRow(plan, index);
  if (follows && plan.rows[index - 1].kind == RowKind::kFlush) return PlanError::kKind;
  if (follows) {
    if (row.position != static_cast<uint64_t>(plan.rows[index - 1].position) + 1)
      return PlanError::kRowOrder;
  } else {
    for (uint32_t i = 0; i + 1 < index; ++i) {
      if (plan.rows[i].seq_index == row.seq_index) return PlanError::kRowOrder;
    }
    // The first row stands right behind the decided tokens: state and KV have no holes.
    if (row.position != seq.committed) return PlanError::kRowOrder;
  }
  if (row.position >= limits.context || row.position / kKvBlockCells >= seq.block_count) {
    return PlanError::kPosition;
  }
  if (row.token < 0 || static_cast<uint32_t>(row.token) >= limits.vocab) return PlanError::kToken;
  if (row.target < -1 || (row.target >= 0 && static_cast<uint32_t>(row.target) >= limits.vocab)) {
    return PlanError::kToken;
  }
  if (row.next_token < -1 ||
      (row.next_token >= 0 && static_cast<uint32_t>(row.next_token) >= limits.vocab)) {
    return PlanError::kToken;
  }
  switch (row.kind) {
    case RowKind::kPrompt:
    case RowKind::kDecode:
      // Given tokens never stand behind a guess, and a sequence has one newest token.
      if (follows && plan.rows[index - 1].kind != RowKind::kPrompt) return PlanError::kKind;
      break;
    case RowKind::kDraft:
      // A guess is checked against the pick of the row before.
      if (!follows || !plan.rows[index - 1].pick) return PlanError::kKind;
      break;
    default:
      return PlanError::kKind;
  }
  const bool wants_logits = row.pick || row.top_logprobs > 0 || row.target >= 0;
  if (row.needs_logits > 1 || row.pick > 1 || row.top_logprobs > kLogprobsMax ||
      (wants_logits && !row.needs_logits)) {
    return PlanError::kOutputs;
  }
  return PlanError::kNone;
}

// Copies [offset, offset + bytes) of the heap when it lies inside and is aligned for its entries.
bool CopyList(const SequenceArea& from, SequenceArea* to, uint64_t offset, uint64_t bytes) {
  if (bytes == 0) return true;
  if (offset > kSequenceHeapBytes || bytes > kSequenceHeapBytes - offset || offset % 4 != 0)
    return false;
  std::memcpy(to->heap + offset, from.heap + offset, bytes);
  return true;
}

// A row's lists together are no larger than the heap, whether they overlap or not: what is made of
// them has room for that much.
PlanError CopyLists(const WindowPlan& plan, const RowPlan& row, const PlanLimits& limits,
                    const SequenceArea* areas, PlanAreas* copy) {
  static_assert(alignof(SequenceArea) >= 4 && sizeof(SequenceArea::kv_blocks) % 4 == 0);
  const SequenceArea& from = areas[plan.seqs[row.seq_index].slot];
  SequenceArea* to = &copy->seqs[row.seq_index];
  const uint64_t mask_bytes =
      row.mask_offset == kNoMask ? 0 : (static_cast<uint64_t>(limits.vocab) + 31) / 32 * 4;
  const uint64_t bias_bytes = uint64_t{row.bias_count} * sizeof(TokenBias);
  const uint64_t penalty_bytes = uint64_t{row.penalty_count} * sizeof(TokenCount);
  if (mask_bytes + bias_bytes + penalty_bytes > kSequenceHeapBytes ||
      !CopyList(from, to, row.mask_offset, mask_bytes) ||
      !CopyList(from, to, row.bias_offset, bias_bytes) ||
      !CopyList(from, to, row.penalty_offset, penalty_bytes)) {
    return PlanError::kHeapRange;
  }
  return PlanError::kNone;
}

// Of the copy, once nothing is copied any more: lists of different rows may overlap.
PlanError CheckEntries(const RowPlan& row, const PlanLimits& limits, const PlanAreas* copy) {
  for (const TokenBias& bias : copy->Bias(row)) {
    if (bias.token < 0 || static_cast<uint32_t>(bias.token) >= limits.vocab ||
        std::isnan(bias.bias)) {
      return PlanError::kListEntry;
    }
  }
  for (const TokenCount& count : copy->Penalties(row)) {
    if (count.token < 0 || static_cast<uint32_t>(count.token) >= limits.vocab)
      return PlanError::kListEntry;
  }
  return PlanError::kNone;
}

}  // namespace

const char* PlanErrorText(PlanError error) {
  static constexpr const char* kTexts[] = {
#define LODE_X(name, text) text,
      LODE_PLAN_ERRORS(LODE_X)
#undef LODE_X
  };
  const uint32_t index = static_cast<uint32_t>(error);
  return index < std::size(kTexts) ? kTexts[index] : "unknown";
}

const uint32_t* PlanAreas::Mask(const RowPlan& row) const {
  if (row.mask_offset == kNoMask) return nullptr;
  return reinterpret_cast<const uint32_t*>(seqs[row.seq_index].heap + row.mask_offset);
}
std::span<const TokenBias> PlanAreas::Bias(const RowPlan& row) const {
  if (row.bias_count == 0) return {};
  return {reinterpret_cast<const TokenBias*>(seqs[row.seq_index].heap + row.bias_offset),
          row.bias_count};
}
std::span<const TokenCount> PlanAreas::Penalties(const RowPlan& row) const {
  if (row.penalty_count == 0) return {};
  return {reinterpret_cast<const TokenCount*>(seqs[row.seq_index].heap + row.penalty_offset),
          row.penalty_count};
}

PlanVerdict ValidatePlan(const WindowPlan& plan, const PlanLimits& limits,
                         const SequenceArea* areas, PlanAreas* copy) {
  if (plan.generation != limits.generation || plan.device != limits.device)
    return {PlanError::kGeneration, 0};
  if (plan.n_rows > kWindowRowsMax || plan.n_seqs > kWindowRowsMax ||
      (plan.flags & ~kKnownFlags) != 0) {
    return {PlanError::kCounts, 0};
  }
  if (const PlanError error = CheckTunables(plan.tunables); error != PlanError::kNone)
    return {error, 0};
  for (uint32_t s = 0; s < plan.n_seqs; ++s) {
    const PlanError error = CheckSequence(plan, s, limits, areas, copy);
    if (error != PlanError::kNone) return {error, s};
  }
  for (uint32_t r = 0; r < plan.n_rows; ++r) {
    PlanError error = CheckRow(plan, r, limits);
    if (error == PlanError::kNone) error = CopyLists(plan, plan.rows[r], limits, areas, copy);
    if (error != PlanError::kNone) return {error, r};
  }
  for (uint32_t r = 0; r < plan.n_rows; ++r) {
    const PlanError error = CheckEntries(plan.rows[r], limits, copy);
    if (error != PlanError::kNone) return {error, r};
  }
  return {};
}

}  // namespace lode
