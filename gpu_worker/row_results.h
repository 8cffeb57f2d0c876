// What a row of a window reports: pick, log probabilities, alternatives, hash. From the device's
// own look at the logits where it has one (WindowEngine::pick), else from the logits. Step 9.
// Called by the worker loop; FillRow on its pool's threads, one row per call.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "gpu_worker/plan_check.h"
#include "gpu_worker/row_pick.h"
#include "gpu_worker/sampler.h"
#include "gpu_worker/window_engine.h"
#include "shared/wire/window_plan.h"
#include "shared/wire/window_result.h"

namespace lode {

// Bytes of a window's change lists, at most: whole heaps, and the drafts of every row.
inline constexpr size_t kChangeBytesMax =
    kWindowRowsMax * (kSequenceHeapBytes + (kWindowRowsMax + 4) * sizeof(uint64_t));

// What the device should make of the rows' logits: wants[i] of plan row row_of[i], and the lists they
// name. Rows of one sequence share theirs. `changes` grows to kChangeBytesMax at most.
void MakeWants(const WindowPlan& plan, std::span<const uint32_t> row_of, const PlanAreas& areas,
               uint32_t vocab, RowWants* wants, std::vector<uint8_t>* changes);

// Fills everything of `out` that comes from logits. `step_row`: the row's place in the engine's
// last window; the row has needs_logits.
void FillRow(const WindowPlan& plan, uint32_t plan_row, const PlanAreas& areas,
             const WindowEngine& engine, uint32_t step_row, uint32_t vocab, SamplerScratch* scratch,
             RowResult* out);

}  // namespace lode
