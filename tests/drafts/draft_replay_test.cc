// The learned policy against measurement: an answer is generated once without drafts, then offered
// as drafts of which a chosen share is wrong, at three hit rates. For each, windows of every number
// of rows are timed (drafts fixed), which says what number of drafts is fastest for that share; the
// policy, left alone, must settle on it or on one within 3 % of it. The model is synthetic, of the
// flagship's widths; LODE_REPLAY_MODEL names another one, and where that has a draft block the cost
// of its passes is printed as well.
//
// How it measures: the tier is full before anything is timed (no bytes came for a while). A row
// count's time is the median of windows with always as many drafts and the same share of right ones
// (wrong tokens choose other experts, which are in slots less often), half of them timed before the
// policy's turns and half behind, so that drift shows; the same windows are what the policy has
// learned from. Which drafts are right is drawn, but every stretch of the answer has its
// share (ReplayIsRight), so tokens per window follow from the share.
//
// Real time decides here. On a card it is judged: within 3 % plus what the medians may be off
// (printed as noise, at most kNoiseAllowed). The cpu device's threads share their cores with
// whatever else runs, so there the test prints its figures and compares the answers;
// LODE_REPLAY_NEAR=0.97 judges there too (or judges more strictly, or with 0 not at all).
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>

#include "daemon/draft_policy.h"
#include "shared/shm/wait_word.h"
#include "tests/bits/engine_stack.h"
#include "tests/support/places.h"

namespace lode {
namespace {

constexpr char kDefaultModel[] = "synth:layers=2,interval=2,experts=32,pack=q2_0,vocab=2048";
constexpr double kShares[] = {0.5, 0.7, 0.87};  // of drafts that are right
// Of all experts' bytes in the tier. In this order a policy that trusts what it learned with
// everything in the tier too long stands still at the end.
constexpr double kSlotShares[] = {1, 0.5, 0};
constexpr double kNear = 0.97;
// Medians that may be further off than this (two of them together) judge nothing.
constexpr double kNoiseAllowed = 0.03;
// Windows of a row count and a share, before the policy's turns and behind them.
constexpr uint32_t kTimedWindows = 5;
// The first window with drafts of a request is not timed: what the prompt left is still in the
// caches.
constexpr uint32_t kUntimed = 1;
// For the cost of guesses; the last ones of an answer guess less.
constexpr uint32_t kHeadWindows = 24;
// Windows in which the policy finds its way and is judged, at the fastest number of drafts: its
// usual number is that of most of them. Fewer where nothing is judged.
constexpr uint32_t kJudgedWindows = 96, kPrintedWindows = 32;
constexpr uint32_t kAnswerTokens = 256;
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

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

// Times of windows of one row count, ns.
struct RowTimes {
  std::vector<double> before, behind;
  double median() const {
    std::vector<double> all = before;
    all.insert(all.end(), behind.begin(), behind.end());
    return Median(all);
  }
  double drift() const { return Median(behind) / Median(before) - 1; }
  // What the median may be off, relative: its standard error from the median deviation of either
  // half's windows (1.48 makes that a standard deviation, 1.25 is what a median loses against a
  // mean), and half of the drift.
  double noise() const {
    std::vector<double> off;
    for (const auto* half : {&before, &behind}) {
      const double middle = Median(*half);
      for (const double v : *half) off.push_back(std::fabs(v - middle));
    }
    const double error = 1.25 * 1.48 * Median(off) / std::sqrt(static_cast<double>(off.size()));
    return std::hypot(error / median(), drift() / 2);
  }
};
using Times = std::array<RowTimes, kWindowRowsMax>;  // [drafts]

struct Measured {
  std::vector<int32_t> tokens;
  RequestUsage usage;
  std::vector<std::pair<uint32_t, double>> windows;  // tokens given, ns since the window before
  double rate = 0;                                   // tokens per second of decoding
};

// Tokens per window with n drafts that hold with probability `right`, each given those before.
double TokensWith(uint32_t n, double right) {
  double tokens = 1, reach = 1;
  for (uint32_t i = 0; i < n; ++i) tokens += reach *= right;
  return tokens;
}

// Windows by their number of drafts, from the counts by depth.
std::array<uint64_t, kWindowRowsMax> WindowsByDrafts(const RequestUsage& usage) {
  const auto& offered = usage.drafts_offered[0];
  std::array<uint64_t, kWindowRowsMax> windows = {usage.decode_windows - offered[1]};
  for (uint32_t n = 1; n <= kDraftsMax; ++n)
    windows[n] = offered[n] - (n < kDraftsMax ? offered[n + 1] : 0);
  return windows;
}
uint32_t UsualDrafts(const RequestUsage& usage) {
  const auto windows = WindowsByDrafts(usage);
  return static_cast<uint32_t>(std::max_element(windows.begin(), windows.end()) - windows.begin());
}
std::string WindowsOf(const RequestUsage& usage) {
  std::string text;
  for (const uint64_t windows : WindowsByDrafts(usage)) text += ' ' + std::to_string(windows);
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
      if (last != 0 && !event.tokens.empty())
        run.windows.emplace_back(event.tokens.size(), static_cast<double>(now - last));
      last = now;
      for (const TokenOut& token : event.tokens) run.tokens.push_back(token.id);
      if (event.finish) break;
    }
    run.usage = event.finish->usage;
    run.rate =
        (run.usage.completion_tokens - 1) / (static_cast<double>(run.usage.decode_ns) * 1e-9);
    return run;
  }

  // An answer with drafts of which `right` are; n: most drafts of a window, or always so many.
  Measured AskReplayed(double right, uint32_t n, bool fixed, uint32_t tokens) {
    ReplayDrafts replay;
    replay.answer = answer_;
    replay.right = right;
    DraftOptions drafts;
    drafts.head = drafts.lookup = false;
    drafts.replay = std::make_shared<ReplayDrafts>(replay);
    drafts.max = n;
    drafts.fixed = fixed;
    const Measured run = Ask(drafts, tokens);
    EXPECT_LE(run.tokens.size(), answer_.size());
    EXPECT_TRUE(std::equal(run.tokens.begin(), run.tokens.end(), answer_.begin()));
    return run;
  }

  // From here on `share` of all experts' bytes are in the tier and stay there: those that another
  // text used last, so that the answer meets them as often at its start, where windows are timed, as
  // further on.
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

  // Windows of n + 1 rows. The last ones of an answer have fewer: no token may come behind its end.
  void Time(double right, uint32_t n, std::vector<double>* times) {
    const double windows = kTimedWindows + kUntimed;
    const auto wanted = static_cast<uint32_t>(std::ceil(windows * TokensWith(n, right))) + n + 1;
    const Measured run = AskReplayed(right, n, true, wanted);
    uint32_t seen = 0, done = 1;  // the prompt's last row gave the first token
    for (const auto& [tokens, ns] : run.windows) {
      if (done + n + 1 <= wanted && seen++ >= kUntimed) times->push_back(ns);
      done += tokens;
    }
    EXPECT_FALSE(times->empty());
  }

  std::unique_ptr<ModelSource> source_;
  TokenizerData data_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<EngineStack> stack_;
  std::vector<int32_t> answer_;
};

// What following and guessing to every depth costs behind a window.
void PrintDraftCosts(const std::function<Measured(uint32_t depth)>& ask) {
  for (uint32_t depth = 1; depth <= kDraftsMax; ++depth) {
    const Measured run = ask(depth);
    std::printf(
        "figure: draft head, depth %u: %.3f ms behind a window, %u windows, %u guesses verified\n",
        depth, static_cast<double>(run.usage.timing.draft_ns) / run.usage.decode_windows * 1e-6,
        run.usage.decode_windows, run.usage.drafted_tokens);
  }
  std::fflush(stdout);
}

void PrintTimes(const Times& times, double right) {
  std::string line = fmt::format(
      "figure: draft replay, {:.2f} right, ms of 1 to 8 rows (noise, drift in %):", right);
  for (const RowTimes& t : times) {
    line += fmt::format(" {:.2f} ({:.1f}, {:+.1f})", t.median() * 1e-6, 100 * t.noise(),
                        100 * t.drift());
  }
  std::printf("%s\n", line.c_str());
}

// Tokens of the policy's windows at the number of drafts that was fastest so far.
uint32_t JudgedTokens(const Times& times, double right) {
  double best = 0, tokens = 1;
  for (uint32_t n = 0; n < kWindowRowsMax; ++n) {
    const double of_n = TokensWith(n, right), rate = of_n / Median(times[n].before);
    if (rate <= best) continue;
    best = rate;
    tokens = of_n;
  }
  const uint32_t windows = Near() > 0 ? kJudgedWindows : kPrintedWindows;
  return std::min(kAnswerTokens, static_cast<uint32_t>(windows * tokens));
}

// The policy's usual number against the fastest, for one share of right drafts.
void Judge(const Times& times, double right, const Measured& run) {
  const auto rate = [&](uint32_t n) { return TokensWith(n, right) / times[n].median(); };
  uint32_t best = 0;
  for (uint32_t n = 1; n < kWindowRowsMax; ++n) best = rate(n) > rate(best) ? n : best;
  const uint32_t usual = UsualDrafts(run.usage);
  const double reached = rate(usual) / rate(best);
  const double noise = usual == best ? 0 : std::hypot(times[best].noise(), times[usual].noise());
  const auto& lookups = run.usage.lookups;
  const double all = static_cast<double>(lookups[0] + lookups[1] + lookups[2]);
  std::printf(
      "figure: draft replay, hit rate %.2f, %.2f right: fastest %u drafts, policy %u, %.3f of the "
      "fastest "
      "(noise %.3f); %.1f tokens/s, without drafts %.1f, windows of 0 to 7 drafts%s\n",
      static_cast<double>(lookups[0]) / all, right, best, usual, reached, noise, run.rate,
      1e9 / times[0].median(), WindowsOf(run.usage).c_str());
  std::fflush(stdout);
  if (noise > kNoiseAllowed) {
    std::printf("not judged: the two medians may be off by %.3f together\n", noise);
    return;
  }
  EXPECT_GE(reached, Near() - noise) << lookups[0] / all << " hit, " << right << " right";
}

TEST_F(DraftReplay, PolicySettlesOnTheFastestNumberOfRows) {
  bool planned = false;
  for (const double slots : SlotShares()) {
    FillTier(slots);
    if (!planned) {
      planned = true;
      answer_ = Ask({}, kAnswerTokens).tokens;
      ASSERT_EQ(answer_.size(), kAnswerTokens);
      if (source_->config().nextn_layers > 0) {
        PrintDraftCosts([&](uint32_t depth) {
          DraftOptions head;
          head.lookup = false;
          head.min_p = 0;
          head.max = depth;
          head.fixed = true;
          return Ask(head, kHeadWindows);
        });
      }
    }
    std::array<Times, std::size(kShares)> times;
    for (uint32_t n = 0; n < kWindowRowsMax; ++n) {
      for (size_t i = 0; i < times.size(); ++i) Time(kShares[i], n, &times[i][n].before);
    }
    Measured runs[std::size(kShares)];
    for (size_t i = 0; i < times.size(); ++i) {
      const uint32_t tokens = JudgedTokens(times[i], kShares[i]);
      runs[i] = AskReplayed(kShares[i], kDraftsMax, false, tokens);
    }
    for (uint32_t n = kWindowRowsMax; n-- > 0;) {
      for (size_t i = 0; i < times.size(); ++i) Time(kShares[i], n, &times[i][n].behind);
    }
    for (size_t i = 0; i < times.size(); ++i) {
      PrintTimes(times[i], kShares[i]);
      Judge(times[i], kShares[i], runs[i]);
    }
  }
}

}  // namespace
}  // namespace lode
