// The benchmark's routing against the published figures that it was fitted to, each within 5 %.
#include "gpu_worker/bench_routing.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace lode {
namespace {

constexpr uint32_t kExperts = 512, kUsed = 10, kWindows = 4000;

TEST(BenchRouting, DistinctExpertsOfSeveralRows) {
  const double published[] = {1, 1.75, 2.4, 3.05};
  for (uint32_t n_rows = 1; n_rows <= 4; ++n_rows) {
    BenchRouting routing(kExperts, kUsed, 7);
    std::vector<uint16_t> ids(n_rows * kUsed);
    size_t distinct = 0;
    for (uint32_t w = 0; w < kWindows; ++w) {
      routing.Draw(n_rows, kUsed, ids.data());
      distinct += std::set<uint16_t>(ids.begin(), ids.end()).size();
    }
    const double ratio = static_cast<double>(distinct) / kWindows / kUsed;
    EXPECT_NEAR(ratio / published[n_rows - 1], 1, 0.05) << n_rows << " rows";
  }
}

TEST(BenchRouting, LookupsOfThePopularExperts) {
  BenchRouting routing(kExperts, kUsed, 9);
  uint16_t ids[kUsed];
  uint64_t in_11 = 0, in_16 = 0;
  for (uint32_t w = 0; w < kWindows; ++w) {
    routing.Draw(1, kUsed, ids);
    for (const uint16_t id : ids) {
      ASSERT_LT(id, kExperts);
      in_11 += id < 0.11 * kExperts;
      in_16 += id < 0.16 * kExperts;
    }
  }
  EXPECT_NEAR(static_cast<double>(in_11) / (kWindows * kUsed) / 0.38, 1, 0.05);
  EXPECT_NEAR(static_cast<double>(in_16) / (kWindows * kUsed) / 0.50, 1, 0.05);
}

TEST(BenchRouting, ARowNamesNoExpertTwice) {
  BenchRouting routing(12, 10, 1);
  uint16_t ids[8 * 10];
  for (uint32_t w = 0; w < 100; ++w) {
    routing.Draw(8, 10, ids);
    for (uint32_t r = 0; r < 8; ++r)
      EXPECT_EQ(std::set<uint16_t>(ids + r * 10, ids + r * 10 + 10).size(), 10u);
  }
}

}  // namespace
}  // namespace lode
