// What the scheduler sees of the worker processes: the GPU worker's shared memory while it is
// ready, whether every CPU worker answers, and a way to say that one is stuck. The supervisor
// implements it; tests put a thread behind it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "daemon/request.h"
#include "shared/base/status.h"
#include "shared/wire/exchange_layout.h"
#include "shared/wire/window_segment.h"

namespace lode {

// One life of the GPU worker. The memory stays mapped as long as somebody holds the link.
struct GpuLink {
  WindowSegment* window = nullptr;
  ExchangeHeader* exchange = nullptr;
  uint32_t generation = 0;
  uint32_t n_cpu_workers = 0;
  std::shared_ptr<void> keep_alive;
};

class Fleet {
 public:
  virtual ~Fleet() = default;

  // The ready GPU worker; null while there is none. A different pointer means another process: its
  // device state is empty. After a process's end has been seen it is never returned again. Any
  // thread.
  virtual std::shared_ptr<const GpuLink> gpu() const = 0;
  // Every CPU worker is ready. While false, windows are planned with kCpuLaneDown. Any thread.
  virtual bool cpu_lane_up() const = 0;
  // Not OK: workers cannot be brought up, the engine is over. Any thread.
  virtual Status failure() const = 0;
  // Why the last GPU worker ended, for messages.
  virtual std::string last_gpu_end() const = 0;

  // The window that is about to be published, or runs. When a CPU worker ends, the fleet voids
  // windows up to this one; the caller publishes first and looks at cpu_lane_up() after, so that
  // one of the two sees the other.
  virtual void NoteWindow(uint64_t window) = 0;
  // Kills the worker; it is restarted as after any other end. From this call on gpu() is null until
  // a new process is ready.
  virtual void RestartGpu(const std::string& why) = 0;
  // The worker (or a peer that it waits for) let windows time out. Windows up to now are void and
  // cpu_lane_up() is false until every CPU worker has answered or was restarted. A worker that is
  // merely slow is left alone, one that is stuck is killed (daemon/worker_watch.h).
  virtual void RestartCpu(uint32_t index, const std::string& why) = 0;

  virtual std::vector<EngineSnapshot::WorkerInfo> Workers() const = 0;
  virtual double load_progress() const = 0;       // 0..1
  virtual uint64_t last_progress_ns() const = 0;  // of loading
  // Called after any change, from the fleet's own thread. Set once, before anything starts.
  virtual void SetOnChange(std::function<void()> on_change) = 0;
};

}  // namespace lode
