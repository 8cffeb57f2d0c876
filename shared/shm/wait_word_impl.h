// Publish and wait on a WaitWord, as templates on the platform (atomics, futex, clock). Production
// instantiates them once in wait_word.cc; the model test instantiates them with atomics that hand
// every access to a scheduler with store buffers.
//
// The hazard is Dekker's: the publisher stores `value` then looks for sleepers, the waiter
// registers as sleeper then looks at `value`; if both looks could pass before both stores, the
// waiter would sleep through its own wake-up. The four accesses are therefore seq_cst: in their
// single total order one side's look comes last and sees the other side's store.
//
// A platform has: Atomic<T>; FutexWait(Atomic<uint32_t>&, expected, wake_by_ns);
// FutexWakeAll(Atomic<uint32_t>&); NowNs(); Pause().
#pragma once

#include <algorithm>
#include <cstdint>

#include "shared/shm/wait_word.h"

namespace lode {

template <class Platform, class Word>
void WakeAllWith(Word& word) {
  // Release: pairs with the acquire of `futex` in WaitChangeWith. A waiter that reads the bumped
  // count also sees everything that was stored before the bump, so it cannot fall asleep on the new
  // count with an old value in hand.
  word.futex.fetch_add(1, std::memory_order_release);
  Platform::FutexWakeAll(word.futex);
}

template <class Platform, class Word>
void PublishWith(Word& word, uint64_t value) {
  // seq_cst: release for the payload (pairs with the acquires of `value` in WaitChangeWith), and
  // one of the four Dekker accesses.
  word.value.store(value, std::memory_order_seq_cst);
  // seq_cst: Dekker. Zero here means that every later waiter's look at `value` finds the store
  // above.
  if (word.sleepers.load(std::memory_order_seq_cst) != 0) WakeAllWith<Platform>(word);
}

template <class Platform, class Word>
uint64_t WaitChangeWith(Word& word, uint64_t seen, const WaitBudget& budget) {
  constexpr uint32_t kPollsPerClock = 32;  // reading the clock costs about as much as 32 polls
  // Acquire: pairs with the publisher's store; what it wrote before is visible after this returns a
  // new value.
  uint64_t value = word.value.load(std::memory_order_acquire);
  if (value != seen) return value;
  uint64_t now = Platform::NowNs();
  const uint64_t spin_until = std::min(now + budget.spin_ns, budget.deadline_ns);
  while (now < spin_until) {
    for (uint32_t i = 0; i < kPollsPerClock; ++i) {
      value = word.value.load(std::memory_order_acquire);  // as above
      if (value != seen) return value;
      Platform::Pause();
    }
    now = Platform::NowNs();
  }
  while (now < budget.deadline_ns) {
    word.sleepers.fetch_add(
        1, std::memory_order_seq_cst);  // Dekker: registered before the last look at `value`
    // Acquire: pairs with the release of the bump in WakeAllWith. Read before the last look: a bump
    // after this line makes FUTEX_WAIT return at once, a bump before it makes the look below see
    // the new value.
    const uint32_t ticket = word.futex.load(std::memory_order_acquire);
    value = word.value.load(std::memory_order_seq_cst);  // Dekker: the last look
    if (value == seen)
      Platform::FutexWait(word.futex, ticket, std::min(now + kWaitSliceNs, budget.deadline_ns));
    word.sleepers.fetch_sub(1, std::memory_order_relaxed);  // only a count; a late view costs the
                                                            // publisher one system call
    if (value != seen) return value;
    value = word.value.load(std::memory_order_acquire);  // pairs with the publisher's store
    if (value != seen) return value;
    // Relaxed: only tells a WakeAll without a new value apart from the end of a slice.
    if (word.futex.load(std::memory_order_relaxed) != ticket) return value;
    now = Platform::NowNs();
  }
  return value;
}

}  // namespace lode
