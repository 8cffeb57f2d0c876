// lode-cpu-worker: one per NUMA node, started by loded. Holds the node's share of every expert in
// memory and answers the jobs that the GPU worker rings for. The process's life is common to all
// workers (shared/control/worker_main.h); this file says what is the CPU worker's own.
#include "cpu_worker/cpu_worker.h"
#include "shared/base/fault.h"
#include "shared/base/process_limits.h"
#include "shared/control/worker_main.h"

namespace {

class CpuBody : public lode::WorkerBody {
 public:
  explicit CpuBody(const lode::WorkerIdentity& identity)
      : worker_(identity.index, identity.generation) {}

  std::vector<lode::SegmentWant> Wants(const lode::LoadPlan&) const override {
    return {{"exchange", 1}, {"arena", 1}};
  }
  // Fills the arena, or adopts what a predecessor left in it; starts the threads.
  lode::StatusOr<lode::ReadyReport> Load(const lode::LoadPlan& plan,
                                         std::vector<lode::ReceivedSegment> segments,
                                         const ProgressFn& progress,
                                         const std::atomic<bool>& stop) override {
    LODE_ASSIGN_OR_RETURN(
        lode::ReadyReport report,
        worker_.Load(plan, std::move(segments[0].fd), std::move(segments[1].fd), progress, stop));
    LODE_FAULT("cpu_worker.before_ready");
    return report;
  }
  // The arena does not change any more: answers jobs until drained.
  void Run() override { worker_.Run(); }
  std::map<std::string, double> Statistics() const override { return worker_.Statistics(); }

 private:
  lode::CpuWorker worker_;
};

}  // namespace

int main(int argc, char** argv) {
  lode::InstallLastWords("lode-cpu-worker");
  return lode::RunWorker(argc, argv,
                         {"lode-cpu-worker", lode::WorkerRole::kCpu, [](const auto& identity) {
                            return std::make_unique<CpuBody>(identity);
                          }});
}
