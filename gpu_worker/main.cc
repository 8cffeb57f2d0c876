// lode-gpu-worker: one per GPU (or one cpu device), started by loded. Holds dense weights, expert
// slots and sequence state, and runs the windows that the daemon plans. This file is the table of
// contents of the process.
#include <cstdio>

#include "gpu_worker/gpu_worker.h"
#include "shared/base/fault.h"
#include "shared/control/worker_main.h"

namespace {

lode::Status Live(lode::WorkerProcess& process, lode::GpuWorker& worker) {
  // What to serve, and the memory that is shared with the others.
  LODE_ASSIGN_OR_RETURN(const lode::LoadPlan plan, process.WaitLoadPlan());
  LODE_ASSIGN_OR_RETURN(
      auto received,
      process.ReceiveSegments({{"window", 1}, {"exchange", 1}, {"arena", plan.n_nodes}}));
  lode::GpuSegments segments = {std::move(received[0].fd), std::move(received[1].fd), {}};
  for (uint32_t n = 0; n < plan.n_nodes; ++n)
    segments.arenas.push_back(std::move(received[2 + n].fd));

  // Dense weights, state, the wait for the experts, expert slots.
  const auto progress = [&](const std::string& phase, uint64_t done, uint64_t total) {
    process.Progress(phase, done, total);
  };
  LODE_ASSIGN_OR_RETURN(const lode::ReadyReport report,
                        worker.Load(plan, std::move(segments), progress, process.stop()));
  LODE_FAULT("gpu_worker.before_ready");
  process.Ready(report);

  // From here on: plans in, results out, until drained.
  worker.Run();
  return lode::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  const lode::StatusOr<lode::WorkerFlags> flags =
      lode::ParseWorkerFlags(argc, argv, lode::WorkerRole::kGpu);
  if (!flags.ok()) {
    std::fprintf(stderr, "lode-gpu-worker: %s\n", lode::Message(flags.status()).c_str());
    return lode::kExitUsage;
  }
  lode::GpuWorker worker(flags->identity.index, flags->identity.generation);

  // End with the daemon, report to the daemon.
  lode::WorkerEvents events;
  events.collect_statistics = [&worker] { return worker.Statistics(); };
  events.cpu_worker_replaced = [&worker](uint32_t index, uint32_t) {
    worker.CpuWorkerReplaced(index);
  };
  auto process = lode::WorkerProcess::Start(*flags, "lode-gpu-worker", std::move(events));
  if (!process.ok()) {
    std::fprintf(stderr, "lode-gpu-worker: %s\n", lode::Message(process.status()).c_str());
    return lode::kExitFailed;
  }
  return (*process)->Finish(Live(**process, worker));
}
