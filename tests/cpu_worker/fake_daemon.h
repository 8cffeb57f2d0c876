// The daemon's side of the control plane for tests: a gRPC server on a unix socket in a temporary
// folder, worker processes as children, segments over socketpairs, a record of what workers said.
// Test-only.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "shared/base/fd.h"
#include "shared/control/load_plan.h"

namespace lode::test {

// What one worker process (index, generation) has said so far.
struct WorkerRecord {
  bool registered = false, ready = false, drained = false, ended = false;
  int pid = 0;
  std::string failure;
  std::vector<std::string> phases;
  std::map<std::string, std::string> facts;
  std::map<std::string, double> statistics;
};

class FakeDaemon {
 public:
  FakeDaemon();
  ~FakeDaemon();

  struct Child {
    pid_t pid = -1;
    Fd socket;  // our end of the fd socket
    uint32_t index = 0, generation = 0;
  };
  // Starts lode-cpu-worker with LODE_FAULT=fault; it will get `plan` when it registers.
  Child Spawn(uint32_t index, uint32_t generation, const LoadPlan& plan,
              const std::string& fault = "");
  void SendSegments(const Child& child, int exchange_fd, uint64_t exchange_bytes, int arena_fd,
                    uint64_t arena_bytes);

  // Waits until `done` holds for the worker's record; false after timeout_ms.
  template <class F>
  bool WaitFor(const Child& child, F done, uint32_t timeout_ms = 30000) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                             [&] { return done(records_[Key(child)]); });
  }
  bool WaitReady(const Child& child) {
    return WaitFor(child, [](const WorkerRecord& r) { return r.ready; });
  }
  WorkerRecord Record(const Child& child);
  // Exit status (waitpid) within timeout_ms, after which `pid` is -1; -1 when it still runs.
  static int WaitExit(Child& child, uint32_t timeout_ms);
  // The plan for a worker that another process will spawn.
  void SetPlan(uint32_t index, uint32_t generation, const LoadPlan& plan);

  void Drain(const Child& child);
  void CollectStatistics(const Child& child);
  // The daemon's end of every stream breaks, as if it had died.
  void Die();

  std::string socket_path() const;
  std::vector<std::string> Arguments(const Child& child, int worker_fd) const;

 private:
  struct Service;
  using WorkerKey = std::pair<uint32_t, uint32_t>;
  static WorkerKey Key(const Child& child) { return {child.index, child.generation}; }

  std::string folder_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<WorkerKey, WorkerRecord> records_;
  std::map<WorkerKey, LoadPlan> plans_;
  std::unique_ptr<Service> service_;
};

}  // namespace lode::test
