// The planner's promises as properties over random needs: bounds, everybody progresses, rotation is
// fair.
#include "daemon/window_planner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "daemon/kv_blocks.h"

namespace lode {
namespace {

uint32_t Sum(const std::vector<RowShare>& shares) {
  uint32_t n = 0;
  for (const RowShare& s : shares) n += s.rows;
  return n;
}

TEST(ShareRows, BoundsHoldForRandomNeeds) {
  std::mt19937 rng(7);
  for (int round = 0; round < 20000; ++round) {
    RowLimits limits{1 + static_cast<uint32_t>(rng() % 8), 1 + static_cast<uint32_t>(rng() % 8)};
    std::vector<RowNeed> needs(rng() % 70);
    uint32_t wanted = 0, decoders = 0, prompts = 0;
    for (size_t i = 0; i < needs.size(); ++i) {
      needs[i].decode = rng() % 2;
      needs[i].rows = rng() % 5 == 0 ? 0 : needs[i].decode ? 1 : 1 + rng() % 20;
      needs[i].last_turn = rng() % 4;
      needs[i].order = i;
      wanted += std::min(needs[i].rows, limits.prompt_rows);
      (needs[i].decode ? decoders : prompts) += needs[i].rows > 0;
    }
    const auto shares = ShareRows(needs, limits);
    // Every row of the window is used as long as anybody wants one; nobody gets more than it asked
    // for, or twice.
    EXPECT_EQ(Sum(shares), std::min(wanted, limits.window_rows));
    std::vector<bool> seen(needs.size());
    uint32_t got_prompts = 0, got_decoders = 0;
    for (const RowShare& s : shares) {
      ASSERT_LT(s.index, needs.size());
      EXPECT_FALSE(seen[s.index]);
      seen[s.index] = true;
      EXPECT_GE(s.rows, 1u);
      EXPECT_LE(s.rows, std::min(needs[s.index].rows, limits.prompt_rows));
      ++(needs[s.index].decode ? got_decoders : got_prompts);
    }
    if (limits.window_rows > 1) {
      EXPECT_GE(got_prompts, prompts > 0 ? 1u : 0u);
      EXPECT_GE(got_decoders, std::min(decoders, limits.window_rows - 1));
    }
    // Nobody who waits was served before somebody of its kind who got a row.
    for (size_t i = 0; i < needs.size(); ++i) {
      if (seen[i] || needs[i].rows == 0) continue;
      for (const RowShare& s : shares) {
        if (needs[s.index].decode == needs[i].decode) {
          EXPECT_LE(needs[s.index].last_turn, needs[i].last_turn);
        }
      }
    }
  }
}

// Runs `windows` windows and returns how many rows each got.
std::vector<uint32_t> Simulate(std::vector<RowNeed> needs, RowLimits limits, uint32_t windows) {
  std::vector<uint32_t> got(needs.size());
  uint64_t turn = 0;
  for (uint32_t w = 1; w <= windows; ++w) {
    for (const RowShare& s : ShareRows(needs, limits)) {
      got[s.index] += s.rows;
      needs[s.index].last_turn = ++turn;
    }
  }
  return got;
}

TEST(ShareRows, RotationIsFairAmongMoreDecodersThanRows) {
  for (const uint32_t n : {9u, 13u, 16u, 64u}) {
    std::vector<RowNeed> needs(n);
    for (uint32_t i = 0; i < n; ++i) needs[i] = {1, true, 0, i};
    const auto got = Simulate(needs, {}, 1000);
    EXPECT_EQ(std::accumulate(got.begin(), got.end(), 0u), 8000u);
    const auto [low, high] = std::minmax_element(got.begin(), got.end());
    EXPECT_LE(*high - *low, 1u) << n;
  }
}

TEST(ShareRows, FullHouseOfDecodersDoesNotStarveAPrompt) {
  std::vector<RowNeed> needs(10);
  for (uint32_t i = 0; i < 10; ++i) needs[i] = {i == 9 ? 1000u : 1u, i != 9, 0, i};
  const auto got = Simulate(needs, {}, 100);
  EXPECT_GE(got[9], 100u);                             // the prompt moves every window
  for (int i = 0; i < 9; ++i) EXPECT_GE(got[i], 77u);  // 7 of 8 rows over 9 decoders
}

TEST(ShareRows, WindowOfOneRowAlternates) {
  std::vector<RowNeed> needs = {{1, true, 0, 0}, {100, false, 0, 1}};
  const auto got = Simulate(needs, {1, 8}, 100);
  EXPECT_EQ(got[0], 50u);
  EXPECT_EQ(got[1], 50u);
}

TEST(ShareRows, PromptsShareTheRestOneRowAtATime) {
  std::vector<RowNeed> needs = {
      {1, true, 5, 0}, {20, false, 5, 1}, {20, false, 5, 2}, {2, false, 5, 3}};
  const auto shares = ShareRows(needs, {});
  ASSERT_EQ(shares.size(), 4u);
  EXPECT_EQ(shares[0].rows, 1u);
  EXPECT_EQ(shares[1].rows, 3u);
  EXPECT_EQ(shares[2].rows, 2u);
  EXPECT_EQ(shares[3].rows, 2u);
}

TEST(KvBlocks, TakesGivesAndNeverSharesABlock) {
  EXPECT_EQ(KvBlocks::BlocksFor(1), 1u);
  EXPECT_EQ(KvBlocks::BlocksFor(256), 1u);
  EXPECT_EQ(KvBlocks::BlocksFor(257), 2u);
  std::mt19937 rng(3);
  KvBlocks kv(50);
  std::vector<std::vector<uint32_t>> lists(6);
  for (int round = 0; round < 5000; ++round) {
    auto& list = lists[rng() % lists.size()];
    if (!list.empty()) {
      kv.Give(&list);
      continue;
    }
    const uint32_t want = 1 + rng() % 20, free = kv.free();
    EXPECT_EQ(kv.Take(want, &list), want <= free);
    std::vector<bool> used(50);
    uint32_t taken = 0;
    for (const auto& l : lists) {
      for (const uint32_t b : l) {
        EXPECT_FALSE(used[b]);
        used[b] = true;
        ++taken;
      }
    }
    EXPECT_EQ(taken + kv.free(), 50u);
  }
}

}  // namespace
}  // namespace lode
