// The GPU worker's and the daemon's side of the exchange, played by a test: makes the segments,
// rings jobs, waits for answers, and computes what the answers must be from whole matrices of the
// model with one kernel table. The workers themselves run in this process (StartWorker) or are made
// by the test.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu_worker/cpu_worker.h"
#include "kernels/kernel_table.h"
#include "shared/model/model_source.h"
#include "shared/shm/segment.h"
#include "shared/wire/exchange_layout.h"

namespace lode::test {

extern const char kDemoModel[];

// One window's routing in one layer: per row the routed experts in order; `cpu` says which of them
// the CPU lane computes.
struct Routing {
  std::vector<std::vector<uint16_t>> rows;
  std::map<uint16_t, bool> cpu;
};

class ExchangeHarness {
 public:
  ExchangeHarness(const std::string& model, uint32_t n_workers);
  ~ExchangeHarness();  // stops the workers that run here

  const ModelSource& source() const { return *source_; }
  const ExchangeShape& shape() const { return layout_.shape; }
  ExchangeHeader& header() { return *exchange_->As<ExchangeHeader>(); }
  const Segment& exchange() const { return *exchange_; }
  const Segment& arena(uint32_t n) const { return *arenas_[n]; }
  static Fd Dup(int fd);

  LoadPlan Plan(uint32_t threads) const;
  // Loads worker `index` in this process and runs it on its own thread.
  void StartWorker(uint32_t index, const LoadPlan& plan);
  void StartAll(uint32_t threads) {
    for (uint32_t i = 0; i < shape().n_workers; ++i) StartWorker(i, Plan(threads));
  }
  void StopWorker(uint32_t index);
  CpuWorker& worker(uint32_t index) { return *running_[index]->worker; }

  void OpenWindow(uint64_t window);
  void CloseWindow();

  // Random activations of n_rows rows and a random routing of which a part goes to the CPU lane.
  Routing RandomRouting(uint32_t layer, uint32_t n_rows, uint32_t seed) const;
  std::vector<std::vector<float>> RandomActivations(uint32_t n_rows, uint32_t seed) const;

  // A sound job for the routing; activations are written into the parity's area. Not rung.
  ExpertJob MakeJob(uint32_t layer, const Routing& routing,
                    const std::vector<std::vector<float>>& x, bool float_reference = false);
  // Publishes the job and rings. Returns its tag.
  uint64_t Ring(const ExpertJob& job);
  // Waits until worker `index` has acknowledged the tag; false after timeout_ms.
  bool WaitAck(uint32_t index, uint64_t tag, uint32_t timeout_ms = 20000);
  JobStatus StatusOf(uint32_t index) {
    return static_cast<JobStatus>(header().workers[index].status.load());
  }

  const float* Result(uint32_t layer, uint32_t row, uint32_t order) const;
  float* MutableActivation(uint32_t layer, uint32_t row);
  // What Result must hold for one (row, expert), by `table` over whole matrices.
  std::vector<float> Expected(uint32_t layer, uint16_t expert, const std::vector<float>& x,
                              const KernelTable& table, bool float_reference = false) const;
  // Compares every vector of the job bit for bit.
  void ExpectResults(const ExpertJob& job, const Routing& routing,
                     const std::vector<std::vector<float>>& x, bool float_reference = false);

  uint64_t window() const { return window_; }
  static const KernelTable& Scalar();

 private:
  struct Running {
    std::unique_ptr<CpuWorker> worker;
    std::atomic<bool> stop{false};
    std::thread thread;
  };

  std::unique_ptr<ModelSource> source_;
  ExchangeLayout layout_;
  std::unique_ptr<Segment> exchange_;
  std::vector<std::unique_ptr<Segment>> arenas_;
  std::map<uint32_t, std::unique_ptr<Running>> running_;
  mutable std::map<std::string, std::vector<uint8_t>> matrices_;
  uint64_t window_ = 0;
};

}  // namespace lode::test
