// CPU workers in threads of the test process, over real segments and the demo model: everything of
// a serving machine but the processes.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cpu_worker/cpu_worker.h"
#include "gpu_worker/arena_set.h"
#include "shared/wire/segment_headers.h"
#include "tests/support/places.h"

namespace lode {

inline std::string DemoModel() {
  return TestSources() + "/tests/models/demo-q4-with-mtp.gguf";
}

inline uint32_t BestIsa() {
  const IsaChoice* choices = nullptr;
  uint32_t best = 0;
  const size_t n = IsaChoices(&choices);
  for (uint32_t i = 0; i < n; ++i) {
    if (choices[i].supported) best = i;
  }
  return best;
}

// N CPU workers that serve one exchange segment until this object ends.
class Workers {
 public:
  // wait_ms: patience with peers, see LoadPlan; long by default, since a busy build machine must
  // not fail a test.
  // device: of the GPU worker; a cuda device wakes nobody, so workers poll.
  Workers(const std::string& model, uint32_t n, bool float_reference = false,
          uint32_t wait_ms = 20'000, const std::string& device = "cpu") {
    auto source = ModelSource::Open(model);
    EXPECT_TRUE(source.ok()) << source.status();
    source_ = std::move(*source);
    const ModelConfig& c = source_->config();
    shape_ = {c.hidden, c.expert_width, c.experts_used, n};
    auto exchange = Segment::Create("exchange", ExchangeLayout{shape_}.bytes());
    EXPECT_TRUE(exchange.ok()) << exchange.status();
    exchange_ = std::move(*exchange);
    InitExchange(*exchange_, shape_, 0);
    plan_.model = model;
    plan_.identity = source_->identity();
    plan_.n_nodes = n;
    plan_.threads = 1;
    plan_.device = device;
    plan_.isa = "auto";
    plan_.wait_ms = wait_ms;
    plan_.wait_max_ms = 2 * wait_ms;
    plan_.huge_pages = 0;
    plan_.float_reference = float_reference;
    for (uint32_t i = 0; i < n; ++i) AddArena(i, n);
    for (uint32_t i = 0; i < n; ++i) StartWorker(i, 1);
  }
  ~Workers() {
    for (uint32_t i = 0; i < workers_.size(); ++i) StopWorker(i);
  }

  // A worker's loop ends as if its process had died; its arena stays.
  void StopWorker(uint32_t i) {
    if (!threads_[i].joinable()) return;
    *stops_[i] = true;
    threads_[i].join();
    workers_[i].reset();
  }
  void StartWorker(uint32_t i, uint32_t generation) {
    if (workers_.size() <= i) {
      workers_.resize(i + 1);
      threads_.resize(i + 1);
      stops_.resize(i + 1);
    }
    stops_[i] = std::make_unique<std::atomic<bool>>(false);
    workers_[i] = std::make_unique<CpuWorker>(i, generation);
    auto ready = workers_[i]->Load(
        plan_, Fd(dup(exchange_->fd())), Fd(dup(arena_segments_[i]->fd())),
        [](const std::string&, uint64_t, uint64_t) {}, *stops_[i]);
    EXPECT_TRUE(ready.ok()) << ready.status();
    threads_[i] = std::thread([w = workers_[i].get()] { w->Run(); });
  }

  ExchangeHeader* header() const { return exchange_->As<ExchangeHeader>(); }
  Segment& exchange() const { return *exchange_; }
  Segment& arena(uint32_t i) const { return *arena_segments_[i]; }
  const LoadPlan& plan() const { return plan_; }
  const ModelConfig& config() const { return source_->config(); }
  uint32_t n() const { return plan_.n_nodes; }
  ArenaSet Arenas() const {
    std::vector<const uint8_t*> data;
    for (const auto& arena : arena_segments_) data.push_back(arena->data());
    return ArenaSet(layouts_, data);
  }

 private:
  void AddArena(uint32_t i, uint32_t n) {
    auto layout = ComputeArenaLayout(*source_, i, n);
    EXPECT_TRUE(layout.ok()) << layout.status();
    auto arena = Segment::Create("arena", layout->bytes);
    EXPECT_TRUE(arena.ok()) << arena.status();
    layouts_.push_back(*layout);
    arena_segments_.push_back(std::move(*arena));
  }

  std::unique_ptr<ModelSource> source_;
  ExchangeShape shape_;
  LoadPlan plan_;
  std::unique_ptr<Segment> exchange_;
  std::vector<ArenaLayout> layouts_;
  std::vector<std::unique_ptr<Segment>> arena_segments_;
  std::vector<std::unique_ptr<std::atomic<bool>>> stops_;
  std::vector<std::unique_ptr<CpuWorker>> workers_;
  std::vector<std::thread> threads_;
};

}  // namespace lode
