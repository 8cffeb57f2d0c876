// A sign of life that costs nothing and needs nobody: a thread that counts up a word of the window
// segment as long as this process runs at all. It says that the process was not stopped (SIGSTOP, a
// frozen cgroup, a debugger); whether the work goes on is said by other words
// (ExchangeHeader::gpu_heartbeat). So the daemon may judge it within seconds, though a window may
// rightly take longer. Made by GpuWorker while loading, ended with it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "shared/wire/window_segment.h"

namespace lode {

class Pulse {
 public:
  // `word` outlives this.
  explicit Pulse(std::atomic<uint32_t>* word) : thread_([this, word] { Beat(word); }) {}
  ~Pulse() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  Pulse(const Pulse&) = delete;
  Pulse& operator=(const Pulse&) = delete;

 private:
  void Beat(std::atomic<uint32_t>* word) {
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, std::chrono::milliseconds(kPulseMs), [this] { return stop_; }))
      word->fetch_add(1, std::memory_order_relaxed);  // only compared with its earlier self
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;  // guarded by mutex_
  std::thread thread_;
};

}  // namespace lode
