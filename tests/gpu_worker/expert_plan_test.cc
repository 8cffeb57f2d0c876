// Properties of the lane decision over random routings: every routed id is planned exactly once, in
// order of first appearance, with the right rows and places; hits are the residents; of the misses
// exactly the last (misses * share) >> 8 are pulled.
#include "gpu_worker/expert_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace lode {
namespace {

struct Case {
  std::vector<RoutedRow> rows;
  std::vector<uint16_t> residency;
  uint32_t used;
};

Case RandomCase(std::mt19937* rng, uint32_t experts) {
  Case c;
  c.used = 1 + (*rng)() % std::min(experts, 12u);
  c.rows.resize((*rng)() % (kWindowRowsMax + 1));
  std::vector<uint16_t> ids(experts);
  for (uint32_t i = 0; i < experts; ++i) ids[i] = static_cast<uint16_t>(i);
  for (RoutedRow& row : c.rows) {
    std::shuffle(ids.begin(), ids.end(), *rng);
    std::copy_n(ids.begin(), c.used, row.ids);
  }
  c.residency.assign(experts, kNotResident);
  uint16_t slot = 0;
  for (uint32_t i = 0; i < experts; ++i) {
    if ((*rng)() % 3 == 0) c.residency[i] = slot++;
  }
  return c;
}

std::vector<uint16_t> FirstAppearances(const Case& c) {
  std::vector<uint16_t> order;
  for (const RoutedRow& row : c.rows) {
    for (uint32_t o = 0; o < c.used; ++o) {
      if (std::find(order.begin(), order.end(), row.ids[o]) == order.end())
        order.push_back(row.ids[o]);
    }
  }
  return order;
}

void CheckPlan(const Case& c, uint32_t share, bool down) {
  ExpertPlan plan;
  PlanExperts(c.rows.data(), c.rows.size(), c.used, c.residency.data(), share, down, &plan);
  const std::vector<uint16_t> order = FirstAppearances(c);
  ASSERT_EQ(plan.n_experts, order.size());
  std::vector<uint32_t> miss_lanes;
  uint32_t by_lane[kLanes] = {};
  for (uint32_t i = 0; i < plan.n_experts; ++i) {
    const PlannedExpert& e = plan.experts[i];
    EXPECT_EQ(e.expert, order[i]);
    ++by_lane[e.lane];
    for (uint32_t r = 0; r < c.rows.size(); ++r) {
      const auto* ids = c.rows[r].ids;
      const auto* at = std::find(ids, ids + c.used, e.expert);
      EXPECT_EQ((e.rows >> r) & 1u, at != ids + c.used ? 1u : 0u);
      if (at != ids + c.used) {
        EXPECT_EQ(e.order[r], at - ids);
      }
    }
    EXPECT_EQ(e.rows >> c.rows.size(), 0u);
    EXPECT_EQ(e.slot, c.residency[e.expert]);
    EXPECT_EQ(e.slot != kNotResident, e.lane == static_cast<uint32_t>(Lane::kHit));
    if (e.slot == kNotResident) miss_lanes.push_back(e.lane);
  }
  const size_t pulls = down ? miss_lanes.size() : (miss_lanes.size() * share) >> 8;
  for (size_t i = 0; i < miss_lanes.size(); ++i) {
    const bool pulled = i >= miss_lanes.size() - pulls;
    EXPECT_EQ(miss_lanes[i], static_cast<uint32_t>(pulled ? Lane::kPull : Lane::kCpu));
  }
  for (uint32_t lane = 0; lane < kLanes; ++lane) EXPECT_EQ(plan.n_by_lane[lane], by_lane[lane]);
}

TEST(ExpertPlan, HoldsItsPropertiesOnRandomRoutings) {
  std::mt19937 rng(7);
  for (int i = 0; i < 400; ++i) {
    const Case c = RandomCase(&rng, 1 + rng() % 600);
    CheckPlan(c, rng() % (kShareOne + 1), false);
    CheckPlan(c, 0, false);
    CheckPlan(c, kShareOne, false);
    CheckPlan(c, rng() % (kShareOne + 1), true);
  }
}

// Seven misses at share 0.55 (round(256 * 0.55) = 141): 7 * 141 >> 8 = 3 are pulled, the last
// three.
TEST(ExpertPlan, PublishedShareByHand) {
  RoutedRow row = {{10, 11, 12, 13, 14, 15, 16, 17}, {}};
  std::vector<uint16_t> residency(64, kNotResident);
  residency[12] = 5;
  ExpertPlan plan;
  PlanExperts(&row, 1, 8, residency.data(), 141, false, &plan);
  EXPECT_EQ(plan.n_by_lane[0], 1u);
  EXPECT_EQ(plan.n_by_lane[1], 3u);
  EXPECT_EQ(plan.n_by_lane[2], 4u);
  EXPECT_EQ(plan.experts[4].lane, static_cast<uint32_t>(Lane::kCpu));  // expert 14: the fourth miss
  EXPECT_EQ(plan.experts[5].lane, static_cast<uint32_t>(Lane::kPull));  // expert 15
  EXPECT_EQ(plan.experts[2].slot, 5u);
}

TEST(ExpertPlan, WorstCaseFillsTheTable) {
  std::vector<RoutedRow> rows(kWindowRowsMax);
  uint16_t next = 0;
  for (RoutedRow& row : rows) {
    for (uint16_t& id : row.ids) id = next++;
  }
  std::vector<uint16_t> residency(kExpertsMax, kNotResident);
  ExpertPlan plan;
  PlanExperts(rows.data(), kWindowRowsMax, kExpertsUsedMax, residency.data(), 0, false, &plan);
  EXPECT_EQ(plan.n_experts, kJobExpertsMax);
}

}  // namespace
}  // namespace lode
