// What number of drafts is fastest, measured so sharply that a policy can be judged by it within a
// percent or so. A host drifts by several percent within seconds (its cores are shared, pieces of
// text meet other experts), so row counts are not timed one after the other: many short rounds time
// all of them, in an order that changes, over the same text, and only ratios taken within a round
// count. How many tokens a number of drafts gives is not measured but counted over the places where
// replayed drafts are right. Used by draft_replay_test; no clock, no engine. Main thread.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "shared/base/limits.h"

namespace lode {

// Windows of a row count in a row. The first is not timed: it advances the state by what the window
// before it, of another row count, accepted.
inline constexpr uint32_t kBlockWindows = 3;

// Where the replayed drafts of an answer of `tokens` tokens are right when `right` of them are.
class ReplayPattern {
 public:
  ReplayPattern(double right, uint32_t tokens);
  // Drafts that hold, of n in the window whose first draft stands for place `at` of the answer.
  uint32_t Held(uint32_t at, uint32_t n) const;
  // Tokens per window with always n drafts: the mean over all places where a window may start.
  double Tokens(uint32_t n) const { return tokens_[n]; }

 private:
  std::vector<uint32_t> right_run_;  // [place] right drafts from there on
  std::array<double, kWindowRowsMax> tokens_ = {};
};

// Windows of one timed answer, by place in it.
struct RoundsPlan {
  std::vector<uint8_t> drafts;   // of each window
  std::vector<uint32_t> tokens;  // that each window gives
  uint32_t answer_tokens = 0;    // all of them and the one that the prompt's window gave
};
// `rounds` rounds of blocks of the numbers in `contenders`; `first_round`: rounds planned before,
// which rotate and turn the order.
RoundsPlan PlanRounds(const ReplayPattern& pattern, const std::vector<uint32_t>& contenders,
                      uint32_t first_round, uint32_t rounds);

class Yardstick {
 public:
  explicit Yardstick(const ReplayPattern& pattern) : pattern_(pattern) {}

  // Times, ns, of the windows of a plan, at least as many as it has.
  void Add(const RoundsPlan& plan, const std::vector<double>& ns);
  uint32_t rounds() const { return static_cast<uint32_t>(rounds_.size()); }

  struct Ratio {
    double value = 1;
    double noise = 0;  // standard error
  };
  // Tokens per second with n drafts in those with `base` drafts, over the rounds that timed both.
  Ratio Speed(uint32_t n, uint32_t base) const;
  // The number of drafts with the most tokens per second, of those that most rounds have timed.
  uint32_t Fastest() const;
  // All numbers whose speed may be at least `share` of the fastest, and `also`.
  std::vector<uint32_t> Contenders(double share, uint32_t also) const;
  // Median time of a window with n drafts, ns.
  double WindowNs(uint32_t n) const;
  // Time of a block's first windows in that of its others, for all n: what not timing them avoids.
  Ratio FirstOfBlock() const;

 private:
  // Of one round, [number of drafts][window of its block]; 0: not in this round.
  using Round = std::array<std::array<double, kBlockWindows>, kWindowRowsMax>;
  // In how many rounds n was timed.
  uint32_t Timed(uint32_t n) const;

  ReplayPattern pattern_;
  std::vector<Round> rounds_;
};

}  // namespace lode
