// What a sequence remembers about drafts: guesses for its next window, what the running window
// verifies, and how its drafts fared. All of it may be lost at any time without changing the
// answer. Scheduler thread only; written by daemon/draft_planner.cc.
#pragma once

#include <cstdint>
#include <vector>

#include "daemon/draft_policy.h"
#include "daemon/prompt_lookup.h"
#include "shared/base/limits.h"

namespace lode {

struct SequenceDrafts {
  // Guesses of the head behind the committed tokens; empty after anything unexpected.
  std::vector<int32_t> guesses;
  bool explore = false;  // verify them whatever the policy expects: that is how it learns

  // The running window: what it verifies, and what it asks of the head for the next.
  DraftClass offered_class = DraftClass::kHead;
  std::vector<int32_t> offered;
  uint32_t asked = 0;
  bool asked_to_explore = false;

  PromptLookup lookup;
  Acceptance acceptance;
  Explorer head_explorer;
  Explorer offers_explorer;  // of drafts that are there without being asked for
};

}  // namespace lode
