// A 64-bit word in shared memory that one process publishes and others wait for: spin first, then a
// *shared* futex (std::atomic::wait is process-private). A publisher that cannot make system calls
// (a GPU) simply stores `value`; waiters on such a word must not sleep (spin budget = their
// deadline). The algorithm itself is a template on the platform (shared/shm/wait_word_impl.h), so
// that tests/shared drives it through every interleaving with a scheduler of its own.
#pragma once

#include <atomic>
#include <cstdint>

namespace lode {

template <template <class> class Atomic>
struct BasicWaitWord {
  Atomic<uint64_t>
      value;  // written by the publisher (release or stronger), read by waiters (acquire)
  Atomic<uint32_t> futex;  // bumped by the publisher when somebody sleeps
  Atomic<uint32_t>
      sleepers;  // waiters inside FUTEX_WAIT, or about to enter it; a waiter killed there leaves it
                 // too high, which costs later publishers one system call each and nothing else
};
using WaitWord = BasicWaitWord<std::atomic>;
static_assert(sizeof(WaitWord) == 16 && std::atomic<uint64_t>::is_always_lock_free);

// Stores `value` (release) and wakes sleepers. Any thread of the publishing process.
void Publish(WaitWord& word, uint64_t value);
// Wakes every sleeper without changing the value (abort, shutdown). A waiter that checks its own
// condition, then sleeps, can miss this: such waiters pass deadlines of at most kWaitSliceNs and
// loop.
void WakeAll(WaitWord& word);

struct WaitBudget {
  uint64_t spin_ns;      // busy polling before the first sleep; 0 = sleep at once
  uint64_t deadline_ns;  // absolute, NowNs(); the wait returns by then
};
// Longest single sleep: should a wake ever be lost (a publisher killed between its store and its
// wake), the waiter looks at the word again after this long.
inline constexpr uint64_t kWaitSliceNs = 50'000'000;  // 50 ms

// Waits until value != seen, or the deadline; returns the value seen last (acquire). It may return the
// old value before the deadline: after WakeAll, and when the publisher of `seen` itself finds the
// waiter registered and wakes it late. Callers loop on their own condition and deadline.
uint64_t WaitChange(WaitWord& word, uint64_t seen, const WaitBudget& budget);

uint64_t NowNs();  // CLOCK_MONOTONIC

// One breath of a spinning thread: tells the core that this is a poll.
inline void SpinPause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

}  // namespace lode
