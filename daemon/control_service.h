// The daemon's end of the control plane: a gRPC server on a unix socket inside the 0700 runtime
// folder, one stream per worker process. It translates messages into events and plain structs into
// messages; every decision is the supervisor's. The only file of the engine that knows gRPC is
// control_service.cc.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "shared/base/status.h"
#include "shared/control/load_plan.h"

namespace lode {

// Which process life a message belongs to.
struct WorkerKey {
  WorkerRole role = WorkerRole::kCpu;
  uint32_t index = 0, generation = 0;
  auto operator<=>(const WorkerKey&) const = default;
};

struct ControlEvent {
  enum class Kind { kRegistered, kProgress, kReady, kFailed, kStatistics, kDrained, kClosed };
  Kind kind = Kind::kClosed;
  WorkerKey key;
  int pid = 0;                               // kRegistered, as the worker says
  std::string text;                          // kProgress: phase; kReady: summary
  uint64_t done = 0, total = 0;              // kProgress, bytes
  Status status;                             // kFailed
  std::map<std::string, std::string> facts;  // kReady
  std::map<std::string, double> values;      // kStatistics
};

class ControlServer {
 public:
  // Called on gRPC threads, must not block. Register is checked for version and arithmetic before
  // it becomes an event; a worker of another build gives kFailed.
  using Sink = std::function<void(ControlEvent)>;
  // Fails when the socket cannot be bound: path too long, folder missing.
  static StatusOr<std::unique_ptr<ControlServer>> Start(const std::string& socket_path, Sink sink);
  virtual ~ControlServer() = default;  // ends every stream

  // False when the worker's stream is not there (any more). Any thread.
  virtual bool SendLoadPlan(const WorkerKey& to, const LoadPlan& plan) = 0;
  virtual bool SendDrain(const WorkerKey& to) = 0;
  virtual bool SendCpuWorkerReplaced(const WorkerKey& to, uint32_t index, uint32_t generation) = 0;
  virtual bool SendCollectStatistics(const WorkerKey& to) = 0;
};

}  // namespace lode
