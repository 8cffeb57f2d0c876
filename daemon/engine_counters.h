// What the engine counts, as plain atomics: the scheduler (and, for restarts, the supervisor) adds,
// the metrics exporter reads at a scrape. Every value only grows unless it is called a gauge.
// Relaxed everywhere: nothing is ordered by them.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <utility>

#include "daemon/draft_source.h"
#include "shared/base/limits.h"
#include "shared/wire/window_result.h"

namespace lode {

using Counter = std::atomic<uint64_t>;

inline void Add(Counter& counter, uint64_t n) { counter.fetch_add(n, std::memory_order_relaxed); }

// Durations in fixed buckets. `bounds_ns` are upper bounds, ascending; one more bucket holds the
// rest.
class DurationHistogram {
 public:
  static constexpr size_t kBuckets = 16;
  // 0.5 ms to about 16 s, doubling: windows lie in the middle, first tokens at the end.
  static constexpr uint64_t BoundNs(size_t i) { return 500'000ull << i; }

  void Observe(uint64_t ns) {
    size_t i = 0;
    while (i < kBuckets && ns > BoundNs(i)) ++i;
    Add(counts_[i], 1);
    Add(sum_ns_, ns);
  }
  // Observations at or below bound i; i == kBuckets: all.
  uint64_t CumulativeCount(size_t i) const {
    uint64_t n = 0;
    for (size_t k = 0; k <= i && k <= kBuckets; ++k)
      n += counts_[k].load(std::memory_order_relaxed);
    return n;
  }
  uint64_t sum_ns() const { return sum_ns_.load(std::memory_order_relaxed); }

 private:
  std::array<Counter, kBuckets + 1> counts_ = {};
  Counter sum_ns_{0};
};

struct EngineCounters {
  // Requests, by how they ended; refused = never queued.
  Counter requests_submitted{0}, requests_refused{0};
  std::array<Counter, 4> requests_finished = {};  // [FinishReason]
  Counter prompt_tokens{0}, answer_tokens{0}, drafted_tokens{0}, accepted_draft_tokens{0};
  // By draft source and depth (1 = right behind the decode row).
  std::array<std::array<Counter, kDraftsMax + 1>, kDraftSources> drafts_offered = {},
                                                                 drafts_held = {};
  Counter draft_ns{0}, verify_ns{0};  // of windows: drafting; everything else
  Counter decode_shares{0};           // (sequence, window) pairs that gave tokens of an answer
  // Windows, by how they ended.
  Counter windows_ok{0}, windows_aborted{0}, windows_not_finite{0}, windows_bad_plan{0},
      windows_lost{0};
  Counter window_rows{0};
  Counter sequences_rebuilt{0};  // started over after a lost GPU worker
  Counter stalls{0};             // watchdog reports
  // Distinct (layer, expert) pairs, bytes and busy time by lane; time by stage.
  std::array<Counter, kLanes> lookups = {}, lane_bytes = {}, lane_ns = {};
  std::array<Counter, kStages> stage_ns = {};
  Counter tier_swaps{0}, tier_upload_bytes{0};
  Counter resident_experts{0}, resident_bytes{0};  // gauges
  DurationHistogram window_time;       // plan published -> result taken, seen from the daemon
  DurationHistogram first_token_time;  // submitted -> first token
  DurationHistogram token_time;        // between two tokens of one answer
  DurationHistogram queue_time;        // submitted -> admitted
};

// Tokens per (sequence, window) pair that gave any, over the last kWindows windows. Scheduler thread.
class TokenRate {
 public:
  static constexpr uint32_t kWindows = 256;
  void AddWindow(uint32_t shares, uint32_t tokens) {
    if (shares == 0) return;
    auto& slot = ring_[next_++ % kWindows];
    shares_ += shares - slot.first;
    tokens_ += tokens - slot.second;
    slot = {shares, tokens};
  }
  double per_window() const {
    return shares_ ? static_cast<double>(tokens_) / static_cast<double>(shares_) : 0;
  }

 private:
  std::array<std::pair<uint32_t, uint32_t>, kWindows> ring_ = {};
  uint64_t shares_ = 0, tokens_ = 0, next_ = 0;
};

// hit_rate and pcie_share over the last kWindows windows. Written by the scheduler thread only;
// read through Rates by it too.
class LaneRates {
 public:
  static constexpr uint32_t kWindows = 256;  // the definition's own number (docs/metrics.md)

  void AddWindow(const uint64_t lookups[kLanes]) {
    auto& slot = ring_[next_++ % kWindows];
    for (uint32_t i = 0; i < kLanes; ++i) {
      sum_[i] += lookups[i] - slot[i];
      slot[i] = lookups[i];
    }
  }
  // Found in VRAM / all. 0 without lookups.
  double hit_rate() const {
    const uint64_t all = sum_[0] + sum_[1] + sum_[2];
    return all ? static_cast<double>(sum_[static_cast<uint32_t>(Lane::kHit)]) /
                     static_cast<double>(all)
               : 0;
  }
  // Pulled / misses. 0 without misses.
  double pcie_share() const {
    const uint64_t pulled = sum_[static_cast<uint32_t>(Lane::kPull)];
    const uint64_t misses = pulled + sum_[static_cast<uint32_t>(Lane::kCpu)];
    return misses ? static_cast<double>(pulled) / static_cast<double>(misses) : 0;
  }

 private:
  std::array<std::array<uint64_t, kLanes>, kWindows> ring_ = {};
  uint64_t sum_[kLanes] = {};
  uint64_t next_ = 0;
};

}  // namespace lode
