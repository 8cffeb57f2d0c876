// SPSC ring of PODs in shared memory. One producer process, one consumer process; positions are
// monotonic counters reduced modulo the capacity only on access, so full and empty differ without a
// spare slot. The consumer copies a slot out before reading it. Templated on the word type (its
// Publish is found by argument), so that a deterministic scheduler can drive it in tests.
#pragma once

#include <atomic>
#include <cstdint>
#include <type_traits>

#include "shared/shm/wait_word.h"

namespace lode {

template <class T, uint32_t N, class Word = WaitWord>
struct SpscRing {
  static_assert(std::is_trivially_copyable_v<T> && N > 0 && (N & (N - 1)) == 0);
  alignas(64) Word head;  // written by the producer: items published so far
  alignas(64) Word tail;  // written by the consumer: items taken so far
  alignas(64) T slots[N];

  // Producer. False when full (nothing written).
  bool TryPush(const T& item) {
    const uint64_t h = head.value.load(std::memory_order_relaxed);  // own counter
    // Pairs with the consumer's Publish(tail): the slot's previous content has been copied out.
    if (h - tail.value.load(std::memory_order_acquire) >= N) return false;
    slots[h % N] = item;
    Publish(head, h + 1);  // release: pairs with the acquire in TryPop
    return true;
  }
  // Consumer. False when empty.
  bool TryPop(T* out) {
    const uint64_t t = tail.value.load(std::memory_order_relaxed);  // own counter
    // Pairs with the producer's Publish(head): the slot is complete.
    const uint64_t h = head.value.load(std::memory_order_acquire);
    if (h == t || h - t > N)
      return false;  // h - t > N: a broken peer; treated as empty, its supervisor acts
    *out = slots[t % N];
    Publish(tail,
            t + 1);  // release: pairs with the acquire in TryPush, the slot may be written again
    return true;
  }
  // Consumer: waits for an item until the deadline.
  bool Pop(T* out, const WaitBudget& budget) {
    for (;;) {
      // Read before the attempt: a push that comes between the two changes `head`, and the wait
      // below returns at once.
      const uint64_t seen = head.value.load(std::memory_order_relaxed);
      if (TryPop(out)) return true;
      if (NowNs() >= budget.deadline_ns) return false;
      WaitChange(head, seen, budget);
    }
  }
};

}  // namespace lode
