// The choice of combinations: no triple of values is missing, none is there twice, the number is
// kept.
#include "tests/bits/combinations.h"

#include <gtest/gtest.h>

#include <set>

namespace lode {
namespace {

TEST(Combinations, FullProductHasEveryOneOnce) {
  const auto product = FullProduct({3, 2, 4});
  EXPECT_EQ(product.size(), 24u);
  EXPECT_EQ(std::set<Combination>(product.begin(), product.end()).size(), 24u);
}

TEST(Combinations, EveryTripleOfValuesOccurs) {
  const std::vector<uint32_t> values = {3, 3, 3, 2, 4, 2, 3, 2};
  const auto chosen = ChooseCombinations(values, 120);
  EXPECT_EQ(chosen.size(), 120u);
  EXPECT_EQ(std::set<Combination>(chosen.begin(), chosen.end()).size(), chosen.size());
  size_t wanted = 0;
  std::set<std::vector<uint32_t>> seen;
  for (uint32_t a = 0; a < values.size(); ++a) {
    for (uint32_t b = a + 1; b < values.size(); ++b) {
      for (uint32_t c = b + 1; c < values.size(); ++c) {
        wanted += size_t{values[a]} * values[b] * values[c];
        for (const Combination& x : chosen) seen.insert({a, b, c, x[a], x[b], x[c]});
      }
    }
  }
  EXPECT_EQ(seen.size(), wanted);
}

TEST(Combinations, NeverMoreThanThereAreAndNeverFewerThanNeeded) {
  EXPECT_EQ(ChooseCombinations({2, 2}, 100).size(), 4u);
  EXPECT_EQ(ChooseCombinations({2, 2, 2}, 1).size(), 8u);  // one triple of factors: all of it
}

}  // namespace
}  // namespace lode
