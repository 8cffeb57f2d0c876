// A 64-bit word in shared memory that one process publishes and others wait for: spin first, then a *shared* futex
// (std::atomic::wait is process-private). A publisher that cannot make system calls (a GPU) simply stores `value`; waiters
// on such a word must not sleep (spin budget = their deadline).
#pragma once

#include <atomic>
#include <cstdint>

namespace lode {

struct WaitWord {
  std::atomic<uint64_t> value;     // written by the publisher (release), read by waiters (acquire)
  std::atomic<uint32_t> futex;     // bumped by the publisher when somebody sleeps
  std::atomic<uint32_t> sleepers;  // waiters inside FUTEX_WAIT, or about to enter it
};
static_assert(sizeof(WaitWord) == 16 && std::atomic<uint64_t>::is_always_lock_free);

// Stores `value` (release) and wakes sleepers. Any thread of the publishing process.
void Publish(WaitWord& word, uint64_t value);
// Wakes every sleeper without changing the value (abort, shutdown).
void WakeAll(WaitWord& word);

struct WaitBudget {
  uint64_t spin_ns;      // busy polling before the first sleep; 0 = sleep at once
  uint64_t deadline_ns;  // absolute, NowNs(); the wait returns by then
};
// Waits until value != seen, or the deadline; returns the value seen last (acquire). Spurious returns of the old value
// happen only at the deadline or after WakeAll (callers loop on their own condition).
uint64_t WaitChange(WaitWord& word, uint64_t seen, const WaitBudget& budget);

uint64_t NowNs();  // CLOCK_MONOTONIC

}  // namespace lode
