// See draft_loop.h.
#include "gpu_worker/draft_loop.h"

#include <algorithm>
#include <limits>

#include "kernels/canonical.h"
#include "shared/base/check.h"
#include "shared/base/log.h"
#include "shared/shm/wait_word.h"

namespace lode {

DraftLoop::DraftLoop(uint32_t vocab, uint32_t slots, uint32_t context, DraftEngine& drafter,
                     HostPool& pool)
    : context_(context), drafter_(drafter), pool_(pool), slots_(slots) {
  for (uint32_t i = 0; i < kWindowRowsMax; ++i) scratch_.emplace_back(vocab);
  if (drafter.vocabulary().empty()) return;
  // Tokens outside the reduced vocabulary are never guessed.
  full_logits_.assign(kWindowRowsMax,
                      std::vector<float>(vocab, -std::numeric_limits<float>::infinity()));
}

void DraftLoop::Run(const WindowPlan& plan, const StepParams& params, const uint32_t* row_of,
                    const float* wide, const PlanAreas& areas, WindowResult* result) {
  const uint64_t begin = NowNs();
  StepParams pass = {};
  n_chains_ = 0;
  CollectRows(plan, params, row_of, *result, &pass);
  if (pass.n_rows == 0) return;  // nobody follows
  if (DeviceCanRun(plan)) {
    RunOnDevice(plan, pass, wide, result);
    result->draft_ns = NowNs() - begin;
    return;
  }
  const float* residual = wide;
  while (pass.n_rows > 0) {
    const WindowOutcome outcome = drafter_.Step(pass, residual);
    if (!outcome.ok()) {
      Forget(plan);
      break;
    }
    ++result->draft_passes;
    TakeGuesses(plan, areas, result);
    residual = drafter_.wide();
    NextPass(params, *result, &pass);
  }
  result->draft_ns = NowNs() - begin;
}

// Drawn guesses need the host's sampler.
bool DraftLoop::DeviceCanRun(const WindowPlan& plan) const {
  return drafter_.runs_chains() &&
         std::none_of(chains_, chains_ + n_chains_, [&](const Chain& chain) {
           return (plan.seqs[chain.seq].draft_flags & kDraftCoupled) != 0;
         });
}

// All passes at once: the device picks. The chains that go deepest come first, so that a pass's rows
// are those of the first chains.
void DraftLoop::RunOnDevice(const WindowPlan& plan, const StepParams& first, const float* wide,
                            WindowResult* result) {
  std::stable_sort(chains_, chains_ + n_chains_,
                   [](const Chain& a, const Chain& b) { return a.wanted > b.wanted; });
  DraftChain chains[kWindowRowsMax];
  for (uint32_t i = 0; i < n_chains_; ++i)
    chains[i] = {chains_[i].row, chains_[i].wanted, plan.seqs[chains_[i].seq].draft_min_p};
  DraftGuess guesses[kWindowRowsMax][kDraftsMax];
  uint32_t n_guesses[kWindowRowsMax] = {};
  const WindowOutcome outcome = drafter_.RunChains(first, wide, {chains, n_chains_}, guesses,
                                                   n_guesses, &result->draft_passes);
  for (uint32_t i = 0; i < n_chains_; ++i) {
    const uint32_t seq = chains_[i].seq;
    for (uint32_t g = 0; g < n_guesses[i] && guesses[i][g].p >= chains[i].min_p; ++g) {
      result->drafts[seq][g] = guesses[i][g].token;
      result->draft_p[seq][g] = guesses[i][g].p;
      result->n_drafts[seq] = g + 1;
    }
  }
  if (!outcome.ok()) Forget(plan);
}

// Rows of the first pass: of every sequence that follows, the rows that hold.
void DraftLoop::CollectRows(const WindowPlan& plan, const StepParams& params,
                            const uint32_t* row_of, const WindowResult& result, StepParams* pass) {
  for (uint32_t i = 0; i < params.n_seqs; ++i) {
    if (params.seqs[i].n_rows > 0 && (plan.seqs[i].draft_flags & kDraftFollow) != 0)
      AddSequence(plan, params.seqs[i], i, row_of, result, pass);
  }
}

void DraftLoop::AddSequence(const WindowPlan& plan, const StepSequence& staged, uint32_t seq,
                            const uint32_t* row_of, const WindowResult& result, StepParams* pass) {
  const SequencePlan& q = plan.seqs[seq];
  Slot& slot = slots_[q.slot];
  if (slot.epoch != q.epoch) slot = {q.epoch, 0};
  if (slot.end < q.committed) return;  // a hole: rows went by that the head did not follow
  Chain chain = {};
  chain.seq = seq;
  const uint32_t holding = std::min(staged.n_rows, result.proposed_accepts[seq]);
  const uint32_t first = pass->n_rows;
  bool picked = false;
  for (uint32_t r = 0; r < holding; ++r) {
    const uint32_t plan_row = row_of[staged.first_row + r];
    const RowPlan& row = plan.rows[plan_row];
    const int32_t next = row.next_token >= 0 ? row.next_token : result.rows[plan_row].token;
    if (next < 0) break;  // nobody knows what follows: a prompt that is only scored
    picked = row.pick != 0;
    if (row.kind == RowKind::kDraft) chain.tail[chain.n_tail++] = row.token;
    chain.plan_row = plan_row;
    chain.position = row.position;
    chain.row = pass->n_rows;
    pass->rows[pass->n_rows++] = {pass->n_seqs, row.position, next, 0, staged.first_row + r};
  }
  const uint32_t n_rows = pass->n_rows - first;
  if (n_rows == 0) return;
  pass->seqs[pass->n_seqs++] = {
      .slot = q.slot, .committed = q.committed, .first_row = first, .n_rows = n_rows};
  slot.end = q.committed + n_rows;
  // Chain rows stand behind the last one; the daemon reserved their cells, but trust is no check.
  const uint64_t cells =
      std::min<uint64_t>(context_, static_cast<uint64_t>(q.block_count) * kKvBlockCells);
  chain.wanted =
      static_cast<uint32_t>(std::min<uint64_t>(q.draft_max, cells - chain.position));
  if (!picked || chain.wanted == 0) return;
  chain.tail[chain.n_tail++] = pass->rows[chain.row].token;
  pass->rows[chain.row].needs_logits = 1;
  chains_[n_chains_++] = chain;
}

// One guess of every chain; chains that are done or unsure end here.
void DraftLoop::TakeGuesses(const WindowPlan& plan, const PlanAreas& areas, WindowResult* result) {
  ParallelFor(pool_, n_chains_,
              [&](uint32_t i) { guesses_[i] = GuessOf(plan, chains_[i], areas, i); });
  uint32_t alive = 0;
  for (uint32_t i = 0; i < n_chains_; ++i) {
    Chain& chain = chains_[i];
    const Guess& guess = guesses_[i];
    if (guess.token < 0 || !(guess.p >= plan.seqs[chain.seq].draft_min_p)) continue;
    uint32_t& n = result->n_drafts[chain.seq];
    result->drafts[chain.seq][n] = guess.token;
    result->draft_p[chain.seq][n++] = guess.p;
    chain.tail[chain.n_tail++] = guess.token;
    if (n < chain.wanted) chains_[alive++] = chain;
  }
  n_chains_ = alive;
}

DraftLoop::Guess DraftLoop::GuessOf(const WindowPlan& plan, const Chain& chain,
                                    const PlanAreas& areas, uint32_t scratch) {
  const std::span<const int32_t> ids = drafter_.vocabulary();
  const std::span<const float> logits(drafter_.logits(chain.row), drafter_.logits_size());
  int32_t token = -1;
  float logit = 0;
  if ((plan.seqs[chain.seq].draft_flags & kDraftCoupled) == 0) {
    const int32_t best = ArgmaxLogit(logits);
    token = ids.empty() ? best : ids[static_cast<size_t>(best)];
    logit = logits[static_cast<size_t>(best)];
  } else {
    std::span<const float> full = logits;
    if (!ids.empty()) {
      std::vector<float>& spread = full_logits_[scratch];
      for (size_t i = 0; i < ids.size(); ++i) spread[static_cast<size_t>(ids[i])] = logits[i];
      full = spread;
    }
    const RowPlan& row = plan.rows[chain.plan_row];
    PickInput in;
    in.logits = full;
    in.mask = areas.Mask(row);
    in.bias = areas.Bias(row);
    in.counts = areas.Penalties(row);
    in.draft_tokens = {chain.tail, chain.n_tail};
    in.position = chain.position + 2;
    in.sampling = &plan.seqs[chain.seq].sampling;
    token = PickToken(in, &scratch_[scratch]);
    logit = full[static_cast<size_t>(token)];
  }
  return {token, canonical::Exp(Normalize(logits).LogProb(logit))};
}

// The chains that are left, each one row further, from its own residual.
void DraftLoop::NextPass(const StepParams& params, const WindowResult& result, StepParams* pass) {
  StepParams next = {};
  for (uint32_t i = 0; i < n_chains_; ++i) {
    Chain& chain = chains_[i];
    const int32_t token = result.drafts[chain.seq][result.n_drafts[chain.seq] - 1];
    const uint32_t position = ++chain.position;
    next.seqs[next.n_seqs] = {.slot = params.seqs[chain.seq].slot,
                              .committed = position,
                              .first_row = next.n_rows,
                              .n_rows = 1};
    next.rows[next.n_rows] = {next.n_seqs++, position, token, 1, chain.row};
    chain.row = next.n_rows++;
  }
  *pass = next;
}

// A pass failed half-way: what these slots' cells hold is unknown, so they count as empty.
void DraftLoop::Forget(const WindowPlan& plan) {
  spdlog::warn("window {}: the draft head met a value that is not finite; no drafts", plan.window);
  for (uint32_t i = 0; i < plan.n_seqs; ++i) slots_[plan.seqs[i].slot].end = 0;
}

}  // namespace lode
