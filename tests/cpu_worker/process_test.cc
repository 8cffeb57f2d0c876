// CPU workers as real processes: the same bits, kill -9 at every step of the protocol, adoption of
// the arena by the next process, bounded waits of the survivors, the abort word, and the end of an
// orphan. Labels: kill.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "shared/control/worker_main.h"
#include "tests/cpu_worker/exchange_harness.h"
#include "tests/cpu_worker/fake_daemon.h"

namespace lode::test {
namespace {

constexpr uint32_t kWaitMs = 400;  // LoadPlan::wait_ms of these tests; the exchange waits 3/4 of it
constexpr uint64_t kNsPerMs = 1'000'000;

class ProcessTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kWorkers = 2;
  ProcessTest() : h_(kDemoModel, kWorkers) {}
  ~ProcessTest() override {
    for (auto& [key, child] : children_) {
      if (child.pid <= 0) continue;  // reaped
      kill(child.pid, SIGKILL);
      FakeDaemon::WaitExit(child, 5000);
    }
  }

  FakeDaemon::Child& Start(uint32_t index, uint32_t generation, const std::string& fault = "",
                           uint32_t wait_ms = kWaitMs) {
    LoadPlan plan = h_.Plan(2);
    plan.wait_ms = wait_ms;
    plan.wait_max_ms = 5 * wait_ms;
    plan.huge_pages = 1;
    FakeDaemon::Child child = daemon_.Spawn(index, generation, plan, fault);
    daemon_.SendSegments(child, h_.exchange().fd(), h_.exchange().size(), h_.arena(index).fd(),
                         h_.arena(index).size());
    return children_[{index, generation}] = std::move(child);
  }
  void Reap(uint32_t index, uint32_t generation) { children_.erase({index, generation}); }

  struct Sent {
    ExpertJob job;
    Routing routing;
    std::vector<std::vector<float>> x;
  };
  Sent RingLayer(uint32_t layer, uint32_t n_rows = 3) {
    Sent sent;
    sent.routing = h_.RandomRouting(layer, n_rows, static_cast<uint32_t>(h_.window()));
    sent.x = h_.RandomActivations(n_rows, static_cast<uint32_t>(h_.window() * 100 + layer));
    sent.job = h_.MakeJob(layer, sent.routing, sent.x);
    h_.Ring(sent.job);
    return sent;
  }
  // A whole window over every layer, compared bit for bit.
  void RunWindow() {
    h_.OpenWindow(h_.window() + 1);
    for (uint32_t layer = 0; layer < h_.source().config().layers; ++layer) {
      const Sent sent = RingLayer(layer);
      for (uint32_t i = 0; i < kWorkers; ++i) {
        ASSERT_TRUE(h_.WaitAck(i, sent.job.tag)) << "worker " << i << " layer " << layer;
        ASSERT_EQ(h_.StatusOf(i), JobStatus::kOk) << "worker " << i << " layer " << layer;
      }
      h_.ExpectResults(sent.job, sent.routing, sent.x);
      if (HasFatalFailure()) return;
    }
    h_.CloseWindow();
  }

  ExchangeHarness h_;
  FakeDaemon daemon_;
  std::map<std::pair<uint32_t, uint32_t>, FakeDaemon::Child> children_;
};

TEST_F(ProcessTest, ServeAndDrain) {
  for (uint32_t i = 0; i < kWorkers; ++i) Start(i, 1);
  for (auto& [key, child] : children_)
    ASSERT_TRUE(daemon_.WaitReady(child)) << daemon_.Record(child).failure;
  for (uint32_t w = 0; w < 3; ++w) RunWindow();
  if (HasFatalFailure()) return;
  for (auto& [key, child] : children_) {
    const WorkerRecord before = daemon_.Record(child);
    EXPECT_FALSE(before.phases.empty());
    EXPECT_EQ(before.facts.at("threads"), "2");
    daemon_.CollectStatistics(child);
    ASSERT_TRUE(
        daemon_.WaitFor(child, [](const WorkerRecord& r) { return !r.statistics.empty(); }));
    EXPECT_EQ(daemon_.Record(child).statistics["jobs_ok"], 3.0 * h_.source().config().layers);
    daemon_.Drain(child);
    const int status = FakeDaemon::WaitExit(child, 1000);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == kExitOk) << status;
    EXPECT_TRUE(daemon_.WaitFor(child, [](const WorkerRecord& r) { return r.drained && r.ended; }));
  }
}

// One worker dies at each step of a job or of loading; the other never hangs; the successor adopts
// what is complete and the relaunched window has the right bits.
class KillTest : public ProcessTest, public ::testing::WithParamInterface<const char*> {};

TEST_P(KillTest, SuccessorTakesOver) {
  const std::string point = GetParam();
  const bool while_loading = point.find("before_ready") != std::string::npos ||
                             point.find("read_expert") != std::string::npos ||
                             point.find("complete_flag") != std::string::npos ||
                             point.find("populate") != std::string::npos ||
                             point.find("register") != std::string::npos;
  // In the middle of loading, and in the second job of serving.
  const bool per_expert =
      point.find("expert") != std::string::npos || point.find("flag") != std::string::npos;
  const std::string nth = while_loading ? (per_expert ? ":100" : ":1") : ":2";
  Start(0, 1);
  FakeDaemon::Child& victim = Start(1, 1, "cpu1.gen1/" + point + nth + ":kill");
  ASSERT_TRUE(daemon_.WaitReady(children_[std::make_pair(0u, 1u)]));
  if (!while_loading) {
    ASSERT_TRUE(daemon_.WaitReady(victim)) << daemon_.Record(victim).failure;
    h_.OpenWindow(1);
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const Sent sent = RingLayer(layer);
      // The survivor answers within its bounded wait, whatever the victim does.
      ASSERT_TRUE(h_.WaitAck(0, sent.job.tag, 5 * kWaitMs)) << "layer " << layer;
      if (layer == 1 && h_.StatusOf(0) != JobStatus::kOk) {
        EXPECT_EQ(h_.StatusOf(0), JobStatus::kPeerTimeout);
        EXPECT_EQ(h_.header().workers[0].error_row.load(), 1u) << "names the worker that died";
      }
      if (layer == 0) {
        ASSERT_TRUE(h_.WaitAck(1, sent.job.tag));
      }
    }
  }
  const int status = FakeDaemon::WaitExit(victim, 10000);
  ASSERT_TRUE(status != -1 && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)
      << "the fault point was not reached: " << status;
  Reap(1, 1);
  h_.header().abort_window.store(h_.window());  // the daemon voids the window
  h_.CloseWindow();

  FakeDaemon::Child& successor = Start(1, 2);
  ASSERT_TRUE(daemon_.WaitReady(successor)) << daemon_.Record(successor).failure;
  const WorkerRecord record = daemon_.Record(successor);
  const uint32_t experts = h_.source().config().layers * h_.source().config().experts;
  const uint32_t adopted = static_cast<uint32_t>(std::stoul(record.facts.at("adopted_experts")));
  EXPECT_EQ(record.facts.at("rejected_experts"), "0");
  if (!while_loading || point == "cpu_worker.before_ready") {
    EXPECT_EQ(adopted, experts);
  } else if (per_expert) {
    EXPECT_GE(adopted, 90u);  // 100 were begun, by at most two readers each one unfinished
    EXPECT_LT(adopted, experts);
  } else {
    EXPECT_EQ(adopted, 0u);
  }
  for (uint32_t w = 0; w < 2 && !HasFatalFailure(); ++w) RunWindow();
}

INSTANTIATE_TEST_SUITE_P(Points, KillTest,
                         ::testing::Values("worker.after_register", "cpu_worker.after_populate",
                                           "cpu_worker.read_expert",
                                           "cpu_worker.before_complete_flag",
                                           "cpu_worker.before_ready", "cpu_worker.after_bell",
                                           "cpu_worker.after_gate_up", "cpu_worker.before_down",
                                           "cpu_worker.before_ack", "cpu_worker.after_ack"),
                         [](const auto& info) {
                           std::string name = info.param;
                           for (char& c : name) c = c == '.' ? '_' : c;
                           return name;
                         });

// A byte of the arena changes while no worker is alive: the successor notices and reads that expert
// again.
TEST_F(ProcessTest, FlippedByteIsReadAgain) {
  for (uint32_t i = 0; i < kWorkers; ++i) Start(i, 1);
  for (auto& [key, child] : children_) ASSERT_TRUE(daemon_.WaitReady(child));
  FakeDaemon::Child& victim = children_[std::make_pair(1u, 1u)];
  kill(victim.pid, SIGKILL);
  FakeDaemon::WaitExit(victim, 5000);
  Reap(1, 1);
  const ArenaLayout layout = *ComputeArenaLayout(h_.source(), 1, kWorkers);
  h_.arena(1).data()[layout.offset(4, 11) + 123] ^= 0x10;
  FakeDaemon::Child& successor = Start(1, 2);
  ASSERT_TRUE(daemon_.WaitReady(successor));
  EXPECT_EQ(daemon_.Record(successor).facts.at("rejected_experts"), "1");
  for (uint32_t w = 0; w < 4 && !HasFatalFailure(); ++w) RunWindow();
}

// A stopped peer does not hold anybody: the abort word ends the wait at once, long before the
// bounded wait would.
TEST_F(ProcessTest, AbortWordEndsTheWait) {
  constexpr uint32_t kLongMs = 20000;
  Start(0, 1, "", kLongMs);
  FakeDaemon::Child& stopped = Start(1, 1, "cpu1/cpu_worker.after_bell:1:stop", kLongMs);
  for (auto& [key, child] : children_) ASSERT_TRUE(daemon_.WaitReady(child));
  h_.OpenWindow(1);
  const Sent sent = RingLayer(0);
  EXPECT_FALSE(h_.WaitAck(0, sent.job.tag, 300)) << "worker 0 must be waiting for worker 1";
  h_.header().abort_window.store(1);
  ASSERT_TRUE(h_.WaitAck(0, sent.job.tag, kLongMs / 2));
  EXPECT_EQ(h_.StatusOf(0), JobStatus::kAborted);
  h_.CloseWindow();
  // The late one comes back, finds its job void, and both serve the next window.
  kill(stopped.pid, SIGCONT);
  RunWindow();
}

// The stream to the daemon breaks: workers end within a second, also one that is stopped in a wait
// for a peer.
TEST_F(ProcessTest, OrphansEndWithinASecond) {
  Start(0, 1, "", 20000);
  Start(1, 1, "cpu1/cpu_worker.after_bell:1:sleep=30000", 20000);
  for (auto& [key, child] : children_) ASSERT_TRUE(daemon_.WaitReady(child));
  h_.OpenWindow(1);
  RingLayer(0);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  daemon_.Die();
  for (auto& [key, child] : children_) {
    // Promised within a second on a machine that has time; a busy one gets ten.
    const int status = FakeDaemon::WaitExit(child, 10000);
    ASSERT_NE(status, -1);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == kExitOrphaned) << status;
  }
}

// The parent dies while the control socket lives on (another process holds it): PR_SET_PDEATHSIG.
TEST_F(ProcessTest, ParentDeathEndsTheWorker) {
  int pipe_fds[2];
  ASSERT_EQ(pipe(pipe_fds), 0);
  LoadPlan plan = h_.Plan(1);
  plan.n_nodes = kWorkers;
  daemon_.SetPlan(0, 1, plan);
  const pid_t parent = fork();
  if (parent == 0) {
    FakeDaemon::Child child = daemon_.Spawn(0, 1, plan);
    daemon_.SendSegments(child, h_.exchange().fd(), h_.exchange().size(), h_.arena(0).fd(),
                         h_.arena(0).size());
    (void)!write(pipe_fds[1], &child.pid, sizeof(child.pid));
    pause();
    _exit(0);
  }
  FakeDaemon::Child child;
  ASSERT_EQ(read(pipe_fds[0], &child.pid, sizeof(child.pid)),
            static_cast<ssize_t>(sizeof(child.pid)));
  child.generation = 1;
  close(pipe_fds[0]);
  close(pipe_fds[1]);
  ASSERT_TRUE(daemon_.WaitReady(child)) << daemon_.Record(child).failure;
  kill(parent, SIGKILL);
  int status = 0;
  waitpid(parent, &status, 0);
  EXPECT_TRUE(daemon_.WaitFor(
      child, [](const WorkerRecord& r) { return r.ended; }, 1500))
      << "the worker outlives its parent";
}

TEST_F(ProcessTest, WrongFlagsAreUsageErrors) {
  for (const char* flag : {"--role=gpu", "--index=x", "--fd=-1", "--nonsense=1", "positional"}) {
    FakeDaemon::Child child;
    std::vector<std::string> arguments = daemon_.Arguments(child, 5);
    arguments.push_back(flag);
    std::vector<char*> argv;
    for (std::string& a : arguments) argv.push_back(a.data());
    argv.push_back(nullptr);
    child.pid = fork();
    if (child.pid == 0) {
      execv(argv[0], argv.data());
      _exit(127);
    }
    const int status = FakeDaemon::WaitExit(child, 5000);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == kExitUsage) << flag << " " << status;
  }
}

// A model that changed under us is refused with a sentence, not served.
TEST_F(ProcessTest, WrongIdentityIsRefused) {
  LoadPlan plan = h_.Plan(1);
  plan.identity = std::string(32, '0');
  FakeDaemon::Child child = daemon_.Spawn(0, 1, plan);
  daemon_.SendSegments(child, h_.exchange().fd(), h_.exchange().size(), h_.arena(0).fd(),
                       h_.arena(0).size());
  ASSERT_TRUE(daemon_.WaitFor(child, [](const WorkerRecord& r) { return r.ended; }));
  EXPECT_NE(daemon_.Record(child).failure.find("identity"), std::string::npos)
      << daemon_.Record(child).failure;
  const int status = FakeDaemon::WaitExit(child, 5000);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == kExitFailed) << status;
}

}  // namespace
}  // namespace lode::test
