// The learned policy against measurement: an answer is generated once without drafts, then offered
// as drafts of which a chosen share is wrong, at three hit rates. For each, windows of every number
// of rows are timed (drafts fixed), which says what number of drafts is fastest for that share; the
// policy, left alone, must settle on it or on one within 3 % of it. The model is synthetic, of the
// flagship's widths; LODE_REPLAY_MODEL names another one, and where that has a draft block the cost
// of its passes is printed as well.
//
// How it measures: the tier is full before anything is timed (no bytes came for a while). Row
// counts take turns within an answer, a few windows each (replay_yardstick.h), with the share of
// right drafts that is judged (wrong tokens choose other experts, which are in slots less often):
// some rounds before the policy's answer, some behind it, there only of the row counts that may be
// the fastest, until the two numbers that are compared are known well enough. The policy is judged
// by the number of drafts of most windows of the second half of its answer; it has learned from all
// windows that ran before.
//
// Real time decides here. On a card it is judged: within 3 % plus what the measurement may be off
// (printed as noise, at most kNoiseAllowed). The cpu device's threads share their cores with
// whatever else runs, so there the test prints its figures and compares the answers;
// LODE_REPLAY_NEAR=0.97 judges there too (or judges more strictly, or with 0 not at all).
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "daemon/draft_policy.h"
#include "shared/shm/wait_word.h"
#include "tests/bits/engine_stack.h"
#include "tests/drafts/replay_yardstick.h"
#include "tests/support/places.h"

namespace lode {
namespace {

constexpr char kDefaultModel[] = "synth:layers=2,interval=2,experts=32,pack=q2_0,vocab=2048";
constexpr double kShares[] = {0.5, 0.7, 0.87};  // of drafts that are right
// Of all experts' bytes in the tier. In this order a policy that trusts what it learned with
// everything in the tier too long stands still at the end.
constexpr double kSlotShares[] = {1, 0.5, 0};
constexpr double kNear = 0.97;
// A measurement that may be further off than this judges nothing; rounds go on until it is known
// well, or there were too many.
constexpr double kNoiseAllowed = 0.03, kNoiseWanted = 0.008;
// Rounds before the policy's turn and behind it, there so many at a time.
constexpr uint32_t kRoundsBefore = 2, kRoundsBehind = 2, kRoundsBehindMax = 8;
// Behind the policy's turn, numbers of drafts that are slower than this part of the fastest are not
// timed any more.
constexpr double kContends = 0.92;
// For the cost of guesses; the last ones of an answer guess less.
constexpr uint32_t kHeadWindows = 24;
// Windows of the policy's answer, at the fastest number of drafts, of which the second half is
// judged: with experts in slots, and without, where windows differ most. Fewer where nothing is
// judged.
constexpr uint32_t kJudgedCached = 128, kJudgedWindows = 250, kPrintedWindows = 48;
constexpr uint32_t kAnswerTokensJudged = 1024, kAnswerTokensPrinted = 320;
// The tier is full when no byte came for this long.
constexpr uint64_t kQuietNs = 100'000'000, kFillNsMax = 120'000'000'000;
constexpr uint32_t kFillTokens = 2;
constexpr uint64_t kAnswerNsMax = 300'000'000'000;

std::string Model() {
  const char* text = std::getenv("LODE_REPLAY_MODEL");
  return text != nullptr ? text : kDefaultModel;
}
// LODE_REPLAY_SLOTS=0.5,1: other shares, or another order.
std::vector<double> SlotShares() {
  const char* text = std::getenv("LODE_REPLAY_SLOTS");
  std::vector<double> shares;
  if (text == nullptr) return {std::begin(kSlotShares), std::end(kSlotShares)};
  for (char* end = nullptr; *text != '\0'; text = *end == ',' ? end + 1 : end) {
    shares.push_back(std::strtod(text, &end));
    if (end == text) break;
  }
  return shares;
}
double Near() {
  const char* text = std::getenv("LODE_REPLAY_NEAR");
  return text != nullptr ? std::atof(text) : (TestDevice() == "cuda" ? kNear : 0);
}

uint32_t AnswerTokens() { return Near() > 0 ? kAnswerTokensJudged : kAnswerTokensPrinted; }

// Windows by their number of drafts.
using WindowCounts = std::array<uint64_t, kWindowRowsMax>;

struct Measured {
  std::vector<int32_t> tokens;
  RequestUsage usage;
  // Behind the prompt's window, window by window: tokens given, ns since the window before, and the
  // windows so far with at least [n] drafts.
  struct Window {
    size_t tokens;
    double ns;
    WindowCounts offered;
  };
  std::vector<Window> windows;
  double rate = 0;  // tokens per second of decoding
};

// Windows [from, end) of an answer by their number of drafts.
WindowCounts WindowsByDrafts(const Measured& run, size_t from) {
  WindowCounts counts = {};
  if (from == 0 || from >= run.windows.size()) return counts;
  const WindowCounts &first = run.windows[from - 1].offered, &last = run.windows.back().offered;
  uint64_t more = run.windows.size() - from;  // with at least n drafts
  for (uint32_t n = 0; n < kWindowRowsMax; ++n) {
    const uint64_t next = n < kDraftsMax ? last[n + 1] - first[n + 1] : 0;
    counts[n] = more - next;
    more = next;
  }
  return counts;
}
uint32_t UsualDrafts(const WindowCounts& windows) {
  return static_cast<uint32_t>(std::max_element(windows.begin(), windows.end()) - windows.begin());
}
std::string Words(const WindowCounts& windows) {
  std::string text;
  for (const uint64_t n : windows) text += ' ' + std::to_string(n);
  return text;
}

class DraftReplay : public ::testing::Test {
 protected:
  void SetUp() override {
    auto source = ModelSource::Open(Model());
    ASSERT_TRUE(source.ok()) << source.status();
    source_ = std::move(*source);
    data_ = *source_->tokenizer();
    tokenizer_ = std::move(*Tokenizer::Create(data_));
    auto stack =
        EngineStack::Start(*source_, *tokenizer_, {.cpu_workers = 1, .threads = MeasuredThreads()});
    ASSERT_TRUE(stack.ok()) << stack.status();
    stack_ = std::move(*stack);
    ASSERT_TRUE(stack_->UseBestIsa(1).ok());
  }

  Measured Ask(const DraftOptions& drafts, uint32_t tokens,
               const std::vector<int32_t>& prompt = {76, 111, 100, 101}) {
    Request request;
    request.id = "replay";
    request.prompt = prompt;
    request.sampling.top_p = 1;
    request.sampling.repetition_penalty = 1;
    request.max_tokens = tokens;
    request.drafts = drafts;
    auto stream = stack_->scheduler().Submit(std::move(request));
    EXPECT_TRUE(stream.ok()) << stream.status();
    Measured run;
    StreamEvent event;
    const uint64_t deadline = NowNs() + kAnswerNsMax;
    uint64_t last = 0;
    for (;;) {
      event = {};
      if (!(*stream)->Pop(&event, deadline)) {
        ADD_FAILURE() << "no answer in time";
        return run;
      }
      const uint64_t now = NowNs();
      if (last != 0 && !event.tokens.empty()) {
        Measured::Window window = {event.tokens.size(), static_cast<double>(now - last), {}};
        const auto& offered = stack_->scheduler().counters().drafts_offered[0];
        for (uint32_t n = 1; n <= kDraftsMax; ++n) window.offered[n] = offered[n].load();
        run.windows.push_back(window);
      }
      last = now;
      for (const TokenOut& token : event.tokens) run.tokens.push_back(token.id);
      if (event.finish) break;
    }
    run.usage = event.finish->usage;
    run.rate =
        (run.usage.completion_tokens - 1) / (static_cast<double>(run.usage.decode_ns) * 1e-9);
    return run;
  }

  // An answer with drafts of which `right` are. turns: drafts of its windows in turn, always so
  // many; empty: the policy chooses.
  Measured AskReplayed(double right, const std::vector<uint8_t>& turns, uint32_t tokens) {
    ReplayDrafts replay;
    replay.answer = answer_;
    replay.right = right;
    replay.turns = turns;
    DraftOptions drafts;
    drafts.head = drafts.lookup = false;
    drafts.replay = std::make_shared<ReplayDrafts>(replay);
    drafts.max = kDraftsMax;
    drafts.fixed = !turns.empty();
    const Measured run = Ask(drafts, tokens);
    EXPECT_LE(run.tokens.size(), answer_.size());
    EXPECT_TRUE(std::equal(run.tokens.begin(), run.tokens.end(), answer_.begin()));
    return run;
  }

  // From here on `share` of all experts' bytes are in the tier and stay there: those that another
  // text used last, so that the answer meets them as often at its start, where windows are timed,
  // as further on.
  void FillTier(double share) {
    TunablesChange change;
    change.vram_budget_bytes =
        static_cast<uint64_t>(static_cast<double>(*ExpertSlotBytesTotal(*source_)) * share);
    change.tier_policy = TierPolicy::kStatic;
    ASSERT_TRUE(stack_->scheduler().SetTunables(change).ok());
    const EngineCounters& counters = stack_->scheduler().counters();
    const uint64_t begin = NowNs();
    const auto other_text = [&] { Ask({}, kFillTokens, {501, 402, 303, 204, 105}); };
    other_text();  // its borders see the change
    for (uint64_t seen = ~0ull;;) {
      // What has landed is counted at the next border, so every look is a short answer.
      std::this_thread::sleep_for(std::chrono::nanoseconds(kQuietNs));
      other_text();
      const uint64_t now = counters.tier_upload_bytes.load();
      if (now == seen) break;
      seen = now;
      ASSERT_LT(NowNs() - begin, kFillNsMax) << "the tier does not fill";
    }
    std::printf(
        "figure: draft replay, %.2f of the experts' bytes: %llu experts in slots after %.1f s\n",
        share, static_cast<unsigned long long>(counters.resident_experts.load()),
        static_cast<double>(NowNs() - begin) * 1e-9);
  }

  // One more answer, of so many rounds. Its last windows may have too few drafts (no token comes
  // behind an answer's end), so it is a little longer.
  void TimeRounds(double right, const std::vector<uint32_t>& contenders, uint32_t rounds,
                  const ReplayPattern& pattern, Yardstick* yardstick) {
    const RoundsPlan plan = PlanRounds(pattern, contenders, yardstick->rounds(), rounds);
    const uint32_t tokens = plan.answer_tokens + kDraftsMax;
    ASSERT_LE(tokens, answer_.size());
    const Measured run = AskReplayed(right, plan.drafts, tokens);
    std::vector<double> ns;
    ASSERT_GE(run.windows.size(), plan.drafts.size());
    for (size_t w = 0; w < plan.drafts.size(); ++w) {
      ASSERT_EQ(run.windows[w].tokens, plan.tokens[w]) << "window " << w;
      ns.push_back(run.windows[w].ns);
    }
    yardstick->Add(plan, ns);
  }

  // What following and guessing to every depth costs behind a window.
  void PrintHeadCosts() {
    for (uint32_t depth = 1; depth <= kDraftsMax; ++depth) {
      DraftOptions head;
      head.lookup = false;
      head.min_p = 0;
      head.max = depth;
      head.fixed = true;
      const RequestUsage usage = Ask(head, kHeadWindows).usage;
      std::printf(
          "figure: draft head, depth %u: %.3f ms behind a window, %u windows, %u guesses "
          "verified\n",
          depth, static_cast<double>(usage.timing.draft_ns) / usage.decode_windows * 1e-6,
          usage.decode_windows, usage.drafted_tokens);
    }
    std::fflush(stdout);
  }

  std::unique_ptr<ModelSource> source_;
  TokenizerData data_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<EngineStack> stack_;
  std::vector<int32_t> answer_;
};

// Tokens of the policy's answer when the fastest number of drafts gives so many a window.
uint32_t JudgedTokens(double slots, double per_window) {
  const uint32_t judged = slots > 0 ? kJudgedCached : kJudgedWindows;
  const uint32_t windows = Near() > 0 ? judged : kPrintedWindows;
  return std::min(AnswerTokens(), static_cast<uint32_t>(windows * per_window));
}

// Seconds since the test began: a section on a card has a limit.
double Seconds() {
  static const uint64_t begin = NowNs();
  return static_cast<double>(NowNs() - begin) * 1e-9;
}

// The policy's usual number against the fastest, for one share of right drafts.
void Judge(const Yardstick& yardstick, double right, const Measured& run) {
  const uint32_t best = yardstick.Fastest();
  const WindowCounts late = WindowsByDrafts(run, run.windows.size() / 2);
  const uint32_t usual = UsualDrafts(late);
  const Yardstick::Ratio reached = yardstick.Speed(usual, best);
  const auto& lookups = run.usage.lookups;
  const double all = static_cast<double>(lookups[0] + lookups[1] + lookups[2]);
  std::string ms, of;
  for (uint32_t n = 0; n < kWindowRowsMax; ++n) {
    const Yardstick::Ratio speed = yardstick.Speed(n, best);
    ms += fmt::format(" {:.2f}", yardstick.WindowNs(n) * 1e-6);
    of += fmt::format(" {:.3f} ({:.3f})", speed.value, speed.noise);
  }
  std::printf(
      "figure: draft replay, hit rate %.2f, %.2f right: fastest %u drafts, policy %u, %.3f of the "
      "fastest (noise %.3f); %.1f tokens/s, windows of 0 to 7 drafts%s, late ones%s\n"
      "figure: draft replay, %.2f right, %u rounds, first of a block %.3f (%.3f), at %.1f s; ms of "
      "1 "
      "to 8 rows:%s; of the fastest (noise):%s\n",
      static_cast<double>(lookups[0]) / all, right, best, usual, reached.value, reached.noise,
      run.rate, Words(WindowsByDrafts(run, 1)).c_str(), Words(late).c_str(), right,
      yardstick.rounds(), yardstick.FirstOfBlock().value, yardstick.FirstOfBlock().noise, Seconds(),
      ms.c_str(), of.c_str());
  std::fflush(stdout);
  if (reached.noise > kNoiseAllowed) {
    std::printf("not judged: the two numbers' speeds may be off by %.3f\n", reached.noise);
    return;
  }
  EXPECT_GE(reached.value, Near() - reached.noise)
      << lookups[0] / all << " hit, " << right << " right";
}

TEST_F(DraftReplay, PolicySettlesOnTheFastestNumberOfRows) {
  Seconds();
  const std::vector<uint32_t> every = {0, 1, 2, 3, 4, 5, 6, 7};
  for (const double slots : SlotShares()) {
    FillTier(slots);
    if (answer_.empty()) {
      answer_ = Ask({}, AnswerTokens()).tokens;
      ASSERT_EQ(answer_.size(), AnswerTokens());
      if (source_->config().nextn_layers > 0) PrintHeadCosts();
    }
    for (const double right : kShares) {
      const ReplayPattern pattern(right, AnswerTokens());
      Yardstick yardstick(pattern);
      TimeRounds(right, every, kRoundsBefore, pattern, &yardstick);
      const Measured run =
          AskReplayed(right, {}, JudgedTokens(slots, pattern.Tokens(yardstick.Fastest())));
      const uint32_t usual = UsualDrafts(WindowsByDrafts(run, run.windows.size() / 2));
      const auto contenders = yardstick.Contenders(kContends, usual);
      for (uint32_t rounds = 0; rounds < kRoundsBehindMax; rounds += kRoundsBehind) {
        TimeRounds(right, contenders, kRoundsBehind, pattern, &yardstick);
        if (Near() == 0 || yardstick.Speed(usual, yardstick.Fastest()).noise <= kNoiseWanted) break;
      }
      Judge(yardstick, right, run);
      if (HasFatalFailure()) return;
    }
  }
}

}  // namespace
}  // namespace lode
