// The listener: one warp beside a window's trunk that does nothing but look at the CPU workers'
// acknowledgements over PCIe and leaves what it sees in device memory. A look over PCIe takes 1.2
// us, one at device memory half of that and beside other loads nothing; the answer to a job is
// often there before anybody waits for it. Nobody relies on the listener: branches of a graph need
// not run at the same time. Off unless asked for: it slows the CPU lane down. A waiter
// (cuda_lane_kernels.cu) that hears nothing at once looks over PCIe itself. The listener leaves
// when the window's last answer is over, when the window is void, when the trunk has shown no sign
// of life for a millisecond (it would run alone, or ahead of the trunk), or at a deadline of its
// own.
//
// Looks of several warps at one line delay each other and every launch (figures:
// docs/measurements/h200-engine.md). So there is one warp with one look in flight, and it looks at
// a copy of the acks that nobody else on the card reads, at the abort word only now and then.
//
// Orders. A worker's release of its ack is acquired at system scope by a lane of the listener; that
// lane and the warp's first lane meet in SyncWarp; the first lane releases the tag at device scope;
// the waiter acquires it. Each step is a pair of morally strong operations, so they are one
// causality chain, and what the worker wrote before its ack is visible to the waiter. Device code.
#pragma once

#include "gpu_worker/cuda_lane_kernels.h"
#include "kernels/cuda/platform.h"
#include "kernels/cuda/system.h"

namespace lode::cuda {

// Without a sign of life of the trunk. Plans and waits give one; no other stage takes that long.
inline constexpr uint64_t kTrunkStillNs = 1'000'000;
inline constexpr uint64_t kListenNsMax = 2'000'000'000;  // of one window; longer ones do without
// Looks between two at the abort word and at what the trunk says: some 10 us.
inline constexpr uint32_t kLooksPerRound = 8;

// The trunk lives. Any thread.
LODE_DEVICE void TellListener(const LaneConstants& c) {
  if (c.listener != nullptr) StoreRelaxedDevice(&c.listener->trunk_ns, ClockNs());
}
// No layer of this window waits any more.
LODE_DEVICE void EndListener(const LaneConstants& c) {
  if (c.listener != nullptr) StoreRelaxedDevice(&c.listener->ended, 1);
}

// One warp, until it may leave: lane w looks at worker w, the next ones at the abort word and at
// what the trunk says, all in one load.
LODE_DEVICE void Listen(const LaneConstants& c) {
  static_assert(kCpuWorkersMax + 3 <= 32);
  ListenerWords* const words = c.listener;
  uint64_t* const acks = reinterpret_cast<uint64_t*>(c.exchange + c.acks);
  const uint32_t lane = ThreadId();
  const bool is_worker = lane < c.shape.nodes, is_abort = lane == kCpuWorkersMax,
             is_trunk = lane == kCpuWorkersMax + 1;
  uint64_t* const word = is_worker  ? acks + lane
                         : is_abort ? reinterpret_cast<uint64_t*>(c.exchange + c.abort_window)
                         : is_trunk ? &words->trunk_ns
                                    : &words->ended;
  const uint64_t window = c.window->window, begin = ClockNs();
  uint64_t told = 0;
  for (uint32_t look = 0;; ++look) {
    const bool round = look % kLooksPerRound == 0;
    const uint64_t seen = LoadAcquireSystem(is_worker || round ? word : acks);
    SyncWarp();
    if (round) {
      const uint64_t now = ClockNs();
      const bool over = is_worker  ? now - begin > kListenNsMax
                        : is_abort ? seen >= window
                        : is_trunk ? now > seen && now - seen > kTrunkStillNs
                                   : seen != 0;
      if (BallotWarp(over) != 0) return;
    }
    const uint32_t low = ShuffleFrom(static_cast<uint32_t>(seen), 0);
    const uint64_t first = uint64_t{ShuffleFrom(static_cast<uint32_t>(seen >> 32), 0)} << 32 | low;
    const bool all = BallotWarp(is_worker && seen != first) == 0;
    if (lane == 0 && all && first != told) StoreReleaseDevice(&words->tag, first);
    if (all) told = first;
  }
}

// A waiter's look at the listener's word, an acquire: begin it early and judge it later.
LODE_DEVICE uint64_t Hear(const LaneConstants& c) {
  return c.listener != nullptr ? LoadAcquireDevice(&c.listener->tag) : 0;
}

}  // namespace lode::cuda
