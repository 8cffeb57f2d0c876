// The VRAM tier: expert slots per layer, which expert sits where, and the copies that change it.
// Where slots live and what copies them is a SlotMemory: the copy engine on cuda, anonymous memory
// of at most `vram_budget_bytes` on the cpu device.
//
// Rules (docs/design/expert-tier.md):
//  - The residency table changes only in Border, between two windows; a window plans every layer
//  with one table.
//  - An evicted expert stops being planned at that border. The upload into its slot starts only
//  after the last window whose table
//    named it is done (WindowDone).
//  - A newcomer is planned from the first border that sees its copy finished ("landed").
// Threads: everything is called by the worker loop's thread, except the upload thread inside (the
// copy engine's stand-in).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "gpu_worker/arena_set.h"
#include "gpu_worker/expert_plan.h"
#include "gpu_worker/slot_memory.h"
#include "gpu_worker/tier_policy.h"
#include "shared/base/status.h"
#include "shared/wire/window_plan.h"

namespace lode {

// What a border did; WindowResult::tier_swaps and tier_upload_bytes.
struct TierStep {
  uint64_t swaps = 0;         // evictions whose newcomer was queued
  uint64_t upload_bytes = 0;  // of copies that landed at this border
};

class ExpertTier {
 public:
  using ProgressFn = std::function<void(uint64_t done_bytes, uint64_t total_bytes)>;
  // Places by `ranking` (empty: evenly) under the budget and copies; REQUIRES all experts complete.
  // memory null: host memory.
  static StatusOr<std::unique_ptr<ExpertTier>> Create(const ArenaSet& arenas, uint64_t budget_bytes,
                                                      std::span<const RankedExpert> ranking,
                                                      const ProgressFn& progress,
                                                      std::unique_ptr<SlotMemory> memory = nullptr);
  ~ExpertTier();

  // ---- while a window runs
  // -------------------------------------------------------------------------------------------
  const uint16_t* residency(uint32_t layer) const {
    return &residency_[static_cast<size_t>(layer) * experts_];
  }
  const uint8_t* slot(uint32_t layer, uint16_t slot) const {
    return memory_->slots(layer) + slot * arenas_.slot_bytes(layer);
  }
  // Grows with every change of any residency table or slot address.
  uint64_t table_version() const { return table_version_; }
  // Every routed id of every row adds 1.
  void Count(uint32_t layer, const RoutedRow* rows, uint32_t n_rows, uint32_t experts_used);
  // Decides the next round's swaps now, where the next border has one: for devices that leave the
  // host idle while a window runs. What is counted later waits for the round behind it.
  void PlanAhead();

  // ---- between windows
  // -------------------------------------------------------------------------------------------------
  // Before each window: lands finished copies, applies a changed budget, and every 4th window runs
  // the policy.
  TierStep Border(TierPolicy policy, uint64_t budget_bytes);
  // The window that followed the last Border is done (aborted ones too): nothing reads its table
  // any more.
  void WindowDone();

  uint64_t resident_experts() const { return resident_experts_; }
  uint64_t resident_bytes() const { return resident_bytes_; }  // landed experts
  uint64_t slot_bytes_total() const;                           // landed or not, <= the budget
  const std::vector<float>& counts() const { return counts_; }

  // Lookups since start as a ranking file (RankingText), written to a temporary file beside `path`
  // and renamed.
  Status WriteProfile(const std::string& path) const;

  // Waits until no copy is queued that may run now; false at the deadline. Tests and orderly
  // shutdown.
  bool WaitUploads(uint64_t deadline_ns);
  // Stops (true) or resumes the copies: lets tests see what happens between eviction and landing.
  void HoldUploads(bool hold);

 private:
  struct Upload {
    uint16_t layer, expert, slot;
    uint64_t after;  // starts when windows_done_ >= after
  };
  ExpertTier(const ArenaSet& arenas, std::unique_ptr<SlotMemory> memory);
  size_t Index(uint32_t layer, uint32_t expert) const {
    return static_cast<size_t>(layer) * experts_ + expert;
  }
  void SetResident(uint16_t layer, uint16_t expert, uint16_t slot);
  void Evict(uint16_t layer, uint16_t expert);
  void Queue(const Upload& upload);
  uint64_t Land();
  uint64_t RunRound(TierPolicy policy);
  std::vector<Swap> Plan() const { return PlanSwaps(counts_, states_, layers_, experts_, params_); }
  bool Resize(uint64_t budget_bytes);
  void CancelUploads();
  void ResizeLayer(uint16_t layer, const std::vector<uint16_t>& wanted);
  void UploadThread();

  const ArenaSet& arenas_;
  const uint32_t layers_, experts_;
  const LfuParams params_;
  std::vector<ExpertRef> order_;  // placement order of the start ranking
  const std::unique_ptr<SlotMemory> memory_;

  // Worker loop's thread.
  std::vector<uint16_t> slots_;      // [layer] slots in use
  std::vector<uint16_t> residency_;  // [layer][expert]: slot or kNotResident
  std::vector<TierState> states_;    // [layer][expert]
  std::vector<float> counts_;        // [layer][expert], decayed
  std::vector<double> lookups_;      // [layer][expert], since start
  uint64_t budget_bytes_ = 0;
  uint64_t table_version_ = 0;
  uint64_t windows_begun_ = 0;
  uint32_t windows_in_round_ = 0;
  std::optional<std::vector<Swap>> planned_;  // by falling gain; of the round at the next border
  uint32_t outstanding_ = 0;  // uploads queued and not landed
  uint64_t resident_experts_ = 0, resident_bytes_ = 0;

  // Guarded by mutex_.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Upload> queue_;
  std::vector<Upload> landed_;
  uint64_t windows_done_ = 0;
  bool busy_ = false, hold_ = false, stop_ = false;
  std::thread thread_;
};

}  // namespace lode
