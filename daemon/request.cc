// RequestStream: a queue with one writer (the scheduler) and one reader (the API). See
// daemon/request.h.
#include "daemon/request.h"

#include <chrono>

#include "shared/shm/wait_word.h"

namespace lode {

bool RequestStream::Push(StreamEvent event) {
  std::function<void()> notify;
  bool full = false;
  {
    std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
    full = events_.size() >= kCapacityEvents;
    if (full && full_since_ns_ == 0) full_since_ns_ = NowNs();
    notify = notify_;
  }
  changed_.notify_all();
  if (notify) notify();
  return !full;
}

bool RequestStream::Full() const {
  std::lock_guard lock(mutex_);
  return events_.size() >= kCapacityEvents;
}

void RequestStream::SetNotify(std::function<void()> notify) {
  bool waiting = false;
  {
    std::lock_guard lock(mutex_);
    notify_ = notify;
    waiting = !events_.empty();
  }
  if (waiting && notify) notify();  // what came before the reader was listening
}

bool RequestStream::TryPop(StreamEvent* event) {
  std::lock_guard lock(mutex_);
  if (events_.empty()) return false;
  *event = std::move(events_.front());
  events_.pop_front();
  if (events_.size() < kCapacityEvents) full_since_ns_ = 0;
  return true;
}

bool RequestStream::Pop(StreamEvent* event, uint64_t deadline_ns) {
  // steady_clock is CLOCK_MONOTONIC, the clock of NowNs.
  const std::chrono::steady_clock::time_point deadline{std::chrono::nanoseconds(deadline_ns)};
  std::unique_lock lock(mutex_);
  if (!changed_.wait_until(lock, deadline, [&] { return !events_.empty(); })) return false;
  *event = std::move(events_.front());
  events_.pop_front();
  if (events_.size() < kCapacityEvents) full_since_ns_ = 0;
  return true;
}

void RequestStream::Cancel() {
  std::lock_guard lock(mutex_);
  cancelled_ = true;
}

bool RequestStream::cancelled() const {
  std::lock_guard lock(mutex_);
  return cancelled_;
}

uint64_t RequestStream::full_since_ns() const {
  std::lock_guard lock(mutex_);
  return full_since_ns_;
}

}  // namespace lode
