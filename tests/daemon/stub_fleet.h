// A GPU worker made of a thread, behind the Fleet interface. Its "model": the next token is a hash
// of every token so far, so an answer shows any row that was lost, repeated or out of order; and
// its device state is checked like a real one: rows must continue exactly where the state of their
// (slot, epoch) ends. Behaviour is scripted window by window.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "daemon/fleet.h"
#include "shared/base/check.h"
#include "shared/shm/wait_word.h"

namespace lode {

class StubFleet : public Fleet {
 public:
  enum class Act { kOk, kAbort, kNotFinite, kBadPlan, kDie, kHang };
  struct Reaction {
    Act act = Act::kOk;
    uint32_t row = 0;               // kNotFinite
    uint32_t worker = 0xffffffffu;  // kAbort: who did not answer
  };
  // Called by the worker thread for every plan.
  using Script = std::function<Reaction(const WindowPlan&)>;

  explicit StubFleet(Script script = {}) : script_(std::move(script)) { NewLink(); }
  ~StubFleet() override {
    quit_ = true;
    if (thread_.joinable()) thread_.join();
    for (std::thread& thread : old_) thread.join();
    for (void* map : maps_) munmap(map, kMapBytes);
  }

  static int32_t NextToken(const std::vector<int32_t>& tokens) {
    return 'a' + static_cast<int32_t>(Hash(tokens) % 26);
  }
  static uint64_t Hash(const std::vector<int32_t>& tokens) {
    uint64_t h = 1469598103934665603ull;
    for (const int32_t t : tokens) h = (h ^ static_cast<uint64_t>(t)) * 1099511628211ull;
    return h ^ (h >> 29);
  }
  // What a client must get.
  static std::vector<int32_t> Answer(std::vector<int32_t> tokens, size_t n) {
    std::vector<int32_t> answer;
    for (size_t i = 0; i < n; ++i) {
      answer.push_back(NextToken(tokens));
      tokens.push_back(answer.back());
    }
    return answer;
  }

  // -- Fleet --
  std::shared_ptr<const GpuLink> gpu() const override {
    std::lock_guard lock(mutex_);
    return link_;
  }
  bool cpu_lane_up() const override {
    noted_at_look_ = noted_.load();
    return cpu_up_;
  }
  Status failure() const override {
    std::lock_guard lock(mutex_);
    return failure_;
  }
  std::string last_gpu_end() const override { return "gpu0 ended by signal 9"; }
  void NoteWindow(uint64_t window) override { noted_ = window; }
  void RestartGpu(const std::string& why) override {
    last_restart_ = why;
    ++gpu_restarts_;
    Replace();
  }
  void RestartCpu(uint32_t index, const std::string&) override {
    last_cpu_restart_ = index;
    ++cpu_restarts_;
    cpu_up_ = false;
  }
  std::vector<EngineSnapshot::WorkerInfo> Workers() const override { return {}; }
  double load_progress() const override { return 1; }
  uint64_t last_progress_ns() const override { return NowNs(); }
  void SetOnChange(std::function<void()> on_change) override { on_change_ = std::move(on_change); }

  // -- for tests --
  void Fail(Status status) {
    {
      std::lock_guard lock(mutex_);
      failure_ = std::move(status);
    }
    if (on_change_) on_change_();
  }
  // The process ends; the next one is there at once, with empty state.
  void Replace() {
    {
      std::lock_guard lock(mutex_);
      link_ = nullptr;
    }
    NewLink();
    if (on_change_) on_change_();
  }
  void Withdraw() {
    std::lock_guard lock(mutex_);
    link_ = nullptr;
  }
  // Lets a test read the plans that were executed.
  std::vector<WindowPlan> Plans() const {
    std::lock_guard lock(mutex_);
    return plans_;
  }
  std::string error() const {
    std::lock_guard lock(mutex_);
    return error_;
  }
  std::atomic<bool> cpu_up_{true};
  std::atomic<uint32_t> gpu_restarts_{0}, cpu_restarts_{0}, last_cpu_restart_{0xffffffffu};
  std::atomic<uint64_t> noted_{0};
  mutable std::atomic<uint64_t> noted_at_look_{
      0};  // what NoteWindow had said when the lane was looked at
  std::atomic<uint64_t> window_delay_us_{0};
  std::string last_restart_;

 private:
  struct State {
    uint64_t epoch = 0;
    std::vector<int32_t> tokens;
  };
  static constexpr size_t kExchangeAt = (sizeof(WindowSegment) + 63) / 64 * 64;
  static constexpr size_t kMapBytes = kExchangeAt + sizeof(ExchangeHeader);

  void NewLink() {
    // Only from one thread at a time: the constructor, then whoever kills.
    if (thread_.joinable() && std::this_thread::get_id() != thread_.get_id()) {
      quit_ = true;
      thread_.join();
      quit_ = false;
    } else if (thread_.joinable()) {
      old_.push_back(std::move(thread_));  // the dying thread replaces itself; it returns right after
    }
    void* map =
        mmap(nullptr, kMapBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    LODE_CHECK(map != MAP_FAILED, "no memory");
    maps_.push_back(map);
    auto link = std::make_shared<GpuLink>();
    link->window = static_cast<WindowSegment*>(map);
    link->exchange = reinterpret_cast<ExchangeHeader*>(static_cast<uint8_t*>(map) + kExchangeAt);
    link->generation = ++generation_;
    link->n_cpu_workers = 2;
    std::lock_guard lock(mutex_);
    link_ = link;
    thread_ = std::thread([this, link] { Live(link); });
  }

  void Live(std::shared_ptr<const GpuLink> link) {
    std::map<uint32_t, State> slots;
    WindowPlan plan;
    while (!quit_) {
      if (!link->window->plans.Pop(&plan, WaitBudget{0, NowNs() + 5'000'000})) {
        if (gpu() != link) return;
        continue;
      }
      {
        std::lock_guard lock(mutex_);
        plans_.push_back(plan);
      }
      if (window_delay_us_)
        std::this_thread::sleep_for(std::chrono::microseconds(window_delay_us_));
      const Reaction reaction = script_ ? script_(plan) : Reaction{};
      if (reaction.act == Act::kDie) return Replace();
      if (reaction.act == Act::kHang) {
        while (!quit_ && gpu() == link) std::this_thread::sleep_for(std::chrono::milliseconds(2));
        return;
      }
      WindowResult result = Run(plan, reaction, link.get(), &slots);
      LODE_CHECK(link->window->results.TryPush(result), "result ring full");
    }
  }

  WindowResult Run(const WindowPlan& plan, const Reaction& reaction, const GpuLink* link,
                   std::map<uint32_t, State>* slots) {
    WindowResult result = {};
    result.window = plan.window;
    result.generation = plan.generation;
    result.n_rows = plan.n_rows;
    if (reaction.act == Act::kAbort) {
      result.status = WindowStatus::kAborted;
      result.error = {3, 0, reaction.worker, 0};
      return result;
    }
    if (reaction.act == Act::kNotFinite) {
      result.status = WindowStatus::kNotFinite;
      result.error = {5, reaction.row, 0xffffffffu, 0};
      return result;
    }
    if (reaction.act == Act::kBadPlan) {
      result.status = WindowStatus::kBadPlan;
      return result;
    }
    for (uint32_t r = 0; r < plan.n_rows; ++r) Row(plan, r, link, slots, &result);
    result.lookups[0] = 3 * plan.n_rows;
    result.lookups[1] = 2 * plan.n_rows;
    result.lookups[2] = 5 * plan.n_rows;
    return result;
  }

  void Row(const WindowPlan& plan, uint32_t r, const GpuLink* link,
           std::map<uint32_t, State>* slots, WindowResult* result) {
    const RowPlan& row = plan.rows[r];
    const SequencePlan& seq = plan.seqs[row.seq_index];
    State& state = (*slots)[seq.slot];
    if (state.epoch != seq.epoch) state = {seq.epoch, {}};
    const bool first = r == 0 || plan.rows[r - 1].seq_index != row.seq_index;
    if (first && seq.committed != state.tokens.size())
      Complain("committed does not match the state");
    if (row.position != state.tokens.size()) Complain("row does not continue the state");
    if (seq.block_count * uint64_t{kKvBlockCells} <= row.position)
      Complain("row beyond its KV blocks");
    state.tokens.push_back(row.token);
    RowResult& out = result->rows[r];
    out.token = row.pick ? NextToken(state.tokens) : -1;
    out.argmax = row.needs_logits ? NextToken(state.tokens) : -1;
    out.logprob = -1.0f;
    out.target_logprob = row.target >= 0 ? -0.5f * static_cast<float>(row.target) : 0;
    out.logits_hash = Hash(state.tokens) + 1;
    out.lookups[0] = 1;
    if (row.penalty_count > 0) {  // what the lists say must be what was committed
      const auto* counts = reinterpret_cast<const TokenCount*>(
          link->window->sequences[seq.slot].heap + row.penalty_offset);
      uint32_t n = 0;
      for (uint32_t i = 0; i < row.penalty_count; ++i) n += counts[i].count;
      penalty_sum_ = n;
    }
  }
  void Complain(const char* what) {
    std::lock_guard lock(mutex_);
    error_ = what;
  }

  mutable std::mutex mutex_;
  std::shared_ptr<const GpuLink> link_;
  std::vector<WindowPlan> plans_;
  Status failure_;
  std::string error_;
  std::vector<void*> maps_;
  Script script_;
  std::function<void()> on_change_;
  std::thread thread_;
  std::vector<std::thread> old_;
  std::atomic<bool> quit_{false};
  uint32_t generation_ = 0;

 public:
  std::atomic<uint32_t> penalty_sum_{0};
};

}  // namespace lode
