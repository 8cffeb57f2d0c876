// A worker that only plays its part in the control protocol. LODE_FAKE_CPU or LODE_FAKE_GPU says how:
//
//   ok          ready, then waits for its end
//   fail        reports a load failure that stays
//   fail_io     reports one that may pass
//   abort       dies before it registers
//   silent      registers and says nothing more
//   stubborn    ready, ignores every request to end
//   abort_once  generation 1 dies after Ready, later ones are ok
//   stop_once   generation 1 stops itself (SIGSTOP) after Ready, later ones are ok
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <thread>

#include "gpu_worker/pulse.h"
#include "shared/control/worker_main.h"

namespace {

lode::Status Live(lode::WorkerProcess& process, const std::string& how, bool cpu) {
  LODE_ASSIGN_OR_RETURN(const lode::LoadPlan plan, process.WaitLoadPlan());
  const std::vector<lode::SegmentWant> cpu_wants = {{"exchange", 1}, {"arena", 1}};
  const std::vector<lode::SegmentWant> gpu_wants = {
      {"window", 1}, {"exchange", 1}, {"arena", plan.n_nodes}};
  LODE_ASSIGN_OR_RETURN(auto segments, process.ReceiveSegments(cpu ? cpu_wants : gpu_wants));
  std::unique_ptr<lode::Segment> window;
  std::unique_ptr<lode::Pulse> pulse;
  if (!cpu) {
    LODE_ASSIGN_OR_RETURN(window, lode::Segment::Attach(std::move(segments[0].fd), "window",
                                                        sizeof(lode::WindowSegment),
                                                        lode::Segment::Access::kReadWrite));
    pulse = std::make_unique<lode::Pulse>(&window->As<lode::WindowSegment>()->pulse);
  }
  if (how == "fail") return lode::ResourceExhausted("not enough locked memory; raise memlock");
  if (how == "fail_io") return lode::Unavailable("the disk did not answer");
  while (how == "silent" && !process.stop())
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  process.Progress("read", 5, 10);
  lode::ReadyReport report;
  report.summary = "fake";
  report.facts["isa"] = "scalar";
  process.Ready(report);
  if ((how == "abort_once" || how == "stop_once") && process.flags().identity.generation == 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    raise(how == "abort_once" ? SIGKILL : SIGSTOP);
  }
  while (how == "stubborn" || !process.stop())
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  return lode::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  bool cpu = false;
  for (int i = 1; i < argc; ++i) cpu |= std::string(argv[i]) == "--role=cpu";
  const char* how = std::getenv(cpu ? "LODE_FAKE_CPU" : "LODE_FAKE_GPU");
  if (how && std::string(how) == "abort") raise(SIGKILL);
  const auto flags =
      lode::ParseWorkerFlags(argc, argv, cpu ? lode::WorkerRole::kCpu : lode::WorkerRole::kGpu);
  if (!flags.ok()) return lode::kExitUsage;
  auto process = lode::WorkerProcess::Start(*flags, "fake-worker", {});
  if (!process.ok()) return lode::kExitFailed;
  return (*process)->Finish(Live(**process, how ? how : "ok", cpu));
}
