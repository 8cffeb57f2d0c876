// The scheduler against a GPU worker made of a thread: answers, limits, cancellation, slow readers,
// and every way a window or a worker can end. The expected answer is a function of the prompt
// alone, whatever happens on the way.
#include "daemon/scheduler.h"

#include <gtest/gtest.h>

#include "tests/daemon/stub_fleet.h"
#include "tests/daemon/tokenizer_fixture.h"

namespace lode {
namespace {

using Act = StubFleet::Act;
using Reaction = StubFleet::Reaction;

const Tokenizer& Bytes() {
  static const auto tokenizer = SmallVocabulary().Make().value();
  return *tokenizer;
}

SchedulerConfig Config() {
  SchedulerConfig config;
  config.vocab = 256;
  config.context = 2048;
  config.sequences = 12;
  config.kv_blocks = 40;
  config.queue = 64;
  return config;
}

Request MakeRequest(const std::string& prompt, uint32_t max_tokens) {
  Request request;
  request.id = prompt;
  for (const char c : prompt) request.prompt.push_back(static_cast<uint8_t>(c));
  request.max_tokens = max_tokens;
  request.sampling.top_p = 1;
  request.sampling.repetition_penalty = 1;
  request.hash_logits = true;
  return request;
}

uint64_t In(double seconds) { return NowNs() + static_cast<uint64_t>(seconds * 1e9); }

struct Outcome {
  std::vector<int32_t> tokens;
  std::string text;
  FinishEvent finish;
  bool ended = false;
};

Outcome Read(RequestStream* stream, double seconds = 20) {
  Outcome out;
  StreamEvent event;
  const uint64_t deadline = In(seconds);
  while (!out.ended && stream->Pop(&event, deadline)) {
    for (const TokenOut& t : event.tokens) out.tokens.push_back(t.id);
    out.text += event.text;
    if (event.finish) {
      out.finish = *event.finish;
      out.ended = true;
    }
  }
  return out;
}

uint64_t ExpectedHash(std::vector<int32_t> tokens, size_t n) {
  uint64_t h = 0;
  for (size_t i = 0; i < n; ++i) {
    h = ChainLogitsHash(h, StubFleet::Hash(tokens) + 1);
    tokens.push_back(StubFleet::NextToken(tokens));
  }
  return h;
}

void ExpectAnswer(const std::string& prompt, size_t n, const Outcome& out) {
  ASSERT_TRUE(out.ended) << prompt;
  EXPECT_EQ(out.finish.reason, FinishReason::kLength) << prompt << ": " << out.finish.error;
  const std::vector<int32_t> ids(prompt.begin(), prompt.end());
  EXPECT_EQ(out.tokens, StubFleet::Answer(ids, n)) << prompt;
  EXPECT_EQ(out.text, std::string(out.tokens.begin(), out.tokens.end()));
  EXPECT_EQ(out.finish.logits_hash, ExpectedHash(ids, n)) << prompt;
}

// Submits prompts of many lengths at once and checks every answer.
void RunMany(Scheduler* scheduler, StubFleet* fleet, uint32_t requests = 20, uint32_t tokens = 30) {
  std::vector<std::pair<std::string, std::shared_ptr<RequestStream>>> streams;
  for (uint32_t i = 0; i < requests; ++i) {
    const std::string prompt(1 + i * 3, static_cast<char>('A' + i));
    auto stream = scheduler->Submit(MakeRequest(prompt, tokens));
    ASSERT_TRUE(stream.ok()) << stream.status();
    streams.emplace_back(prompt, *stream);
  }
  for (auto& [prompt, stream] : streams) ExpectAnswer(prompt, tokens, Read(stream.get()));
  EXPECT_EQ(fleet->error(), "");
  const EngineSnapshot snapshot = scheduler->Snapshot();
  EXPECT_EQ(snapshot.running, 0u);
  EXPECT_EQ(snapshot.kv_blocks_free, snapshot.kv_blocks);
}

TEST(Scheduler, ManyRequestsShareWindows) {
  StubFleet fleet;
  Scheduler scheduler(Config(), &fleet, &Bytes());
  EXPECT_FALSE(scheduler.Submit(MakeRequest("early", 1)).ok());  // still loading
  EXPECT_TRUE(scheduler.WarmUp(In(5)).ok());
  scheduler.SetAccepting(true);
  RunMany(&scheduler, &fleet);
  bool shared = false;
  for (const WindowPlan& plan : fleet.Plans()) shared |= plan.n_seqs > 1;
  EXPECT_TRUE(shared);
  EXPECT_NEAR(scheduler.Snapshot().hit_rate, 0.3, 1e-9);
  EXPECT_NEAR(scheduler.Snapshot().pcie_share, 2.0 / 7, 1e-9);
  EXPECT_EQ(scheduler.counters().answer_tokens.load(), 20u * 30 + 2);
}

TEST(Scheduler, AbortedWindowsAreRunAgain) {
  uint32_t n = 0;
  StubFleet fleet(
      [&](const WindowPlan&) { return Reaction{++n % 3 == 0 ? Act::kAbort : Act::kOk}; });
  Scheduler scheduler(Config(), &fleet, &Bytes());
  scheduler.SetAccepting(true);
  RunMany(&scheduler, &fleet);
  std::map<uint64_t, int> numbers;
  for (const WindowPlan& plan : fleet.Plans())
    EXPECT_EQ(++numbers[plan.window], 1);  // never reused
  EXPECT_GT(scheduler.counters().windows_aborted.load(), 10u);
}

TEST(Scheduler, DeadGpuWorkerCostsOnlyAPause) {
  uint32_t n = 0;
  StubFleet fleet(
      [&](const WindowPlan&) { return Reaction{++n == 12 || n == 33 ? Act::kDie : Act::kOk}; });
  SchedulerConfig config = Config();
  config.sequences = 6;
  Scheduler scheduler(config, &fleet, &Bytes());
  scheduler.SetAccepting(true);
  RunMany(&scheduler, &fleet, 6, 30);
  EXPECT_GT(scheduler.counters().sequences_rebuilt.load(), 0u);
}

TEST(Scheduler, RequestThatKillsEveryWorkerIsGivenUp) {
  StubFleet fleet([&](const WindowPlan& plan) {
    for (uint32_t i = 0; i < plan.n_rows; ++i) {
      if (plan.rows[i].token == '!') return Reaction{Act::kDie};
    }
    return Reaction{};
  });
  Scheduler scheduler(Config(), &fleet, &Bytes());
  scheduler.SetAccepting(true);
  auto good = scheduler.Submit(MakeRequest("good", 2000));
  auto bad = scheduler.Submit(MakeRequest("bad!", 4));
  ASSERT_TRUE(good.ok() && bad.ok());
  const Outcome out = Read(bad->get());
  EXPECT_EQ(out.finish.reason, FinishReason::kError);
  EXPECT_NE(Message(out.finish.error).find("ended 3 times"), std::string::npos) << out.finish.error;
  (*good)->Cancel();
  EXPECT_TRUE(Read(good->get()).ended);
}

TEST(Scheduler, NotFiniteFailsOnlyItsSequence) {
  StubFleet fleet([&](const WindowPlan& plan) {
    for (uint32_t i = 0; i < plan.n_rows; ++i) {
      if (plan.rows[i].token == '!') return Reaction{Act::kNotFinite, i};
    }
    return Reaction{};
  });
  Scheduler scheduler(Config(), &fleet, &Bytes());
  scheduler.SetAccepting(true);
  auto good = scheduler.Submit(MakeRequest("good", 40));
  auto bad = scheduler.Submit(MakeRequest("bad!", 40));
  ASSERT_TRUE(good.ok() && bad.ok());
  const Outcome out = Read(bad->get());
  EXPECT_EQ(out.finish.reason, FinishReason::kError);
  EXPECT_NE(Message(out.finish.error).find("layer 5, position 3"), std::string::npos)
      << out.finish.error;
  ExpectAnswer("good", 40, Read(good->get()));
}

TEST(Scheduler, SilentCpuWorkerIsRestartedAndThenNamed) {
  StubFleet fleet([&](const WindowPlan& plan) {
    return plan.flags & kCpuLaneDown ? Reaction{} : Reaction{Act::kAbort, 0, 1};
  });
  Scheduler scheduler(Config(), &fleet, &Bytes());
  scheduler.SetAccepting(true);
  RunMany(&scheduler, &fleet, 3, 10);  // after the restart windows are planned without the CPU lane
  EXPECT_EQ(fleet.cpu_restarts_, 1u);
  EXPECT_EQ(fleet.last_cpu_restart_, 1u);

  StubFleet broken([](const WindowPlan&) { return Reaction{Act::kAbort, 0, 1}; });
  Scheduler other(Config(), &broken, &Bytes());
  other.SetAccepting(true);
  auto stream = other.Submit(MakeRequest("x", 4));
  const Outcome out = Read(stream->get());
  EXPECT_EQ(out.finish.reason, FinishReason::kError);
  EXPECT_NE(Message(out.finish.error).find("cpu1"), std::string::npos) << out.finish.error;
}

TEST(Scheduler, HangingWorkerIsReportedAndReplaced) {
  std::atomic<int> n{0};
  StubFleet fleet([&](const WindowPlan&) { return Reaction{++n == 3 ? Act::kHang : Act::kOk}; });
  SchedulerConfig config = Config();
  config.watchdog_seconds = 1;
  Scheduler scheduler(config, &fleet, &Bytes());
  scheduler.SetAccepting(true);
  RunMany(&scheduler, &fleet, 2, 10);
  EXPECT_EQ(fleet.gpu_restarts_, 1u);
  EXPECT_NE(fleet.last_restart_.find("no progress for 1.0 s"), std::string::npos)
      << fleet.last_restart_;
  EXPECT_EQ(scheduler.counters().stalls.load(), 1u);
}

// A CPU worker's end takes the lane down, then voids windows up to the noted one. So the window is
// noted before the lane is looked at, and both before the plan is out: else a worker that ends in
// between leaves a window that asks it and that nobody voids.
TEST(Scheduler, WindowIsNotedBeforeTheLaneIsLookedAt) {
  std::atomic<uint64_t> windows{0}, late{0};
  StubFleet* probe = nullptr;
  StubFleet fleet([&](const WindowPlan& plan) {
    ++windows;
    late += probe->noted_at_look_ < plan.window;
    return Reaction{};
  });
  probe = &fleet;
  Scheduler scheduler(Config(), &fleet, &Bytes());
  scheduler.SetAccepting(true);
  RunMany(&scheduler, &fleet, 3, 20);
  EXPECT_GT(windows, 20u);
  EXPECT_EQ(late, 0u);
  // What the look found is what the plan says.
  fleet.cpu_up_ = false;
  RunMany(&scheduler, &fleet, 1, 5);
  EXPECT_NE(fleet.Plans().back().flags & kCpuLaneDown, 0u);
}

// The window never ends; whoever is over hears so all the same, in the queue and in the window.
TEST(Scheduler, HangingWindowHoldsNobodyWhoIsOver) {
  std::atomic<bool> hung{false};
  StubFleet fleet([&](const WindowPlan&) {
    hung = true;
    return Reaction{Act::kHang};
  });
  SchedulerConfig config = Config();
  config.sequences = 2;
  config.watchdog_seconds = 3600;
  Scheduler scheduler(config, &fleet, &Bytes());
  scheduler.SetAccepting(true);
  auto cancelled = scheduler.Submit(MakeRequest("running", 5)).value();
  const uint64_t deadline = In(60);
  while (!hung && NowNs() < deadline) std::this_thread::yield();
  Request late = MakeRequest("late", 5);
  late.deadline_ns = In(0.1);
  auto expired = scheduler.Submit(std::move(late)).value();
  auto waiting = scheduler.Submit(MakeRequest("waiting", 5)).value();
  auto last = scheduler.Submit(MakeRequest("last", 5)).value();
  cancelled->Cancel();
  waiting->Cancel();
  EXPECT_EQ(Read(waiting.get()).finish.reason, FinishReason::kCancelled);
  EXPECT_EQ(Read(cancelled.get()).finish.reason, FinishReason::kCancelled);
  EXPECT_EQ(Read(expired.get()).finish.error.code(), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(fleet.gpu_restarts_, 0u);
  EXPECT_EQ(scheduler.Snapshot().running, 1u);  // its slot is in the window
  fleet.Replace();                              // the border comes, then the next window hangs
  last->Cancel();
  EXPECT_TRUE(Read(last.get()).ended);
  scheduler.Stop();
  StreamEvent event;
  EXPECT_FALSE(cancelled->TryPop(&event));  // one last event, not two
}

TEST(Scheduler, CancelledRequestsEndAtTheNextBorderAlsoInTheQueue) {
  StubFleet fleet;
  fleet.window_delay_us_ = 1000;
  SchedulerConfig config = Config();
  config.sequences = 1;
  Scheduler scheduler(config, &fleet, &Bytes());
  scheduler.SetAccepting(true);
  auto first = scheduler.Submit(MakeRequest("first", 1500));
  auto second = scheduler.Submit(MakeRequest("second", 5));
  auto third = scheduler.Submit(MakeRequest("third", 5));
  ASSERT_TRUE(first.ok() && second.ok() && third.ok());
  (*second)->Cancel();
  EXPECT_EQ(Read(second->get()).finish.reason, FinishReason::kCancelled);
  (*first)->Cancel();
  EXPECT_EQ(Read(first->get()).finish.reason, FinishReason::kCancelled);
  ExpectAnswer("third", 5, Read(third->get()));
}

TEST(Scheduler, DeadlinesEndRunningAndWaitingRequests) {
  StubFleet fleet;
  fleet.window_delay_us_ = 10'000;  // the answer would take 15 s
  SchedulerConfig config = Config();
  config.sequences = 1;
  Scheduler scheduler(config, &fleet, &Bytes());
  scheduler.SetAccepting(true);
  Request running = MakeRequest("first", 1500), waiting = MakeRequest("second", 5);
  running.deadline_ns = In(2);
  waiting.deadline_ns = In(1);
  auto first = scheduler.Submit(std::move(running)), second = scheduler.Submit(std::move(waiting));
  const Outcome late = Read(second->get()), cut = Read(first->get());
  EXPECT_EQ(late.finish.error.code(), StatusCode::kDeadlineExceeded);
  EXPECT_EQ(cut.finish.error.code(), StatusCode::kDeadlineExceeded);
  EXPECT_GT(cut.tokens.size(), 3u);
}

TEST(Scheduler, ClientThatDoesNotReadStopsOnlyItself) {
  StubFleet fleet;
  SchedulerConfig config = Config();
  config.slow_client_seconds = 3;  // `paused` is read again within this, also on a busy machine
  Scheduler scheduler(config, &fleet, &Bytes());
  scheduler.SetAccepting(true);
  auto slow = scheduler.Submit(MakeRequest("slow", 1500));
  auto paused = scheduler.Submit(MakeRequest("paused", 400));
  ASSERT_TRUE(slow.ok() && paused.ok());
  const uint64_t deadline = In(60);
  while (!((*slow)->Full() && (*paused)->Full()) && NowNs() < deadline) std::this_thread::yield();
  ASSERT_TRUE((*slow)->Full());
  auto quick = scheduler.Submit(MakeRequest("quick", 100));
  ExpectAnswer("quick", 100, Read(quick->get()));
  ExpectAnswer("paused", 400, Read(paused->get()));  // reads again in time: nothing is lost
  while (scheduler.Snapshot().running > 0 && NowNs() < deadline) std::this_thread::yield();
  const Outcome out = Read(slow->get());
  EXPECT_EQ(out.finish.reason, FinishReason::kCancelled);
  EXPECT_NE(Message(out.finish.error).find("slow_client_seconds"), std::string::npos);
  EXPECT_EQ(out.tokens.size(), RequestStream::kCapacityEvents);
}

TEST(Scheduler, LimitsAreRefusedWithTheirNames) {
  StubFleet fleet;
  fleet.window_delay_us_ = 1000;
  SchedulerConfig config = Config();
  config.sequences = 1;
  config.queue = 2;
  config.kv_blocks = 4;
  Scheduler scheduler(config, &fleet, &Bytes());
  scheduler.SetAccepting(true);
  const auto error = [&](Request request) {
    return Message(scheduler.Submit(std::move(request)).status());
  };
  EXPECT_NE(error(MakeRequest("", 1)).find("empty"), std::string::npos);
  EXPECT_NE(error(MakeRequest("x", 0)).find("max_tokens"), std::string::npos);
  EXPECT_NE(error(MakeRequest("x", 2048)).find("context of 2048"), std::string::npos);
  EXPECT_NE(error(MakeRequest("x", 1024)).find("5 KV blocks"), std::string::npos);
  Request bad = MakeRequest("x", 1);
  bad.prompt = {256};
  EXPECT_NE(error(bad).find("vocabulary"), std::string::npos);
  bad = MakeRequest("x", 1);
  bad.sampling.top_p = std::nanf("");
  EXPECT_NE(error(bad).find("top_p"), std::string::npos);
  bad = MakeRequest("x", 1);
  bad.logit_bias = {{1000, 1.0f}};
  EXPECT_NE(error(bad).find("logit bias"), std::string::npos);
  std::vector<std::shared_ptr<RequestStream>> streams;
  for (int i = 0; i < 3; ++i) streams.push_back(scheduler.Submit(MakeRequest("q", 1000)).value());
  const uint64_t deadline = In(60);
  while (scheduler.Snapshot().running < 1 && NowNs() < deadline) std::this_thread::yield();
  EXPECT_NE(error(MakeRequest("q", 1)).find("option queue"), std::string::npos);
  scheduler.Drain(In(0.1));  // cuts the rest
  EXPECT_NE(error(MakeRequest("q", 1)).find("draining"), std::string::npos);
  for (auto& stream : streams)
    EXPECT_EQ(Read(stream.get()).finish.reason, FinishReason::kCancelled);
}

TEST(Scheduler, WaitsForKvBlocksInOrder) {
  StubFleet fleet;
  SchedulerConfig config = Config();
  config.kv_blocks = 4;
  Scheduler scheduler(config, &fleet, &Bytes());
  scheduler.SetAccepting(true);
  std::vector<std::shared_ptr<RequestStream>> streams;
  for (const uint32_t tokens : {600u, 600u, 10u}) {
    streams.push_back(scheduler.Submit(MakeRequest(std::string(1, 'a'), tokens)).value());
  }
  uint64_t longest = 0;
  std::vector<Outcome> outs(3);
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) readers.emplace_back([&, i] { outs[i] = Read(streams[i].get()); });
  for (auto& reader : readers) reader.join();
  ExpectAnswer("a", 600, outs[0]);
  ExpectAnswer("a", 600, outs[1]);
  ExpectAnswer("a", 10, outs[2]);
  for (const WindowPlan& plan : fleet.Plans()) longest = std::max<uint64_t>(longest, plan.n_seqs);
  EXPECT_LE(longest, 2u);
}

TEST(Scheduler, EngineFailureEndsEverythingWithItsText) {
  StubFleet fleet([](const WindowPlan&) { return Reaction{Act::kHang}; });
  Scheduler scheduler(Config(), &fleet, &Bytes());
  scheduler.SetAccepting(true);
  auto stream = scheduler.Submit(MakeRequest("x", 4));
  ASSERT_TRUE(stream.ok());
  fleet.Fail(FailedPrecondition("gpu0 cannot load: no memory"));
  EXPECT_EQ(Message(Read(stream->get()).finish.error), "gpu0 cannot load: no memory");
  EXPECT_EQ(Message(scheduler.Submit(MakeRequest("x", 4)).status()), "gpu0 cannot load: no memory");
  EXPECT_EQ(scheduler.Snapshot().state, "failed");
}

TEST(Scheduler, TunablesChangeAtABorderAndNeverTheAnswer) {
  StubFleet fleet;
  fleet.window_delay_us_ = 200;
  Scheduler scheduler(Config(), &fleet, &Bytes());
  scheduler.SetAccepting(true);
  auto stream = scheduler.Submit(MakeRequest("tune", 200));
  TunablesChange change;
  change.pull_share = 0.5f;
  change.cpu_isa = {{1, 2}};
  EXPECT_TRUE(scheduler.SetTunables(change).ok());
  change.pull_share = 1.5f;
  EXPECT_FALSE(scheduler.SetTunables(change).ok());
  ExpectAnswer("tune", 200, Read(stream->get()));
  const WindowPlan last = fleet.Plans().back();
  EXPECT_EQ(last.tunables.epoch, 2u);
  EXPECT_EQ(last.tunables.pull_share, 0.5f);
  EXPECT_EQ(last.tunables.cpu_isa[1], 2u);
}

TEST(Scheduler, PenaltiesCountTheAnswer) {
  StubFleet fleet;
  Scheduler scheduler(Config(), &fleet, &Bytes());
  scheduler.SetAccepting(true);
  Request request = MakeRequest("pen", 50);
  request.sampling.frequency_penalty = 0.5f;
  request.logit_bias = {{7, 1.0f}};
  auto stream = scheduler.Submit(std::move(request));
  ExpectAnswer("pen", 50, Read(stream->get()));
  EXPECT_EQ(fleet.penalty_sum_, 49u);
}

TEST(Scheduler, StopEndsOpenStreams) {
  StubFleet fleet([](const WindowPlan&) { return Reaction{Act::kHang}; });
  Scheduler scheduler(Config(), &fleet, &Bytes());
  scheduler.SetAccepting(true);
  auto stream = scheduler.Submit(MakeRequest("x", 4));
  scheduler.Stop();
  EXPECT_TRUE(Read(stream->get()).ended);
  EXPECT_FALSE(scheduler.Submit(MakeRequest("x", 4)).ok());
}

}  // namespace
}  // namespace lode
