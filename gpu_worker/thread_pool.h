// The compute threads of the cpu device: a fixed set, started once, that spreads the units of one
// operation. A result never depends on who computes which unit, so units are claimed dynamically
// and the number of active threads may change at any window border. Idle threads sleep on a futex
// (after an optional spin, off by default: spinning on a machine with fewer free cores than threads
// delays the very thread that is waited for). Thread: ParallelFor and SetActive are called by the
// worker loop only.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "gpu_worker/host_pool.h"

namespace lode {

class ThreadPool : public HostPool {
 public:
  // `threads` includes the caller, at least 1. Every thread checks its floating-point environment
  // first.
  explicit ThreadPool(uint32_t threads, uint32_t spin_ns = 0);
  ~ThreadPool() override;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  uint32_t threads() const { return static_cast<uint32_t>(workers_.size()) + 1; }
  uint32_t active() const { return active_.load(std::memory_order_relaxed); }
  void SetActive(uint32_t threads);  // 0 = all; clamped to 1..threads()

  // f(unit, thread) for every unit in [0, n_units), in any order on any thread; returns when all
  // have run. `thread` is below threads() and selects scratch memory. f must not throw and must not
  // call ParallelFor.
  template <typename F>
  void ParallelFor(uint32_t n_units, const F& f) {
    Spread(
        n_units,
        [](const void* p, uint32_t unit, uint32_t thread) {
          (*static_cast<const F*>(p))(unit, thread);
        },
        &f);
  }
  // The same on the caller alone when the operation is too short to be worth waking anybody:
  // `operations` is a rough count of multiply-adds.
  template <typename F>
  void ParallelFor(uint32_t n_units, uint64_t operations, const F& f) {
    if (operations >= kWakeOperationsMin) return ParallelFor(n_units, f);
    for (uint32_t unit = 0; unit < n_units; ++unit) f(unit, 0u);
  }
  void Run(uint32_t n, void (*fn)(void* arg, uint32_t i), void* arg) override {
    ParallelFor(n, [&](uint32_t unit, uint32_t) { fn(arg, unit); });
  }

 private:
  using UnitFn = void (*)(const void* context, uint32_t unit, uint32_t thread);
  // About 20 us of one core, twice what waking a thread costs.
  static constexpr uint64_t kWakeOperationsMin = 100'000;

  // Units of one claim word; a longer job runs in slices.
  static constexpr uint32_t kSliceUnits = 0xffff;

  void Spread(uint32_t n_units, UnitFn fn, const void* context);
  void SpreadSlice(uint32_t first, uint32_t n_units, UnitFn fn, const void* context);
  void WorkerMain(uint32_t thread);
  void ClaimUnits(uint32_t epoch, uint32_t thread);

  const uint32_t spin_ns_;
  std::vector<std::thread> workers_;
  std::atomic<uint32_t> active_;
  std::atomic<bool> stop_{false};
  // The job of epoch `epoch_`. A thread loads claim_ = (epoch 32 | units 16 | next unit 16), then the
  // fields, then takes the unit by compare-and-swap. The count travels inside the word, so a thread
  // that was late for an exhausted job can never take a unit of the next one; and when the swap
  // succeeds the fields belonged to the word's epoch, since they change only after all its units are
  // done.
  std::atomic<UnitFn> fn_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::atomic<uint32_t> first_unit_{0};  // of this slice of a long job
  alignas(64) std::atomic<uint64_t> claim_{0};
  alignas(64) std::atomic<uint32_t> done_{0};
  alignas(64) std::atomic<uint32_t> epoch_{0};  // sleeping threads wait on it
};

}  // namespace lode
