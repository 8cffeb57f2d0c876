// The life of a worker process, common to lode-cpu-worker and lode-gpu-worker: flags, log, death
// with the parent, control stream, load plan, segments; then the worker's own part; then the end. A
// worker's main.cc calls these in order.
//
//   int main(int argc, char** argv) {
//     StatusOr<WorkerFlags> flags = ParseWorkerFlags(argc, argv, WorkerRole::kGpu);
//     ...
//     auto process = WorkerProcess::Start(*flags, "lode-gpu-worker", std::move(events));
//     plan = (*process)->WaitLoadPlan();  segments = (*process)->ReceiveSegments({{"window", 1},
//     ...}); load, (*process)->Ready(report), loop until (*process)->stop(), return
//     (*process)->Finish(status);
//   }
//
// A worker ends within kOrphanExitMs when the daemon is gone (the stream breaks, or the parent
// dies): `stop` is set at once, and a process that has not ended by itself by then is ended by a
// timer. A drain or SIGTERM only sets `stop`.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "shared/base/status.h"
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
