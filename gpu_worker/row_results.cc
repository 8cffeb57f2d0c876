// See row_results.h.
#include "gpu_worker/row_results.h"

#include <algorithm>
#include <cstring>

namespace lode {
namespace {

const SamplingPlan& SamplingOf(const WindowPlan& plan, const RowPlan& row) {
  return plan.seqs[row.seq_index].sampling;
}

bool Penalises(const SamplingPlan& s) {
  return s.repetition_penalty != 1.0f || s.presence_penalty != 0.0f || s.frequency_penalty != 0.0f;
}

// Drafts up to and including the row's own token, which count like committed tokens; rows before
// are adjacent and ascending. Returns how many.
uint32_t DraftsUpTo(const WindowPlan& plan, uint32_t plan_row, int32_t* drafts) {
  uint32_t n = 0;
  for (uint32_t r = 0; r <= plan_row; ++r) {
    if (plan.rows[r].seq_index == plan.rows[plan_row].seq_index &&
        plan.rows[r].kind == RowKind::kDraft)
      drafts[n++] = plan.rows[r].token;
  }
  return n;
}

// Puts a list behind the others; its place.
template <class T>
uint32_t Append(std::span<const T> list, std::vector<uint8_t>* changes) {
  const size_t at =
      (changes->size() + alignof(uint64_t) - 1) / alignof(uint64_t) * alignof(uint64_t);
  changes->resize(at + list.size_bytes());
  if (!list.empty()) std::memcpy(changes->data() + at, list.data(), list.size_bytes());
  return static_cast<uint32_t>(at);
}

// `like`: the wants of an earlier row with the same mask, bias and penalty lists; null: none.
void AddChanges(const WindowPlan& plan, uint32_t plan_row, const PlanAreas& areas, uint32_t vocab,
                const RowWants* like, RowWants* wants, std::vector<uint8_t>* changes) {
  const RowPlan& row = plan.rows[plan_row];
  const SamplingPlan& s = SamplingOf(plan, row);
  const uint32_t* mask = areas.Mask(row);
  const std::span<const TokenBias> bias = areas.Bias(row);
  const bool penalises = Penalises(s);
  wants->mask = kNoChange;
  if (!row.pick || (mask == nullptr && bias.empty() && !penalises)) return;
  wants->changed = 1;
  wants->repetition_penalty = s.repetition_penalty;
  wants->presence_penalty = s.presence_penalty;
  wants->frequency_penalty = s.frequency_penalty;
  if (like != nullptr) {
    wants->mask = like->mask;
    wants->bias = like->bias;
    wants->n_bias = like->n_bias;
    wants->counts = like->counts;
    wants->n_counts = like->n_counts;
  } else {
    if (mask != nullptr) wants->mask = Append(std::span(mask, (vocab + 31) / 32), changes);
    wants->bias = Append(bias, changes);
    wants->n_bias = static_cast<uint32_t>(bias.size());
    const std::span<const TokenCount> counts =
        penalises ? areas.Penalties(row) : std::span<const TokenCount>();
    wants->counts = Append(counts, changes);
    wants->n_counts = static_cast<uint32_t>(counts.size());
  }
  int32_t drafts[kWindowRowsMax];
  wants->n_drafts = penalises ? DraftsUpTo(plan, plan_row, drafts) : 0;
  wants->drafts = Append(std::span<const int32_t>(drafts, wants->n_drafts), changes);
}

// Rows of one sequence whose lists are the same bytes.
bool SameLists(const RowPlan& a, const RowPlan& b) {
  return a.pick && b.pick && a.seq_index == b.seq_index && a.mask_offset == b.mask_offset &&
         a.bias_offset == b.bias_offset && a.bias_count == b.bias_count &&
         a.penalty_offset == b.penalty_offset && a.penalty_count == b.penalty_count;
}

int32_t PickFrom(std::span<const float> logits, const WindowPlan& plan, uint32_t plan_row,
                 const PlanAreas& areas, SamplerScratch* scratch) {
  const RowPlan& row = plan.rows[plan_row];
  int32_t drafts[kWindowRowsMax];
  const uint32_t n_drafts = DraftsUpTo(plan, plan_row, drafts);
  PickInput in;
  in.logits = logits;
  in.mask = areas.Mask(row);
  in.bias = areas.Bias(row);
  in.counts = areas.Penalties(row);
  in.draft_tokens = {drafts, n_drafts};
  in.position = row.position + 1;
  in.sampling = &SamplingOf(plan, row);
  return PickToken(in, scratch);
}

}  // namespace

void MakeWants(const WindowPlan& plan, std::span<const uint32_t> row_of, const PlanAreas& areas,
               uint32_t vocab, RowWants* wants, std::vector<uint8_t>* changes) {
  changes->clear();
  for (size_t i = 0; i < row_of.size(); ++i) {
    const RowPlan& row = plan.rows[row_of[i]];
    const SamplingPlan& s = SamplingOf(plan, row);
    RowWants& want = wants[i] = {};
    want.whole = row.top_logprobs > 0 || (plan.flags & kHashLogits) != 0;
    want.draw = row.pick && s.temperature > 0.0f;
    want.position = row.position + 1;
    want.target = row.target;
    want.seed = s.seed;
    want.temperature = s.temperature;
    want.top_p = s.top_p;
    want.min_p = s.min_p;
    want.top_k = s.top_k;
    want.stream = s.stream;
    const RowWants* like = nullptr;
    for (size_t j = 0; j < i && like == nullptr; ++j)
      like = wants[j].changed != 0 && SameLists(plan.rows[row_of[j]], row) ? &wants[j] : nullptr;
    AddChanges(plan, row_of[i], areas, vocab, like, &want, changes);
  }
}

void FillRow(const WindowPlan& plan, uint32_t plan_row, const PlanAreas& areas,
             const WindowEngine& engine, uint32_t step_row, uint32_t vocab, SamplerScratch* scratch,
             RowResult* out) {
  const RowPlan& row = plan.rows[plan_row];
  const std::span<const float> logits(engine.logits(step_row), vocab);
  RowPick pick = {};
  const bool known = engine.pick(step_row, &pick);
  out->argmax = known ? pick.argmax : ArgmaxLogit(logits);
  if (row.pick) out->token = known ? pick.token : PickFrom(logits, plan, plan_row, areas, scratch);
  if (row.pick || row.target >= 0) {
    const LogNormalizer norm =
        known ? NormalizerOf(pick.max, pick.sum) : Normalize(logits, out->argmax);
    if (out->token >= 0) {
      out->logprob =
          norm.LogProb(known ? pick.token_logit : logits[static_cast<size_t>(out->token)]);
    }
    if (row.target >= 0) {
      out->target_logprob =
          norm.LogProb(known ? pick.target_logit : logits[static_cast<size_t>(row.target)]);
    }
  }
  if (row.top_logprobs > 0) {
    out->n_top = std::min<uint32_t>(row.top_logprobs, vocab);
    TopTokens(logits, out->n_top, scratch, out->top);
  }
  if (plan.flags & kHashLogits) out->logits_hash = HashLogits(logits);
}

}  // namespace lode
