// lode-gpu-worker: one per GPU (or one cpu device), started by loded. Holds dense weights, expert
// slots and sequence state, and runs the windows that the daemon plans. The process's life is
// common to all workers (shared/control/worker_main.h); this file says what is the GPU worker's
// own.
#include "gpu_worker/gpu_worker.h"
#include "shared/base/fault.h"
#include "shared/base/process_limits.h"
#include "shared/control/worker_main.h"

namespace {

class GpuBody : public lode::WorkerBody {
 public:
  explicit GpuBody(const lode::WorkerIdentity& identity)
      : worker_(identity.index, identity.generation) {}

  std::vector<lode::SegmentWant> Wants(const lode::LoadPlan& plan) const override {
    return {{"window", 1}, {"exchange", 1}, {"arena", plan.n_nodes}};
  }
  // Dense weights, state, the wait for the experts, expert slots.
  lode::StatusOr<lode::ReadyReport> Load(const lode::LoadPlan& plan,
                                         std::vector<lode::ReceivedSegment> received,
                                         const ProgressFn& progress,
                                         const std::atomic<bool>& stop) override {
    lode::GpuSegments segments = {std::move(received[0].fd), std::move(received[1].fd), {}};
    for (uint32_t n = 0; n < plan.n_nodes; ++n)
      segments.arenas.push_back(std::move(received[2 + n].fd));
    LODE_ASSIGN_OR_RETURN(lode::ReadyReport report,
                          worker_.Load(plan, std::move(segments), progress, stop));
    LODE_FAULT("gpu_worker.before_ready");
    return report;
  }
  // Plans in, results out, until drained.
  void Run() override { worker_.Run(); }
  std::map<std::string, double> Statistics() const override { return worker_.Statistics(); }
  void CpuWorkerReplaced(uint32_t index) override { worker_.CpuWorkerReplaced(index); }

 private:
  lode::GpuWorker worker_;
};

}  // namespace

int main(int argc, char** argv) {
  lode::InstallLastWords("lode-gpu-worker");
  return lode::RunWorker(argc, argv,
                         {"lode-gpu-worker", lode::WorkerRole::kGpu, [](const auto& identity) {
                            return std::make_unique<GpuBody>(identity);
                          }});
}
