// The lane decision of one layer: dedup by a small table, then one pass over the misses from the
// back. Step 5. Called once per layer and window by the expert lanes; no allocation, no state.
#include "gpu_worker/expert_plan.h"

#include <cstring>

#include "shared/base/check.h"

namespace lode {
namespace {

constexpr uint16_t kUnseen = 0xffff;

// Distinct experts in order of first appearance, each with its rows and its place in every row.
void Dedup(const RoutedRow* rows, uint32_t n_rows, uint32_t experts_used, ExpertPlan* plan) {
  uint16_t place[kExpertsMax];  // expert -> index in plan->experts
  std::memset(place, 0xff, sizeof(place));
  static_assert(kJobExpertsMax < kUnseen);
  for (uint32_t r = 0; r < n_rows; ++r) {
    for (uint32_t o = 0; o < experts_used; ++o) {
      const uint16_t id = rows[r].ids[o];
      LODE_CHECK(id < kExpertsMax, "row {} routes to expert {}, above every model's count", r, id);
      if (place[id] == kUnseen) {
        place[id] = static_cast<uint16_t>(plan->n_experts);
        PlannedExpert& fresh = plan->experts[plan->n_experts++];
        fresh = PlannedExpert{};
        fresh.expert = id;
        fresh.slot = kNotResident;
      }
      PlannedExpert& expert = plan->experts[place[id]];
      expert.rows |= RowMask{1} << r;
      expert.order[r] = static_cast<uint8_t>(o);
    }
  }
}

}  // namespace

void PlanExperts(const RoutedRow* rows, uint32_t n_rows, uint32_t experts_used,
                 const uint16_t* residency, uint32_t share_256, bool cpu_lane_down,
                 ExpertPlan* plan) {
  LODE_CHECK(n_rows <= kWindowRowsMax && experts_used <= kExpertsUsedMax && share_256 <= kShareOne,
             "{} rows, {} experts per row, share {}/256", n_rows, experts_used, share_256);
  plan->n_experts = 0;
  for (uint32_t& n : plan->n_by_lane) n = 0;
  Dedup(rows, n_rows, experts_used, plan);

  uint32_t misses = 0;
  for (uint32_t i = 0; i < plan->n_experts; ++i) {
    PlannedExpert& expert = plan->experts[i];
    expert.slot = residency[expert.expert];
    if (expert.slot == kNotResident) ++misses;
  }
  const uint32_t pulls = cpu_lane_down ? misses : (misses * share_256) >> 8;
  uint32_t on_cpu = misses - pulls;  // the first misses; the last `pulls` cross the link
  for (uint32_t i = 0; i < plan->n_experts; ++i) {
    PlannedExpert& expert = plan->experts[i];
    Lane lane = Lane::kHit;
    if (expert.slot == kNotResident) {
      lane = on_cpu > 0 ? Lane::kCpu : Lane::kPull;
      if (on_cpu > 0) --on_cpu;
    }
    expert.lane = static_cast<uint32_t>(lane);
    ++plan->n_by_lane[expert.lane];
  }
}

}  // namespace lode
