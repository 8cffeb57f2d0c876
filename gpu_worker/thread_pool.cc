// The claim protocol of the cpu device's threads: see thread_pool.h.
#include "gpu_worker/thread_pool.h"

#include <algorithm>
#include <chrono>

#include "kernels/kernel_table.h"
#include "shared/base/check.h"

namespace lode {
namespace {

void CheckFloatEnvironment() {
  LODE_CHECK(
      FloatEnvironmentIsCanonical(),
      "a library changed the rounding or denormal mode of a compute thread; results would differ");
}

}  // namespace

ThreadPool::ThreadPool(uint32_t threads, uint32_t spin_ns)
    : spin_ns_(spin_ns), active_(std::max(1u, threads)) {
  CheckFloatEnvironment();
  for (uint32_t t = 1; t < std::max(1u, threads); ++t)
    workers_.emplace_back([this, t] { WorkerMain(t); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true, std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::SetActive(uint32_t threads) {
  const uint32_t all = this->threads();
  active_.store(threads == 0 ? all : std::min(threads, all), std::memory_order_relaxed);
}

void ThreadPool::Spread(uint32_t n_units, UnitFn fn, const void* context) {
  if (n_units == 0) return;
  if (n_units == 1 || active() == 1) {
    for (uint32_t unit = 0; unit < n_units; ++unit) fn(context, unit, 0);
    return;
  }
  for (uint32_t first = 0; first < n_units; first += kSliceUnits)
    SpreadSlice(first, std::min(kSliceUnits, n_units - first), fn, context);
}

void ThreadPool::SpreadSlice(uint32_t first, uint32_t n_units, UnitFn fn, const void* context) {
  const uint32_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
  fn_.store(fn, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  first_unit_.store(first, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  // Publishes the job: pairs with the acquire load of claim_ in ClaimUnits.
  claim_.store(static_cast<uint64_t>(epoch) << 32 | n_units << 16, std::memory_order_release);
  epoch_.store(epoch, std::memory_order_release);
  epoch_.notify_all();
  ClaimUnits(epoch, 0);
  // Units still running belong to threads that are computing; the wait ends with the longest of
  // them. Pairs with the release increments in ClaimUnits.
  for (uint32_t done; (done = done_.load(std::memory_order_acquire)) != n_units;)
    done_.wait(done, std::memory_order_acquire);
}

void ThreadPool::ClaimUnits(uint32_t epoch, uint32_t thread) {
  uint64_t claim = claim_.load(std::memory_order_acquire);
  for (;;) {
    const UnitFn fn = fn_.load(std::memory_order_relaxed);
    const void* context = context_.load(std::memory_order_relaxed);
    const uint32_t first = first_unit_.load(std::memory_order_relaxed);
    const uint32_t n_units = static_cast<uint32_t>(claim >> 16) & 0xffff;
    const uint32_t unit = static_cast<uint32_t>(claim) & 0xffff;
    if (static_cast<uint32_t>(claim >> 32) != epoch || unit >= n_units) return;
    if (!claim_.compare_exchange_weak(claim, claim + 1, std::memory_order_acq_rel,
                                      std::memory_order_acquire))
      continue;
    fn(context, first + unit, thread);
    if (done_.fetch_add(1, std::memory_order_release) + 1 == n_units && thread != 0)
      done_.notify_one();
    claim = claim_.load(std::memory_order_acquire);
  }
}

void ThreadPool::WorkerMain(uint32_t thread) {
  CheckFloatEnvironment();
  uint32_t seen = 0;
  for (;;) {
    const auto spin_end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(spin_ns_);
    while (epoch_.load(std::memory_order_acquire) == seen &&
           std::chrono::steady_clock::now() < spin_end) {
    }
    epoch_.wait(seen, std::memory_order_acquire);  // an idle thread sleeps until the next job or
                                                   // the end of the pool
    seen = epoch_.load(std::memory_order_acquire);
    if (stop_.load(std::memory_order_relaxed)) return;
    if (thread < active()) ClaimUnits(seen, thread);
  }
}

}  // namespace lode
