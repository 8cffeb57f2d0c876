// One window through the GPU worker: number it, publish the plan, wait for the result. The wait
// ends by itself: with the result, when the worker's end was seen, or, when nothing at all moves
// for the watchdog's time, by a report of who waits for what and the restart of the stuck part.
// Step 4 and the daemon's side of step 9. Scheduler thread only.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "daemon/fleet.h"
#include "shared/shm/wait_word.h"

namespace lode {

struct RunnerConfig {
  uint64_t spin_ns = 0;
  uint64_t watchdog_ns = 0;  // without any progress of the window
  // Called every 20 ms while a window is awaited: what must not wait for it (requests that are
  // over).
  std::function<void()> on_wait = {};
};

enum class RunOutcome {
  kResult,      // *result is this window's
  kWorkerLost,  // the GPU worker ended, or was told to; its state is gone
  kStopped,     // the stop flag was set
};

class WindowRunner {
 public:
  WindowRunner(Fleet* fleet, RunnerConfig config, const std::atomic<bool>* stop)
      : fleet_(fleet), config_(std::move(config)), stop_(stop) {}

  // Fills in window, generation, device and kCpuLaneDown. `why`: one sentence when the worker was
  // lost.
  RunOutcome Run(const std::shared_ptr<const GpuLink>& link, WindowPlan* plan, WindowResult* result,
                 std::string* why);

  void set_watchdog_ns(uint64_t ns) { config_.watchdog_ns = ns; }
  uint64_t last_window() const { return window_; }
  // When anything last moved: a result, or a progress word while a window runs. Any thread.
  uint64_t last_progress_ns() const { return progress_ns_.load(std::memory_order_relaxed); }
  void NoteProgress() { progress_ns_.store(NowNs(), std::memory_order_relaxed); }
  uint64_t stalls() const { return stalls_; }

 private:
  bool Publish(const GpuLink& link, const WindowPlan& plan, std::string* why);
  void HandleStall(const GpuLink& link, const WindowPlan& plan);

  Fleet* fleet_;
  RunnerConfig config_;
  const std::atomic<bool>* stop_;
  uint64_t window_ = 0;  // never reused: results and tags of dead workers cannot be mistaken
  uint64_t stalls_ = 0;
  std::atomic<uint64_t> progress_ns_{0};
};

// Who waits for what, from the words in shared memory. stuck_cpu: the CPU worker that owes an
// answer, or -1: the GPU worker.
struct StallReport {
  std::string text;
  int stuck_cpu = -1;
};
StallReport DescribeStall(const GpuLink& link, uint64_t window);

}  // namespace lode
