// The life of a worker process, common to lode-cpu-worker and lode-gpu-worker: flags, log, death
// with the parent, control stream, load plan, segments, loading, ready; then the worker's own part;
// then the end. A worker's main.cc gives its part as a WorkerBody and returns RunWorker.
//
// A worker ends within kOrphanExitMs when the daemon is gone (the stream breaks, or the parent
// dies): `stop` is set at once, and a process that has not ended by itself by then is ended by a
// timer. A drain or SIGTERM only sets `stop`.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "shared/base/status.h"
#include "shared/control/load_plan.h"
#include "shared/control/worker_client.h"
#include "shared/shm/segment.h"

namespace lode {

inline constexpr uint32_t kOrphanExitMs = 800;
// Exit codes that the supervisor tells apart.
inline constexpr int kExitOk = 0;
inline constexpr int kExitFailed = 1;  // Failed was sent (or could not be): see the log
inline constexpr int kExitUsage = 2;
inline constexpr int kExitOrphaned = 3;  // the daemon went away

struct WorkerFlags {
  std::string control;      // --control=PATH, the daemon's unix socket
  int fd = -1;              // --fd=N, inherited SOCK_SEQPACKET socket that segments arrive on
  WorkerIdentity identity;  // --role=cpu|gpu --index=N --generation=N
  std::string log_level = "info";  // --log-level=
};
// One sentence naming the flag that is missing, unknown or no number. A --role other than `role` is
// refused.
StatusOr<WorkerFlags> ParseWorkerFlags(int argc, char** argv, WorkerRole role);

struct SegmentWant {
  std::string label;   // "exchange", "arena", "window", "status"
  uint32_t count = 1;  // indexes 0..count-1, or any one index when count is 1
};
struct ReceivedSegment {
  FdMessage message;
  Fd fd;
};

// What is different about a worker. One object per process; lifecycle: Load once, then Run; both on
// the main thread. Statistics and CpuWorkerReplaced come from the control stream's thread, at any
// time.
class WorkerBody {
 public:
  using ProgressFn =
      std::function<void(const std::string& phase, uint64_t done_bytes, uint64_t total_bytes)>;

  virtual ~WorkerBody() = default;
  virtual std::vector<SegmentWant> Wants(const LoadPlan& plan) const = 0;
  // `segments`: what Wants said, in that order. Cancelled soon after `stop` becomes true.
  virtual StatusOr<ReadyReport> Load(const LoadPlan& plan, std::vector<ReceivedSegment> segments,
                                     const ProgressFn& progress, const std::atomic<bool>& stop) = 0;
  // Serves until the `stop` given to Load is true.
  virtual void Run() = 0;
  virtual std::map<std::string, double> Statistics() const = 0;
  virtual void CpuWorkerReplaced(uint32_t /*index*/) {}
};

struct WorkerProgram {
  const char* name;  // of the binary
  WorkerRole role;
  std::function<std::unique_ptr<WorkerBody>(const WorkerIdentity& identity)> make;
};
// main() of a worker: returns the exit code.
int RunWorker(int argc, char** argv, const WorkerProgram& program);

class WorkerProcess {
 public:
  // Death signal, signal handlers, log, control stream. `events` may leave everything empty; drain
  // and broken are also handled here (stop is set before the given functions are called).
  static StatusOr<std::unique_ptr<WorkerProcess>> Start(const WorkerFlags& flags,
                                                        const std::string& process_name,
                                                        WorkerEvents events);
  ~WorkerProcess();

  StatusOr<LoadPlan> WaitLoadPlan();
  // Receives until every wanted (label, index) is there; order of arrival does not matter. A label
  // nobody wants, a repeated index or a message generation other than this worker's own is an
  // error. Result: sorted by the order of `wants`, then by index.
  StatusOr<std::vector<ReceivedSegment>> ReceiveSegments(const std::vector<SegmentWant>& wants);
  void Progress(const std::string& phase, uint64_t done_bytes, uint64_t total_bytes);
  void Ready(const ReadyReport& report);
  // Reports `status` (Failed, or Drained when ok) and ends the stream; returns the exit code.
  int Finish(const Status& status);

  // True once this process should end. Every loop of a worker looks at it at least every 50 ms.
  const std::atomic<bool>& stop() const;
  const WorkerFlags& flags() const;

 private:
  WorkerProcess();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lode
