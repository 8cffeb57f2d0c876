// The loop of a CPU worker after "ready": sleep between windows, poll the bell inside them, answer
// every job. Step 7 of the life of a token; the exchange protocol is drawn in
// docs/design/exchange.md. Thread: Run owns the calling thread (thread 0 of the pool). Counters may
// be read from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>

#include "cpu_worker/expert_runner.h"
#include "shared/pool/node_pool.h"
#include "shared/wire/arena_layout.h"
#include "shared/wire/exchange_layout.h"

namespace lode {

struct WorkerLoopOptions {
  uint32_t me = 0;  // worker index
  uint32_t generation = 0;
  uint64_t spin_ns = 0;  // busy polling of the bell before the first sleep
  // The bell is rung by a GPU, which wakes nobody: poll without sleeping while a window is open.
  bool bell_never_wakes = false;
  ExpertRunnerOptions runner;  // shape and waits; `me` and `stop` are filled in here
};

class WorkerLoop {
 public:
  // All outlive the loop: layout and arena of the complete store, the checked exchange segment, the
  // pool.
  WorkerLoop(const ArenaLayout& layout, const uint8_t* arena, uint8_t* exchange, NodePool* pool,
             const WorkerLoopOptions& options, const std::atomic<bool>& stop);

  // Takes over the worker's line of the exchange: jobs rung before this call are void and stay
  // unanswered. Call before Ready.
  void Announce();
  // Returns when `stop` becomes true, within some 50 ms.
  void Run();

  // Jobs by status, weight bytes, busy seconds. Any thread.
  std::map<std::string, double> Statistics() const;

 private:
  void ServeOpenWindow(uint64_t epoch);
  bool PollBell();
  void Answer(uint64_t tag);
  void Acknowledge(uint64_t tag, JobStatus status, uint32_t error_row);

  const ArenaLayout& layout_;
  ExchangeHeader* const header_;
  NodePool* const pool_;
  const WorkerLoopOptions options_;
  const std::atomic<bool>& stop_;
  WorkerLine& line_;
  const IsaChoice* tables_ = nullptr;
  uint32_t n_tables_ = 0;
  ExpertRunner runner_;
  uint64_t answered_ = 0;  // bell value that needs no answer any more
  ExpertJob job_;          // private copy
  static constexpr uint32_t kStatuses = 5;
  std::atomic<uint64_t> jobs_by_status_[kStatuses] = {};
};

}  // namespace lode
