// The worker's end of the control plane: one gRPC stream to the daemon's unix socket, from the
// start of the process to its end. Register goes first, the daemon answers with a LoadPlan; then
// both sides talk when they have something to say. A broken stream means that the daemon died. Both
// kinds of worker use it, through shared/control/worker_main.h.
//
// Threads: Connect starts one reader thread, which calls the events; every Send function may be
// called from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "shared/base/status.h"
#include "shared/control/load_plan.h"

namespace lode {

struct WorkerIdentity {
  WorkerRole role = WorkerRole::kCpu;
  uint32_t index = 0;       // NUMA node or device
  uint32_t generation = 0;  // given at spawn
};

// Called on the reader thread; must return soon and must not destroy the client. Empty functions
// are skipped.
struct WorkerEvents {
  std::function<void()> drain;                                        // finish and end
  std::function<std::map<std::string, double>()> collect_statistics;  // the answer is sent back
  std::function<void(uint32_t index, uint32_t generation)> cpu_worker_replaced;
  std::function<void(const Status& why)> broken;  // once; nothing can be sent any more
};

class WorkerClient {
 public:
  // Connects to unix:socket_path and registers. Fails when the daemon does not take the stream
  // before the deadline (NowNs()).
  static StatusOr<std::unique_ptr<WorkerClient>> Connect(const std::string& socket_path,
                                                         const WorkerIdentity& identity,
                                                         WorkerEvents events, uint64_t deadline_ns);
  // Ends the stream and joins the reader thread.
  ~WorkerClient();

  // Waits for the daemon's LoadPlan. DeadlineExceeded, or Unavailable when the stream broke.
  StatusOr<LoadPlan> WaitLoadPlan(uint64_t deadline_ns);

  // False when the stream is broken; `broken` has been or will be called.
  bool SendProgress(const std::string& phase, uint64_t done_bytes, uint64_t total_bytes);
  bool SendReady(const ReadyReport& report);
  bool SendFailed(const Status& status);
  bool SendStatistics(const std::map<std::string, double>& values);
  bool SendDrained();

 private:
  WorkerClient();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lode
