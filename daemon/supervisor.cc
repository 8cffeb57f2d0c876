// The supervisor seen from other threads, and its start: segments, control socket, snapshots. The
// thread's own part is in daemon/supervisor_loop.cc.
#include "daemon/supervisor.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <chrono>

#include "daemon/fd_store.h"
#include "shared/base/check.h"
#include "shared/base/log.h"
#include "shared/shm/wait_word.h"
#include "shared/wire/segment_headers.h"

namespace lode {

StatusOr<std::unique_ptr<Supervisor>> Supervisor::Create(SupervisorConfig config) {
  LODE_CHECK(!config.cpu_plans.empty() && config.cpu_plans.size() == config.arenas.size(),
             "plans and arenas differ");
  std::unique_ptr<Supervisor> supervisor(new Supervisor(std::move(config)));
  supervisor->event_.Reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!supervisor->event_.valid()) return ErrnoStatus("eventfd", errno);
  LODE_RETURN_IF_ERROR(supervisor->MakeSegments());
  const SupervisorConfig& made = supervisor->config_;
  for (uint32_t i = 0; i < made.cpu_plans.size(); ++i) {
    auto worker = std::make_unique<Worker>();
    worker->role = WorkerRole::kCpu;
    worker->index = i;
    worker->name = fmt::format("cpu{}", i);
    worker->plan = &made.cpu_plans[i];
    supervisor->workers_.push_back(std::move(worker));
  }
  auto gpu = std::make_unique<Worker>();
  gpu->role = WorkerRole::kGpu;
  gpu->index = 0;
  gpu->name = "gpu0";
  gpu->plan = &made.gpu_plan;
  supervisor->workers_.push_back(std::move(gpu));
  Supervisor* self = supervisor.get();
  LODE_ASSIGN_OR_RETURN(supervisor->control_,
                        ControlServer::Start(made.socket_path, [self](ControlEvent event) {
                          self->Post(std::move(event));
                        }));
  supervisor->progress_ns_ = NowNs();
  return supervisor;
}

Supervisor::~Supervisor() {
  Stop();
  control_.reset();  // its threads post events: gone before the rest
  if (!config_.socket_path.empty()) unlink(config_.socket_path.c_str());
}

std::string Supervisor::ArenaName(uint32_t node) const {
  return fmt::format("lode-arena-{}-of-{}", node, arenas_.size());
}

Status Supervisor::MakeSegments() {
  LODE_ASSIGN_OR_RETURN(exchange_,
                        Segment::Create("exchange", ExchangeLayout{config_.shape}.bytes()));
  InitExchange(*exchange_, config_.shape, 0);
  std::map<std::string, Fd> stored = TakeStoredFds();
  arenas_.resize(config_.arenas.size());
  for (uint32_t node = 0; node < arenas_.size(); ++node) {
    LODE_ASSIGN_OR_RETURN(arenas_[node], MakeArena(node, &stored));
  }
  for (const auto& [name, fd] : stored) {
    if (fd.valid() && name.rfind("lode-arena-", 0) == 0)
      RemoveStoredFd(name);  // another split: memory nobody will use
  }
  return OkStatus();
}

// An arena from the fd store is used when it is exactly what this daemon would make; its bytes are
// checked by the worker.
StatusOr<std::unique_ptr<Segment>> Supervisor::MakeArena(uint32_t node,
                                                         std::map<std::string, Fd>* stored) {
  const ArenaLayout& layout = config_.arenas[node];
  const std::string label = fmt::format("arena{}", node), name = ArenaName(node);
  if (const auto it = stored->find(name); it != stored->end()) {
    auto segment =
        Segment::Attach(std::move(it->second), label, layout.bytes, Segment::Access::kReadWrite);
    const Status fits =
        segment.ok() ? CheckArena(**segment, layout, config_.identity) : segment.status();
    if (fits.ok()) {
      spdlog::info("arena of cpu{} adopted from the fd store, {} MiB", node, layout.bytes >> 20);
      return segment;
    }
    spdlog::info("arena of cpu{} in the fd store is not used: {}", node, Message(fits));
    RemoveStoredFd(name);
  }
  if (config_.huge_arenas) {
    auto segment = Segment::Create(label, layout.bytes, Segment::Pages::kHugeTlb);
    if (segment.ok()) return segment;
    spdlog::warn("no huge pages for the arena of cpu{}, ordinary pages are used: {}", node,
                 Message(segment.status()));
  }
  return Segment::Create(label, layout.bytes);
}

void Supervisor::SetOnChange(std::function<void()> on_change) {
  LODE_CHECK(!thread_.joinable(), "SetOnChange after Start");
  on_change_ = std::move(on_change);
}

void Supervisor::Start() {
  LODE_CHECK(!thread_.joinable(), "started twice");
  thread_ = std::thread([this] { Run(); });
}

Status Supervisor::WaitReady(const std::function<bool()>& keep_waiting) {
  constexpr std::chrono::milliseconds kTick{100};
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      if (!failure_.ok()) return failure_;
      if (link_ && lane_up_) return OkStatus();
      changed_.wait_for(lock, kTick);
    }
    if (!keep_waiting()) return Error(StatusCode::kCancelled, "asked to stop while loading");
  }
}

void Supervisor::Stop() {
  stopping_ = true;
  Wake();
  if (thread_.joinable()) thread_.join();
}

void Supervisor::Wake() {
  const uint64_t one = 1;
  // Full counter (EAGAIN) means that it is readable already.
  [[maybe_unused]] const ssize_t n = write(event_.get(), &one, sizeof(one));
}

void Supervisor::Post(ControlEvent event) {
  {
    std::lock_guard lock(mutex_);
    events_.push_back(std::move(event));
  }
  Wake();
}

void Supervisor::RestartGpu(const std::string& why) {
  {
    std::lock_guard lock(mutex_);
    link_.reset();
    last_gpu_end_ = why;
    orders_.push_back({WorkerRole::kGpu, 0, why});
  }
  Wake();
}

void Supervisor::RestartCpu(uint32_t index, const std::string& why) {
  lane_up_ = false;
  // A worker that is merely slow drops the void window's job at its next chunk.
  VoidWindowsUpTo(window_.load(std::memory_order_seq_cst));
  {
    std::lock_guard lock(mutex_);
    orders_.push_back({WorkerRole::kCpu, index, why});
  }
  Wake();
}

// Windows up to this one end aborted; the release pairs with the waiters' look at the abort word.
// Several threads void windows, none takes back another's word.
void Supervisor::VoidWindowsUpTo(uint64_t window) {
  std::atomic<uint64_t>& word = exchange_->As<ExchangeHeader>()->abort_window;
  uint64_t seen = word.load(std::memory_order_relaxed);
  while (seen < window && !word.compare_exchange_weak(seen, window, std::memory_order_release,
                                                      std::memory_order_relaxed)) {
  }
}

std::shared_ptr<const GpuLink> Supervisor::gpu() const {
  std::lock_guard lock(mutex_);
  return link_;
}

Status Supervisor::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

std::string Supervisor::last_gpu_end() const {
  std::lock_guard lock(mutex_);
  return last_gpu_end_;
}

std::map<std::string, std::string> Supervisor::Facts(WorkerRole role, uint32_t index) const {
  std::lock_guard lock(mutex_);
  for (const auto& worker : workers_) {
    if (worker->role == role && worker->index == index) return worker->facts;
  }
  return {};
}

std::vector<EngineSnapshot::WorkerInfo> Supervisor::Workers() const {
  static constexpr const char* kNames[] = {"dead", "starting", "loading", "ready"};
  std::vector<EngineSnapshot::WorkerInfo> infos;
  std::lock_guard lock(mutex_);
  for (const auto& worker : workers_) {
    EngineSnapshot::WorkerInfo info;
    info.name = worker->name;
    const bool never_ran = worker->state == State::kDown && worker->generation == 0;
    info.state = kNames[static_cast<size_t>(never_ran ? State::kStarting : worker->state)];
    info.detail = worker->phase;
    info.pid = worker->pid;
    info.restarts = worker->restarts;
    info.statistics = worker->statistics;
    infos.push_back(std::move(info));
  }
  return infos;
}

double Supervisor::load_progress() const {
  std::lock_guard lock(mutex_);
  double sum = 0;
  for (const auto& worker : workers_) sum += worker->state == State::kReady ? 1 : worker->fraction;
  return sum / static_cast<double>(workers_.size());
}

std::string Supervisor::LoadingText() const {
  std::string text;
  std::lock_guard lock(mutex_);
  for (const auto& worker : workers_) {
    if (worker->state == State::kReady) continue;
    text += fmt::format("{}{}: {} {:.0f}%", text.empty() ? "" : ", ", worker->name,
                        worker->phase.empty() ? "starting" : worker->phase, worker->fraction * 100);
  }
  return text;
}

}  // namespace lode
