// The listener: one small kernel beside a window's trunk that does nothing but look at the CPU
// workers' acknowledgements, several looks in flight at a time, and leaves what it sees in device
// memory. A look over PCIe takes 1.2 us, one at device memory half of that, and the answer to a job
// is mostly there before anybody waits for it: then a wait costs next to nothing. Nobody relies on
// it: branches of a graph need not run at the same time. A waiter (cuda_lane_kernels.cu) that hears
// nothing new looks over PCIe itself, and the listener leaves when the window's last answer is over,
// when the window is void, when the trunk has shown no sign of life for a millisecond (it would run
// alone, or ahead of the trunk), or at a deadline of its own.
//
// Orders. A worker's release of its ack is acquired at system scope by a lane of the listener; that
// lane and the warp's first lane meet in SyncWarp; the first lane releases the tag at device scope;
// the waiter acquires it. Each step is a pair of morally strong operations, so they are one causality
// chain, and what the worker wrote before its ack is visible to the waiter. Device code.
#pragma once

#include "gpu_worker/cuda_lane_kernels.h"
#include "kernels/cuda/platform.h"
#include "kernels/cuda/system.h"

namespace lode::cuda {

// Without a sign of life of the trunk. Plans and waits give one; no other stage takes that long.
inline constexpr uint64_t kTrunkStillNs = 1'000'000;
inline constexpr uint64_t kListenNsMax = 2'000'000'000;  // of one window; longer ones do without
// Looks are a round trip of 1.2 us apart; the warps of four begin a quarter of that after each other.
inline constexpr uint32_t kListenerStaggerNs = 300;
LODE_DEVICE uint8_t* LineOf(const LaneConstants& c, uint32_t worker) {
  return c.exchange + c.workers + worker * c.worker_stride;
}

// The trunk lives. Any thread.
LODE_DEVICE void TellListener(const LaneConstants& c) {
  if (c.listener != nullptr) StoreRelaxedDevice(&c.listener->trunk_ns, ClockNs());
}
// No layer of this window waits any more.
LODE_DEVICE void EndListener(const LaneConstants& c) {
  if (c.listener != nullptr) StoreRelaxedDevice(&c.listener->ended, 1);
}

// One warp, until it may leave: lane w looks at worker w, the next ones at the abort word and at what
// the trunk says, all in one load.
LODE_DEVICE void Listen(const LaneConstants& c) {
  static_assert(kCpuWorkersMax + 3 <= 32);
  ListenerWords* const words = c.listener;
  const uint32_t lane = ThreadId() % 32, warp = ThreadId() / 32;
  const bool is_worker = lane < c.shape.nodes, is_abort = lane == kCpuWorkersMax,
             is_trunk = lane == kCpuWorkersMax + 1;
  uint64_t* const word =
      is_worker  ? reinterpret_cast<uint64_t*>(LineOf(c, lane) + c.line_ack)
      : is_abort ? reinterpret_cast<uint64_t*>(c.exchange + c.abort_window)
      : is_trunk ? &words->trunk_ns
                 : &words->ended;
  const uint64_t window = c.window->window, begin = ClockNs();
  uint64_t told = 0, now = begin;
  const uint32_t flags = c.listener_flags;
  uint64_t* const line0 = reinterpret_cast<uint64_t*>(LineOf(c, 0) + c.line_ack);
  Nap(warp * kListenerStaggerNs);
  for (uint32_t look = 0;; ++look) {
    const bool house = (flags & 8) == 0 || look % 8 == 0;
    uint64_t* const at = house || is_worker ? word : line0;
    const uint64_t seen = (flags & 1) != 0 ? LoadRelaxedSystem(at) : LoadAcquireSystem(at);
    SyncWarp();
    if ((flags & 4) == 0 || look % 32 == 0) now = ClockNs();
    const bool over = is_worker  ? now - begin > kListenNsMax
                      : !house ? false
                      : is_abort ? seen >= window
                      : is_trunk ? now > seen && now - seen > kTrunkStillNs
                                 : seen != 0;
    if (BallotWarp(over) != 0) break;
    const uint32_t low = ShuffleFrom(static_cast<uint32_t>(seen), 0);
    const uint64_t first = uint64_t{ShuffleFrom(static_cast<uint32_t>(seen >> 32), 0)} << 32 | low;
    const bool all = BallotWarp(is_worker && seen != first) == 0;
    if (lane != 0 || !all || first == told) continue;
    told = first;
    if ((flags & 2) != 0) {
      StoreRelaxedDevice(&words->tags[warp], first);
    } else {
      StoreReleaseDevice(&words->tags[warp], first);
    }
  }
}

// ---- the waiter's side; one whole warp
// A look at the listener's words, an acquire: begin it early and judge it later.
LODE_DEVICE uint64_t Hear(const LaneConstants& c) {
  if (c.listener == nullptr) return 0;
  return LoadAcquireDevice(&c.listener->tags[ThreadId() % kListenersMax]);
}
// Whether every worker has acknowledged `tag`. False says nothing.
LODE_DEVICE bool Heard(uint64_t said, uint64_t tag) {
  if (BallotWarp(said == tag) == 0) return false;
  SyncWarp();
  return true;
}

}  // namespace lode::cuda
