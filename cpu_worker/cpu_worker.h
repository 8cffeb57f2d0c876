// A CPU expert worker as one object: load plan and segments in, a loop that answers jobs out.
// main.cc runs it as a process; tests run several in one process. Lifecycle: Load once, then Run;
// Statistics at any time from any thread.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "shared/pool/node_pool.h"
#include "cpu_worker/weight_store.h"
#include "cpu_worker/worker_loop.h"
#include "shared/base/fd.h"
#include "shared/base/status.h"
#include "shared/control/load_plan.h"
#include "shared/model/model_source.h"
#include "shared/shm/segment.h"

namespace lode {

class CpuWorker {
 public:
  CpuWorker(uint32_t index, uint32_t generation) : index_(index), generation_(generation) {}

  // Opens the model, checks the exchange, fills or adopts the arena, starts the threads, takes over
  // its line of the exchange. When it returns ok, jobs are answered as soon as Run is called.
  StatusOr<ReadyReport> Load(const LoadPlan& plan, Fd exchange, Fd arena,
                             const WeightStore::ProgressFn& progress,
                             const std::atomic<bool>& stop);
  // Until `stop` (the one given to Load) is true.
  void Run();
  std::map<std::string, double> Statistics() const;

 private:
  // Const after the constructor.
  const uint32_t index_, generation_;
  // Loading thread; const after Load.
  std::unique_ptr<ModelSource> source_;
  std::unique_ptr<Segment> exchange_;
  std::unique_ptr<WeightStore> store_;
  std::unique_ptr<NodePool> pool_;
  mutable std::mutex mutex_;  // guards the pointer: statistics may be asked for while loading
  std::unique_ptr<WorkerLoop> loop_;
};

}  // namespace lode
