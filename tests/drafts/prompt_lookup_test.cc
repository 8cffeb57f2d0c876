// Prompt lookup: the longest repeated suffix, the latest on ties, bounded work, against a plain
// search.
#include "daemon/prompt_lookup.h"

#include <gtest/gtest.h>

#include <random>

namespace lode {
namespace {

using Tokens = std::vector<int32_t>;

// The definition, by trying every place.
PromptLookup::Match Slow(const Tokens& t, uint32_t wanted) {
  PromptLookup::Match best;
  const auto size = static_cast<uint32_t>(t.size());
  for (uint32_t end = size - 1; end >= PromptLookup::kGram && size > PromptLookup::kGram; --end) {
    uint32_t length = 0;
    while (length < std::min(end, PromptLookup::kMatchMax) &&
           t[end - 1 - length] == t[size - 1 - length]) {
      ++length;
    }
    if (length >= PromptLookup::kGram && length > best.length)
      best = {length, end, std::min(wanted, size - end)};
  }
  return best;
}

TEST(PromptLookup, FindsWhatFollowedTheLongestRepetition) {
  PromptLookup lookup;
  const Tokens t = {1, 2, 3, 4, 50, 9, 2, 3, 4, 60, 7, 1, 2, 3, 4};
  lookup.Extend(t);
  const PromptLookup::Match match = lookup.Find(t, 3);
  EXPECT_EQ(match.length, 4u);  // 1 2 3 4, not only 2 3 4 which came later
  EXPECT_EQ(match.from, 4u);
  EXPECT_EQ(match.n, 3u);
  EXPECT_EQ(lookup.Find(t, 0).n, 0u);
}

TEST(PromptLookup, AgreesWithPlainSearchWhileTheTextGrows) {
  std::mt19937 random(5);
  for (const int alphabet : {2, 4, 30}) {
    PromptLookup lookup;
    Tokens t;
    uint32_t found = 0;
    for (int i = 0; i < 300; ++i) {
      t.push_back(static_cast<int32_t>(random() % static_cast<uint32_t>(alphabet)));
      lookup.Extend(t);
      const PromptLookup::Match got = lookup.Find(t, 5), want = Slow(t, 5);
      // With two letters there are more occurrences than it looks at: only the length may be less.
      if (alphabet == 2) {
        EXPECT_LE(got.length, want.length);
        continue;
      }
      ASSERT_EQ(got.length, want.length) << i;
      ASSERT_EQ(got.from, want.from) << i;
      ASSERT_EQ(got.n, want.n) << i;
      found += got.length > 0;
    }
    if (alphabet == 4) {
      EXPECT_GT(found, 50u);
    }
  }
}

TEST(PromptLookup, NothingRepeatedGivesNothing) {
  PromptLookup lookup;
  Tokens t;
  for (int32_t i = 0; i < 100; ++i) {
    t.push_back(i);
    lookup.Extend(t);
    EXPECT_EQ(lookup.Find(t, 7).length, 0u);
  }
  for (const Tokens& few : {Tokens{}, Tokens{1}, Tokens{1, 1, 1}}) {
    PromptLookup fresh;
    fresh.Extend(few);
    EXPECT_EQ(fresh.Find(few, 7).length, 0u);
  }
}

TEST(PromptLookup, LongPromptsAreIndexedInPieces) {
  Tokens t;
  for (int32_t i = 0; i < 40000; ++i) t.push_back(i);
  for (const int32_t again : {39000, 39001, 39002, 39003}) t.push_back(again);
  PromptLookup lookup;
  lookup.Extend(t);
  EXPECT_EQ(lookup.Find(t, 1).length, 0u);  // not that far yet
  for (int i = 0; i < 3; ++i) lookup.Extend(t);
  EXPECT_EQ(lookup.Find(t, 1).length, 4u);
  EXPECT_EQ(t[lookup.Find(t, 1).from], 39004);
}

}  // namespace
}  // namespace lode
