// The yardstick by which the draft policy is judged: with times that drift by far more than what
// numbers of drafts differ by, it finds the fastest and says how far off it may be; its plans meet
// every number of drafts alike, and its tokens are those of the replayed drafts.
#include "tests/drafts/replay_yardstick.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "daemon/draft_planner.h"

namespace lode {
namespace {

constexpr uint32_t kTokens = 1024;
const std::vector<uint32_t> kEvery = {0, 1, 2, 3, 4, 5, 6, 7};

TEST(ReplayPattern, CountsWhatReplayedDraftsGive) {
  ReplayDrafts replay;
  replay.right = 0.7;
  const ReplayPattern pattern(replay.right, kTokens);
  for (const uint32_t n : kEvery) {
    uint32_t windows = 0, given = 0;  // every place once
    for (uint32_t at = 1; at < kTokens - kDraftsMax; ++at, ++windows) {
      uint32_t held = 0;
      while (held < n && ReplayIsRight(replay, at + held)) ++held;
      EXPECT_EQ(pattern.Held(at, n), held) << at;
      given += 1 + held;
    }
    EXPECT_DOUBLE_EQ(pattern.Tokens(n), static_cast<double>(given) / windows);
  }
  // Near the formula for drafts that hold independently.
  EXPECT_NEAR(pattern.Tokens(2), 1 + .7 + .49, 0.05);
}

TEST(PlanRounds, EveryNumberMeetsTheSameTextAndDrift) {
  const ReplayPattern pattern(0.87, kTokens);
  const RoundsPlan plan = PlanRounds(pattern, kEvery, 0, 16);
  ASSERT_EQ(plan.drafts.size(), 16 * kEvery.size() * kBlockWindows);
  std::array<double, kWindowRowsMax> turns = {};
  uint32_t at = 1;
  for (size_t w = 0; w < plan.drafts.size(); ++w) {
    EXPECT_EQ(plan.drafts[w], plan.drafts[w - w % kBlockWindows]);
    EXPECT_EQ(plan.tokens[w], 1 + pattern.Held(at, plan.drafts[w]));
    at += plan.tokens[w];
    turns[plan.drafts[w]] += static_cast<double>(w);
  }
  EXPECT_EQ(plan.answer_tokens, at);
  for (const uint32_t n : kEvery) EXPECT_NEAR(turns[n] / turns[0], 1, 0.05) << n;
}

// A host that gets 20 % slower and back within seconds, windows that differ by 2 %, one in a hundred
// that takes three times as long; speeds of the last recorded machine.
TEST(Yardstick, IsSharpOnAHostThatDrifts) {
  const double ms[] = {14.24, 19.71, 22.95, 28.93, 32.93, 36.74, 38.54, 43.32};
  const ReplayPattern pattern(0.7, kTokens);
  uint32_t within = 0, all = 0;
  for (uint32_t seed = 0; seed < 40; ++seed) {
    std::mt19937 random(seed);
    std::normal_distribution<double> noise(1, 0.02);
    Yardstick yardstick(pattern);
    double now = 0.1 * seed;  // seconds
    const auto measure = [&](const std::vector<uint32_t>& contenders, uint32_t rounds) {
      const RoundsPlan plan = PlanRounds(pattern, contenders, yardstick.rounds(), rounds);
      std::vector<double> ns;
      for (const uint8_t n : plan.drafts) {
        const double drift = 1 + 0.1 * std::sin(now * 2 * 3.14159 / 9);
        ns.push_back(ms[n] * 1e6 * drift * noise(random) * (random() % 100 == 0 ? 3 : 1));
        now += ns.back() * 1e-9;
      }
      yardstick.Add(plan, ns);
    };
    measure(kEvery, 3);
    now += 7;  // the policy's answer
    const auto contenders = yardstick.Contenders(0.85, 1);
    for (int i = 0; i < 3; ++i) measure(contenders, 2);
    EXPECT_EQ(yardstick.rounds(), 9u);
    EXPECT_EQ(yardstick.Fastest(), 2u) << seed;
    const Yardstick::Ratio speed = yardstick.Speed(1, 2);
    const double truth = pattern.Tokens(1) / ms[1] / (pattern.Tokens(2) / ms[2]);
    EXPECT_LT(speed.noise, 0.015) << seed;
    EXPECT_NEAR(speed.value, truth, 0.03) << seed;
    ++all;
    within += std::fabs(speed.value - truth) <= 2 * speed.noise ? 1 : 0;
  }
  EXPECT_GE(within, 0.85 * all);
}

TEST(Yardstick, NumbersTimedInNoCommonRoundAreNotCompared) {
  const ReplayPattern pattern(0.5, kTokens);
  Yardstick yardstick(pattern);
  for (const uint32_t n : {0u, 1u}) {
    const RoundsPlan plan = PlanRounds(pattern, {n}, 0, 1);
    yardstick.Add(plan, std::vector<double>(plan.drafts.size(), 1e6));
  }
  EXPECT_EQ(yardstick.Speed(1, 0).value, 0);
  EXPECT_EQ(yardstick.Speed(1, 0).noise, 1);
}

}  // namespace
}  // namespace lode
