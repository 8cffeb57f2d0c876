// What the three lanes of a window take and report, whichever device runs them: the settings of one
// window, its counts, and why a lane ended it. Plain data. Written and read by the worker loop's
// thread. Used by the lanes of both devices and by the worker loop.
#pragma once

#include <cstdint>

#include "kernels/kernel_table.h"
#include "shared/base/limits.h"
#include "shared/wire/window_plan.h"
#include "shared/wire/window_result.h"

namespace lode {

// WindowError::detail of a lane's kAborted outcome; WindowError::layer and worker say where.
enum class LaneError : uint32_t {
  kAbortWord = 1,   // the daemon declared the window void
  kNoProgress = 2,  // the worker's progress word did not move for wait_ns
  kTooLong = 3,     // it moved, but the job took more than wait_max_ns
  kPeerTimeout =
      4,  // the worker itself gave up waiting for another one (WindowError::row holds that worker)
  kBadJob = 5,  // the worker refused the job: our bug or mixed builds
};
const char* LaneErrorText(LaneError error);

// Patience and identity of the lanes; const after start.
struct LanesOptions {
  uint32_t experts_used = 0;
  uint32_t generation = 0;  // of this GPU worker; part of every tag
  bool float_reference = false;
  uint64_t spin_ns = 0;                // busy polling for an acknowledgement before sleeping
  uint64_t wait_ns = 200'000'000;      // without a change of the worker's progress word
  uint64_t wait_max_ns = 500'000'000;  // in all
};

// What may change at a window border.
struct LanesWindow {
  uint64_t window = 0;
  uint32_t share_256 = 0;
  SplitPolicy split = SplitPolicy::kFixed;
  bool cpu_lane_down = false;
  uint32_t cpu_isa[kCpuWorkersMax] = {};
  uint32_t cpu_threads = 0;
  const KernelTable* kernels = nullptr;  // of hits and pulls; cpu device only
};

// Per window; WindowResult and RowResult fields of the same names.
struct LaneCounts {
  uint64_t lookups[kLanes] = {};
  uint64_t bytes[kLanes] = {};
  uint64_t lane_ns[kLanes] = {};
  // Of a window that a device runs alone, by its own clock; bell to answer, summed over layers.
  uint64_t device_ns = 0, answer_ns = 0;
  uint16_t layer_lookups[kLayersMax][kLanes] = {};
  uint32_t row_lookups[kWindowRowsMax][kLanes] = {};
};

}  // namespace lode
