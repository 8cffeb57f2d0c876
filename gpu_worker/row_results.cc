// See row_results.h.
#include "gpu_worker/row_results.h"

#include <algorithm>

namespace lode {
namespace {

const SamplingPlan& SamplingOf(const WindowPlan& plan, const RowPlan& row) {
  return plan.seqs[row.seq_index].sampling;
}

// Nothing changes the row's logits before the draw.
bool Unchanged(const WindowPlan& plan, const RowPlan& row, const PlanAreas& areas) {
  const SamplingPlan& s = SamplingOf(plan, row);
  return areas.Mask(row) == nullptr && areas.Bias(row).empty() && s.repetition_penalty == 1.0f &&
         s.presence_penalty == 0.0f && s.frequency_penalty == 0.0f;
}

int32_t PickFrom(std::span<const float> logits, const WindowPlan& plan, uint32_t plan_row,
                 const PlanAreas& areas, SamplerScratch* scratch) {
  const RowPlan& row = plan.rows[plan_row];
  // Drafts up to and including this row's own token count like committed tokens; rows before are
  // adjacent and ascending.
  int32_t drafts[kWindowRowsMax];
  uint32_t n_drafts = 0;
  for (uint32_t r = 0; r <= plan_row; ++r) {
    if (plan.rows[r].seq_index == row.seq_index && plan.rows[r].kind == RowKind::kDraft)
      drafts[n_drafts++] = plan.rows[r].token;
  }
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

RowWants WantsOf(const WindowPlan& plan, uint32_t plan_row, const PlanAreas& areas) {
  const RowPlan& row = plan.rows[plan_row];
  const SamplingPlan& s = SamplingOf(plan, row);
  const bool unchanged = Unchanged(plan, row, areas);
  RowWants wants = {};
  wants.whole = (row.pick && !unchanged) || row.top_logprobs > 0 || (plan.flags & kHashLogits) != 0;
  wants.draw = row.pick && unchanged && s.temperature > 0.0f;
  wants.position = row.position + 1;
  wants.target = row.target;
  wants.seed = s.seed;
  wants.temperature = s.temperature;
  wants.top_p = s.top_p;
  wants.min_p = s.min_p;
  wants.top_k = s.top_k;
  wants.stream = s.stream;
  return wants;
}

void FillRow(const WindowPlan& plan, uint32_t plan_row, const PlanAreas& areas,
             const WindowEngine& engine, uint32_t step_row, uint32_t vocab, SamplerScratch* scratch,
             RowResult* out) {
  const RowPlan& row = plan.rows[plan_row];
  const std::span<const float> logits(engine.logits(step_row), vocab);
  RowPick pick = {};
  const bool known = engine.pick(step_row, &pick);
  out->argmax = known ? pick.argmax : ArgmaxLogit(logits);
  const bool unchanged = Unchanged(plan, row, areas);
  if (row.pick) {
    if (known && unchanged) {
      out->token = pick.token;
    } else if (unchanged && SamplingOf(plan, row).temperature == 0.0f) {
      out->token = out->argmax;
    } else {
      out->token = PickFrom(logits, plan, plan_row, areas, scratch);
    }
  }
  if (row.pick || row.target >= 0) {
    const LogNormalizer norm =
        known ? NormalizerOf(pick.max, pick.sum) : Normalize(logits, out->argmax);
    if (out->token >= 0) {
      out->logprob = norm.LogProb(known && unchanged ? pick.token_logit
                                                     : logits[static_cast<size_t>(out->token)]);
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
