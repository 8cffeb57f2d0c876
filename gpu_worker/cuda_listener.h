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

inline constexpr uint64_t kListenerGone = ~uint64_t{0};
// Without a sign of life of the trunk. Plans and waits give one; no other stage takes that long.
inline constexpr uint64_t kTrunkStillNs = 1'000'000;
inline constexpr uint64_t kListenNsMax = 2'000'000'000;  // of one window; longer ones do without
// Looks are a round trip of 1.2 us apart; the warps of four begin a quarter of that after each other.
inline constexpr uint32_t kListenerStaggerNs = 300;
// So many looks of a waiter at the same beats (0.6 us each): the listener stands still.
inline constexpr uint32_t kStillHearings = 32;
// Of a waiter: looks at device memory for each of its own over PCIe.
inline constexpr uint32_t kHearingsPerLook = 16;

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
  uint64_t told = 0;
  Nap(warp * kListenerStaggerNs);
  for (uint64_t beat = 1;; ++beat) {
    const uint64_t seen = LoadAcquireSystem(word);
    SyncWarp();
    const uint64_t now = ClockNs();
    const bool over = is_worker  ? now - begin > kListenNsMax
                      : is_abort ? seen >= window
                      : is_trunk ? now > seen && now - seen > kTrunkStillNs
                                 : seen != 0;
    if (BallotWarp(over) != 0) break;
    const uint32_t low = ShuffleFrom(static_cast<uint32_t>(seen), 0);
    const uint64_t first = uint64_t{ShuffleFrom(static_cast<uint32_t>(seen >> 32), 0)} << 32 | low;
    const bool all = BallotWarp(is_worker && seen != first) == 0;
    if (lane != 0) continue;
    if (all && first != told) {
      if (c.listener_relaxed != 0) {
        StoreRelaxedDevice(&words->tags[warp], first);
      } else {
        StoreReleaseDevice(&words->tags[warp], first);
      }
      told = first;
    }
    StoreRelaxedDevice(&words->beats[warp], beat);
  }
  if (lane == 0) StoreRelaxedDevice(&words->beats[warp], kListenerGone);
}

// ---- the waiter's side; one whole warp
// Word `lane` of the listener: tags, then beats. An acquire. Issue it early and judge it later.
LODE_DEVICE uint64_t Hear(const LaneConstants& c) {
  if (c.listener == nullptr) return 0;
  return LoadAcquireDevice(&c.listener->tags[0] + ThreadId() % (2 * kListenersMax));
}

enum class Heard : uint32_t { kAnswered, kNothing, kNobody };  // kNobody: look yourself

struct Ear {
  uint64_t last = 0;
  uint32_t still = 0;
};
// What a hearing says about the job `tag`.
LODE_DEVICE Heard JudgeHearing(uint64_t value, uint64_t tag, Ear* ear) {
  const bool is_tag = ThreadId() % (2 * kListenersMax) < kListenersMax;
  if (BallotWarp(is_tag && value == tag) != 0) {
    SyncWarp();
    return Heard::kAnswered;
  }
  const bool alive = !is_tag && value != 0 && value != kListenerGone;
  const bool moved = alive && value != ear->last;
  ear->last = value;
  if (BallotWarp(alive) == 0) return Heard::kNobody;
  ear->still = BallotWarp(moved) != 0 ? 0 : ear->still + 1;
  return ear->still < kStillHearings ? Heard::kNothing : Heard::kNobody;
}

}  // namespace lode::cuda
