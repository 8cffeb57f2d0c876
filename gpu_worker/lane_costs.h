// What an expert costs each lane, learned from windows as they run: moving averages for the split
// policy `balanced`. Pure bookkeeping, no clock. Thread: the worker loop's; the engine feeds it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "shared/base/limits.h"

namespace lode {

class LaneCosts {
 public:
  // One layer of a window: `pulls` experts took device_ns, from the plan to the last byte; where the
  // kernels that compute read some of them, to the wait, so that it is an upper bound.
  void LearnPull(uint32_t n_rows, uint32_t pulls, uint64_t device_ns) {
    if (pulls > 0) Move(&rows_[Index(n_rows)].pull_ns, static_cast<double>(device_ns) / pulls, 1);
  }
  // One window: `jobs` jobs with `experts` experts took the busiest CPU worker busy_ns by its own
  // clock. (When the device sees an answer says little: it looks when its own lanes are done.)
  void LearnCpu(uint32_t n_rows, uint32_t jobs, uint64_t experts, uint64_t busy_ns) {
    if (experts == 0) return;
    const double busy = static_cast<double>(busy_ns), per = static_cast<double>(experts);
    Move(&rows_[Index(n_rows)].cpu_ns, busy / per, jobs);
  }

  // What a pull takes by the probe at start.
  void StartPull(double ns) {
    for (Row& row : rows_) row.pull_ns = ns;
  }

  // ns per expert; at least 1.
  uint32_t pull_ns(uint32_t n_rows) const { return Whole(rows_[Index(n_rows)].pull_ns); }
  uint32_t cpu_ns(uint32_t n_rows) const { return Whole(rows_[Index(n_rows)].cpu_ns); }
  // Bell to answer of a job that computes nothing, about; part of every job's time.
  static constexpr uint32_t kFixedNs = 6'000;

 private:
  struct Row {
    // Before anything was measured: one expert of 1.4 MB over a PCIe 5 link and by some 12 cores.
    double pull_ns = 30'000, cpu_ns = 25'000;
  };
  // One layer moves an average by 1/64: a window of 48 layers by half.
  static constexpr double kWeight = 1.0 / 64;
  static void Move(double* average, double value, uint32_t layers) {
    *average += std::min(1.0, kWeight * layers) * (value - *average);
  }
  static uint32_t Whole(double ns) {
    return static_cast<uint32_t>(std::clamp(ns, 1.0, 1e9));
  }
  static uint32_t Index(uint32_t n_rows) { return std::clamp(n_rows, 1u, kWindowRowsMax) - 1; }

  Row rows_[kWindowRowsMax];
};

}  // namespace lode
