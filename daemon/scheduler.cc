// The side of the scheduler that other threads see: Submit, Snapshot, tunables, warm-up, drain,
// stop. The loop is in daemon/scheduler_loop.cc.
#include "daemon/scheduler.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "daemon/commit.h"
#include "shared/base/check.h"
#include "shared/base/log.h"
#include "shared/shm/wait_word.h"

namespace lode {
namespace {

// More biases than any client sends; keeps the lists of a sequence far inside its heap.
constexpr size_t kBiasesMax = 4096;
static_assert(kBiasesMax * sizeof(TokenBias) <= kListBytesMax / 2);

Status CheckSampling(const SamplingPlan& s) {
  const auto outside = [](const char* name, double value, const char* bounds) {
    return InvalidArgument("{} = {} must be {}", name, value, bounds);
  };
  // Written so that NaN fails.
  if (!(s.temperature >= 0 && s.temperature <= 100))
    return outside("temperature", s.temperature, "0 to 100");
  if (!(s.top_p > 0 && s.top_p <= 1)) return outside("top_p", s.top_p, "above 0, at most 1");
  if (!(s.min_p >= 0 && s.min_p < 1)) return outside("min_p", s.min_p, "0 to below 1");
  if (!(s.repetition_penalty > 0 && s.repetition_penalty <= 100)) {
    return outside("repetition_penalty", s.repetition_penalty, "above 0, at most 100");
  }
  if (!(std::fabs(s.presence_penalty) <= 100))
    return outside("presence_penalty", s.presence_penalty, "-100 to 100");
  if (!(std::fabs(s.frequency_penalty) <= 100))
    return outside("frequency_penalty", s.frequency_penalty, "-100 to 100");
  return OkStatus();
}

SamplingPlan GreedySampling() {
  SamplingPlan s = {};
  s.top_p = 1;
  s.repetition_penalty = 1;
  return s;
}

}  // namespace

Scheduler::Scheduler(SchedulerConfig config, Fleet* fleet, const Tokenizer* tokenizer)
    : config_(std::move(config)),
      fleet_(fleet),
      tokenizer_(tokenizer),
      tunables_(config_.tunables),
      prompt_rows_(config_.prompt_rows),
      kv_(config_.kv_blocks),
      drafts_(config_.drafts),
      runner_(fleet,
              RunnerConfig{config_.spin_ns, static_cast<uint64_t>(config_.watchdog_seconds * 1e9),
                           [this] { ReleaseOver(); }},
              &stop_) {
  LODE_CHECK(config_.sequences >= 1 && config_.sequences <= kSequenceSlotsMax, "{} sequences",
             config_.sequences);
  LODE_CHECK(config_.vocab > 0 && config_.context > 0, "no vocabulary or context");
  tunables_.epoch = 1;
  for (uint32_t slot = config_.sequences; slot > 0; --slot) free_slots_.push_back(slot - 1);
  view_.kv_free = kv_.free();
  runner_.NoteProgress();
  fleet_->SetOnChange([this] {
    std::lock_guard lock(mutex_);
    poked_ = true;
    wake_.notify_all();
  });
  thread_ = std::thread([this] { Loop(); });
}

Scheduler::~Scheduler() { Stop(); }

Status Scheduler::CheckRequest(const Request& request) const {
  if (request.prompt.empty())
    return InvalidArgument("the prompt is empty; it needs at least one token");
  for (size_t i = 0; i < request.prompt.size(); ++i) {
    if (request.prompt[i] < 0 || static_cast<uint32_t>(request.prompt[i]) >= config_.vocab) {
      return InvalidArgument(
          "token {} at position {} of the prompt is outside the vocabulary of {}",
          request.prompt[i], i, config_.vocab);
    }
  }
  if (request.max_tokens == 0 && !request.prompt_logprobs) {
    return InvalidArgument("max_tokens = 0 must be at least 1 unless prompt_logprobs is asked for");
  }
  const uint64_t cells = request.prompt.size() + uint64_t{request.max_tokens};
  if (cells > config_.context) {
    return InvalidArgument(
        "prompt of {} tokens and max_tokens = {} exceed the context of {} tokens",
        request.prompt.size(), request.max_tokens, config_.context);
  }
  if (KvBlocks::BlocksFor(cells) > config_.kv_blocks) {
    return InvalidArgument(
        "prompt of {} tokens and max_tokens = {} need {} KV blocks of {} tokens, there are {} in "
        "all; raise "
        "kv_tokens or ask for less",
        request.prompt.size(), request.max_tokens, KvBlocks::BlocksFor(cells), kKvBlockCells,
        config_.kv_blocks);
  }
  if (request.top_logprobs > kLogprobsMax) {
    return InvalidArgument("{} alternatives per token are asked for, at most {} are possible",
                           request.top_logprobs, kLogprobsMax);
  }
  if (request.logit_bias.size() > kBiasesMax) {
    return InvalidArgument("{} logit biases are given, at most {} are possible",
                           request.logit_bias.size(), kBiasesMax);
  }
  for (const TokenBias& bias : request.logit_bias) {
    if (bias.token < 0 || static_cast<uint32_t>(bias.token) >= config_.vocab ||
        !std::isfinite(bias.bias)) {
      return InvalidArgument(
          "logit bias {} for token {} must be a number for a token of the vocabulary of {}",
          bias.bias, bias.token, config_.vocab);
    }
  }
  if (request.allowed != nullptr && request.allowed->size() != (config_.vocab + 31) / 32) {
    return InvalidArgument("a mask of {} words does not fit the vocabulary of {}",
                           request.allowed->size(), config_.vocab);
  }
  if (request.drafts.max > kDraftsMax ||
      !(request.drafts.min_p >= 0 && request.drafts.min_p <= 1)) {
    return InvalidArgument("{} drafts with min_p = {} are asked for; at most {} and 0 to 1 are possible",
                           request.drafts.max, request.drafts.min_p, kDraftsMax);
  }
  return CheckSampling(request.sampling);
}

StatusOr<std::shared_ptr<RequestStream>> Scheduler::Submit(Request request) {
  Add(counters_.requests_submitted, 1);
  auto stream = Enqueue(std::move(request), false);
  if (!stream.ok()) Add(counters_.requests_refused, 1);
  return stream;
}

StatusOr<std::shared_ptr<RequestStream>> Scheduler::Enqueue(Request request, bool internal) {
  LODE_RETURN_IF_ERROR(fleet_->failure());
  LODE_RETURN_IF_ERROR(CheckRequest(request));
  const uint64_t now = NowNs();
  if (config_.request_seconds > 0) {
    const uint64_t end = now + static_cast<uint64_t>(config_.request_seconds * 1e9);
    request.deadline_ns = std::min(request.deadline_ns.value_or(end), end);
  }
  auto stream = std::make_shared<RequestStream>();
  LODE_ASSIGN_OR_RETURN(auto sequence,
                        Sequence::Create(std::move(request), stream, tokenizer_, now));

  std::lock_guard lock(mutex_);
  if (stop_) return Unavailable("the daemon is stopping");
  if (state_ == State::kDraining)
    return Unavailable("the daemon is draining and takes no new requests");
  if (state_ == State::kLoading && !internal)
    return Unavailable("the model is still loading; try again later");
  const size_t unfilled =
      config_.sequences -
      std::min(config_.sequences, view_.running);  // slots the queue's head will take
  if (queue_.size() >= config_.queue + unfilled) {
    return ResourceExhausted(
        "the queue is full: {} requests may wait (option queue); try again later", config_.queue);
  }
  queue_.push_back(std::move(sequence));
  poked_ = true;
  wake_.notify_all();
  return stream;
}

EngineSnapshot Scheduler::Snapshot() const {
  EngineSnapshot snapshot;
  const Status failure = fleet_->failure();
  const bool degraded = !fleet_->gpu() || !fleet_->cpu_lane_up();
  {
    std::lock_guard lock(mutex_);
    snapshot.running = view_.running;
    snapshot.queued = static_cast<uint32_t>(queue_.size());
    snapshot.kv_blocks_free = view_.kv_free;
    snapshot.hit_rate = view_.hit_rate;
    snapshot.pcie_share = view_.pcie_share;
    snapshot.tokens_per_window = view_.tokens_per_window;
    switch (state_) {
      case State::kLoading:
        snapshot.state = "loading";
        break;
      case State::kReady:
        snapshot.state = degraded ? "degraded" : "ready";
        break;
      case State::kDraining:
        snapshot.state = "draining";
        break;
    }
  }
  if (!failure.ok()) {
    snapshot.state = "failed";
    snapshot.detail = Message(failure);
  }
  snapshot.slots = config_.sequences;
  snapshot.kv_blocks = config_.kv_blocks;
  snapshot.load_progress = fleet_->load_progress();
  snapshot.workers = fleet_->Workers();
  snapshot.last_progress_ns = last_progress_ns();
  snapshot.facts = config_.facts;
  for (const auto& worker : snapshot.workers) {
    if (snapshot.detail.empty() && worker.state != "ready") {
      snapshot.detail = fmt::format("{} is {}{}{}", worker.name, worker.state,
                                    worker.detail.empty() ? "" : ": ", worker.detail);
    }
  }
  return snapshot;
}

void Scheduler::SetAccepting(bool accepting) {
  std::lock_guard lock(mutex_);
  if (state_ != State::kDraining) state_ = accepting ? State::kReady : State::kLoading;
}

Status Scheduler::WarmUp(uint64_t deadline_ns) {
  Request request;
  request.id = "warm-up";
  request.prompt = {0, 0};  // any tokens do; two, so that a prompt row and the picking row both run
  request.sampling = GreedySampling();
  request.max_tokens = kWarmUpTokens - static_cast<uint32_t>(request.prompt.size());
  LODE_ASSIGN_OR_RETURN(auto stream, Enqueue(std::move(request), true));
  StreamEvent event;
  uint32_t tokens = 0;
  while (stream->Pop(&event, deadline_ns)) {
    tokens += static_cast<uint32_t>(event.tokens.size());
    if (!event.finish) continue;
    if (!event.finish->error.ok()) return event.finish->error;
    return tokens > 0 ? OkStatus() : Internal("the warm-up request ended without a token");
  }
  stream->Cancel();
  return DeadlineExceeded("the warm-up request got no token in time");
}

Status Scheduler::SetTunables(const TunablesChange& change) {
  if (change.pull_share && !(*change.pull_share >= 0 && *change.pull_share <= 1)) {
    return InvalidArgument("pull_share = {} must be 0 to 1", *change.pull_share);
  }
  if (change.prompt_rows && (*change.prompt_rows < 1 || *change.prompt_rows > kWindowRowsMax)) {
    return InvalidArgument("prompt_rows = {} must be 1 to {}", *change.prompt_rows, kWindowRowsMax);
  }
  for (const auto& [worker, isa] : change.cpu_isa) {
    if (worker >= kCpuWorkersMax) return InvalidArgument("there is no CPU worker {}", worker);
  }
  std::lock_guard lock(mutex_);
  Tunables& t = tunables_;
  if (change.vram_budget_bytes) t.vram_budget_bytes = *change.vram_budget_bytes;
  if (change.pull_share) t.pull_share = *change.pull_share;
  if (change.split_policy) t.split_policy = static_cast<uint32_t>(*change.split_policy);
  if (change.tier_policy) t.tier_policy = static_cast<uint32_t>(*change.tier_policy);
  if (change.device_isa) t.device_isa = *change.device_isa;
  if (change.cpu_threads) t.cpu_threads = *change.cpu_threads;
  if (change.device_threads) t.device_threads = *change.device_threads;
  for (const auto& [worker, isa] : change.cpu_isa) t.cpu_isa[worker] = isa;
  if (change.prompt_rows) prompt_rows_ = *change.prompt_rows;
  ++t.epoch;
  return OkStatus();
}

void Scheduler::Drain(uint64_t deadline_ns) {
  const std::chrono::steady_clock::time_point deadline{std::chrono::nanoseconds(deadline_ns)};
  // The loop looks at cancel_all_ at the next window border; a border is never further away than
  // the watchdog's time.
  const auto done = [this] { return stop_ || (queue_.empty() && view_.running == 0); };
  std::unique_lock lock(mutex_);
  state_ = State::kDraining;
  if (idle_.wait_until(lock, deadline, done)) return;
  cancel_all_ = true;
  poked_ = true;
  wake_.notify_all();
  constexpr std::chrono::seconds kBorderWait{2};
  if (!idle_.wait_for(lock, kBorderWait, done))
    spdlog::warn("drain: a window is still running; stopping anyway");
}

void Scheduler::Stop() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    wake_.notify_all();
    idle_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

}  // namespace lode
