// A whole GPU worker in a thread of the test process, over the segments that CPU workers of
// worker_fixture.h serve: load, plans in, results out. One for every test that drives a worker
// window by window; what the windows hold is theirs.
#pragma once

#include <memory>
#include <thread>

#include "gpu_worker/gpu_worker.h"
#include "shared/shm/wait_word.h"
#include "tests/gpu_worker/worker_fixture.h"

namespace lode {

class ServedGpuWorker {
 public:
  static constexpr uint32_t kGeneration = 5;
  static constexpr uint32_t kSlots = 2, kBlocks = 4, kContext = 1024;  // kBlocks: of each slot
  static constexpr uint64_t kWindowNsMax = 200'000'000'000;

  // `workers` outlives it. Nothing runs before Start.
  explicit ServedGpuWorker(const Workers& workers) : workers_(workers) {
    auto window = Segment::Create("window", sizeof(WindowSegment));
    EXPECT_TRUE(window.ok()) << window.status();
    window_ = std::move(*window);
    InitWindowSegment(*window_, kGeneration, 0, workers.config().vocab);
  }
  ~ServedGpuWorker() { Stop(); }

  // What a worker of this device is told; tests change what they are about.
  LoadPlan Plan(const char* device) const {
    LoadPlan plan = workers_.plan();
    plan.device = device;
    plan.kv_type = "q8";
    plan.wait_ms = 20'000;
    plan.wait_max_ms = 60'000;
    plan.kv_blocks = kSlots * kBlocks;
    plan.sequence_slots = kSlots;
    plan.context = kContext;
    plan.vram_budget_bytes = ~uint64_t{0};
    return plan;
  }
  GpuSegments Segments() const {
    GpuSegments segments = {Fd(dup(window_->fd())), Fd(dup(workers_.exchange().fd())), {}};
    for (uint32_t n = 0; n < workers_.n(); ++n)
      segments.arenas.emplace_back(dup(workers_.arena(n).fd()));
    return segments;
  }

  StatusOr<ReadyReport> Start(const LoadPlan& plan) {
    worker_ = std::make_unique<GpuWorker>(0, kGeneration);
    stop_ = false;
    auto ready = worker_->Load(plan, Segments(), nullptr, stop_);
    if (ready.ok()) thread_ = std::thread([this] { worker_->Run(); });
    return ready;
  }
  void Stop() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
    worker_.reset();
  }
  GpuWorker* worker() const { return worker_.get(); }  // null: not started
  WindowSegment* segment() const { return window_->As<WindowSegment>(); }
  const std::atomic<bool>& stop() const { return stop_; }

  // The next window's plan and its result.
  void Run(WindowPlan* plan, WindowResult* result) {
    plan->window = ++windows_;
    plan->generation = kGeneration;
    ASSERT_TRUE(segment()->plans.TryPush(*plan));
    ASSERT_TRUE(segment()->results.Pop(result, {0, NowNs() + kWindowNsMax}));
    EXPECT_EQ(result->window, plan->window);
  }
  uint64_t windows() const { return windows_; }  // run so far: the last one's number

 private:
  const Workers& workers_;
  std::unique_ptr<Segment> window_;
  std::atomic<bool> stop_{false};
  std::unique_ptr<GpuWorker> worker_;
  std::thread thread_;
  uint64_t windows_ = 0;
};

}  // namespace lode
