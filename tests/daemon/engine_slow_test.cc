// A machine that is slow is not a machine that is broken: the whole engine with its real worker
// processes and tight waits, on a demo model, while a CPU worker is stopped and goes on, while it
// stays stopped, and while more processes compute than there are cores. Answers keep their bits;
// nobody who lives is restarted; the engine does not give up. Labels: kill.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "daemon/setup.h"
#include "shared/shm/wait_word.h"
#include "tests/daemon/tokenizer_fixture.h"

namespace lode {
namespace {

constexpr double kPatienceSeconds = 150;  // a loaded test machine
constexpr uint32_t kTokens = 24;

class EngineSlowTest : public testing::Test {
 protected:
  // Waits far below what a loaded machine needs.
  void Start(uint32_t wait_ms, uint32_t wait_max_ms) {
    Options options;
    options.model = LODE_SOURCE_DIR "/tests/models/demo-q4-with-mtp.gguf";
    options.device = "cpu";
    options.cpu_workers = 2;
    options.cpu_threads = 1;
    options.device_threads = 1;
    options.spin_us = 0;
    options.lock_memory = false;
    options.log_level = "warn";
    options.kv_tokens = 4096;
    options.wait_ms = wait_ms;
    options.wait_max_ms = wait_max_ms;
    Topology topology;
    topology.nodes.push_back({0, {0}, 0});
    const std::string socket = testing::TempDir() + "/lode-slow-" + std::to_string(getpid());
    auto setup = MakeSetup(options, DemoModel(), topology, socket, LODE_BINARY_DIR "/bin");
    ASSERT_TRUE(setup.ok()) << setup.status();
    setup->scheduler.tunables.vram_budget_bytes = 0;  // every expert is a miss
    setup->scheduler.tunables.pull_share = 0;         // of the CPU lane
    auto supervisor = Supervisor::Create(setup->supervisor);
    ASSERT_TRUE(supervisor.ok()) << supervisor.status();
    supervisor_ = std::move(*supervisor);
    scheduler_ = std::make_unique<Scheduler>(setup->scheduler, supervisor_.get(), &DemoTokenizer());
    supervisor_->Start();
    const uint64_t deadline = In(kPatienceSeconds);
    const Status ready = supervisor_->WaitReady([&] { return NowNs() < deadline; });
    ASSERT_TRUE(ready.ok()) << ready;
    const Status warm = scheduler_->WarmUp(In(kPatienceSeconds));
    ASSERT_TRUE(warm.ok()) << warm;
    scheduler_->SetAccepting(true);
  }
  void TearDown() override {
    for (const pid_t pid : burners_) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
    if (scheduler_) scheduler_->Stop();
    if (supervisor_) supervisor_->Stop();
  }
  static uint64_t In(double seconds) { return NowNs() + static_cast<uint64_t>(seconds * 1e9); }

  EngineSnapshot::WorkerInfo Info(const std::string& name) const {
    for (const auto& worker : supervisor_->Workers()) {
      if (worker.name == name) return worker;
    }
    return {};
  }
  uint32_t Restarts() const {
    uint32_t all = 0;
    for (const auto& worker : supervisor_->Workers()) all += worker.restarts;
    return all;
  }
  void Burn(int processes) {
    for (int i = 0; i < processes; ++i) {
      const pid_t pid = fork();
      if (pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (;;) asm volatile("");
      }
      burners_.push_back(pid);
    }
  }
  // Tokens and hash of one answer; `at` is called once, when the fifth token has come.
  std::pair<std::vector<int32_t>, uint64_t> Answer(const std::function<void()>& at = nullptr) {
    Request request;
    request.id = "slow";
    request.prompt = DemoTokenizer().Encode("def main(argv):\n    \"\"\"Read", false).value();
    request.sampling.temperature = 0.8f;
    request.sampling.top_p = 1;
    request.sampling.repetition_penalty = 1.1f;
    request.sampling.seed = 42;
    request.max_tokens = kTokens;
    request.hash_logits = true;
    auto stream = scheduler_->Submit(std::move(request));
    EXPECT_TRUE(stream.ok()) << stream.status();
    if (!stream.ok()) return {};
    std::vector<int32_t> tokens;
    StreamEvent event;
    bool called = false;
    const uint64_t deadline = In(kPatienceSeconds);
    while (!event.finish && (*stream)->Pop(&event, deadline)) {
      for (const TokenOut& token : event.tokens) tokens.push_back(token.id);
      if (at && !called && tokens.size() >= 5) {
        called = true;
        at();
      }
    }
    EXPECT_TRUE(event.finish) << "no end of the answer after " << tokens.size() << " tokens";
    if (!event.finish) return {};
    EXPECT_EQ(event.finish->reason, FinishReason::kLength) << event.finish->error;
    return {tokens, event.finish->logits_hash};
  }

  std::unique_ptr<Supervisor> supervisor_;
  std::unique_ptr<Scheduler> scheduler_;
  std::vector<pid_t> burners_;
};

TEST_F(EngineSlowTest, AStoppedWorkerThatGoesOnIsNotRestarted) {
  Start(150, 2000);
  const auto calm = Answer();
  ASSERT_EQ(calm.first.size(), kTokens);
  for (const char* name : {"cpu0", "cpu1"}) {
    SCOPED_TRACE(name);
    const int pid = Info(name).pid;
    std::thread waker;
    EXPECT_EQ(Answer([&] {
                kill(pid, SIGSTOP);
                waker = std::thread([pid] {
                  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
                  kill(pid, SIGCONT);
                });
              }),
              calm);
    if (waker.joinable()) waker.join();
    EXPECT_EQ(Info(name).pid, pid);
    // And it is used again.
    const uint64_t deadline = In(20);
    while (!supervisor_->cpu_lane_up() && NowNs() < deadline) usleep(20'000);
    EXPECT_TRUE(supervisor_->cpu_lane_up());
    EXPECT_EQ(Answer(), calm);
  }
  EXPECT_EQ(Restarts(), 0u);
  EXPECT_GE(scheduler_->counters().windows_aborted.load(), 2u) << "nothing was slow";
}

TEST_F(EngineSlowTest, AWorkerThatStaysStoppedIsReplaced) {
  Start(150, 2000);
  const auto calm = Answer();
  for (const char* name : {"cpu0", "cpu1"}) {
    SCOPED_TRACE(name);
    const int pid = Info(name).pid;
    EXPECT_EQ(Answer([&] { kill(pid, SIGSTOP); }), calm);
    const uint64_t deadline = In(kPatienceSeconds);
    while ((Info(name).pid == pid || !supervisor_->cpu_lane_up()) && NowNs() < deadline)
      usleep(20'000);
    EXPECT_NE(Info(name).pid, pid);
    EXPECT_EQ(Info(name).restarts, 1u) << "the stopped one, not its peer";
    EXPECT_EQ(Answer(), calm);
  }
  EXPECT_EQ(Restarts(), 2u);
}

// Many more runnable processes than cores, and waits of a few milliseconds: nearly every wait runs
// out. The engine must be slow and nothing else.
TEST_F(EngineSlowTest, AnOverloadedMachineIsOnlySlow) {
  Start(4, 12);
  const auto calm = Answer();
  ASSERT_EQ(calm.first.size(), kTokens);
  Burn(4 * static_cast<int>(std::thread::hardware_concurrency()));
  EXPECT_EQ(Answer(), calm);
  EXPECT_EQ(Restarts(), 0u);
  EXPECT_TRUE(supervisor_->failure().ok()) << supervisor_->failure();
  std::printf("%llu windows aborted, %llu done\n",
              static_cast<unsigned long long>(scheduler_->counters().windows_aborted.load()),
              static_cast<unsigned long long>(scheduler_->counters().windows_ok.load()));
}

}  // namespace
}  // namespace lode
