// See worker_main.h. The state that signal handlers touch is a few lock-free atomics of this file;
// everything else hangs on Impl.
#include "shared/control/worker_main.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <thread>
#include <utility>

#include "shared/base/fault.h"
#include "shared/base/limits.h"
#include "shared/base/log.h"
#include "shared/shm/wait_word.h"

namespace lode {
namespace {

constexpr uint64_t kNsPerMs = 1'000'000;
constexpr uint64_t kConnectMs = 10'000;  // the daemon listens before it spawns us
// The GPU worker's plan and arenas come when the CPU workers have read tens of GB from a disk that
// may be slow. Both waits look at `stop` every 50 ms, and the daemon supervises by progress; so
// these only bound a message that was lost.
constexpr uint64_t kLoadPlanMs = 3'600'000;
constexpr uint64_t kSegmentsMs = 3'600'000;
constexpr uint64_t kStopSliceMs = 50;

// Written by signal handlers, so global and lock-free.
std::atomic<bool> stop_requested{false};
std::atomic<pid_t> parent_pid{0};
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<pid_t>::is_always_lock_free);

void OnTerminate(int) { stop_requested.store(true, std::memory_order_relaxed); }

// PR_SET_PDEATHSIG fires when the *thread* that forked us ends, not only when the process does:
// look who the parent is now.
void OnParentDeath(int) {
  if (getppid() == parent_pid.load(std::memory_order_relaxed)) return;
  stop_requested.store(true, std::memory_order_relaxed);
  alarm(1);  // the default action of SIGALRM ends a process that cannot end itself
}

Status InstallSignals() {
  parent_pid.store(getppid(), std::memory_order_relaxed);
  struct sigaction action = {};
  sigemptyset(&action.sa_mask);
  action.sa_handler = OnTerminate;
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGINT, &action, nullptr);
  action.sa_handler = OnParentDeath;
  sigaction(SIGHUP, &action, nullptr);
  action.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &action, nullptr);
  if (prctl(PR_SET_PDEATHSIG, SIGHUP) != 0) return ErrnoStatus("PR_SET_PDEATHSIG", errno);
  // The parent may have died before the line above took effect.
  if (getppid() != parent_pid.load(std::memory_order_relaxed))
    return Unavailable("the daemon died before this worker started");
  return OkStatus();
}

StatusOr<uint32_t> FlagNumber(std::string_view name, std::string_view text, uint32_t max) {
  uint32_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value > max) {
    return InvalidArgument("flag --{}={} is no number in 0..{}", name, text, max);
  }
  return value;
}

Status TakeFlag(std::string_view name, std::string_view value, WorkerFlags* flags,
                WorkerRole role) {
  constexpr uint32_t kFdMax = 1u << 20;
  if (name == "control") {
    flags->control = value;
  } else if (name == "log-level") {
    flags->log_level = value;
  } else if (name == "fd") {
    LODE_ASSIGN_OR_RETURN(const uint32_t fd, FlagNumber(name, value, kFdMax));
    flags->fd = static_cast<int>(fd);
  } else if (name == "index") {
    LODE_ASSIGN_OR_RETURN(flags->identity.index,
                          FlagNumber(name, value, std::max(kCpuWorkersMax, kDevicesMax) - 1));
  } else if (name == "generation") {
    LODE_ASSIGN_OR_RETURN(flags->identity.generation, FlagNumber(name, value, UINT32_MAX));
  } else if (name == "role") {
    const std::string_view wanted = role == WorkerRole::kCpu ? "cpu" : "gpu";
    if (value != wanted)
      return InvalidArgument("flag --role={}: this program is the {} worker", value, wanted);
  } else {
    return InvalidArgument(
        "unknown flag --{}; known: control, fd, role, index, generation, log-level", name);
  }
  return OkStatus();
}

}  // namespace

StatusOr<WorkerFlags> ParseWorkerFlags(int argc, char** argv, WorkerRole role) {
  WorkerFlags flags;
  flags.identity.role = role;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    const size_t equals = argument.find('=');
    if (argument.substr(0, 2) != "--" || equals == std::string_view::npos) {
      return InvalidArgument(
          "argument '{}' is not --name=value; workers are started by loded, not by hand", argument);
    }
    LODE_RETURN_IF_ERROR(
        TakeFlag(argument.substr(2, equals - 2), argument.substr(equals + 1), &flags, role));
  }
  if (flags.control.empty())
    return InvalidArgument(
        "flag --control=PATH is missing; workers are started by loded, not by hand");
  if (flags.fd < 0)
    return InvalidArgument("flag --fd=N is missing; workers are started by loded, not by hand");
  return flags;
}

struct WorkerProcess::Impl {
  WorkerFlags flags;
  Fd socket;
  std::unique_ptr<WorkerClient> client;
  std::atomic<bool> orphaned{false};

  // The last resort: started when the daemon is gone, ends this process unless Finish comes first.
  std::mutex mutex;
  std::condition_variable changed;
  bool finished = false;
  std::thread reaper;

  void Orphaned(const Status& why) {
    stop_requested.store(true, std::memory_order_relaxed);
    orphaned.store(true, std::memory_order_relaxed);
    spdlog::warn("{}; this worker ends", Message(why));
    std::lock_guard<std::mutex> lock(mutex);
    if (finished || reaper.joinable()) return;
    reaper = std::thread([this] {
      std::unique_lock<std::mutex> wait_lock(mutex);
      const bool done = changed.wait_for(wait_lock, std::chrono::milliseconds(kOrphanExitMs),
                                         [this] { return finished; });
      if (!done) _exit(kExitOrphaned);
    });
  }
};

WorkerProcess::WorkerProcess() : impl_(std::make_unique<Impl>()) {}

WorkerProcess::~WorkerProcess() {
  impl_->client.reset();  // joins its reader: no event comes after this
  {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    impl_->finished = true;
  }
  impl_->changed.notify_all();
  if (impl_->reaper.joinable()) impl_->reaper.join();
}

StatusOr<std::unique_ptr<WorkerProcess>> WorkerProcess::Start(const WorkerFlags& flags,
                                                              const std::string& process_name,
                                                              WorkerEvents events) {
  InitLog(process_name, flags.log_level);
  SetFaultScope(fmt::format("{}{}.gen{}", flags.identity.role == WorkerRole::kCpu ? "cpu" : "gpu",
                            flags.identity.index, flags.identity.generation));
  LODE_RETURN_IF_ERROR(InstallSignals());
  std::unique_ptr<WorkerProcess> process(new WorkerProcess());
  Impl* impl = process->impl_.get();
  impl->flags = flags;
  impl->socket.Reset(flags.fd);
  if (fcntl(flags.fd, F_SETFD, FD_CLOEXEC) != 0)
    return ErrnoStatus(fmt::format("flag --fd={}", flags.fd), errno);
  events.drain = [then = std::move(events.drain)] {
    stop_requested.store(true, std::memory_order_relaxed);
    if (then) then();
  };
  events.broken = [impl, then = std::move(events.broken)](const Status& why) {
    impl->Orphaned(why);
    if (then) then(why);
  };
  LODE_ASSIGN_OR_RETURN(impl->client,
                        WorkerClient::Connect(flags.control, flags.identity, std::move(events),
                                              NowNs() + kConnectMs * kNsPerMs));
  LODE_FAULT("worker.after_register");
  return process;
}

StatusOr<LoadPlan> WorkerProcess::WaitLoadPlan() {
  const uint64_t deadline_ns = NowNs() + kLoadPlanMs * kNsPerMs;
  for (;;) {
    StatusOr<LoadPlan> plan =
        impl_->client->WaitLoadPlan(std::min(deadline_ns, NowNs() + kStopSliceMs * kNsPerMs));
    if (plan.status().code() != StatusCode::kDeadlineExceeded || NowNs() >= deadline_ns)
      return plan;
    if (stop().load(std::memory_order_relaxed))
      return Error(StatusCode::kCancelled, "asked to end before the load plan came");
  }
}

StatusOr<std::vector<ReceivedSegment>> WorkerProcess::ReceiveSegments(
    const std::vector<SegmentWant>& wants) {
  struct Place {
    size_t want;
    ReceivedSegment segment;
  };
  std::vector<Place> got;
  size_t missing = 0;
  for (const SegmentWant& want : wants) missing += want.count;
  const uint64_t deadline_ns = NowNs() + kSegmentsMs * kNsPerMs;
  while (got.size() < missing) {
    FdMessage message = {};
    StatusOr<Fd> fd = RecvFd(impl_->socket.get(), &message,
                             std::min(deadline_ns, NowNs() + kStopSliceMs * kNsPerMs));
    if (fd.status().code() == StatusCode::kDeadlineExceeded && NowNs() < deadline_ns) {
      if (stop().load(std::memory_order_relaxed))
        return Error(StatusCode::kCancelled, "asked to end before every segment came");
      continue;
    }
    if (!fd.ok()) return fd.status();
    const auto want = std::find_if(wants.begin(), wants.end(),
                                   [&](const SegmentWant& w) { return w.label == message.label; });
    if (want == wants.end())
      return InvalidArgument("segment '{}' is none this worker uses", message.label);
    const size_t place = static_cast<size_t>(want - wants.begin());
    if (message.generation != impl_->flags.identity.generation) {
      return FailedPrecondition("segment '{}' is for generation {}, this worker is {}",
                                message.label, message.generation,
                                impl_->flags.identity.generation);
    }
    const bool repeated = std::any_of(got.begin(), got.end(), [&](const Place& p) {
      return p.want == place && (want->count == 1 || p.segment.message.index == message.index);
    });
    if (repeated || (want->count > 1 && message.index >= want->count)) {
      return InvalidArgument("segment '{}' {} came twice or is out of range", message.label,
                             message.index);
    }
    got.push_back({place, {message, std::move(*fd)}});
  }
  std::stable_sort(got.begin(), got.end(), [](const Place& a, const Place& b) {
    return a.want != b.want ? a.want < b.want : a.segment.message.index < b.segment.message.index;
  });
  std::vector<ReceivedSegment> result;
  for (Place& p : got) result.push_back(std::move(p.segment));
  return result;
}

void WorkerProcess::Progress(const std::string& phase, uint64_t done_bytes, uint64_t total_bytes) {
  impl_->client->SendProgress(phase, done_bytes, total_bytes);
}

void WorkerProcess::Ready(const ReadyReport& report) {
  spdlog::info("ready: {}", report.summary);
  impl_->client->SendReady(report);
}

int WorkerProcess::Finish(const Status& status) {
  if (impl_->orphaned.load(std::memory_order_relaxed)) return kExitOrphaned;
  if (status.ok() || status.code() == StatusCode::kCancelled) {
    impl_->client->SendDrained();
    return kExitOk;
  }
  spdlog::error("{}", Message(status));
  impl_->client->SendFailed(status);
  return kExitFailed;
}

const std::atomic<bool>& WorkerProcess::stop() const { return stop_requested; }
const WorkerFlags& WorkerProcess::flags() const { return impl_->flags; }

namespace {

// From the load plan to the end of serving.
Status Live(WorkerProcess& process, WorkerBody& body) {
  // What to serve, and the memory that is shared with the others.
  LODE_ASSIGN_OR_RETURN(const LoadPlan plan, process.WaitLoadPlan());
  LODE_ASSIGN_OR_RETURN(std::vector<ReceivedSegment> segments,
                        process.ReceiveSegments(body.Wants(plan)));
  // Everything that takes long or can fail. After Ready nothing is allocated.
  const auto progress = [&](const std::string& phase, uint64_t done, uint64_t total) {
    process.Progress(phase, done, total);
  };
  LODE_ASSIGN_OR_RETURN(const ReadyReport report,
                        body.Load(plan, std::move(segments), progress, process.stop()));
  process.Ready(report);
  body.Run();
  return OkStatus();
}

}  // namespace

int RunWorker(int argc, char** argv, const WorkerProgram& program) {
  const auto say = [&](const Status& status) {
    std::fprintf(stderr, "%s: %s\n", program.name, Message(status).c_str());
  };
  const StatusOr<WorkerFlags> flags = ParseWorkerFlags(argc, argv, program.role);
  if (!flags.ok()) {
    say(flags.status());
    return kExitUsage;
  }
  // Before the process: its control stream asks the body for statistics until it is gone.
  const std::unique_ptr<WorkerBody> body = program.make(flags->identity);
  WorkerEvents events;
  events.collect_statistics = [&body] { return body->Statistics(); };
  events.cpu_worker_replaced = [&body](uint32_t index, uint32_t) {
    body->CpuWorkerReplaced(index);
  };
  const auto process = WorkerProcess::Start(*flags, program.name, std::move(events));
  if (!process.ok()) {
    say(process.status());
    return kExitFailed;
  }
  return (*process)->Finish(Live(**process, *body));
}

}  // namespace lode
