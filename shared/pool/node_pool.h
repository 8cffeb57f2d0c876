// The compute threads of a process: of a CPU worker, and of the GPU worker on the cpu device. Work
// is flat phases; a phase is a number of chunks that threads claim one by one (which evens out cores
// of unequal speed), a few per thread; the phase ends when every chunk is done. A CPU worker's job is
// one phase, whose chunks may wait for earlier ones (cpu_worker/job_chunks.h). The caller is thread 0
// and computes too. Threads spin for the next phase while they are to be awake (a window is open) and
// park on a futex otherwise. Step 7 of the life of a token. Thread: everything here is called by one
// thread, the one that called Start.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "shared/base/status.h"
#include "shared/pool/phase_board.h"
#include "shared/shm/wait_word.h"

namespace lode {

struct NodePoolOptions {
  uint32_t threads = 1;        // 1..kPoolThreadsMax, the caller included
  std::vector<uint32_t> cpus;  // one per thread to pin to; empty: not pinned
  uint64_t spin_ns = 0;  // busy polling between phases of an open window before a thread sleeps
};

class NodePool {
 public:
  static constexpr uint32_t kPoolThreadsMax = 1024;
  static constexpr uint32_t kChunksMax = PhaseBoard<std::atomic>::kChunksMax;
  static constexpr uint32_t kChunksPerThread =
      3;  // enough to even out speeds, few enough to keep claims rare

  // Pins the calling thread too: it becomes thread 0. Fails when a thread cannot start, or when the
  // float environment of a thread is not the canonical one. A CPU that cannot be pinned to is
  // logged and left to the scheduler.
  static StatusOr<std::unique_ptr<NodePool>> Start(const NodePoolOptions& options);
  ~NodePool();

  uint32_t threads() const { return options_.threads; }
  uint32_t active() const { return active_count_; }
  uint64_t spin_ns() const { return options_.spin_ns; }

  // Threads 0..n-1 take part from the next phase on; 0 or too many: all.
  void SetActive(uint32_t n);
  // Window open: threads spin. Closed: they sleep.
  void SetAwake(bool awake);

  // Given to f: next.Claim() is the chunk that this thread does after the present one, or
  // Next::kNone. For functions that can prepare it, asked when the present one is nearly done.
  using Next = PhaseBoard<std::atomic>::Next;

  // Runs f(chunk, thread) or f(chunk, thread, next) for chunk 0..n-1, each exactly once, and
  // returns when all are done; their writes are visible to the caller then. f must not throw and
  // must be bounded in time.
  template <class F>
  void RunPhase(uint32_t n_chunks, F&& f) {
    using Function = std::remove_reference_t<F>;
    RunErased(
        n_chunks,
        [](void* context, uint32_t chunk, uint32_t thread, Next& next) {
          Function& function = *static_cast<Function*>(context);
          if constexpr (std::is_invocable_v<Function&, uint32_t, uint32_t, Next&>) {
            function(chunk, thread, next);
          } else {
            function(chunk, thread);
          }
        },
        const_cast<void*>(static_cast<const void*>(&f)));
  }

 private:
  using PhaseFn = PhaseBoard<std::atomic>::Fn;

  explicit NodePool(const NodePoolOptions& options) : options_(options) {}
  void RunErased(uint32_t n_chunks, PhaseFn fn, void* context);
  void ThreadMain(uint32_t thread);

  // Const after Start.
  const NodePoolOptions options_;
  std::vector<std::thread> threads_;
  // Caller's thread only.
  uint32_t active_count_ = 0;
  uint32_t epoch_ = 0;

  PhaseBoard<std::atomic> board_;
  alignas(64) WaitWord phase_{};  // epoch of the newest phase; writer: the caller
  alignas(64) WaitWord
      active_{};  // threads that take part; inactive threads sleep on this word. Writer: the caller
  std::atomic<bool> awake_{false};
  std::atomic<bool> stop_{false};
};

}  // namespace lode
