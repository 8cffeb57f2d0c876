// Which rows the next window computes: a pure function of what the sequences need. Step 3 of the
// life of a token.
//
// The rule. A sequence that is decoding asks for one row, one that still has tokens to run (its
// prompt, or a rebuild) for up to `prompt_rows`. Whoever was served longest ago comes first, then
// whoever was admitted first; so with more askers than rows everybody gets a row in rotation.
// Decoding sequences are served first, but while prompts wait one row is theirs: a full house of
// decoders cannot starve a prompt, and a long prompt delays a decoder by at most one rotation. What
// the decoders leave is dealt to the prompts one row at a time, round robin.
//
// Drafts are RowKind::kDraft rows behind a decode row, out of what decoders and prompts leave
// (daemon/draft_planner.h decides how many).
//
// Seams. Chunked prefill enters here: a need of many rows becomes a prefill plan of its own kind
// between two windows, under the same order; by the arithmetic's rules it gives the same bits.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "daemon/sequence.h"
#include "shared/wire/window_plan.h"

namespace lode {

struct RowNeed {
  uint32_t rows = 0;  // that could run now; 0 = none (paused)
  bool decode = false;
  uint64_t last_turn = 0;  // when it was last served: a count of shares, 0 = never
  uint64_t order = 0;      // of admission
};
struct RowShare {
  uint32_t index;  // into the needs
  uint32_t rows;   // 1..need.rows
};
struct RowLimits {
  uint32_t window_rows = kWindowRowsMax;
  uint32_t prompt_rows = kWindowRowsMax;  // of one sequence
};
// Shares, the longest waiting first. Sum of rows <= window_rows; empty only when nobody needs a
// row.
std::vector<RowShare> ShareRows(std::span<const RowNeed> needs, const RowLimits& limits);

// What the sequence would run next.
RowNeed NeedOf(const Sequence& sequence);

// Appends a SequencePlan and `n_rows` rows of the sequence to the plan. REQUIRES 1 <= n_rows <=
// NeedOf(sequence).rows and room in the plan.
void AppendRows(const Sequence& sequence, uint32_t n_rows, WindowPlan* plan);

// Appends SequenceDrafts::offered as rows behind the sequence's decode row, which AppendRows has put
// at the plan's end. REQUIRES room in the plan and cells for them.
void AppendDrafts(const Sequence& sequence, WindowPlan* plan);

// Where the lists of a sequence lie in its SequenceArea::heap: biases from 0, then the penalty
// counts; the mask in the other half.
inline constexpr uint32_t kListBytesMax = kSequenceHeapBytes / 2;
inline constexpr uint32_t kMaskOffset = kListBytesMax;
static_assert(kSequenceHeapBytes - kMaskOffset >= kVocabMax / 8);
uint32_t PenaltyOffset(const Sequence& sequence);
// False when the lists do not fit: too many different tokens under penalties.
bool ListsFit(const Sequence& sequence);
// Writes block table, biases, penalty counts and mask. Before the plan is published.
void WriteSequenceArea(const Sequence& sequence, SequenceArea* area);

}  // namespace lode
