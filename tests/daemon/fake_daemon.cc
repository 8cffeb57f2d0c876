// A daemon that only supervises: prints the workers' pids and waits to be killed. For the test that
// nothing survives it.
#include <cstdio>
#include <thread>

#include "shared/base/log.h"
#include "tests/daemon/supervisor_fixture.h"

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  lode::InitLog("fake-daemon", "error");
  auto supervisor = lode::Supervisor::Create(lode::FakeSupervisorConfig(argv[1], argv[2]));
  if (!supervisor.ok()) return 1;
  (*supervisor)->Start();
  if (!(*supervisor)->WaitReady([] { return true; }).ok()) return 1;
  for (const auto& worker : (*supervisor)->Workers()) std::printf("%d\n", worker.pid);
  std::printf("end\n");
  std::fflush(stdout);
  std::this_thread::sleep_for(std::chrono::hours(1));
}
