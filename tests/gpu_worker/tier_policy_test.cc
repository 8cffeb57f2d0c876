// Placement and the decayed_lfu policy: properties over random counters, one round worked by hand,
// bad ranking files.
#include "gpu_worker/tier_policy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "shared/base/limits.h"

namespace lode {
namespace {

using ::testing::HasSubstr;

TEST(Ranking, ParsesAndRoundTrips) {
  auto ranking = ParseRanking("# comment\n0 3 2.5\n\n 1\t0 7 # why\n1 1 0", 2, 4);
  ASSERT_TRUE(ranking.ok()) << ranking.status();
  ASSERT_EQ(ranking->size(), 3u);
  EXPECT_EQ((*ranking)[0].ref, (ExpertRef{0, 3}));
  EXPECT_FLOAT_EQ((*ranking)[1].score, 7);
  const std::vector<double> scores = {0, 0, 4, 1, 9, 0, 0, 4};
  auto again = ParseRanking(RankingText(scores, 2, 4), 2, 4);
  ASSERT_TRUE(again.ok()) << again.status();
  const std::vector<ExpertRef> order = PlacementOrder(*again, 2, 4);
  const std::vector<ExpertRef> expected = {{1, 0}, {0, 2}, {1, 3}, {0, 3}};
  EXPECT_TRUE(std::equal(expected.begin(), expected.end(), order.begin()));
}

TEST(Ranking, RefusesBadLinesByNumber) {
  const std::map<std::string, std::string> bad = {
      {"0 1\n", "line 1"},        {"0 1 2\n0 9 1\n", "line 2"},   {"2 0 1", "outside"},
      {"0 0 nan", "finite"},      {"0 0 -1", "0 or more"},        {"0 0 1 4", "expected"},
      {"0 0 1\n0 0 2", "second"}, {"x 0 1", "expected"},          {"-1 0 1", "expected"},
      {"0 0 inf", "finite"},      {"99999999999 0 1", "expected"}};
  for (const auto& [text, why] : bad) {
    auto ranking = ParseRanking(text, 2, 4);
    ASSERT_FALSE(ranking.ok()) << text;
    EXPECT_THAT(Message(ranking.status()), HasSubstr(why)) << text;
  }
}

TEST(Placement, WithoutAProfileLayersAreCoveredEvenly) {
  const std::vector<uint64_t> slot_bytes(5, 100);
  const std::vector<ExpertRef> order = PlacementOrder({}, 5, 16);
  ASSERT_EQ(order.size(), 80u);
  for (uint64_t budget : {0ull, 99ull, 100ull, 1234ull, 8000ull, 9000ull}) {
    const Placement placement = PlaceExperts(order, slot_bytes, budget);
    EXPECT_LE(placement.bytes, budget);
    size_t low = 1000, high = 0, sum = 0;
    for (const auto& layer : placement.resident) {
      low = std::min(low, layer.size());
      high = std::max(high, layer.size());
      sum += layer.size();
    }
    EXPECT_LE(high - low, 1u);
    EXPECT_EQ(sum, std::min<uint64_t>(budget / 100, 80));
  }
}

TEST(Placement, RankedPairsComeFirstAndSmallSlotsFillTheRest) {
  const std::vector<RankedExpert> ranking = {{{1, 2}, 5}, {{0, 1}, 9}, {{1, 0}, 5}};
  const std::vector<uint64_t> slot_bytes = {30, 50};
  // 30 (0,1) + 50 (1,0) = 80; (1,2) no longer fits into 125, (0,0) does, then nothing.
  const Placement placement = PlaceExperts(PlacementOrder(ranking, 2, 4), slot_bytes, 125);
  EXPECT_EQ(placement.resident[0], (std::vector<uint16_t>{1, 0}));
  EXPECT_EQ(placement.resident[1], (std::vector<uint16_t>{0}));
  EXPECT_EQ(placement.bytes, 110u);
}

TEST(Placement, ResizeKeepsTheHottestResidents) {
  const std::vector<uint64_t> slot_bytes = {10, 10};
  const std::vector<ExpertRef> order = PlacementOrder({}, 2, 3);
  const std::vector<float> counts = {1, 5, 9, 4, 0, 7};
  const std::vector<uint8_t> resident = {1, 1, 0, 1, 1, 0};
  const auto resized = ResizeOrder(order, counts, resident, 3);
  const Placement shrunk = PlaceExperts(resized, slot_bytes, 25);
  EXPECT_EQ(shrunk.resident[0], (std::vector<uint16_t>{1}));
  EXPECT_EQ(shrunk.resident[1], (std::vector<uint16_t>{0}));
  const Placement grown = PlaceExperts(resized, slot_bytes, 50);
  EXPECT_EQ(grown.resident[0],
            (std::vector<uint16_t>{1, 0, 2}));  // all residents stay, the hottest other joins
  EXPECT_EQ(grown.resident[1], (std::vector<uint16_t>{0, 1}));
}

// Layer 0: residents 0 (count 1) and 1 (4); absent 2 (6), 3 (2), 4 (1.9).
//   6 against 1: gain 5. 2 against 4: not 1.5 more, stop. 4 has less than 2 anyway.
// Layer 1: residents 0 (0), 1 (0.5), 2 (3); absent 3 (2), 4 (2).
//   2 (id 3) against 0: gain 2. 2 (id 4) against 0.5: exactly the margin, gain 1.5.
TEST(DecayedLfu, OneRoundByHand) {
  const std::vector<float> counts = {1, 4, 6, 2, 1.9f, 0, 0.5f, 3, 2, 2};
  using enum TierState;
  const std::vector<TierState> states = {kResident, kResident, kAbsent,   kAbsent, kAbsent,
                                         kResident, kResident, kResident, kAbsent, kAbsent};
  const std::vector<Swap> swaps = PlanSwaps(counts, states, 2, 5, LfuParams{});
  ASSERT_EQ(swaps.size(), 3u);
  EXPECT_EQ(swaps[0].layer, 0);
  EXPECT_EQ(swaps[0].newcomer, 2);
  EXPECT_EQ(swaps[0].victim, 0);
  EXPECT_FLOAT_EQ(swaps[0].gain, 5);
  EXPECT_EQ(swaps[1].newcomer, 3);
  EXPECT_EQ(swaps[1].victim, 0);
  EXPECT_EQ(swaps[2].newcomer, 4);
  EXPECT_EQ(swaps[2].victim, 1);
  EXPECT_FLOAT_EQ(swaps[2].gain, 1.5f);
}

TEST(DecayedLfu, PropertiesOnRandomCounters) {
  std::mt19937 rng(11);
  const LfuParams params;
  for (int round = 0; round < 100; ++round) {
    const uint32_t layers = 1 + rng() % 48, experts = 2 + rng() % 128;
    std::vector<float> counts(static_cast<size_t>(layers) * experts);
    std::vector<TierState> states(counts.size());
    for (size_t i = 0; i < counts.size(); ++i) {
      counts[i] = static_cast<float>(rng() % 12);
      states[i] = static_cast<TierState>(rng() % 3);
    }
    const std::vector<Swap> swaps = PlanSwaps(counts, states, layers, experts, params);
    EXPECT_LE(swaps.size(), params.swaps_max);
    std::set<std::pair<int, int>> touched;
    for (size_t i = 0; i < swaps.size(); ++i) {
      const Swap& s = swaps[i];
      const size_t in = static_cast<size_t>(s.layer) * experts + s.newcomer;
      const size_t out = static_cast<size_t>(s.layer) * experts + s.victim;
      EXPECT_EQ(states[in], TierState::kAbsent);
      EXPECT_EQ(states[out], TierState::kResident);
      EXPECT_GE(counts[in], params.newcomer_min);
      EXPECT_GE(counts[in], counts[out] + params.margin);
      EXPECT_TRUE(touched.insert({s.layer, s.newcomer}).second);
      EXPECT_TRUE(touched.insert({s.layer, s.victim}).second);
      if (i > 0) {
        const Swap& p = swaps[i - 1];
        EXPECT_TRUE(p.gain > s.gain || (p.gain == s.gain && std::tie(p.layer, p.newcomer) <
                                                                std::tie(s.layer, s.newcomer)));
      }
    }
  }
}

TEST(DecayedLfu, CutsAtTheLargestGainsAndNeverSwapsEquals) {
  const LfuParams params;
  const uint32_t layers = 40, experts = 8;
  std::vector<float> counts(layers * experts, 0);
  std::vector<TierState> states(counts.size(), TierState::kAbsent);
  for (uint32_t l = 0; l < layers; ++l) {
    for (uint32_t e = 0; e < 4; ++e) states[l * experts + e] = TierState::kResident;
    for (uint32_t e = 4; e < 8; ++e) counts[l * experts + e] = static_cast<float>(2 + l);
  }
  const std::vector<Swap> swaps = PlanSwaps(counts, states, layers, experts, params);
  ASSERT_EQ(swaps.size(), 96u);
  for (const Swap& s : swaps) EXPECT_GE(s.layer, 40 - 96 / 4);  // 24 hottest layers, 4 swaps each
  std::fill(counts.begin(), counts.end(), 5.0f);
  EXPECT_TRUE(PlanSwaps(counts, states, layers, experts, params).empty());
}

// Eight rows, four windows a round: at most 32 per round, so a counter stays below 32 / (1 - 0.7).
TEST(DecayedLfu, CountersAreBounded) {
  const LfuParams params;
  const float per_round = static_cast<float>(kWindowRowsMax * params.round_windows);
  std::vector<float> counts = {0};
  for (int round = 0; round < 1000; ++round) {
    counts[0] += per_round;
    EXPECT_LE(counts[0], per_round / (1 - params.decay) * 1.0001f);
    DecayCounts(counts, params);
  }
}

}  // namespace
}  // namespace lode
