// Drafts of a window: which guesses each sequence verifies, how many the draft head shall make for
// the next window, and what the result teaches. Glue between the sequences, the prompt lookup and
// the policy's pure functions (daemon/draft_policy.h). Steps 3 and 10 of the life of a token.
// Scheduler thread only.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "daemon/draft_policy.h"
#include "daemon/engine_counters.h"
#include "daemon/sequence.h"
#include "daemon/window_planner.h"
#include "shared/wire/window_plan.h"
#include "shared/wire/window_result.h"

namespace lode {

struct DraftSetup {
  bool head = false;  // the GPU worker has a draft head
  PolicyConstants policy;
};

// Whether the replayed draft for place `at` of the answer is the answer's own token. A function of
// the seed and the place, so a text's drafts are right in the same places whatever is tried. Every
// run of kReplayRun places has the share of right ones that was asked for, in random order: chance
// alone would make stretches of a short answer easier or harder by a tenth.
inline constexpr uint32_t kReplayRun = 50;
bool ReplayIsRight(const ReplayDrafts& replay, uint32_t at);

class DraftPlanner {
 public:
  explicit DraftPlanner(const DraftSetup& setup)
      : setup_(setup), costs_(setup.policy), acceptance_(setup.policy) {}

  // `sequences[i]` gets `shares[i].rows` rows; what is left of the window may hold drafts. Fills
  // SequenceDrafts::offered of each (empty: none).
  void Choose(std::span<Sequence* const> sequences, std::span<const RowShare> shares,
              uint32_t window_rows);
  // Sets the drafting fields of a sequence's plan. `picks`: its last row picks; `decoding`: how
  // many sequences of the window do.
  void Ask(Sequence* sequence, bool picks, uint32_t decoding, SequencePlan* plan);
  // After CommitRows: what drafts of the sequence held, and the guesses for its next window.
  // `finished`: the answer ended in this window.
  void Observe(const WindowResult& result, uint32_t seq_index, uint32_t drafts_held, bool finished,
               Sequence* sequence, EngineCounters* counters);
  // Once per finished window: what it cost. `wall_ns`: plan published to result taken.
  void ObserveWindow(const WindowPlan& plan, const WindowResult& result, uint64_t wall_ns,
                     EngineCounters* counters);

  const WindowCosts& costs() const { return costs_; }
  const Acceptance& acceptance() const { return acceptance_; }

 private:
  struct Candidate {
    DraftClass source = DraftClass::kHead;
    std::vector<int32_t> tokens;
  };
  Candidate Best(Sequence* sequence) const;
  DraftOffer OfferOf(const Sequence& sequence, const Candidate& candidate) const;
  static bool AskedFor(const Sequence& sequence, const Candidate& candidate);
  uint32_t ForcedDrafts(const Sequence& sequence, const Candidate& candidate) const;

  const DraftSetup setup_;
  WindowCosts costs_;
  Acceptance acceptance_;  // of all sequences: what a new one starts from
};

}  // namespace lode
