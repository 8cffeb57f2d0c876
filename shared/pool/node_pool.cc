// See node_pool.h. One futex family for everything: the WaitWords here live in private memory,
// which a shared futex serves as well.
#include "shared/pool/node_pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <system_error>

#include "kernels/kernel_table.h"
#include "shared/base/check.h"
#include "shared/base/log.h"

namespace lode {
namespace {

// A phase that does not end for this many sleep slices (a minute) has lost a thread: our own bug.
// Slices, not time: a process that was stopped by a signal comes back and has used up one.
constexpr uint32_t kPhaseSlicesMax = 1200;

void Pin(uint32_t thread, uint32_t cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  int error = EINVAL;
  if (cpu < CPU_SETSIZE) {
    CPU_SET(cpu, &set);
    error = pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
  }
  if (error != 0)
    spdlog::warn("thread {} cannot be pinned to CPU {}: {}; it runs where the scheduler puts it",
                 thread, cpu, std::strerror(error));
}

}  // namespace

StatusOr<std::unique_ptr<NodePool>> NodePool::Start(const NodePoolOptions& options) {
  if (options.threads == 0 || options.threads > kPoolThreadsMax) {
    return InvalidArgument("{} compute threads: must be 1..{}", options.threads, kPoolThreadsMax);
  }
  if (!options.cpus.empty() && options.cpus.size() != options.threads) {
    return InvalidArgument("{} CPUs to pin {} threads to", options.cpus.size(), options.threads);
  }
  std::unique_ptr<NodePool> pool(new NodePool(options));
  pool->active_count_ = options.threads;
  pool->active_.value.store(options.threads,
                            std::memory_order_relaxed);  // thread creation publishes it
  std::vector<std::future<bool>> canonical;
  for (uint32_t t = 1; t < options.threads; ++t) {
    std::promise<bool> promise;
    canonical.push_back(promise.get_future());
    try {
      pool->threads_.emplace_back([raw = pool.get(), t, p = std::move(promise)]() mutable {
        if (!raw->options_.cpus.empty()) Pin(t, raw->options_.cpus[t]);
        const bool ok = FloatEnvironmentIsCanonical();
        p.set_value(ok);
        if (ok) raw->ThreadMain(t);
      });
    } catch (const std::system_error& e) {
      return ResourceExhausted(
          "cannot start compute thread {} of {}: {}; check the limit on tasks (TasksMax, ulimit "
          "-u)",
          t, options.threads, e.what());
    }
  }
  bool ok = FloatEnvironmentIsCanonical();
  for (std::future<bool>& f : canonical) ok = f.get() && ok;
  if (!ok) {
    return FailedPrecondition(
        "the float environment is not the default one (rounding, flush-to-zero or "
        "denormals-are-zero are set): a preloaded library "
        "changed it, and results would differ");
  }
  if (!options.cpus.empty()) Pin(0, options.cpus[0]);
  return pool;
}

NodePool::~NodePool() {
  stop_.store(true, std::memory_order_release);  // pairs with the acquire in ThreadMain
  // A thread that looked at stop_ before and sleeps after these wakes sleeps one slice at most: its
  // deadlines are slices.
  WakeAll(phase_);
  WakeAll(active_);
  for (std::thread& t : threads_) t.join();
}

void NodePool::SetActive(uint32_t n) {
  const uint32_t count = n == 0 ? options_.threads : std::min(n, options_.threads);
  if (count == active_count_) return;
  active_count_ = count;
  Publish(active_, count);
}

void NodePool::SetAwake(bool awake) {
  if (awake_.exchange(awake, std::memory_order_relaxed) == awake)
    return;  // a hint: no data hangs on it
  if (awake && options_.spin_ns > 0) WakeAll(phase_);
}

void NodePool::RunErased(uint32_t n_chunks, PhaseFn fn, void* context) {
  LODE_CHECK(n_chunks <= kChunksMax, "{} chunks in a phase", n_chunks);
  if (n_chunks == 0) return;
  if (active_count_ == 1 || n_chunks == 1) {
    for (uint32_t i = 0; i < n_chunks; ++i) {
      Next next(i + 1 < n_chunks ? i + 1 : Next::kNone);
      fn(context, i, 0, next);
    }
    return;
  }
  const uint32_t epoch = ++epoch_;
  board_.Open(epoch, n_chunks, fn, context);
  Publish(phase_, epoch);
  board_.TakeChunks(0);
  // Waits for the chunks that others took. Acquire: pairs with the publication by whoever ended the
  // last one, which hands over everybody's writes.
  for (uint32_t slices = 0; slices < kPhaseSlicesMax; ++slices) {
    const uint64_t seen = board_.done().value.load(std::memory_order_acquire);
    if (static_cast<uint32_t>(seen) == epoch) return;
    WaitChange(board_.done(), seen, {options_.spin_ns, NowNs() + kWaitSliceNs});
  }
  LODE_CHECK(false, "phase {}: {} of {} chunks done after {} slices of {} ms", epoch,
             board_.finished(), n_chunks, kPhaseSlicesMax, kWaitSliceNs / 1'000'000);
}

void NodePool::ThreadMain(uint32_t thread) {
  uint64_t seen = 0;
  while (!stop_.load(std::memory_order_acquire)) {  // pairs with the release in the destructor
    const uint64_t active = active_.value.load(std::memory_order_acquire);
    if (thread >= active) {
      WaitChange(active_, active, {0, NowNs() + kWaitSliceNs});
      continue;
    }
    const uint64_t spin_ns = awake_.load(std::memory_order_relaxed) ? options_.spin_ns : 0;
    const uint64_t phase = WaitChange(phase_, seen, {spin_ns, NowNs() + kWaitSliceNs});
    if (phase == seen) continue;
    seen = phase;
    board_.TakeChunks(thread);
  }
}

}  // namespace lode
