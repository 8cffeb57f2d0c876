// WaitWord on Linux: std::atomic, the shared futex (no FUTEX_PRIVATE_FLAG: the waiter may be
// another process with another mapping of the same memfd), CLOCK_MONOTONIC. The order of every
// access is explained in wait_word_impl.h.
#include "shared/shm/wait_word.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

#include "shared/shm/wait_word_impl.h"

namespace lode {
namespace {

constexpr uint64_t kNsPerSecond = 1'000'000'000;

struct LinuxPlatform {
  // Returns on a wake, when the word is not `expected`, on a signal, or at `wake_by_ns`: callers
  // look again in any case, so the result does not matter.
  static void FutexWait(std::atomic<uint32_t>& word, uint32_t expected, uint64_t wake_by_ns) {
    // FUTEX_WAIT_BITSET takes an absolute CLOCK_MONOTONIC time: no drift over interrupted sleeps.
    timespec by = {static_cast<time_t>(wake_by_ns / kNsPerSecond),
                   static_cast<long>(wake_by_ns % kNsPerSecond)};
    syscall(SYS_futex, &word, FUTEX_WAIT_BITSET, expected, &by, nullptr, FUTEX_BITSET_MATCH_ANY);
  }
  static void FutexWakeAll(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE_BITSET, INT_MAX, nullptr, nullptr, FUTEX_BITSET_MATCH_ANY);
  }
  static uint64_t NowNs() { return lode::NowNs(); }
  static void Pause() { SpinPause(); }
};

}  // namespace

void Publish(WaitWord& word, uint64_t value) { PublishWith<LinuxPlatform>(word, value); }
void WakeAll(WaitWord& word) { WakeAllWith<LinuxPlatform>(word); }
uint64_t WaitChange(WaitWord& word, uint64_t seen, const WaitBudget& budget) {
  return WaitChangeWith<LinuxPlatform>(word, seen, budget);
}

uint64_t NowNs() {
  timespec now = {};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * kNsPerSecond + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace lode
