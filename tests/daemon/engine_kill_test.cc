// The whole engine with its real worker processes on the demo model: an answer is the same, token
// for token and logit for logit, when workers are killed in the middle of it.
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <thread>

#include "daemon/setup.h"
#include "shared/base/check.h"
#include "shared/shm/wait_word.h"
#include "tests/daemon/tokenizer_fixture.h"
#include "tests/support/places.h"

namespace lode {
namespace {

constexpr double kPatienceSeconds = 60;  // a loaded test machine

struct Answer {
  std::vector<int32_t> tokens;
  std::string text;
  FinishEvent finish;
};

class EngineKillTest : public testing::Test {
 protected:
  void Start(uint32_t cpu_workers) {
    Options options;
    options.model = TestSources() + "/tests/models/demo-q4-with-mtp.gguf";
    options.device = TestDevice();
    options.cpu_workers = cpu_workers;
    options.split_policy = "fixed";  // every lane has work, whatever the lanes cost here
    options.cpu_threads = 1;
    options.device_threads = 1;
    options.spin_us = 0;
    options.lock_memory = false;
    options.log_level = "error";
    options.kv_tokens = 4096;
    options.wait_ms = 2000;  // the machine may be busy: only real deaths are under test
    options.wait_max_ms = 10000;
    Topology topology;
    topology.nodes.push_back({0, {0}, 0});
    const std::string socket = testing::TempDir() + "/lode-eng-" + std::to_string(getpid());
    auto setup = MakeSetup(options, DemoModel(), topology, socket, TestBinaries());
    ASSERT_TRUE(setup.ok()) << setup.status();
    setup->supervisor.pulse_seconds = 2;  // for the worker that is stopped below
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
    if (scheduler_) scheduler_->Stop();
    if (supervisor_) supervisor_->Stop();
  }
  static uint64_t In(double seconds) { return NowNs() + static_cast<uint64_t>(seconds * 1e9); }

  static Request MakeRequest() {
    Request request;
    request.id = "kill";
    request.prompt =
        DemoTokenizer().Encode("def main(argv):\n    \"\"\"Read the file and print", false).value();
    request.sampling.temperature = 0.8f;
    request.sampling.top_p = 1;
    request.sampling.repetition_penalty = 1.1f;
    request.sampling.seed = 42;
    request.max_tokens = 60;
    request.hash_logits = true;
    return request;
  }
  void Kill(const std::string& name, int signal = SIGKILL) {
    for (const auto& worker : supervisor_->Workers()) {
      if (worker.name == name && worker.pid > 0) kill(worker.pid, signal);
    }
  }
  // A worker that is not back yet cannot die again: answers may take less time than a start.
  void AwaitWorkers() {
    const uint64_t deadline = In(kPatienceSeconds);
    const auto all_ready = [&] {
      for (const auto& worker : supervisor_->Workers()) {
        if (worker.state != "ready") return false;
      }
      return true;
    };
    while (!all_ready()) {
      ASSERT_LT(NowNs(), deadline) << "a worker does not come back";
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
  // Kills `name` (if any) when `after` tokens have come.
  Answer Run(const std::string& name = "", size_t after = 0, size_t again = 0,
             int signal = SIGKILL) {
    Answer answer;
    AwaitWorkers();
    auto stream = scheduler_->Submit(MakeRequest());
    EXPECT_TRUE(stream.ok()) << stream.status();
    if (!stream.ok()) return answer;
    if (!name.empty() && after == 0) Kill(name);
    StreamEvent event;
    const uint64_t deadline = In(kPatienceSeconds);
    while (!event.finish && (*stream)->Pop(&event, deadline)) {
      for (const TokenOut& token : event.tokens) {
        answer.tokens.push_back(token.id);
        const size_t n = answer.tokens.size();
        if (!name.empty() && (n == after || (again && n == again))) Kill(name, signal);
      }
      answer.text += event.text;
    }
    EXPECT_TRUE(event.finish);
    if (event.finish) answer.finish = *event.finish;
    return answer;
  }
  void ExpectSame(const Answer& a, const Answer& b) {
    EXPECT_EQ(b.finish.reason, FinishReason::kLength) << b.finish.error;
    EXPECT_EQ(a.tokens, b.tokens);
    EXPECT_EQ(a.text, b.text);
    EXPECT_EQ(a.finish.logits_hash, b.finish.logits_hash);
  }

  std::unique_ptr<Supervisor> supervisor_;
  std::unique_ptr<Scheduler> scheduler_;
};

TEST_F(EngineKillTest, AnswersSurviveEveryWorkersDeath) {
  Start(2);
  const Answer calm = Run();
  ASSERT_EQ(calm.tokens.size(), 60u);
  ASSERT_NE(calm.finish.logits_hash, 0u);
  ExpectSame(calm, Run());
  for (const char* name : {"cpu0", "cpu1", "gpu0"}) {
    SCOPED_TRACE(name);
    ExpectSame(calm, Run(name, 0));   // while the prompt runs
    ExpectSame(calm, Run(name, 20));  // in the middle
    ExpectSame(calm, Run(name, 10, 40));
  }
  // Stopped, not ended: nothing of it closes, and the answer goes on all the same.
  ExpectSame(calm, Run("gpu0", 30, 0, SIGSTOP));
  EXPECT_NE(supervisor_->last_gpu_end().find("has not run for"), std::string::npos)
      << supervisor_->last_gpu_end();
  EXPECT_GT(scheduler_->counters().sequences_rebuilt.load(), 0u);
  for (const auto& worker : supervisor_->Workers()) EXPECT_GE(worker.restarts, 3u) << worker.name;
}

TEST_F(EngineKillTest, TunablesAndNeighboursDoNotShowInTheAnswer) {
  Start(1);
  const Answer calm = Run();
  TunablesChange change;
  for (const uint64_t budget : {uint64_t{0}, ~uint64_t{0}}) {
    for (const float share : {0.0f, 1.0f}) {
      for (const uint32_t prompt_rows : {1u, 5u}) {
        change.vram_budget_bytes = budget;
        change.pull_share = share;
        change.prompt_rows = prompt_rows;
        change.device_isa = prompt_rows == 1 ? 0 : 1;
        ASSERT_TRUE(scheduler_->SetTunables(change).ok());
        // A neighbour of another length shares the windows.
        Request other = MakeRequest();
        other.prompt.resize(5);
        auto neighbour = scheduler_->Submit(std::move(other));
        ASSERT_TRUE(neighbour.ok());
        ExpectSame(calm, Run());
        (*neighbour)->Cancel();
      }
    }
  }
}

}  // namespace
}  // namespace lode
