// The supervisor's thread: control messages, ends of processes, orders and timers, one after the
// other.
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>

#include "daemon/fd_store.h"
#include "daemon/supervisor.h"
#include "daemon/window_runner.h"
#include "shared/base/check.h"
#include "shared/base/log.h"
#include "shared/shm/wait_word.h"
#include "shared/wire/segment_headers.h"

namespace lode {
namespace {

constexpr int kTimerMs = 50;                     // precision of restarts and deadlines
constexpr uint64_t kTermWaitNs = 1'000'000'000;  // SIGTERM to SIGKILL at an orderly stop
constexpr uint64_t kClosedWaitNs =
    1'000'000'000;  // a worker ends this soon after its stream broke (kOrphanExitMs)
// This thread itself did not run for so long (the whole process group was stopped, the machine
// slept): nobody's silence means anything yet.
constexpr uint64_t kOwnGapNs = 1'000'000'000;
constexpr uint64_t kStatisticsNs = 5'000'000'000;  // for people who look at `lode status`
constexpr uint64_t kRegisterWaitNs =
    20'000'000'000;  // start of a process to its first message; CUDA start-up takes seconds

}  // namespace

void Supervisor::Run() {
  while (!stopping_) {
    WaitForSomething();
    std::deque<ControlEvent> events;
    std::deque<Order> orders;
    {
      std::lock_guard lock(mutex_);
      events.swap(events_);
      orders.swap(orders_);
    }
    for (const ControlEvent& event : events) Handle(event);
    for (const Order& order : orders) HandleOrder(order);
    // Ends after messages: the reason a worker gave before it ended is known by now, or comes too
    // late to matter.
    for (auto& worker : workers_) {
      if (const auto how = worker->process.Reap()) HandleEnd(worker.get(), *how);
    }
    const uint64_t now = NowNs();
    CheckDeadlines(now);
    CheckSuspects(now);
    AskStatistics(now);
    for (auto& worker : workers_) {
      if (worker->state == State::kDown && now >= worker->start_at_ns && failure().ok())
        StartWorker(worker.get());
    }
  }
  StopWorkers();
}

void Supervisor::WaitForSomething() {
  std::vector<pollfd> fds = {{event_.get(), POLLIN, 0}};
  for (const auto& worker : workers_) {
    if (worker->process.running()) fds.push_back({worker->process.pidfd(), POLLIN, 0});
  }
  poll(fds.data(), fds.size(), kTimerMs);
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t n = read(event_.get(), &count, sizeof(count));
}

Supervisor::Worker* Supervisor::Find(WorkerRole role, uint32_t index) {
  for (auto& worker : workers_) {
    if (worker->role == role && worker->index == index) return worker.get();
  }
  return nullptr;
}

void Supervisor::SetState(Worker* worker, State state, std::string phase) {
  std::lock_guard lock(mutex_);
  worker->state = state;
  worker->phase = std::move(phase);
  worker->pid = worker->process.running() ? worker->process.pid() : 0;
}

void Supervisor::Changed() {
  changed_.notify_all();
  if (on_change_) on_change_();
}

// ---- starting
// ----------------------------------------------------------------------------------------------------------

void Supervisor::StartWorker(Worker* worker) {
  const Status status = SpawnWorker(worker);
  if (!status.ok()) return StartFailed(worker, status);
  worker->progress_ns = NowNs();
  worker->ready_ns = 0;
  worker->closed_ns = 0;
  worker->end_reason.clear();
  worker->permanent = worker->asked = false;
  worker->ask_ns = 0;
  SetState(worker, State::kStarting, "starting");
  spdlog::info("{} generation {} started, pid {}", worker->name, worker->generation,
               worker->process.pid());
}

Status Supervisor::SpawnWorker(Worker* worker) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
    return ErrnoStatus("socketpair", errno);
  worker->channel.Reset(ends[0]);
  const Fd theirs(ends[1]);
  ++worker->generation;
  const bool cpu = worker->role == WorkerRole::kCpu;
  LODE_ASSIGN_OR_RETURN(
      worker->process,
      ChildProcess::Spawn(
          {cpu ? config_.cpu_binary : config_.gpu_binary, "--control=" + config_.socket_path,
           fmt::format("--fd={}", ChildProcess::kChannelFd), cpu ? "--role=cpu" : "--role=gpu",
           fmt::format("--index={}", worker->index),
           fmt::format("--generation={}", worker->generation), "--log-level=" + config_.log_level},
          theirs));
  return OkStatus();
}

void Supervisor::StartFailed(Worker* worker, const Status& status) {
  worker->end_reason = Message(status);
  worker->permanent = IsPermanent(status.code());
  HandleEnd(worker, "could not be started");
}

Status Supervisor::SendSegments(Worker* worker) {
  const auto send = [&](const char* label, uint32_t index, const Segment& segment) {
    FdMessage message = {};
    std::snprintf(message.label, sizeof(message.label), "%s", label);
    message.index = index;
    message.generation = worker->generation;
    message.bytes = segment.size();
    return SendFd(worker->channel.get(), message, segment.fd());
  };
  LODE_RETURN_IF_ERROR(send("exchange", 0, *exchange_));
  if (worker->role == WorkerRole::kCpu)
    return send("arena", worker->index, *arenas_[worker->index]);
  LODE_ASSIGN_OR_RETURN(worker->window, Segment::Create("window", sizeof(WindowSegment)));
  InitWindowSegment(*worker->window, worker->generation, worker->index, config_.vocab);
  LODE_RETURN_IF_ERROR(send("window", 0, *worker->window));
  for (uint32_t node = 0; node < arenas_.size(); ++node)
    LODE_RETURN_IF_ERROR(send("arena", node, *arenas_[node]));
  return OkStatus();
}

// ---- messages
// ----------------------------------------------------------------------------------------------------------

void Supervisor::Handle(const ControlEvent& event) {
  Worker* worker = Find(event.key.role, event.key.index);
  if (!worker || event.key != worker->key() || !worker->process.running())
    return;  // of a life that is over
  // An idle worker answers questions about itself; that is no progress of anything.
  if (event.kind != ControlEvent::Kind::kStatistics) progress_ns_ = NowNs();
  switch (event.kind) {
    case ControlEvent::Kind::kRegistered: {
      worker->progress_ns = NowNs();
      SetState(worker, State::kLoading, "loading");
      Status sent = event.pid == worker->process.pid()
                        ? SendSegments(worker)
                        : FailedPrecondition("pid {} registered as {}", event.pid, worker->name);
      if (sent.ok() && !control_->SendLoadPlan(event.key, *worker->plan))
        sent = Unavailable("the control stream broke");
      if (sent.ok()) return;
      worker->end_reason = Message(sent);
      worker->process.Signal(SIGKILL);
      return;
    }
    case ControlEvent::Kind::kProgress: {
      worker->progress_ns = NowNs();
      std::lock_guard lock(mutex_);
      worker->phase = event.text;
      worker->fraction =
          event.total
              ? std::min(1.0, static_cast<double>(event.done) / static_cast<double>(event.total))
              : 0;
      return;
    }
    case ControlEvent::Kind::kReady:
      return HandleReady(worker, event);
    case ControlEvent::Kind::kFailed:
      worker->end_reason = Message(event.status);
      worker->permanent = IsPermanent(event.status.code());
      return;
    case ControlEvent::Kind::kClosed:
      worker->closed_ns = NowNs();  // its end follows, or CheckDeadlines makes one
      return;
    case ControlEvent::Kind::kStatistics: {
      std::lock_guard lock(mutex_);
      worker->statistics = event.values;
      worker->asked = false;
      return;
    }
    case ControlEvent::Kind::kDrained:
      return;
  }
}

void Supervisor::HandleReady(Worker* worker, const ControlEvent& event) {
  worker->ready_ns = worker->pulse_ns = NowNs();
  {
    std::lock_guard lock(mutex_);
    worker->state = State::kReady;
    worker->phase = event.text;
    worker->facts = event.facts;
    worker->fraction = 1;
  }
  spdlog::info("{} is ready: {}", worker->name, event.text);
  if (worker->role == WorkerRole::kCpu) {
    worker->ready_bell =
        exchange_->As<ExchangeHeader>()->bell.value.load(std::memory_order_acquire);
    StoreFd(ArenaName(worker->index), arenas_[worker->index]->fd());
    const Worker* gpu = workers_.back().get();
    if (gpu->state == State::kReady)
      control_->SendCpuWorkerReplaced(gpu->key(), worker->index, worker->generation);
    UpdateLane();
  } else {
    auto link = std::make_shared<GpuLink>();
    std::shared_ptr<Segment> window = std::move(worker->window);
    link->window = window->As<WindowSegment>();
    link->exchange = exchange_->As<ExchangeHeader>();
    link->generation = worker->generation;
    link->n_cpu_workers = static_cast<uint32_t>(arenas_.size());
    link->keep_alive = window;
    std::lock_guard lock(mutex_);
    link_ = std::move(link);
  }
  Changed();
}

void Supervisor::HandleOrder(const Order& order) {
  if (order.role == WorkerRole::kCpu) return Suspect(order.why);
  Worker* worker = Find(order.role, order.index);
  if (!worker || !worker->process.running()) return;
  spdlog::error("{} is killed: {}", worker->name, order.why);
  worker->end_reason = order.why;
  worker->process.Signal(SIGKILL);
}

// Whoever owes an answer to the newest bell is looked at: the worker that was named may itself have
// waited for another one.
void Supervisor::Suspect(const std::string& why) {
  const ExchangeHeader& exchange = *exchange_->As<ExchangeHeader>();
  const uint64_t bell = exchange.bell.value.load(std::memory_order_acquire);
  for (auto& worker : workers_) {
    if (worker->role != WorkerRole::kCpu || worker->state != State::kReady ||
        !worker->process.running() || worker->suspicion)
      continue;
    const WorkerLine& line = exchange.workers[worker->index];
    const StatusOr<ProcessSample> sample = SampleProcess(worker->process.pid());
    const bool owes =
        bell != worker->ready_bell && line.ack.value.load(std::memory_order_acquire) != bell;
    if (!owes || !sample.ok()) continue;
    spdlog::warn("{} owes an answer ({}); misses are pulled until it moves", worker->name, why);
    worker->suspicion.emplace(line.progress.load(std::memory_order_relaxed), *sample, NowNs());
  }
  UpdateLane();
  Changed();
}

void Supervisor::CheckSuspects(uint64_t now_ns) {
  for (auto& worker : workers_) {
    if (!worker->suspicion || !worker->process.running()) continue;
    const WorkerLine& line = exchange_->As<ExchangeHeader>()->workers[worker->index];
    const StatusOr<ProcessSample> sample = SampleProcess(worker->process.pid());
    if (!sample.ok()) continue;  // its end is on the way
    std::string why;
    // Relaxed: only compared with its earlier self.
    switch (worker->suspicion->Judge(line.progress.load(std::memory_order_relaxed), *sample, now_ns,
                                     &why)) {
      case Suspicion::Verdict::kWait:
        break;
      case Suspicion::Verdict::kAlive:
        spdlog::info("{} moves again after {} ms: slow, not stuck", worker->name,
                     (now_ns - worker->suspicion->begin_ns()) / 1'000'000);
        worker->suspicion.reset();
        UpdateLane();
        Changed();
        break;
      case Suspicion::Verdict::kStuck:
        spdlog::error("{} is killed: {}", worker->name, why);
        worker->suspicion.reset();
        worker->stuck = true;
        worker->end_reason = why;
        worker->process.Signal(SIGKILL);
        break;
    }
  }
}

// ---- ends
// --------------------------------------------------------------------------------------------------------------

// The process is gone, so nothing of it can write any more: only now may its place be cleaned and
// given to a successor.
void Supervisor::HandleEnd(Worker* worker, const std::string& how) {
  const uint64_t now = NowNs();
  const uint64_t served_ns = worker->ready_ns ? std::max<uint64_t>(1, now - worker->ready_ns) : 0;
  const std::string doing = worker->ready_ns ? "serving" : worker->phase;
  const std::string text =
      worker->end_reason.empty() ? fmt::format("{} while {}", how, doing) : worker->end_reason;
  worker->channel.Reset();
  if (worker->role == WorkerRole::kCpu)
    FenceCpu(worker);
  else
    FenceGpu(worker);
  const RestartPolicy::Decision decision =
      worker->stuck ? worker->policy.EndedStuck()
                    : worker->policy.Ended(served_ns, text, worker->permanent);
  worker->suspicion.reset();
  worker->stuck = false;
  worker->start_at_ns = now + decision.delay_ns;
  worker->ready_ns = 0;
  SetState(worker, State::kDown, text);
  {
    std::lock_guard lock(mutex_);
    ++worker->restarts;
    worker->fraction = 0;
    worker->facts.clear();
    worker->statistics.clear();
    if (worker->role == WorkerRole::kGpu) {
      last_gpu_end_ = fmt::format("{} (generation {}): {}", worker->name, worker->generation, text);
    }
    if (decision.give_up && failure_.ok())
      failure_ = FailedPrecondition("{} cannot be brought up: {}", worker->name, text);
  }
  spdlog::log(decision.give_up ? spdlog::level::err : spdlog::level::warn,
              "{} generation {} ended ({}): {}; {}", worker->name, worker->generation, how, text,
              decision.give_up ? std::string("the engine gives up")
                               : fmt::format("next start in {} ms", decision.delay_ns / 1'000'000));
  Changed();
}

void Supervisor::FenceCpu(Worker* worker) {
  UpdateLane();  // first down, then void: see Fleet::NoteWindow
  auto* exchange = exchange_->As<ExchangeHeader>();
  WorkerLine& line = exchange->workers[worker->index];
  line.ready.store(0, std::memory_order_release);
  VoidWindowsUpTo(window_.load(std::memory_order_seq_cst));
  WakeAll(line.ack);  // a GPU worker that sleeps on the dead worker's word
}

void Supervisor::FenceGpu(Worker* worker) {
  {
    std::lock_guard lock(mutex_);
    link_.reset();
  }
  worker->window.reset();
  // It may have died inside a window: the pools must not spin until its successor's first one.
  WaitWord& epoch = exchange_->As<ExchangeHeader>()->window_epoch;
  const uint64_t value = epoch.value.load(std::memory_order_acquire);
  if (value & 1) Publish(epoch, value + 1);
}

void Supervisor::UpdateLane() {
  const bool up = std::all_of(workers_.begin(), workers_.end(), [](const auto& worker) {
    return worker->role != WorkerRole::kCpu ||
           (worker->state == State::kReady && worker->process.running() && !worker->suspicion &&
            !worker->stuck);
  });
  lane_up_.store(up, std::memory_order_seq_cst);
}

// ---- timers
// ------------------------------------------------------------------------------------------------------------

void Supervisor::CheckDeadlines(uint64_t now_ns) {
  const uint64_t load_ns = static_cast<uint64_t>(config_.load_seconds * 1e9);
  // The GPU worker waits for the arenas while loading: progress of anybody is progress for it.
  uint64_t newest = 0;
  for (const auto& worker : workers_) newest = std::max(newest, worker->progress_ns);
  CheckPulse(workers_.back().get(), now_ns);
  last_look_ns_ = now_ns;
  for (auto& worker : workers_) {
    // Without its stream a worker cannot be controlled, and it ends by itself. If not, its end is
    // made: a successor may start only after it.
    if (worker->process.running() && worker->closed_ns != 0 &&
        now_ns > worker->closed_ns + kClosedWaitNs) {
      if (worker->end_reason.empty())
        worker->end_reason = "its control stream broke and it did not end";
      worker->process.Signal(SIGKILL);
    }
    if (!worker->process.running() || worker->state == State::kReady ||
        worker->state == State::kDown)
      continue;
    const bool starting = worker->state == State::kStarting;
    const uint64_t since =
        worker->role == WorkerRole::kGpu && !starting ? newest : worker->progress_ns;
    const uint64_t limit = starting ? std::min(load_ns, kRegisterWaitNs) : load_ns;
    if (now_ns < since + limit) continue;
    worker->end_reason = fmt::format("no progress for {:.0f} s while {} (option load_seconds)",
                                     static_cast<double>(limit) / 1e9, worker->phase);
    worker->progress_ns = now_ns;
    worker->process.Signal(SIGKILL);
  }
}

// A stopped process closes nothing and answers nothing; only its pulse tells. Its end is made, and
// everything else follows from that as after any other end.
void Supervisor::CheckPulse(Worker* worker, uint64_t now_ns) {
  std::shared_ptr<const GpuLink> link = gpu();
  if (!link || worker->state != State::kReady || !worker->process.running()) return;
  const uint32_t pulse = link->window->pulse.load(std::memory_order_relaxed);
  if (pulse != worker->pulse || now_ns > last_look_ns_ + kOwnGapNs) {
    worker->pulse = pulse;
    worker->pulse_ns = now_ns;
  }
  const uint64_t silent_ns = now_ns - worker->pulse_ns;
  if (static_cast<double>(silent_ns) < config_.pulse_seconds * 1e9) return;
  // A machine that has no core or no disk for it is not helped by another start of it.
  const auto sample = SampleProcess(worker->process.pid());
  if (sample.ok() && sample->wants_to_run && silent_ns < Suspicion::kNsMax) return;
  const StallReport report = DescribeStall(*link, window_.load(std::memory_order_relaxed));
  worker->end_reason = fmt::format("its process has not run for {:.1f} s (stopped?): {}",
                                   static_cast<double>(silent_ns) / 1e9, report.text);
  spdlog::error("{} is killed: {}", worker->name, worker->end_reason);
  worker->pulse_ns = now_ns;
  worker->process.Signal(SIGKILL);
}

void Supervisor::AskStatistics(uint64_t now_ns) {
  for (auto& worker : workers_) {
    if (worker->state != State::kReady || !worker->process.running() || worker->asked ||
        now_ns < worker->ask_ns)
      continue;
    worker->ask_ns = now_ns + kStatisticsNs;
    worker->asked = true;
    control_->SendCollectStatistics(worker->key());
  }
}

void Supervisor::StopWorkers() {
  {
    std::lock_guard lock(mutex_);
    link_.reset();
  }
  lane_up_ = false;
  for (auto& worker : workers_) {
    if (!worker->process.running()) continue;
    control_->SendDrain(worker->key());
    worker->process.Signal(SIGTERM);
  }
  const uint64_t kill_at = NowNs() + kTermWaitNs;
  bool killed = false;
  for (;;) {
    bool running = false;
    for (auto& worker : workers_) {
      worker->process.Reap();
      running |= worker->process.running();
    }
    if (!running) return;
    if (!killed && NowNs() >= kill_at) {
      killed = true;
      for (auto& worker : workers_) {
        if (worker->process.running())
          spdlog::warn("{} did not end in time and is killed", worker->name);
        worker->process.Signal(SIGKILL);
      }
    }
    WaitForSomething();
  }
}

}  // namespace lode
