// See daemon/draft_planner.h.
#include "daemon/draft_planner.h"

#include <algorithm>
#include <numeric>

#include "kernels/canonical.h"

namespace lode {
namespace {

// Drafts that can still count: the decode row gives one token, each draft row one more.
uint32_t DraftRoom(const Sequence& sequence, uint32_t committing = 0) {
  const uint32_t max = sequence.request.max_tokens, done = sequence.answer_size() + committing;
  return std::min(sequence.request.drafts.max, max > done + 1 ? max - done - 1 : 0);
}

// Drafts for places `from`, from + 1, ... of the answer.
std::vector<int32_t> Replay(const ReplayDrafts& replay, uint32_t from, uint32_t n) {
  std::vector<int32_t> tokens;
  for (uint32_t at = from; at < from + n && at < replay.answer.size(); ++at) {
    const int32_t right = replay.answer[at], wrong = right == 0 ? 1 : right - 1;
    tokens.push_back(ReplayIsRight(replay, at) ? right : wrong);
  }
  return tokens;
}

// Of the first n drafts of an offer.
double ExpectedTokens(const DraftOffer& offer, uint32_t n) {
  double reach = 1, sum = 0;
  for (uint32_t i = 0; i < std::min(n, offer.n); ++i) sum += reach *= offer.holds[i];
  return sum;
}

// Drafts that a replay allows in the sequence's next window. The prompt's window was the first that
// gave a token.
uint32_t ReplayTurn(const ReplayDrafts& replay, const Sequence& sequence) {
  const uint32_t windows = sequence.usage.decode_windows;
  if (replay.turns.empty() || windows == 0) return kDraftsMax;
  return replay.turns[(windows - 1) % replay.turns.size()];
}

}  // namespace

bool ReplayIsRight(const ReplayDrafts& replay, uint32_t at) {
  const uint32_t run = at / kReplayRun, first = run * kReplayRun;
  const auto right_before = [&](uint32_t place) {
    return static_cast<uint32_t>(replay.right * place + 0.5);
  };
  const auto dice = [&](uint32_t place) { return canonical::Philox(replay.seed, place, 0).v[0]; };
  const uint32_t mine = dice(at);
  uint32_t rank = 0;  // among the run's places
  for (uint32_t place = first; place < first + kReplayRun; ++place) {
    const uint32_t other = dice(place);
    rank += other < mine || (other == mine && place < at) ? 1 : 0;
  }
  return rank < right_before(first + kReplayRun) - right_before(first);
}

// Head or lookup, whichever is expected to give more tokens.
DraftPlanner::Candidate DraftPlanner::Best(Sequence* sequence) const {
  SequenceDrafts& drafts = sequence->drafts;
  const DraftOptions& options = sequence->request.drafts;
  const uint32_t room = DraftRoom(*sequence);
  if (options.replay != nullptr) {
    const uint32_t n = std::min(room, ReplayTurn(*options.replay, *sequence));
    return {DraftClass::kHead, Replay(*options.replay, sequence->answer_size(), n)};
  }
  Candidate head, lookup;
  if (options.head) head.tokens = drafts.guesses;
  if (head.tokens.size() > room) head.tokens.resize(room);
  if (options.lookup && room > 0) {
    drafts.lookup.Extend(sequence->tokens);
    const PromptLookup::Match match = drafts.lookup.Find(sequence->tokens, room);
    lookup.source =
        match.length >= kLookupLongMin ? DraftClass::kLookupLong : DraftClass::kLookupShort;
    const auto first = sequence->tokens.begin() + match.from;
    lookup.tokens.assign(first, first + match.n);
  }
  if (head.tokens.empty() || lookup.tokens.empty()) return head.tokens.empty() ? lookup : head;
  const auto gain = [&](const Candidate& candidate) {
    return ExpectedTokens(OfferOf(*sequence, candidate), kDraftsMax);
  };
  return gain(lookup) > gain(head) ? lookup : head;
}

DraftOffer DraftPlanner::OfferOf(const Sequence& sequence, const Candidate& candidate) const {
  DraftOffer offer;
  offer.n = static_cast<uint32_t>(std::min<size_t>(candidate.tokens.size(), kDraftsMax));
  for (uint32_t i = 0; i < offer.n; ++i)
    offer.holds[i] = sequence.drafts.acceptance.Holds(candidate.source, i + 1, &acceptance_);
  return offer;
}

// Guesses of the head exist because Ask wanted them, and are explored there; other drafts (lookups,
// replayed ones) are there anyway.
bool DraftPlanner::AskedFor(const Sequence& sequence, const Candidate& candidate) {
  return candidate.source == DraftClass::kHead && sequence.request.drafts.replay == nullptr;
}

// Drafts to verify without asking the policy: a fixed number was requested, or the head guessed
// them so that the policy learns.
uint32_t DraftPlanner::ForcedDrafts(const Sequence& sequence, const Candidate& candidate) const {
  const auto n = static_cast<uint32_t>(candidate.tokens.size());
  if (sequence.request.drafts.fixed) return n;
  return AskedFor(sequence, candidate) && sequence.drafts.explore ? n : 0;
}

void DraftPlanner::Choose(std::span<Sequence* const> sequences, std::span<const RowShare> shares,
                          uint32_t window_rows) {
  uint32_t base_rows = 0, base_tokens = 0;
  for (const RowShare& share : shares) base_rows += share.rows;
  uint32_t room = window_rows - base_rows;
  std::vector<Candidate> candidates(sequences.size());
  std::vector<uint32_t> taken(sequences.size(), 0);
  std::vector<uint32_t> forced(sequences.size(), 0);
  std::vector<DraftOffer> offers(sequences.size());
  for (size_t i = 0; i < sequences.size(); ++i) {
    sequences[i]->drafts.offered.clear();
    if (!sequences[i]->decoding()) continue;
    ++base_tokens;
    candidates[i] = Best(sequences[i]);
    forced[i] = ForcedDrafts(*sequences[i], candidates[i]);
    if (forced[i] == 0 && !sequences[i]->request.drafts.fixed)
      offers[i] = OfferOf(*sequences[i], candidates[i]);
  }
  // Forced ones first, one each in turn.
  for (bool dealt = true; dealt && room > 0;) {
    dealt = false;
    for (size_t i = 0; i < sequences.size() && room > 0; ++i) {
      if (taken[i] >= forced[i]) continue;
      ++taken[i];
      ++base_rows;
      --room;
      dealt = true;
    }
  }
  if (base_tokens > 0) {
    const std::vector<uint32_t> chosen =
        ChooseDrafts(costs_, setup_.policy, base_rows, base_tokens, room, offers);
    for (size_t i = 0; i < sequences.size(); ++i) {
      taken[i] += chosen[i];
      room -= chosen[i];
    }
  }
  std::vector<double> expected(sequences.size(), 0);  // tokens of the drafts taken
  for (size_t i = 0; i < sequences.size(); ++i) expected[i] = ExpectedTokens(offers[i], taken[i]);
  const double all_tokens = std::accumulate(expected.begin(), expected.end(), 1.0 * base_tokens);
  for (size_t i = 0; i < sequences.size(); ++i) {
    SequenceDrafts& drafts = sequences[i]->drafts;
    const std::vector<int32_t>& tokens = candidates[i].tokens;
    const uint32_t most = std::min(static_cast<uint32_t>(tokens.size()), taken[i] + room);
    const bool explores =
        !sequences[i]->request.drafts.fixed && !AskedFor(*sequences[i], candidates[i]);
    if (explores && most > 0) {  // without room there is nothing to try
      const uint32_t best = taken[i];
      const Losses losses =
          DraftLosses(costs_, window_rows - room - best, all_tokens - expected[i], best, offers[i]);
      taken[i] = drafts.offers_explorer.Adjust(best, most, losses, setup_.policy);
      room = room + best - taken[i];
    }
    drafts.offered_class = candidates[i].source;
    drafts.offered.assign(tokens.begin(), tokens.begin() + taken[i]);
  }
}

void DraftPlanner::Ask(Sequence* sequence, bool picks, uint32_t decoding, SequencePlan* plan) {
  SequenceDrafts& drafts = sequence->drafts;
  const DraftOptions& options = sequence->request.drafts;
  drafts.asked = 0;
  drafts.asked_to_explore = false;
  if (!setup_.head || !options.head || options.max == 0 || sequence->scoring_only()) return;
  plan->draft_flags = static_cast<uint8_t>(kDraftFollow | (options.coupled ? kDraftCoupled : 0));
  plan->draft_min_p = options.min_p;
  if (!picks) return;
  // This window commits at least one token; drafts of the next stand behind that.
  const uint32_t max = std::min(DraftRoom(*sequence, /*committing=*/1), kDraftsMax);
  if (options.fixed) {
    drafts.asked = max;
  } else {
    const DepthChoice choice =
        ChooseDepth(costs_, setup_.policy, drafts.acceptance, acceptance_, decoding, max);
    drafts.asked = drafts.head_explorer.Adjust(choice.best, max, choice.losses, setup_.policy);
    drafts.asked_to_explore = drafts.asked > choice.best;
  }
  plan->draft_max = static_cast<uint8_t>(drafts.asked);
}

void DraftPlanner::Observe(const WindowResult& result, uint32_t seq_index, uint32_t drafts_held,
                           bool finished, Sequence* sequence, EngineCounters* counters) {
  SequenceDrafts& drafts = sequence->drafts;
  const auto offered = static_cast<uint32_t>(drafts.offered.size());
  const auto source = static_cast<size_t>(SourceOf(drafts.offered_class));
  for (uint32_t depth = 1; depth <= offered; ++depth) {
    const bool held = depth <= drafts_held;
    Add(counters->drafts_offered[source][depth], 1);
    ++sequence->usage.drafts_offered[source][depth];
    if (!held) continue;
    Add(counters->drafts_held[source][depth], 1);
    ++sequence->usage.drafts_held[source][depth];
  }
  // An answer that ends inside the window says nothing about the drafts behind its end.
  const uint32_t judged = finished ? drafts_held : offered;
  drafts.acceptance.Observe(drafts.offered_class, judged, drafts_held, &acceptance_);
  drafts.guesses.clear();
  drafts.explore = false;
  if (finished || sequence->last_accepted != result.proposed_accepts[seq_index]) return;
  const uint32_t given = std::min({result.n_drafts[seq_index], drafts.asked, kDraftsMax});
  drafts.guesses.assign(result.drafts[seq_index], result.drafts[seq_index] + given);
  drafts.explore = drafts.asked_to_explore;
  if (drafts.asked == 0) return;
  drafts.acceptance.ObserveGuesses(drafts.asked, given);
  acceptance_.ObserveGuesses(drafts.asked, given);
}

void DraftPlanner::ObserveWindow(const WindowPlan& plan, const WindowResult& result,
                                 uint64_t wall_ns, EngineCounters* counters) {
  const uint64_t draft_ns = std::min(result.draft_ns, wall_ns);
  Add(counters->draft_ns, draft_ns);
  Add(counters->verify_ns, wall_ns - draft_ns);
  uint32_t asked = 0;
  for (uint32_t i = 0; i < plan.n_seqs; ++i)
    asked = std::max<uint32_t>(asked, plan.seqs[i].draft_max);
  if (result.draft_passes > 0)
    costs_.ObserveDrafting(asked > 0 ? result.draft_passes : 0, draft_ns);
  // Prompt rows need no head and no pick: their windows say nothing about verification.
  for (uint32_t r = 0; r < plan.n_rows; ++r) {
    if (plan.rows[r].kind != RowKind::kDecode && plan.rows[r].kind != RowKind::kDraft) return;
  }
  const uint64_t misses = result.lookups[static_cast<uint32_t>(Lane::kPull)] +
                          result.lookups[static_cast<uint32_t>(Lane::kCpu)];
  costs_.ObserveWindow(plan.n_rows, wall_ns - draft_ns,
                       result.lookups[static_cast<uint32_t>(Lane::kHit)] + misses, misses);
}

}  // namespace lode
