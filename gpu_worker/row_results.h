// What a row of a window reports: pick, log probabilities, alternatives, hash. From the device's
// own look at the logits where it has one (WindowEngine::pick), else from the logits. Step 9.
// Called by the worker loop; FillRow on its pool's threads, one row per call.
#pragma once

#include <cstdint>

#include "gpu_worker/plan_check.h"
#include "gpu_worker/row_pick.h"
#include "gpu_worker/sampler.h"
#include "gpu_worker/window_engine.h"
#include "shared/wire/window_plan.h"
#include "shared/wire/window_result.h"

namespace lode {

// What the device should make of the row's logits.
RowWants WantsOf(const WindowPlan& plan, uint32_t plan_row, const PlanAreas& areas);

// Fills everything of `out` that comes from logits. `step_row`: the row's place in the engine's
// last window; the row has needs_logits.
void FillRow(const WindowPlan& plan, uint32_t plan_row, const PlanAreas& areas,
             const WindowEngine& engine, uint32_t step_row, uint32_t vocab, SamplerScratch* scratch,
             RowResult* out);

}  // namespace lode
