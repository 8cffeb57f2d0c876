// Worker processes come, fail, die and are killed; the supervisor starts, fences, replaces and
// finally stops them.
#include "daemon/supervisor.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <set>

#include "shared/shm/wait_word.h"
#include "tests/daemon/supervisor_fixture.h"

namespace lode {
namespace {

class SupervisorTest : public testing::Test {
 protected:
  void SetUp() override {
    socket_ = testing::TempDir() + "/lode-sup-" + std::to_string(getpid());
    setenv("LODE_FAKE_CPU", "ok", 1);
    setenv("LODE_FAKE_GPU", "ok", 1);
  }
  void Make(double load_seconds = 60, double pulse_seconds = 60) {
    SupervisorConfig config = FakeSupervisorConfig(LODE_BINARY_DIR, socket_);
    config.load_seconds = load_seconds;
    config.pulse_seconds = pulse_seconds;
    auto made = Supervisor::Create(config);
    ASSERT_TRUE(made.ok()) << made.status();
    supervisor_ = std::move(*made);
    supervisor_->Start();
  }
  Status WaitReady(double seconds = 60) {
    const uint64_t deadline = NowNs() + static_cast<uint64_t>(seconds * 1e9);
    return supervisor_->WaitReady([&] { return NowNs() < deadline; });
  }
  template <class Condition>
  bool Eventually(Condition condition, double seconds = 30) {
    const uint64_t deadline = NowNs() + static_cast<uint64_t>(seconds * 1e9);
    while (!condition()) {
      if (NowNs() > deadline) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return true;
  }
  EngineSnapshot::WorkerInfo Info(const std::string& name) {
    for (auto& worker : supervisor_->Workers()) {
      if (worker.name == name) return worker;
    }
    return {};
  }

  std::string socket_;
  std::unique_ptr<Supervisor> supervisor_;
};

bool Alive(int pid) { return kill(pid, 0) == 0; }

TEST_F(SupervisorTest, StartsAndStopsEverything) {
  Make();
  ASSERT_TRUE(WaitReady().ok()) << supervisor_->failure();
  const auto link = supervisor_->gpu();
  ASSERT_TRUE(link);
  EXPECT_EQ(link->n_cpu_workers, 2u);
  EXPECT_EQ(link->window->generation, 1u);
  EXPECT_EQ(supervisor_->Facts(WorkerRole::kGpu, 0).at("isa"), "scalar");
  EXPECT_EQ(supervisor_->load_progress(), 1.0);
  std::vector<int> pids;
  for (const auto& worker : supervisor_->Workers()) pids.push_back(worker.pid);
  ASSERT_EQ(pids.size(), 3u);
  supervisor_->Stop();
  for (const int pid : pids) EXPECT_FALSE(Alive(pid));
  EXPECT_FALSE(supervisor_->gpu());
}

TEST_F(SupervisorTest, PermanentLoadFailureIsFinalAtOnce) {
  setenv("LODE_FAKE_CPU", "fail", 1);
  Make();
  const Status status = WaitReady();
  EXPECT_NE(Message(status).find("cannot be brought up: not enough locked memory; raise memlock"),
            std::string::npos)
      << status;
  EXPECT_EQ(std::max(Info("cpu0").restarts, Info("cpu1").restarts), 1u);
}

TEST_F(SupervisorTest, SameLoadFailureThreeTimesIsFinalAndKeepsItsText) {
  setenv("LODE_FAKE_CPU", "fail_io", 1);
  Make();
  const Status status = WaitReady();
  EXPECT_NE(Message(status).find("cannot be brought up: the disk did not answer"),
            std::string::npos)
      << status;
  EXPECT_EQ(supervisor_->failure(), status);
  EXPECT_EQ(std::max(Info("cpu0").restarts, Info("cpu1").restarts), 3u);
}

TEST_F(SupervisorTest, CrashLoopBeforeRegisterIsFinal) {
  setenv("LODE_FAKE_GPU", "abort", 1);
  Make();
  const Status status = WaitReady();
  EXPECT_NE(Message(status).find("gpu0 cannot be brought up: was killed by signal 9"),
            std::string::npos)
      << status;
}

TEST_F(SupervisorTest, MissingBinaryIsNamed) {
  SupervisorConfig config = FakeSupervisorConfig(LODE_BINARY_DIR, socket_);
  config.gpu_binary = "/does/not/exist";
  supervisor_ = std::move(Supervisor::Create(config).value());
  supervisor_->Start();
  EXPECT_NE(Message(WaitReady()).find("/does/not/exist"), std::string::npos);
}

TEST_F(SupervisorTest, SilentLoaderIsKilled) {
  setenv("LODE_FAKE_CPU", "silent", 1);
  Make(1.0);
  EXPECT_NE(Message(WaitReady()).find("no progress for 1 s"), std::string::npos)
      << supervisor_->failure();
}

TEST_F(SupervisorTest, DeadCpuWorkerVoidsTheWindowAndIsReplaced) {
  Make();
  ASSERT_TRUE(WaitReady().ok());
  const auto link = supervisor_->gpu();
  link->exchange->workers[1].ready.store(1);
  supervisor_->NoteWindow(77);
  const int pid = Info("cpu1").pid;
  kill(pid, SIGKILL);
  ASSERT_TRUE(Eventually([&] { return link->exchange->abort_window.load() == 77; }));
  ASSERT_TRUE(Eventually([&] { return supervisor_->cpu_lane_up(); }));
  EXPECT_EQ(supervisor_->gpu(), link);  // the GPU worker goes on
  EXPECT_NE(Info("cpu1").pid, pid);
  EXPECT_EQ(Info("cpu1").restarts, 1u);
  EXPECT_EQ(link->exchange->workers[1].ready.load(),
            0u);  // the fake worker never sets it: the fence cleared it
}

TEST_F(SupervisorTest, DeadGpuWorkerIsReplacedWithAFreshWindowSegment) {
  Make();
  ASSERT_TRUE(WaitReady().ok());
  const auto link = supervisor_->gpu();
  Publish(link->exchange->window_epoch, 5);  // it dies inside a window
  link->window->sequences[0].heap[0] = 9;
  kill(Info("gpu0").pid, SIGKILL);
  ASSERT_TRUE(Eventually([&] { return supervisor_->gpu() && supervisor_->gpu() != link; }));
  const auto next = supervisor_->gpu();
  EXPECT_EQ(next->generation, 2u);
  EXPECT_EQ(next->window->generation, 2u);
  EXPECT_EQ(next->window->sequences[0].heap[0], 0);
  EXPECT_EQ(link->window->sequences[0].heap[0], 9);  // whoever still holds the old link may read it
  EXPECT_EQ(next->exchange->window_epoch.value.load(), 6u);
  EXPECT_NE(supervisor_->last_gpu_end().find("killed by signal 9"), std::string::npos);
}

TEST_F(SupervisorTest, WorkerThatDiesWhileServingComesBackAtOnce) {
  setenv("LODE_FAKE_GPU", "abort_once", 1);
  Make();
  ASSERT_TRUE(
      Eventually([&] { return supervisor_->gpu() && supervisor_->gpu()->generation == 2; }));
  EXPECT_TRUE(supervisor_->failure().ok());
}

// A stopped process keeps its pidfd, its stream and its memory; only its pulse is gone.
TEST_F(SupervisorTest, StoppedGpuWorkerIsReportedAndReplaced) {
  setenv("LODE_FAKE_GPU", "stop_once", 1);
  Make(60, 2);
  ASSERT_TRUE(
      Eventually([&] { return supervisor_->gpu() && supervisor_->gpu()->generation == 2; }));
  EXPECT_NE(supervisor_->last_gpu_end().find("has not run for"), std::string::npos)
      << supervisor_->last_gpu_end();
  EXPECT_NE(supervisor_->last_gpu_end().find("no window is under way"), std::string::npos)
      << supervisor_->last_gpu_end();
  // One that runs is left alone, for twice the time that the other was given.
  std::this_thread::sleep_for(std::chrono::seconds(4));
  EXPECT_EQ(Info("gpu0").restarts, 1u);
  EXPECT_EQ(Info("gpu0").state, "ready");
}

TEST_F(SupervisorTest, RestartOnOrder) {
  Make();
  ASSERT_TRUE(WaitReady().ok());
  supervisor_->RestartGpu("stuck at layer 3");
  EXPECT_FALSE(supervisor_->gpu());  // at once
  EXPECT_EQ(supervisor_->last_gpu_end(), "stuck at layer 3");
  ASSERT_TRUE(Eventually([&] { return supervisor_->gpu() != nullptr; }));
  // Nobody owes an answer: nothing is wrong with the workers.
  supervisor_->RestartCpu(0, "slow");
  ASSERT_TRUE(Eventually([&] { return supervisor_->cpu_lane_up(); }));
  // cpu1 answers the newest job, cpu0 sleeps on it.
  ExchangeHeader* exchange = supervisor_->gpu()->exchange;
  exchange->workers[1].ack.value.store(7);
  exchange->bell.value.store(7);
  supervisor_->RestartCpu(1, "silent");  // whoever is named, the debtor is looked at
  EXPECT_FALSE(supervisor_->cpu_lane_up());
  ASSERT_TRUE(Eventually([&] { return supervisor_->cpu_lane_up() && Info("cpu0").restarts == 1; }));
  EXPECT_EQ(Info("cpu1").restarts, 0u);
  EXPECT_EQ(exchange->abort_window.load(), 0u) << "no window was noted";
}

TEST_F(SupervisorTest, StubbornWorkerIsKilledAtStop) {
  setenv("LODE_FAKE_CPU", "stubborn", 1);
  Make();
  ASSERT_TRUE(WaitReady().ok());
  const int pid = Info("cpu0").pid;
  const uint64_t begin = NowNs();
  supervisor_->Stop();
  EXPECT_FALSE(Alive(pid));
  EXPECT_GE(NowNs() - begin, 900'000'000u);
}

TEST_F(SupervisorTest, NothingSurvivesTheDaemonsDeath) {
  const std::string command = std::string("exec ") + LODE_BINARY_DIR + "/bin/fake_daemon " +
                              LODE_BINARY_DIR + " " + socket_;
  int out[2];
  ASSERT_EQ(pipe(out), 0);
  const pid_t daemon = fork();
  if (daemon == 0) {
    dup2(out[1], 1);
    close(out[0]);
    close(out[1]);
    execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
    _exit(127);
  }
  close(out[1]);
  FILE* lines = fdopen(out[0], "r");
  std::vector<int> pids;
  char line[64];
  while (std::fgets(line, sizeof(line), lines) && line[0] != 'e') pids.push_back(std::atoi(line));
  ASSERT_EQ(pids.size(), 3u);
  for (const int pid : pids) EXPECT_TRUE(Alive(pid));
  kill(daemon, SIGKILL);
  waitpid(daemon, nullptr, 0);
  // The workers' own promise is 0.8 s; a loaded test machine gets more.
  const bool gone = Eventually(
      [&] {
        for (const int pid : pids) {
          // Orphans are reaped by init; in a container without one they stay as zombies, which are
          // dead all the same.
          char state = 'X';
          if (FILE* stat = std::fopen(("/proc/" + std::to_string(pid) + "/stat").c_str(), "r")) {
            [[maybe_unused]] const int n = std::fscanf(stat, "%*d (%*[^)]) %c", &state);
            std::fclose(stat);
          }
          if (state != 'X' && state != 'Z') return false;
        }
        return true;
      },
      30);
  EXPECT_TRUE(gone);
  std::fclose(lines);
}

TEST(RestartPolicy, SameReasonThreeTimes) {
  RestartPolicy policy;
  EXPECT_FALSE(policy.Ended(0, "a").give_up);
  EXPECT_FALSE(policy.Ended(0, "b").give_up);
  EXPECT_FALSE(policy.Ended(0, "b").give_up);
  EXPECT_TRUE(policy.Ended(0, "b").give_up);
}

TEST(RestartPolicy, PermanentReasonsAreFinalUnlessItServedBefore) {
  RestartPolicy never;
  EXPECT_TRUE(never.Ended(0, "bad model", true).give_up);
  RestartPolicy served;
  EXPECT_FALSE(served.Ended(1'000'000, "killed").give_up);
  EXPECT_FALSE(served.Ended(0, "no memory", true).give_up);
  EXPECT_FALSE(served.Ended(0, "no memory", true).give_up);
  EXPECT_TRUE(served.Ended(0, "no memory", true).give_up);  // three times are enough all the same
  EXPECT_TRUE(IsPermanent(StatusCode::kInvalidArgument));
  EXPECT_FALSE(IsPermanent(StatusCode::kUnavailable));
  EXPECT_FALSE(IsPermanent(StatusCode::kInternal));
}

TEST(RestartPolicy, ServingWorkersComeBackAtOnceAndLoopsSlowDown) {
  RestartPolicy policy;
  EXPECT_EQ(policy.Ended(1'000'000, "x").delay_ns, 0u);
  uint64_t last = 0;
  for (uint32_t i = 2; i < RestartPolicy::kFailuresMax; ++i) {
    const auto decision = policy.Ended(1'000'000, "x");
    EXPECT_FALSE(decision.give_up) << i;
    EXPECT_GE(decision.delay_ns, last);
    EXPECT_LE(decision.delay_ns, RestartPolicy::kLongestDelayNs);
    last = decision.delay_ns;
  }
  EXPECT_TRUE(policy.Ended(1'000'000, "x").give_up);
  RestartPolicy stable;
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(stable.Ended(RestartPolicy::kStableNs, "x").give_up);
}

}  // namespace
}  // namespace lode
