// What belongs in the VRAM tier: pure functions, plain data in and out, no clock. Two questions:
// which experts fill the slots at start (or after the budget changed), and which residents a policy
// swaps for hotter experts at a window border. Called by gpu_worker/expert_tier.cc, at start and
// between windows, and by the offline replayer. Arithmetic and constants:
// docs/design/expert-tier.md.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "shared/base/status.h"

namespace lode {

struct ExpertRef {
  uint16_t layer;
  uint16_t expert;
  bool operator==(const ExpertRef&) const = default;
};

// ---- ranking files
// -----------------------------------------------------------------------------------------------------
struct RankedExpert {
  ExpertRef ref;
  float score;  // >= 0, finite; higher belongs in VRAM sooner
};
// Text, one "layer expert score" per line; '#' starts a comment, blank lines are passed over. Ids
// inside the model's shape, no pair twice. The error names the line.
StatusOr<std::vector<RankedExpert>> ParseRanking(std::string_view text, uint32_t layers,
                                                 uint32_t experts);
// The same text from scores[layer * experts + expert], best first; pairs with score 0 are left out.
std::string RankingText(std::span<const double> scores, uint32_t layers, uint32_t experts);

// Every pair of the model, best first: ranked ones by falling score, then layer, then expert; the
// rest expert by expert over all layers, so that a prefix of it covers the layers evenly.
std::vector<ExpertRef> PlacementOrder(std::span<const RankedExpert> ranking, uint32_t layers,
                                      uint32_t experts);

// ---- placement
// ---------------------------------------------------------------------------------------------------------
struct Placement {
  std::vector<std::vector<uint16_t>>
      resident;        // [layer]: expert ids, best first; its size = the layer's slots
  uint64_t bytes = 0;  // of all slots, <= the budget
};
// Walks `order` and takes every pair whose slot still fits. slot_bytes: [layer].
Placement PlaceExperts(std::span<const ExpertRef> order, std::span<const uint64_t> slot_bytes,
                       uint64_t budget_bytes);

// The order in which slots are given out when the budget changes while serving: residents first
// (hottest first), then the others by falling count; equal counts in `order`'s own order. counts
// and resident: [layer * experts + expert].
std::vector<ExpertRef> ResizeOrder(std::span<const ExpertRef> order, std::span<const float> counts,
                                   std::span<const uint8_t> resident, uint32_t experts);

// ---- policy `decayed_lfu`
// ----------------------------------------------------------------------------------------------
struct LfuParams {
  uint32_t round_windows = 4;  // a round every 4th window
  float newcomer_min = 2.0f;   // a non-resident needs this count
  float margin =
      1.5f;  // and must beat the resident by this much: an upload costs more than one hit gains
  uint32_t swaps_max = 96;  // per round over all layers: bounds the copies between two rounds
  float decay = 0.7f;       // of all counters after each round
};
// What a layer looks like to the policy. An expert whose upload has not landed is neither.
enum class TierState : uint8_t { kAbsent = 0, kResident = 1, kUploading = 2 };

struct Swap {
  uint16_t layer;
  uint16_t newcomer;
  uint16_t victim;
  float gain;  // newcomer's count - victim's count
};
// The swaps of one round, largest gain first (then layer, then newcomer). counts, states: [layer *
// experts + expert].
std::vector<Swap> PlanSwaps(std::span<const float> counts, std::span<const TierState> states,
                            uint32_t layers, uint32_t experts, const LfuParams& params);
void DecayCounts(std::span<float> counts, const LfuParams& params);

}  // namespace lode
