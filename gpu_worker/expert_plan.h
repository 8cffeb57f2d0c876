// Which lane serves which routed expert of a window: pure functions, plain data in and out, no clock. The cpu device calls
// them; the cuda device runs the same code in its plan kernel. Step 5 of the life of a token.
#pragma once

#include <cstdint>

#include "kernels/canonical.h"
#include "shared/base/limits.h"
#include "shared/wire/window_result.h"

namespace lode {

// A row's routed experts in routing order (falling probability, lower id on equal bits).
struct RoutedRow {
  uint16_t ids[kExpertsUsedMax];
  float weights[kExpertsUsedMax];  // renormalised probabilities
};

struct PlannedExpert {
  uint16_t expert;
  uint16_t slot;                    // VRAM slot of the layer when lane == kHit
  uint32_t lane;                    // Lane
  RowMask rows;
  uint8_t order[kWindowRowsMax];    // [row]: place in that row's routing order
};
struct ExpertPlan {
  uint32_t n_experts;               // distinct, in order of first appearance (row by row, routing order)
  uint32_t n_by_lane[kLanes];
  PlannedExpert experts[kJobExpertsMax];
};

// Published constants of policy `fixed`: of the misses, the last (misses * round(256 * share)) >> 8 in routing order are pulled.
inline constexpr uint32_t kShareOne = 256;

// residency[e] = slot of expert e in this layer, or kNotResident. `share_256` = round(256 * pull share), 0..256.
// cpu_lane_down: every miss is pulled.
inline constexpr uint16_t kNotResident = 0xffff;
void PlanExperts(const RoutedRow* rows, uint32_t n_rows, uint32_t experts_used, const uint16_t* residency,
                 uint32_t share_256, bool cpu_lane_down, ExpertPlan* plan);

}  // namespace lode
