// What a job's threads did and when, for tests/bench/lane_bench.cc: a worker that is given a trace
// writes into it, one that is given none pays a look at a null pointer per chunk. Writers: each
// thread its own list; the worker loop the rest. Reader: whoever saw the job's acknowledgement.
#pragma once

#include <cstdint>
#include <vector>

#include "shared/shm/wait_word.h"

namespace lode {

enum class LaneStep : uint32_t { kGateUp, kQuantise, kDown, kWaited };

struct LaneTrace {
  struct Event {
    LaneStep step;
    uint64_t begin_ns, end_ns;  // NowNs()
  };
  struct alignas(64) Thread {
    std::vector<Event> events;
  };
  explicit LaneTrace(uint32_t n_threads) : threads(n_threads) {
    constexpr size_t kEventsMax = 4096;
    for (Thread& t : threads) t.events.reserve(kEventsMax);
  }
  void Clear() {
    for (Thread& t : threads) t.events.clear();
  }

  uint64_t bell_ns = 0, run_ns = 0, open_ns = 0,
           end_ns = 0;  // bell seen, job checked, threads called, all done
  std::vector<Thread> threads;
};

// Adds [construction, destruction) to a thread's list.
class LaneSpan {
 public:
  LaneSpan(LaneTrace* trace, uint32_t thread, LaneStep step)
      : trace_(trace), thread_(thread), step_(step), begin_(trace != nullptr ? NowNs() : 0) {}
  ~LaneSpan() {
    if (trace_ != nullptr) trace_->threads[thread_].events.push_back({step_, begin_, NowNs()});
  }
  LaneSpan(const LaneSpan&) = delete;
  LaneSpan& operator=(const LaneSpan&) = delete;

 private:
  LaneTrace* const trace_;
  const uint32_t thread_;
  const LaneStep step_;
  const uint64_t begin_;
};

}  // namespace lode
