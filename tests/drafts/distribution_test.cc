// Drafts do not bend the distribution: over many seeds, what guess-and-check commits follows the
// filtered softmax of the model, for the first token and for the token behind an accepted draft, by
// chi-square; with drafts taken at the maximum, drawn with the request's own key (coupled), and
// without drafts. The logits are the demo model's own; verification is the rule of the window
// protocol (a draft holds when it is the row's own pick).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <optional>

#include "gpu_worker/sampler.h"
#include "kernels/canonical.h"
#include "tests/golden/golden_prompt.h"

namespace lode::testing {
namespace {

constexpr uint32_t kPosition = 26;  // of the first picked token
constexpr int kSeeds = 12000;
enum class Guess { kNone, kArgmax, kCoupled };

SamplingPlan Sampling(uint64_t seed) {
  SamplingPlan s = {};
  s.seed = seed * 0x9e3779b97f4a7c15ull;
  s.temperature = 1.7f;
  s.top_k = 24;
  s.top_p = 0.97f;
  s.min_p = 0.005f;
  s.repetition_penalty = 1;
  return s;
}

// Textbook definition in double: which tokens survive the filters, and their probabilities.
std::map<int32_t, double> FilteredSoftmax(std::span<const float> logits) {
  const SamplingPlan s = Sampling(0);
  std::vector<int32_t> order(logits.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
  });
  order.resize(s.top_k);
  const double max = logits[static_cast<size_t>(order[0])];
  std::map<int32_t, double> p;
  double total = 0, before = 0, kept = 0;
  for (const int32_t id : order)
    total += p[id] = std::exp((logits[static_cast<size_t>(id)] - max) / s.temperature);
  for (const int32_t id : order) {
    const double mine = p[id];
    if (before >= s.top_p * total || mine < s.min_p) p[id] = 0;
    before += mine;
  }
  for (const auto& [id, x] : p) kept += x;
  for (auto& [id, x] : p) x /= kept;
  return p;
}

// Draws and their expectation: chi-square below its 99.9 % bound (Wilson and Hilferty). Seeds are
// fixed, so the test is deterministic.
void ExpectFollows(const std::map<int32_t, int>& seen, const std::map<int32_t, double>& p,
                   const char* what) {
  int draws = 0;
  for (const auto& [id, n] : seen) {
    draws += n;
    EXPECT_TRUE(p.contains(id) && p.at(id) > 0) << what << ": token " << id << " was filtered";
  }
  double chi = 0;
  int cells = 0;
  for (const auto& [id, probability] : p) {
    const double expected = probability * draws;
    if (expected < 5) continue;
    const auto at = seen.find(id);
    const double n = at == seen.end() ? 0 : at->second;
    chi += (n - expected) * (n - expected) / expected;
    ++cells;
  }
  const double df = std::max(cells - 1, 1);
  const double bound = df * std::pow(1 - 2 / (9 * df) + 3.09 * std::sqrt(2 / (9 * df)), 3);
  std::printf("figure: chi-square %-40s %6.2f, bound %6.2f, %d draws\n", what, chi, bound, draws);
  EXPECT_LT(chi, bound) << what;
}

class Distribution : public ::testing::Test {
 protected:
  Distribution() : scratch_(8192) {
    LocalEngineOptions options;
    options.threads = 2;
    options.context = 256;
    options.drafts = true;
    engine_ = std::move(*LocalEngine::Create(DemoModelPath(), options));
    prompt_ = LoadGolden("q4", "chat")->ids;
    const StatusOr<PromptRun> run = RunPrompt(*engine_, prompt_, kWindowRowsMax);
    first_ = run->logits.back();
    EXPECT_EQ(prompt_.size(), kPosition);
  }

  int32_t Pick(std::span<const float> logits, uint32_t position, const SamplingPlan& s) {
    PickInput in;
    in.logits = logits;
    in.position = position;
    in.sampling = &s;
    return PickToken(in, &scratch_);
  }
  // The model's logits behind the prompt and `token`.
  std::span<const float> Second(int32_t token) {
    std::vector<float>& logits = second_[token];
    if (logits.empty()) {
      const LocalRow row = {0, kPosition, token};
      engine_->Commit(0, kPosition);
      EXPECT_TRUE(engine_->Run(std::span(&row, 1))->ok());
      logits.assign(engine_->logits(0).begin(), engine_->logits(0).end());
    }
    return logits;
  }

  std::unique_ptr<LocalEngine> engine_;
  SamplerScratch scratch_;
  std::vector<int32_t> prompt_;
  std::vector<float> first_;
  std::map<int32_t, std::vector<float>> second_;
};

TEST_F(Distribution, CommittedTokensFollowTheFilteredSoftmax) {
  // Stand-in for a head that is good but wrong in places: the model's logits, bent.
  std::vector<float> head = first_;
  for (uint32_t i = 0; i < head.size(); ++i) {
    const uint32_t dice = canonical::Philox(5, i, 0).v[0];
    head[i] += 1.5f * static_cast<float>(dice % 1024) / 1024;
  }
  for (const Guess guess : {Guess::kNone, Guess::kArgmax, Guess::kCoupled}) {
    std::map<int32_t, int> first;
    std::map<int32_t, std::map<int32_t, int>> second;
    int held = 0;
    for (int seed = 0; seed < kSeeds; ++seed) {
      const SamplingPlan s = Sampling(static_cast<uint64_t>(seed));
      std::optional<int32_t> draft;
      if (guess == Guess::kArgmax) draft = ArgmaxLogit(head);
      if (guess == Guess::kCoupled) draft = Pick(head, kPosition, s);
      // The window: the row before the draft picks; the draft's row counts when it equals the pick.
      const int32_t token = Pick(first_, kPosition, s);
      ++first[token];
      const bool holds = draft && *draft == token;
      held += holds;
      if (guess != Guess::kNone && !holds) continue;
      ++second[token][Pick(Second(token), kPosition + 1, s)];
    }
    const char* name = guess == Guess::kNone     ? "without drafts"
                       : guess == Guess::kArgmax ? "drafts at the maximum"
                                                 : "coupled drafts";
    ExpectFollows(first, FilteredSoftmax(first_), fmt::format("{}: first token", name).c_str());
    // The most frequent first token has enough seconds to judge.
    const auto common = std::max_element(second.begin(), second.end(), [](const auto& a, const auto& b) {
      const auto size = [](const auto& counts) {
        int n = 0;
        for (const auto& [id, k] : counts) n += k;
        return n;
      };
      return size(a.second) < size(b.second);
    });
    ASSERT_NE(common, second.end());
    ExpectFollows(common->second, FilteredSoftmax(Second(common->first)),
                  fmt::format("{}: behind the first", name).c_str());
    std::printf("figure: %-22s %.3f of first drafts held\n", name,
                static_cast<double>(held) / kSeeds);
    if (guess == Guess::kNone) continue;
    EXPECT_GT(held, kSeeds / 20);
  }
}

}  // namespace
}  // namespace lode::testing
