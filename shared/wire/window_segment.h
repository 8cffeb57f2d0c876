// The window segment: daemon <-> one GPU worker. Plan ring, result ring, sequence areas, routing traces.
#pragma once

#include <atomic>

#include "shared/shm/ring.h"
#include "shared/wire/window_plan.h"
#include "shared/wire/window_result.h"

namespace lode {

inline constexpr uint64_t kWindowMagic = 0x4c4f444557494e01ull;  // "LODEWIN" 1
// Windows in flight: one runs, one is planned ahead; the power of two leaves room for a pipelined drafter.
inline constexpr uint32_t kWindowRingSlots = 4;

// How often a GPU worker's process shows that it runs at all.
inline constexpr uint32_t kPulseMs = 100;

struct WindowSegment {
  uint64_t magic;
  uint64_t layout_hash;
  uint32_t generation;   // of the GPU worker this segment was made for; a new worker gets a new segment
  uint32_t device;
  uint32_t vocab;
  // Writer: a thread of the GPU worker, every kPulseMs; reader: the supervisor, which compares it with its earlier self (relaxed).
  std::atomic<uint32_t> pulse;
  SpscRing<WindowPlan, kWindowRingSlots> plans;      // producer: daemon; consumer: GPU worker
  SpscRing<WindowResult, kWindowRingSlots> results;  // producer: GPU worker; consumer: daemon
  RoutingTrace traces[kWindowRingSlots];             // [window % slots], written before its result is published
  SequenceArea sequences[kSequenceSlotsMax];
};

}  // namespace lode
