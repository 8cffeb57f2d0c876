// The compute threads of the cpu device: the process's pool (shared/pool/node_pool.h) as the device
// uses it, spreading the units of one operation. A result never depends on who computes which unit,
// so units are claimed dynamically and the number of active threads may change at any window
// border. Idle threads sleep (after an optional spin, off by default: spinning on a machine with
// fewer free cores than threads delays the very thread that is waited for). Thread: ParallelFor and
// SetActive are called by the worker loop only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "gpu_worker/host_pool.h"
#include "shared/pool/node_pool.h"

namespace lode {

class ThreadPool : public HostPool {
 public:
  // `threads` includes the caller, at least 1. `cpus`: one per thread to pin it to, the caller
  // included; empty: not pinned. A thread that cannot start, or a float environment that is not the
  // canonical one, ends the process.
  explicit ThreadPool(uint32_t threads, uint32_t spin_ns = 0, std::vector<uint32_t> cpus = {});

  uint32_t threads() const { return pool_->threads(); }
  uint32_t active() const { return pool_->active(); }
  void SetActive(uint32_t threads) { pool_->SetActive(threads); }  // 0 = all; clamped to threads()

  // f(unit, thread) for every unit in [0, n_units), in any order on any thread; returns when all
  // have run. `thread` is below threads() and selects scratch memory. f must not throw and must not
  // call ParallelFor.
  template <typename F>
  void ParallelFor(uint32_t n_units, const F& f) {
    for (uint32_t first = 0; first < n_units;) {  // a claim word counts so many
      const uint32_t n = std::min(NodePool::kChunksMax, n_units - first);
      pool_->RunPhase(n, [&](uint32_t unit, uint32_t thread) { f(first + unit, thread); });
      first += n;
    }
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
  // About 20 us of one core, twice what waking a thread costs.
  static constexpr uint64_t kWakeOperationsMin = 100'000;

  std::unique_ptr<NodePool> pool_;
};

}  // namespace lode
