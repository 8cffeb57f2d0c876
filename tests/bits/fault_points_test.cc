// Every named fault point of the workers, through the whole engine: the process dies exactly there,
// once, while it loads or in the middle of an answer, and the answer is the one of the in-process
// engine, token for token and logit for logit. Kills from outside at arbitrary moments:
// tests/daemon/engine_kill_test.cc.
#include <gtest/gtest.h>

#include <cstdlib>

#include "shared/base/log.h"
#include "tests/bits/engine_stack.h"
#include "tests/support/places.h"

namespace lode {
namespace {

struct Fault {
  const char* point;
  const char* worker;  // whose first generation dies
  uint32_t hit;        // the how manyeth passage: for points in windows, somewhere in the answer
  const char* device = nullptr;  // the only one that has the point; null: all
};
// Windows of this test: about 16, of 8 layers each; jobs: one per layer with a CPU share.
const Fault kFaults[] = {
    // Registration and loading.
    {"worker.after_register", "cpu1", 1},
    {"worker.after_register", "gpu0", 1},
    {"cpu_worker.after_populate", "cpu1", 1},
    {"cpu_worker.read_expert", "cpu0", 1},
    {"cpu_worker.read_expert", "cpu1", 100},
    {"cpu_worker.before_complete_flag", "cpu0", 2},
    {"cpu_worker.before_ready", "cpu1", 1},
    {"gpu_worker.before_ready", "gpu0", 1},
    // A CPU job.
    {"cpu_worker.after_bell", "cpu0", 50},
    {"cpu_worker.after_gate_up", "cpu1", 51},
    {"cpu_worker.before_down", "cpu0", 52},
    {"cpu_worker.before_ack", "cpu1", 53},
    {"cpu_worker.after_ack", "cpu0", 54},
    // A window.
    {"gpu_worker.plan_taken", "gpu0", 8},
    {"gpu_worker.tier_border", "gpu0", 9},
    {"gpu_worker.before_bell", "gpu0", 60, "cpu"},
    {"gpu_worker.after_bell", "gpu0", 61, "cpu"},
    {"gpu_worker.before_wait", "gpu0", 62, "cpu"},
    {"gpu_worker.window_launched", "gpu0", 9, "cuda"},
    {"gpu_worker.before_result", "gpu0", 10},
    {"gpu_worker.after_result", "gpu0", 11},
};

class FaultPoints : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    spdlog::set_level(spdlog::level::off);  // deaths are reported as warnings and errors
    const BitsModel* model = FindBitsModel("demo");
    auto source = ModelSource::Open(model->description);
    ASSERT_TRUE(source.ok()) << source.status();
    source_ = source->release();
    auto tokenizer = Tokenizer::Create(source_->tokenizer().value());
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    tokenizer_ = tokenizer->release();
    requests_ = new std::vector<Request>(BitsRequests(*model, *tokenizer_));
    auto engine = LocalEngine::Create(model->description, {});
    ASSERT_TRUE(engine.ok()) << engine.status();
    auto answer = AnswerLocally(**engine, *requests_, 5);
    ASSERT_TRUE(answer.ok()) << answer.status();
    expected_ = new BitsAnswer(*answer);
  }
  static void TearDownTestSuite() {
    delete expected_;
    delete requests_;
    delete tokenizer_;
    delete source_;
  }
  void TearDown() override { unsetenv("LODE_FAULT"); }

  static ModelSource* source_;
  static Tokenizer* tokenizer_;
  static std::vector<Request>* requests_;
  static BitsAnswer* expected_;
};
ModelSource* FaultPoints::source_ = nullptr;
Tokenizer* FaultPoints::tokenizer_ = nullptr;
std::vector<Request>* FaultPoints::requests_ = nullptr;
BitsAnswer* FaultPoints::expected_ = nullptr;

TEST_F(FaultPoints, TheAnswerIsTheSameWhereverAWorkerDies) {
#if !defined(LODE_TEST_HOOKS)
  GTEST_SKIP() << "built without LODE_TEST_HOOKS: there are no fault points";
#endif
  ASSERT_NE(expected_, nullptr);
  for (const Fault& fault : kFaults) {
    if (fault.device != nullptr && TestDevice() != fault.device) continue;
    const std::string spec = fmt::format("{}.gen1/{}:{}", fault.worker, fault.point, fault.hit);
    SCOPED_TRACE(spec);
    setenv("LODE_FAULT", spec.c_str(), 1);
    const auto stack = EngineStack::Start(*source_, *tokenizer_, {.cpu_workers = 2, .threads = 1});
    ASSERT_TRUE(stack.ok()) << stack.status();
    TunablesChange change;  // a card would hold every expert: leave something for the CPU lane
    change.vram_budget_bytes = ExpertSlotBytesTotal(*source_).value() / 2;
    ASSERT_TRUE((*stack)->scheduler().SetTunables(change).ok());
    uint64_t lookups[kLanes] = {};
    const auto answer = (*stack)->Answer(*requests_, {}, lookups);
    ASSERT_TRUE(answer.ok()) << answer.status();
    EXPECT_EQ(answer->tokens, expected_->tokens);
    EXPECT_EQ(answer->Hash(), expected_->Hash());
    EXPECT_GT(lookups[static_cast<uint32_t>(Lane::kCpu)], 0u);
    // Once, and only there: otherwise nothing was tested.
    for (const auto& worker : (*stack)->supervisor().Workers())
      EXPECT_EQ(worker.restarts, worker.name == fault.worker ? 1u : 0u) << worker.name;
  }
}

}  // namespace
}  // namespace lode
