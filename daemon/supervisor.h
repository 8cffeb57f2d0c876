// Starts the workers, follows their loading, watches their lives, restarts them, and owns every
// shared segment. One thread (also the parent of all workers, see daemon/child_process.h) handles
// control messages, ends and timers one after the other.
//
// Who owns which memory, and for how long:
//   exchange  one for the daemon's life. Its tags carry the GPU worker's generation and never
//   repeat, and a worker is started
//             only after its predecessor's end was seen, so nothing of a dead process can be
//             mistaken for something current.
//   window    one per GPU worker generation; dropped with it.
//   arena     one per CPU worker, for the daemon's life and, through the fd store, beyond. A new
//   worker process adopts it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "daemon/child_process.h"
#include "daemon/control_service.h"
#include "daemon/fleet.h"
#include "daemon/restart_policy.h"
#include "daemon/worker_watch.h"
#include "shared/control/load_plan.h"
#include "shared/shm/segment.h"
#include "shared/wire/arena_layout.h"
#include "shared/wire/exchange_layout.h"

namespace lode {

struct SupervisorConfig {
  std::string cpu_binary, gpu_binary;
  std::string socket_path;  // control socket, inside the runtime folder
  std::string log_level = "info";
  std::vector<LoadPlan> cpu_plans;  // one per CPU worker
  LoadPlan gpu_plan;
  ExchangeShape shape = {};
  std::vector<ArenaLayout> arenas;  // one per CPU worker
  std::string identity;             // of the model, for arenas found in the fd store
  bool huge_arenas = false;         // hugetlb pages when the machine has them
  uint32_t vocab = 0;
  double load_seconds = 120;  // without progress
  // A ready GPU worker whose pulse stands still this long does not run (SIGSTOP, a frozen cgroup):
  // fifty beats, so a loaded machine does not look like a stopped process.
  double pulse_seconds = 5;
};

class Supervisor : public Fleet {
 public:
  // Makes the segments and the control socket, adopts arenas from the fd store. Starts nothing.
  static StatusOr<std::unique_ptr<Supervisor>> Create(SupervisorConfig config);
  ~Supervisor() override;  // Stop()

  // Starts every worker. After SetOnChange.
  void Start();
  // Waits until every worker is ready, loading has failed, or `keep_waiting` says no. `tick` runs
  // about ten times a second.
  Status WaitReady(const std::function<bool()>& keep_waiting);
  // Orderly end: Drain message and SIGTERM to all, SIGKILL after a second, wait for the ends.
  // Idempotent.
  void Stop();

  // Facts of a ready worker's report ("isa", "threads", ...); empty while it is not ready. Any
  // thread.
  std::map<std::string, std::string> Facts(WorkerRole role, uint32_t index) const;
  // One line for people: who is loading what.
  std::string LoadingText() const;

  std::shared_ptr<const GpuLink> gpu() const override;
  bool cpu_lane_up() const override { return lane_up_.load(std::memory_order_seq_cst); }
  Status failure() const override;
  std::string last_gpu_end() const override;
  void NoteWindow(uint64_t window) override { window_.store(window, std::memory_order_seq_cst); }
  void RestartGpu(const std::string& why) override;
  void RestartCpu(uint32_t index, const std::string& why) override;
  std::vector<EngineSnapshot::WorkerInfo> Workers() const override;
  double load_progress() const override;
  uint64_t last_progress_ns() const override {
    return progress_ns_.load(std::memory_order_relaxed);
  }
  void SetOnChange(std::function<void()> on_change) override;

 private:
  enum class State { kDown, kStarting, kLoading, kReady };
  struct Worker {
    WorkerRole role;
    uint32_t index;
    std::string name;  // "cpu0", "gpu0"
    const LoadPlan* plan;
    // Supervisor thread only.
    uint32_t generation = 0;
    ChildProcess process;
    Fd channel;
    std::unique_ptr<Segment> window;  // GPU worker: this generation's
    RestartPolicy policy;
    uint64_t start_at_ns = 0;  // kDown: when to start
    uint64_t progress_ns = 0, ready_ns = 0, closed_ns = 0;
    std::string end_reason;              // what the worker or we said before its end
    uint64_t ready_bell = 0;             // the newest job when it became ready: not its business
    std::optional<Suspicion> suspicion;  // CPU worker that owes an answer
    bool stuck = false;                  // and was killed for it
    uint32_t pulse = 0;                  // GPU worker: as last seen,
    uint64_t pulse_ns = 0;               // and since when
    uint64_t ask_ns = 0;                 // when to ask for statistics again
    bool asked = false;      // and no answer has come: a stopped worker is not asked for ever
    bool permanent = false;  // and that it will be the same next time
    // Written by the supervisor thread under mutex_, read by others.
    State state = State::kDown;
    std::string phase;
    double fraction = 0;
    int pid = 0;
    uint32_t restarts = 0;
    std::map<std::string, std::string> facts;
    std::map<std::string, double> statistics;  // of this generation, as last reported
    WorkerKey key() const { return {role, index, generation}; }
  };
  struct Order {  // from other threads to the supervisor thread: kill this generation
    WorkerRole role;
    uint32_t index;
    std::string why;
  };

  explicit Supervisor(SupervisorConfig config) : config_(std::move(config)) {}
  Status MakeSegments();
  StatusOr<std::unique_ptr<Segment>> MakeArena(uint32_t node, std::map<std::string, Fd>* stored);
  std::string ArenaName(uint32_t node) const;
  void Post(ControlEvent event);
  void Wake();
  // -- supervisor thread --
  void Run();
  void WaitForSomething();
  void StartWorker(Worker* worker);
  Status SpawnWorker(Worker* worker);
  void StartFailed(Worker* worker, const Status& status);
  void Handle(const ControlEvent& event);
  Status SendSegments(Worker* worker);
  void HandleReady(Worker* worker, const ControlEvent& event);
  void HandleOrder(const Order& order);
  void HandleEnd(Worker* worker, const std::string& how);
  void FenceCpu(Worker* worker);
  void FenceGpu(Worker* worker);
  void CheckDeadlines(uint64_t now_ns);
  void Suspect(const std::string& why);
  void CheckSuspects(uint64_t now_ns);
  void VoidWindowsUpTo(uint64_t window);
  void CheckPulse(Worker* worker, uint64_t now_ns);
  void AskStatistics(uint64_t now_ns);
  void StopWorkers();
  void UpdateLane();
  void SetState(Worker* worker, State state, std::string phase);
  void Changed();
  Worker* Find(WorkerRole role, uint32_t index);

  // Const after Create.
  const SupervisorConfig config_;
  std::unique_ptr<Segment> exchange_;
  std::vector<std::unique_ptr<Segment>> arenas_;
  Fd event_;  // eventfd: something was posted
  std::function<void()> on_change_;
  std::unique_ptr<ControlServer> control_;

  uint64_t last_look_ns_ = 0;  // supervisor thread: when it last judged pulses
  // Supervisor thread; fields marked in Worker are also guarded by mutex_.
  std::vector<std::unique_ptr<Worker>>
      workers_;  // CPU workers, then the GPU worker; the list is const after Create

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<ControlEvent> events_;      // guarded by mutex_
  std::deque<Order> orders_;             // guarded by mutex_
  std::shared_ptr<const GpuLink> link_;  // guarded by mutex_
  Status failure_;                       // guarded by mutex_
  std::string last_gpu_end_;             // guarded by mutex_

  std::atomic<bool> lane_up_{false};
  std::atomic<uint64_t> window_{0};
  std::atomic<uint64_t> progress_ns_{0};
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace lode
