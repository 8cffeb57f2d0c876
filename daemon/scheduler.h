// The engine: a queue of requests, sequences with slots and KV blocks, and one loop that owns them
// all: border (cancel, deadlines, tunables) -> admit -> plan -> ring -> await -> commit -> stream.
//
// Threads: Submit, Snapshot, SetTunables, Drain from any thread; everything else happens in the
// loop thread. The contract with the GPU worker and what happens when a worker is lost:
// docs/design/window-protocol.md, failure-model.md.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "daemon/draft_planner.h"
#include "daemon/engine_counters.h"
#include "daemon/fleet.h"
#include "daemon/kv_blocks.h"
#include "daemon/request.h"
#include "daemon/sequence.h"
#include "daemon/window_planner.h"
#include "daemon/window_runner.h"
#include "daemon/worker_watch.h"

namespace lode {

// Tokens of the warm-up request, prompt and answer: a context must hold them.
inline constexpr uint32_t kWarmUpTokens = 4;

struct SchedulerConfig {
  uint32_t vocab = 0;
  uint32_t context = 0;    // tokens of one request, prompt and answer; >= kWarmUpTokens
  uint32_t sequences = 1;  // device slots, <= kSequenceSlotsMax
  uint32_t kv_blocks = 1;
  uint32_t queue = 0;  // requests that may wait
  uint32_t prompt_rows = kWindowRowsMax;
  DraftSetup drafts;
  double slow_client_seconds = 30;
  double request_seconds = 0;  // 0: none
  double watchdog_seconds = 60;
  uint64_t spin_ns = 0;
  Tunables tunables = {};                    // at start; epoch is set by the scheduler
  std::map<std::string, std::string> facts;  // shown in snapshots
};

// What may change while the engine runs, from the next window on. Unset: stays.
struct TunablesChange {
  std::optional<uint64_t> vram_budget_bytes;
  std::optional<float> pull_share;
  std::optional<SplitPolicy> split_policy;
  std::optional<TierPolicy> tier_policy;
  std::optional<uint32_t> device_isa;
  std::vector<std::pair<uint32_t, uint32_t>> cpu_isa;  // (CPU worker, kernel table)
  std::optional<uint32_t> cpu_threads, device_threads;
  std::optional<uint32_t> prompt_rows;  // 1..kWindowRowsMax
};

class Scheduler : public Engine {
 public:
  // `fleet` and `tokenizer` outlive this. The loop starts at once and serves Submit after
  // SetAccepting(true).
  Scheduler(SchedulerConfig config, Fleet* fleet, const Tokenizer* tokenizer);
  ~Scheduler() override;  // Stop()

  StatusOr<std::shared_ptr<RequestStream>> Submit(Request request) override;
  EngineSnapshot Snapshot() const override;
  uint32_t context() const override { return config_.context; }

  // Before ready and while draining only the daemon's own warm-up is taken.
  void SetAccepting(bool accepting);
  // One token through every process; OK proves the engine. Fails at the deadline or with the
  // fleet's failure.
  Status WarmUp(uint64_t deadline_ns);
  Status SetTunables(const TunablesChange& change);
  // Refuses new requests and waits until the running ones are done; at the deadline the rest is
  // cancelled. Keeps refusing.
  void Drain(uint64_t deadline_ns);
  // Ends the loop; open streams get a last event.
  void Stop();

  EngineCounters& counters() { return counters_; }
  uint64_t last_progress_ns() const { return runner_.last_progress_ns(); }

 private:
  enum class State { kLoading, kReady, kDraining };

  Status CheckRequest(const Request& request) const;
  StatusOr<std::shared_ptr<RequestStream>> Enqueue(Request request, bool internal);
  // -- loop thread only --
  void Loop();
  void Border();
  void EndSequence(Sequence* sequence, StreamEvent event);
  void Release(Sequence* sequence);
  bool IsOver(const Sequence& sequence, uint64_t now_ns, FinishReason* reason, Status* error) const;
  void EndAll(FinishReason reason, const Status& error);
  void ReapQueue();
  void ReleaseOver();
  void FollowFleet();
  void Admit();
  bool PlanWindow(WindowPlan* plan, std::vector<Sequence*>* planned);
  void RunWindow(WindowPlan* plan, const std::vector<Sequence*>& planned);
  void CommitWindow(const WindowPlan& plan, const WindowResult& result,
                    const std::vector<Sequence*>& planned);
  void HandleAborted(const WindowPlan& plan, const WindowResult& result,
                     const std::vector<Sequence*>& planned);
  void HandleLost(const std::vector<Sequence*>& planned, const std::string& why);
  void Fail(Sequence* sequence, Status error);
  void CountWindow(const WindowPlan& plan, const WindowResult& result, uint64_t wall_ns);
  void CountFinish(const FinishEvent& finish);
  void PublishView();
  void WaitForWork();

  // Const after construction.
  const SchedulerConfig config_;
  Fleet* const fleet_;
  const Tokenizer* const tokenizer_;

  // Guarded by mutex_.
  mutable std::mutex mutex_;
  std::condition_variable wake_;  // the loop
  std::condition_variable idle_;  // Drain
  std::deque<std::unique_ptr<Sequence>> queue_;
  Tunables tunables_;  // epoch grows with every change
  uint32_t prompt_rows_;
  State state_ = State::kLoading;
  bool cancel_all_ = false;  // the drain's deadline has passed
  bool poked_ = false;       // something changed for the loop
  struct View {              // of the loop's state, for Snapshot
    uint32_t running = 0, kv_free = 0;
    double hit_rate = 0, pcie_share = 0, tokens_per_window = 0;
  } view_;

  // Loop thread only.
  std::vector<std::unique_ptr<Sequence>> live_;
  std::vector<uint32_t> free_slots_;
  KvBlocks kv_;
  std::shared_ptr<const GpuLink> link_;
  uint64_t next_epoch_ = 1, next_order_ = 1, next_turn_ = 1;
  uint32_t aborted_in_a_row_ = 0;
  LaneBackoff lane_backoff_;
  LaneRates rates_;
  DraftPlanner drafts_;
  TokenRate token_rate_;
  uint64_t stalls_counted_ = 0;

  // Own synchronisation.
  std::atomic<bool> stop_{false};
  WindowRunner runner_;
  EngineCounters counters_;
  std::thread thread_;
};

}  // namespace lode
