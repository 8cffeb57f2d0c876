// lode-cpu-worker: one per NUMA node, started by loded. Holds the node's share of every expert in
// memory and answers the jobs that the GPU worker rings for. This file is the table of contents of
// the process.
#include <cstdio>

#include "cpu_worker/cpu_worker.h"
#include "shared/base/fault.h"
#include "shared/control/worker_main.h"

namespace {

lode::Status Live(lode::WorkerProcess& process, lode::CpuWorker& worker) {
  // What to serve, and the memory that is shared with the others.
  LODE_ASSIGN_OR_RETURN(const lode::LoadPlan plan, process.WaitLoadPlan());
  LODE_ASSIGN_OR_RETURN(auto segments, process.ReceiveSegments({{"exchange", 1}, {"arena", 1}}));

  // Fill the arena, or adopt what a predecessor left in it; start the threads.
  const auto progress = [&](const std::string& phase, uint64_t done, uint64_t total) {
    process.Progress(phase, done, total);
  };
  LODE_ASSIGN_OR_RETURN(const lode::ReadyReport report,
                        worker.Load(plan, std::move(segments[0].fd), std::move(segments[1].fd),
                                    progress, process.stop()));
  LODE_FAULT("cpu_worker.before_ready");
  process.Ready(report);

  // From here on nothing is allocated and the arena does not change: answer jobs until drained.
  worker.Run();
  return lode::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  const lode::StatusOr<lode::WorkerFlags> flags =
      lode::ParseWorkerFlags(argc, argv, lode::WorkerRole::kCpu);
  if (!flags.ok()) {
    std::fprintf(stderr, "lode-cpu-worker: %s\n", lode::Message(flags.status()).c_str());
    return lode::kExitUsage;
  }
  lode::CpuWorker worker(flags->identity.index, flags->identity.generation);

  // End with the daemon, report to the daemon.
  lode::WorkerEvents events;
  events.collect_statistics = [&worker] { return worker.Statistics(); };
  auto process = lode::WorkerProcess::Start(*flags, "lode-cpu-worker", std::move(events));
  if (!process.ok()) {
    std::fprintf(stderr, "lode-cpu-worker: %s\n", lode::Message(process.status()).c_str());
    return lode::kExitFailed;
  }
  return (*process)->Finish(Live(**process, worker));
}
