// See daemon/window_planner.h.
#include "daemon/window_planner.h"

#include <algorithm>
#include <cstring>

#include "shared/base/check.h"

namespace lode {
namespace {

// Indexes of the needs of one kind, the longest waiting first.
std::vector<uint32_t> InTurn(std::span<const RowNeed> needs, bool decode) {
  std::vector<uint32_t> turn;
  for (uint32_t i = 0; i < needs.size(); ++i) {
    if (needs[i].rows > 0 && needs[i].decode == decode) turn.push_back(i);
  }
  std::sort(turn.begin(), turn.end(), [&](uint32_t a, uint32_t b) {
    if (needs[a].last_turn != needs[b].last_turn) return needs[a].last_turn < needs[b].last_turn;
    return needs[a].order < needs[b].order;
  });
  return turn;
}

// The row picks the token behind it. Its lists are those of the committed tokens; the worker counts
// the window's drafts up to the row itself on top.
void MakePicking(const Sequence& sequence, RowPlan* row) {
  const Request& request = sequence.request;
  row->needs_logits = 1;
  row->pick = 1;
  if (request.want_logprobs)
    row->top_logprobs = static_cast<uint8_t>(std::min(request.top_logprobs, kLogprobsMax));
  row->bias_offset = 0;
  row->bias_count = static_cast<uint32_t>(request.logit_bias.size());
  row->penalty_offset = PenaltyOffset(sequence);
  row->penalty_count = static_cast<uint32_t>(sequence.answer_counts.size());
  if (request.allowed != nullptr) row->mask_offset = kMaskOffset;
}

RowPlan RowAt(const Sequence& sequence, uint32_t position, uint32_t seq_index) {
  const Request& request = sequence.request;
  const bool last = position + 1 == sequence.tokens.size();
  RowPlan row = {};
  row.seq_index = seq_index;
  row.position = position;
  row.token = sequence.tokens[position];
  row.kind = last && position >= sequence.prompt_size() ? RowKind::kDecode : RowKind::kPrompt;
  row.target = -1;
  row.mask_offset = kNoMask;
  row.next_token = last ? -1 : sequence.tokens[position + 1];
  // A prompt row reports its next token's log probability once; a rebuild does not ask again.
  if (request.prompt_logprobs && position < sequence.prompt_size() &&
      position >= sequence.prompt_reported) {
    row.needs_logits = 1;
    row.top_logprobs = static_cast<uint8_t>(std::min(request.top_logprobs, kLogprobsMax));
    if (position + 1 < sequence.prompt_size()) row.target = sequence.tokens[position + 1];
  }
  if (last && !sequence.scoring_only()) MakePicking(sequence, &row);
  return row;
}

}  // namespace

std::vector<RowShare> ShareRows(std::span<const RowNeed> needs, const RowLimits& limits) {
  LODE_CHECK(limits.window_rows >= 1 && limits.prompt_rows >= 1, "row limits must not be zero");
  const std::vector<uint32_t> decoders = InTurn(needs, true);
  const std::vector<uint32_t> prompts = InTurn(needs, false);
  // A window of one row cannot be shared: there the longest waiting prompt and decoder alternate by
  // who waited longer.
  uint32_t for_decoders = limits.window_rows;
  if (!prompts.empty() && limits.window_rows > 1) for_decoders -= 1;
  if (!prompts.empty() && !decoders.empty() && limits.window_rows == 1 &&
      needs[prompts[0]].last_turn < needs[decoders[0]].last_turn) {
    for_decoders = 0;
  }
  std::vector<RowShare> shares;
  for (uint32_t i = 0; i < decoders.size() && i < for_decoders; ++i)
    shares.push_back({decoders[i], 1});
  uint32_t rest = limits.window_rows - static_cast<uint32_t>(shares.size());

  const size_t first_prompt = shares.size();
  for (uint32_t i = 0; i < prompts.size() && i < rest; ++i) shares.push_back({prompts[i], 1});
  rest -= static_cast<uint32_t>(shares.size() - first_prompt);
  for (bool dealt = true; rest > 0 && dealt;) {
    dealt = false;
    for (size_t i = first_prompt; i < shares.size() && rest > 0; ++i) {
      if (shares[i].rows >= std::min(needs[shares[i].index].rows, limits.prompt_rows)) continue;
      ++shares[i].rows;
      --rest;
      dealt = true;
    }
  }
  return shares;
}

RowNeed NeedOf(const Sequence& sequence) {
  RowNeed need;
  need.rows = static_cast<uint32_t>(sequence.tokens.size()) - sequence.rows_done;
  need.decode = sequence.decoding();
  need.last_turn = sequence.last_turn;
  need.order = sequence.order;
  return need;
}

void AppendRows(const Sequence& sequence, uint32_t n_rows, WindowPlan* plan) {
  LODE_CHECK(n_rows >= 1 && sequence.rows_done + n_rows <= sequence.tokens.size(),
             "{} rows from {} of {} tokens", n_rows, sequence.rows_done, sequence.tokens.size());
  LODE_CHECK(plan->n_rows + n_rows <= kWindowRowsMax && plan->n_seqs < kWindowRowsMax,
             "window too full");
  const uint32_t seq_index = plan->n_seqs++;
  SequencePlan& seq = plan->seqs[seq_index];
  seq = {};
  seq.epoch = sequence.epoch;
  seq.slot = sequence.slot;
  seq.committed = sequence.rows_done;
  seq.accepted = sequence.last_accepted;
  seq.block_count = static_cast<uint32_t>(sequence.kv_blocks.size());
  seq.sampling = sequence.request.sampling;
  for (uint32_t i = 0; i < n_rows; ++i) {
    plan->rows[plan->n_rows++] = RowAt(sequence, sequence.rows_done + i, seq_index);
  }
  if (sequence.request.hash_logits) plan->flags |= kHashLogits;
  if (sequence.request.time_stages) plan->flags |= kTimeStages;
}

void AppendDrafts(const Sequence& sequence, WindowPlan* plan) {
  const std::vector<int32_t>& drafts = sequence.drafts.offered;
  LODE_CHECK(plan->n_rows + drafts.size() <= kWindowRowsMax, "{} drafts in a window of {} rows",
             drafts.size(), plan->n_rows);
  for (const int32_t token : drafts) {
    const RowPlan& before = plan->rows[plan->n_rows - 1];
    LODE_CHECK(before.pick, "a draft behind a row that picks nothing");
    RowPlan row = {};
    row.seq_index = before.seq_index;
    row.position = before.position + 1;
    row.token = token;
    row.kind = RowKind::kDraft;
    row.target = row.next_token = -1;
    row.mask_offset = kNoMask;
    MakePicking(sequence, &row);
    plan->rows[plan->n_rows++] = row;
  }
}

uint32_t PenaltyOffset(const Sequence& sequence) {
  return static_cast<uint32_t>(sequence.request.logit_bias.size() * sizeof(TokenBias));
}

bool ListsFit(const Sequence& sequence) {
  return PenaltyOffset(sequence) + sequence.answer_counts.size() * sizeof(TokenCount) <=
         kListBytesMax;
}

void WriteSequenceArea(const Sequence& sequence, SequenceArea* area) {
  LODE_CHECK(ListsFit(sequence) && sequence.kv_blocks.size() <= kKvBlocksPerSequenceMax,
             "lists do not fit the area");
  std::copy(sequence.kv_blocks.begin(), sequence.kv_blocks.end(), area->kv_blocks);
  const auto& biases = sequence.request.logit_bias;
  if (!biases.empty()) std::memcpy(area->heap, biases.data(), biases.size() * sizeof(TokenBias));
  if (sequence.request.allowed != nullptr) {
    const std::vector<uint32_t>& words = *sequence.request.allowed;
    LODE_CHECK(words.size() * sizeof(uint32_t) <= kSequenceHeapBytes - kMaskOffset,
               "a mask of {} words", words.size());
    std::memcpy(area->heap + kMaskOffset, words.data(), words.size() * sizeof(uint32_t));
  }
  uint8_t* at = area->heap + PenaltyOffset(sequence);
  for (const auto& [token, count] : sequence.answer_counts) {
    const TokenCount entry{token, count};
    std::memcpy(at, &entry, sizeof(entry));
    at += sizeof(entry);
  }
}

}  // namespace lode
