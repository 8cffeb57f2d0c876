// The loop of the scheduler: border -> admit -> plan -> ring -> await -> commit -> stream. One
// thread owns the sequences.
#include <algorithm>
#include <chrono>

#include "daemon/commit.h"
#include "daemon/scheduler.h"
#include "shared/base/check.h"
#include "shared/base/log.h"

namespace lode {
namespace {

// Windows in a row that end aborted before their sequences are given up. A dying CPU worker costs
// one or two.
constexpr uint32_t kAbortedWindowsMax = 10;
// GPU workers that may end over one sequence: a request that crashes the worker must not do so for
// ever.
constexpr uint32_t kWorkersLostMax = 3;
// Without work the loop looks at cancellations and readers this often; streams have no way to wake
// it.
constexpr std::chrono::milliseconds kLookBusy{5}, kLookIdle{200};

std::string CulpritOf(const WindowResult& result, uint32_t n_cpu_workers) {
  if (result.error.worker < n_cpu_workers) {
    return fmt::format("cpu{} did not answer at layer {}", result.error.worker, result.error.layer);
  }
  return fmt::format("the window was voided at layer {}", result.error.layer);
}

}  // namespace

void Scheduler::Loop() {
  WindowPlan plan;
  std::vector<Sequence*> planned;
  while (!stop_) {
    Border();
    Admit();
    if (PlanWindow(&plan, &planned)) {
      RunWindow(&plan, planned);
    } else {
      WaitForWork();
    }
  }
  EndAll(FinishReason::kError, Unavailable("the daemon stopped"));
}

// Between two windows: nothing of the device runs, so everything about a sequence may change here
// and nowhere else.
void Scheduler::Border() {
  FollowFleet();
  bool cancel_all = false;
  {
    std::lock_guard lock(mutex_);
    cancel_all = cancel_all_;
  }
  if (cancel_all) EndAll(FinishReason::kCancelled, Unavailable("the daemon is shutting down"));
  ReapQueue();
  const uint64_t now = NowNs();
  std::vector<Sequence*> all;
  for (auto& sequence : live_) all.push_back(sequence.get());
  FinishReason reason;
  Status error;
  for (Sequence* sequence : all) {
    if (sequence->closed)
      Release(sequence);
    else if (IsOver(*sequence, now, &reason, &error))
      EndSequence(sequence, FinishNow(sequence, reason, error, now));
  }
  PublishView();
}

bool Scheduler::IsOver(const Sequence& sequence, uint64_t now_ns, FinishReason* reason,
                       Status* error) const {
  if (sequence.stream->cancelled()) {
    *reason = FinishReason::kCancelled;
    *error = OkStatus();
    return true;
  }
  if (sequence.request.deadline_ns && now_ns >= *sequence.request.deadline_ns) {
    *reason = FinishReason::kError;
    *error = DeadlineExceeded("the request's deadline passed after {:.1f} s with {} tokens",
                              static_cast<double>(now_ns - sequence.submitted_ns) / 1e9,
                              sequence.answer_size());
    return true;
  }
  const uint64_t full_since = sequence.stream->full_since_ns();
  if (full_since != 0 &&
      static_cast<double>(now_ns - full_since) > config_.slow_client_seconds * 1e9) {
    *reason = FinishReason::kCancelled;
    *error = DeadlineExceeded("the client has not read for {} s (option slow_client_seconds)",
                              config_.slow_client_seconds);
    return true;
  }
  return false;
}

void Scheduler::FollowFleet() {
  if (const Status failure = fleet_->failure(); !failure.ok())
    EndAll(FinishReason::kError, failure);
  auto link = fleet_->gpu();
  if (link == link_) return;
  link_ = std::move(link);
  if (!link_) return;
  // Another process: the device remembers nothing. Every sequence runs all its tokens again; by the
  // arithmetic's rules the state comes out the same, and since committed tokens are only run, not
  // picked, nothing is streamed twice.
  for (auto& sequence : live_) {
    if (sequence->rows_done > 0) Add(counters_.sequences_rebuilt, 1);
    sequence->StartOver(next_epoch_++);
  }
  if (!live_.empty())
    spdlog::info("GPU worker generation {}: rebuilding {} sequences", link_->generation,
                 live_.size());
}

void Scheduler::ReapQueue() {
  const uint64_t now = NowNs();
  std::vector<std::pair<std::unique_ptr<Sequence>, StreamEvent>> over;
  {
    std::lock_guard lock(mutex_);
    FinishReason reason;
    Status error;
    for (auto it = queue_.begin(); it != queue_.end();) {
      if (!IsOver(**it, now, &reason, &error)) {
        ++it;
        continue;
      }
      StreamEvent event = FinishNow(it->get(), reason, error, now);
      over.emplace_back(std::move(*it), std::move(event));
      it = queue_.erase(it);
    }
    if (queue_.empty()) idle_.notify_all();
  }
  for (auto& [sequence, event] : over) {
    CountFinish(*event.finish);
    sequence->stream->Push(std::move(event));
  }
}

// While a window is awaited, however long that takes: whoever is over hears so at once. The slot of
// a sequence may be in the window, so it stays taken until the border.
void Scheduler::ReleaseOver() {
  ReapQueue();
  const uint64_t now = NowNs();
  FinishReason reason;
  Status error;
  for (auto& sequence : live_) {
    if (sequence->closed || !IsOver(*sequence, now, &reason, &error)) continue;
    StreamEvent event = FinishNow(sequence.get(), reason, error, now);
    sequence->closed = true;
    CountFinish(*event.finish);
    sequence->stream->Push(std::move(event));
  }
}

// First come, first served: when the head of the queue does not fit, nobody overtakes it, so it
// cannot starve.
void Scheduler::Admit() {
  while (link_ && !free_slots_.empty()) {
    std::unique_ptr<Sequence> sequence;
    {
      std::lock_guard lock(mutex_);
      if (queue_.empty()) return;
      std::vector<uint32_t> blocks;
      if (!kv_.Take(KvBlocks::BlocksFor(queue_.front()->cells_max()), &blocks)) return;
      sequence = std::move(queue_.front());
      queue_.pop_front();
      sequence->kv_blocks = std::move(blocks);
      view_.running = static_cast<uint32_t>(live_.size()) +
                      1;  // under the lock: Drain never sees it in neither place
    }
    sequence->slot = free_slots_.back();
    free_slots_.pop_back();
    sequence->epoch = next_epoch_++;
    sequence->order = next_order_++;
    sequence->admitted_ns = NowNs();
    counters_.queue_time.Observe(sequence->admitted_ns - sequence->submitted_ns);
    live_.push_back(std::move(sequence));
  }
}

bool Scheduler::PlanWindow(WindowPlan* plan, std::vector<Sequence*>* planned) {
  planned->clear();
  if (!link_) return false;
  RowLimits limits;
  *plan = {};
  {
    std::lock_guard lock(mutex_);
    plan->tunables = tunables_;
    limits.prompt_rows = prompt_rows_;
  }
  std::vector<RowNeed> needs;
  needs.reserve(live_.size());
  for (auto& sequence : live_) {
    needs.push_back(NeedOf(*sequence));
    if (sequence->stream->Full())
      needs.back().rows = 0;  // the client does not read: only its own sequence waits
  }
  const std::vector<RowShare> shares = ShareRows(needs, limits);
  for (const RowShare& share : shares) planned->push_back(live_[share.index].get());
  drafts_.Choose(*planned, shares, limits.window_rows);
  for (size_t i = 0; i < shares.size(); ++i) {
    Sequence* sequence = (*planned)[i];
    AppendRows(*sequence, shares[i].rows, plan);
    const bool picks = plan->rows[plan->n_rows - 1].pick != 0;
    AppendDrafts(*sequence, plan);
    drafts_.Ask(sequence, picks, static_cast<uint32_t>(shares.size()), &plan->seqs[i]);
    if (sequence->area_generation != link_->generation || sequence->penalised()) {
      WriteSequenceArea(*sequence, &link_->window->sequences[sequence->slot]);
      sequence->area_generation = link_->generation;
    }
  }
  return !planned->empty();
}

void Scheduler::RunWindow(WindowPlan* plan, const std::vector<Sequence*>& planned) {
  WindowResult result;
  std::string why;
  const uint64_t begin = NowNs();
  if (lane_backoff_.PullNext()) plan->flags |= kCpuLaneDown;
  const RunOutcome outcome = runner_.Run(link_, plan, &result, &why);
  Add(counters_.stalls, runner_.stalls() - stalls_counted_);
  stalls_counted_ = runner_.stalls();
  if (outcome == RunOutcome::kStopped) return;
  if (outcome == RunOutcome::kWorkerLost) return HandleLost(planned, why);
  switch (result.status) {
    case WindowStatus::kOk:
      aborted_in_a_row_ = 0;
      lane_backoff_.Done((plan->flags & kCpuLaneDown) != 0);
      CountWindow(*plan, result, NowNs() - begin);
      drafts_.ObserveWindow(*plan, result, NowNs() - begin, &counters_);
      return CommitWindow(*plan, result, planned);
    case WindowStatus::kAborted:
      return HandleAborted(*plan, result, planned);
    case WindowStatus::kNotFinite: {
      Add(counters_.windows_not_finite, 1);
      const uint32_t row = result.error.row;
      if (row >= plan->n_rows) break;
      const RowPlan& culprit = plan->rows[row];
      return Fail(
          planned[culprit.seq_index],
          Internal("a value that is not finite appeared at layer {}, position {}; the model "
                   "file or the input is outside what the arithmetic can hold",
                   result.error.layer, culprit.position));
    }
    case WindowStatus::kBadPlan:
      break;
  }
  Add(counters_.windows_bad_plan, 1);
  spdlog::error("window {} was refused: status {}, detail {}", plan->window,
                static_cast<uint32_t>(result.status), result.error.detail);
  for (Sequence* sequence : planned) {
    Fail(sequence,
         Internal("the GPU worker refused the window's plan (detail {})", result.error.detail));
  }
}

void Scheduler::CommitWindow(const WindowPlan& plan, const WindowResult& result,
                             const std::vector<Sequence*>& planned) {
  const uint64_t now = NowNs();
  uint32_t tokens = 0, shares = 0;
  for (uint32_t i = 0; i < planned.size(); ++i) {
    Sequence* sequence = planned[i];
    if (sequence->closed) continue;  // the border takes it away
    const uint64_t before = sequence->last_token_ns;
    const RequestUsage& usage = sequence->usage;
    const uint32_t drafted = usage.drafted_tokens, accepted = usage.accepted_draft_tokens;
    Committed done = CommitRows(plan, result, i, config_.vocab, now, sequence);
    sequence->last_turn = next_turn_++;  // in the order of the shares: rotation is a queue
    Add(counters_.prompt_tokens, done.prompt_rows);
    Add(counters_.answer_tokens, done.answer_tokens);
    Add(counters_.drafted_tokens, usage.drafted_tokens - drafted);
    Add(counters_.accepted_draft_tokens, usage.accepted_draft_tokens - accepted);
    tokens += done.answer_tokens;
    shares += done.answer_tokens > 0 ? 1 : 0;
    drafts_.Observe(result, i, usage.accepted_draft_tokens - accepted,
                    done.event.finish.has_value(), sequence, &counters_);
    if (done.answer_tokens > 0 && before == 0)
      counters_.first_token_time.Observe(now - sequence->submitted_ns);
    if (done.answer_tokens > 0 && before != 0)
      counters_.token_time.Observe((now - before) / done.answer_tokens);
    if (done.event.finish) {
      // With the rows behind the answer's end: offered drafts are counted alike everywhere.
      done.event.finish->usage = usage;
      EndSequence(sequence, std::move(done.event));
      continue;
    }
    if (done.has_event) sequence->stream->Push(std::move(done.event));
    if (!ListsFit(*sequence)) {
      Fail(sequence,
           ResourceExhausted("the answer has {} different tokens, more than penalties can count",
                             sequence->answer_counts.size()));
    }
  }
  Add(counters_.decode_shares, shares);
  token_rate_.AddWindow(shares, tokens);
}

// Nothing was committed: the next plan holds the same rows under a new number.
void Scheduler::HandleAborted(const WindowPlan& plan, const WindowResult& result,
                              const std::vector<Sequence*>& planned) {
  Add(counters_.windows_aborted, 1);
  ++aborted_in_a_row_;
  const std::string culprit = CulpritOf(result, link_->n_cpu_workers);
  spdlog::warn("window {} aborted ({} in a row): {}", plan.window, aborted_in_a_row_, culprit);
  // A CPU lane that is slow or stuck: the next windows pull every miss, so that requests go on, and
  // the fleet finds out which of the two it is.
  if ((plan.flags & kCpuLaneDown) == 0 && result.error.worker < link_->n_cpu_workers &&
      lane_backoff_.Aborted()) {
    fleet_->RestartCpu(result.error.worker,
                       fmt::format("{} in {} windows in a row", culprit, aborted_in_a_row_));
  }
  if (aborted_in_a_row_ < kAbortedWindowsMax) return;
  aborted_in_a_row_ = 0;
  for (Sequence* sequence : planned) {
    Fail(sequence,
         Unavailable("{} windows in a row were aborted: {}", kAbortedWindowsMax, culprit));
  }
}

void Scheduler::HandleLost(const std::vector<Sequence*>& planned, const std::string& why) {
  Add(counters_.windows_lost, 1);
  spdlog::warn("window lost: {}", why);
  for (Sequence* sequence : planned) {
    if (++sequence->workers_lost < kWorkersLostMax) continue;
    Fail(sequence, Unavailable("the GPU worker ended {} times while it computed this request: {}",
                               kWorkersLostMax, why));
  }
}

void Scheduler::Fail(Sequence* sequence, Status error) {
  if (sequence->closed) return;
  spdlog::warn("request {} failed: {}", sequence->request.id, Message(error));
  EndSequence(sequence, FinishNow(sequence, FinishReason::kError, std::move(error), NowNs()));
}

void Scheduler::EndSequence(Sequence* sequence, StreamEvent event) {
  const std::shared_ptr<RequestStream> stream = sequence->stream;
  const bool closed = sequence->closed;
  Release(sequence);
  PublishView();  // before the event: a client that saw the end finds the slot free
  if (closed) return;
  CountFinish(*event.finish);
  stream->Push(std::move(event));
}

// Slot and blocks go back at once: no window runs, and the next owner of the slot has another
// epoch.
void Scheduler::Release(Sequence* sequence) {
  const auto it =
      std::find_if(live_.begin(), live_.end(), [&](const auto& s) { return s.get() == sequence; });
  LODE_CHECK(it != live_.end(), "sequence of request {} ended twice", sequence->request.id);
  kv_.Give(&sequence->kv_blocks);
  free_slots_.push_back(sequence->slot);
  live_.erase(it);
}

void Scheduler::EndAll(FinishReason reason, const Status& error) {
  while (!live_.empty()) {
    Sequence* sequence = live_.back().get();
    EndSequence(sequence, FinishNow(sequence, reason, error, NowNs()));
  }
  std::deque<std::unique_ptr<Sequence>> waiting;
  {
    std::lock_guard lock(mutex_);
    waiting.swap(queue_);
    idle_.notify_all();
  }
  for (auto& sequence : waiting) {
    StreamEvent event = FinishNow(sequence.get(), reason, error, NowNs());
    CountFinish(*event.finish);
    sequence->stream->Push(std::move(event));
  }
}

void Scheduler::CountFinish(const FinishEvent& finish) {
  Add(counters_.requests_finished[static_cast<size_t>(finish.reason)], 1);
}

void Scheduler::CountWindow(const WindowPlan& plan, const WindowResult& result, uint64_t wall_ns) {
  Add(counters_.windows_ok, 1);
  Add(counters_.window_rows, plan.n_rows);
  counters_.window_time.Observe(wall_ns);
  for (uint32_t i = 0; i < kLanes; ++i) {
    Add(counters_.lookups[i], result.lookups[i]);
    Add(counters_.lane_bytes[i], result.bytes[i]);
    Add(counters_.lane_ns[i], result.lane_ns[i]);
  }
  for (uint32_t i = 0; i < kStages; ++i) Add(counters_.stage_ns[i], result.stage_ns[i]);
  Add(counters_.tier_swaps, result.tier_swaps);
  Add(counters_.tier_upload_bytes, result.tier_upload_bytes);
  counters_.resident_experts.store(result.resident_experts, std::memory_order_relaxed);
  counters_.resident_bytes.store(result.resident_bytes, std::memory_order_relaxed);
  rates_.AddWindow(result.lookups);
}

void Scheduler::PublishView() {
  std::lock_guard lock(mutex_);
  view_.running = static_cast<uint32_t>(live_.size());
  view_.kv_free = kv_.free();
  view_.hit_rate = rates_.hit_rate();
  view_.pcie_share = rates_.pcie_share();
  view_.tokens_per_window = token_rate_.per_window();
  if (queue_.empty() && live_.empty()) idle_.notify_all();
}

void Scheduler::WaitForWork() {
  std::unique_lock lock(mutex_);
  const bool waiting = !live_.empty() || !queue_.empty();
  if (!waiting) runner_.NoteProgress();  // an idle engine makes all the progress there is to make
  wake_.wait_for(lock, waiting ? kLookBusy : kLookIdle, [this] { return poked_ || stop_.load(); });
  poked_ = false;
}

}  // namespace lode
