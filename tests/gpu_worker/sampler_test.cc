// The pick against an obvious reference (sort, then filter), its distribution by chi-square over
// seeds, and its edge values.
#include "gpu_worker/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <random>

#include "kernels/canonical.h"

namespace lode {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
const float kNan = std::numeric_limits<float>::quiet_NaN();

SamplingPlan Plan(float temperature, uint32_t top_k = 0, float top_p = 1, float min_p = 0) {
  SamplingPlan s = {};
  s.seed = 1;
  s.temperature = temperature;
  s.top_k = top_k;
  s.top_p = top_p;
  s.min_p = min_p;
  s.repetition_penalty = 1;
  return s;
}

int32_t Pick(const std::vector<float>& logits, const SamplingPlan& s, uint32_t position = 7) {
  SamplerScratch scratch(static_cast<uint32_t>(logits.size()));
  PickInput in;
  in.logits = logits;
  in.sampling = &s;
  in.position = position;
  return PickToken(in, &scratch);
}

std::vector<float> RandomLogits(std::mt19937* rng, size_t n, float spread, bool ties) {
  std::normal_distribution<float> normal(0, spread);
  std::vector<float> logits(n);
  for (float& l : logits) l = ties ? std::round(normal(*rng)) : normal(*rng);
  return logits;
}

// Which tokens survive the filters: double arithmetic, a full sort, the textbook definitions.
std::vector<double> FilteredSoftmax(const std::vector<float>& logits, const SamplingPlan& s) {
  std::vector<size_t> order(logits.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  if (s.top_k > 0 && s.top_k < order.size()) order.resize(s.top_k);
  const double max = logits[order[0]];
  std::vector<double> p(logits.size(), 0);
  double total = 0;
  for (size_t i : order) total += p[i] = std::exp((logits[i] - max) / s.temperature);
  double before = 0;
  for (size_t i : order) {
    const double mine = p[i];
    if ((s.top_p < 1 && before >= s.top_p * total) || mine < s.min_p) p[i] = 0;
    before += mine;
  }
  double kept = 0;
  for (double x : p) kept += x;
  for (double& x : p) x /= kept;
  return p;
}

TEST(Sampler, DrawsFollowTheFilteredSoftmax) {
  std::mt19937 rng(3);
  const SamplingPlan plans[] = {Plan(1),          Plan(0.7f),          Plan(1.6f, 5),
                                Plan(1, 0, 0.8f), Plan(1, 0, 1, 0.1f), Plan(0.9f, 12, 0.9f, 0.05f)};
  for (const SamplingPlan& base : plans) {
    const std::vector<float> logits = RandomLogits(&rng, 16, 1.5f, false);
    const std::vector<double> expected = FilteredSoftmax(logits, base);
    constexpr int kDraws = 20000;
    std::vector<int> seen(logits.size(), 0);
    for (int i = 0; i < kDraws; ++i) {
      SamplingPlan s = base;
      s.seed = static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15ull;
      ++seen[Pick(logits, s, 100)];
    }
    double chi = 0;
    int cells = 0;
    for (size_t t = 0; t < logits.size(); ++t) {
      const double e = expected[t] * kDraws;
      if (e == 0) {
        EXPECT_EQ(seen[t], 0) << "a filtered token was picked";
      } else if (e >= 5) {
        chi += (seen[t] - e) * (seen[t] - e) / e;
        ++cells;
      }
    }
    // 99.9 % bound of a chi-square by Wilson and Hilferty; the seeds are fixed, so the test is
    // deterministic.
    const double df = std::max(cells - 1, 1);
    const double bound = df * std::pow(1 - 2 / (9 * df) + 3.09 * std::sqrt(2 / (9 * df)), 3);
    EXPECT_LT(chi, bound) << "temperature " << base.temperature << " top_k " << base.top_k;
  }
}

// Different positions of one seed are independent too: the counter holds the position.
TEST(Sampler, PositionsOfOneSeedAreIndependentDraws) {
  const std::vector<float> logits(4, 0.0f);
  std::vector<int> pairs(16, 0);
  constexpr int kDraws = 16000;
  for (int i = 0; i < kDraws; ++i) {
    ++pairs[Pick(logits, Plan(1), 2 * i) * 4 + Pick(logits, Plan(1), 2 * i + 1)];
  }
  double chi = 0;
  for (int n : pairs) chi += (n - kDraws / 16.0) * (n - kDraws / 16.0) / (kDraws / 16.0);
  EXPECT_LT(chi, 37.7);  // 99.9 % of 15 degrees of freedom
}

// On a flat distribution the draw is the plain argmax of the Gumbel variates, lower id on equal
// values. 65,536 tokens on 2^23 uniform numbers seldom tie at the top: the last three seeds do.
TEST(Sampler, EqualGumbelsGoToTheLowerId) {
  const std::vector<float> logits(65536, 1.5f);
  SamplerScratch scratch(65536);
  int ties = 0;
  for (const uint64_t seed : {0, 1, 2, 3, 4, 5, 325, 639, 801}) {
    float best = -kInf;
    int32_t id = -1;
    bool tie = false;
    for (uint32_t t = 0; t < logits.size(); ++t) {
      const float g = canonical::Gumbel(seed, 9, t, 0);
      tie = g > best ? false : (tie || g == best);
      if (g > best) best = g, id = static_cast<int32_t>(t);
    }
    ties += tie;
    SamplingPlan s = Plan(1);
    s.seed = seed;
    PickInput in;
    in.logits = logits;
    in.sampling = &s;
    in.position = 9;
    EXPECT_EQ(PickToken(in, &scratch), id) << "seed " << seed;
  }
  EXPECT_EQ(ties, 3);
}

// The survivors, exactly: the survivors of many draws at high temperature are compared with a
// sorted reference, with ties.
TEST(Sampler, FiltersKeepExactlyTheReferenceSet) {
  std::mt19937 rng(5);
  for (int round = 0; round < 60; ++round) {
    const std::vector<float> logits = RandomLogits(&rng, 12, 1, round % 2 == 0);
    const SamplingPlan base = Plan(1, round % 3 == 0 ? 1 + rng() % 12 : 0,
                                   round % 4 == 0 ? 1 : 0.55f, round % 5 == 0 ? 0.3f : 0);
    const std::vector<double> expected = FilteredSoftmax(logits, base);
    std::vector<int> seen(logits.size(), 0);
    for (int i = 0; i < 4000; ++i) {
      SamplingPlan s = base;
      s.seed = i;
      ++seen[Pick(logits, s)];
    }
    for (size_t t = 0; t < logits.size(); ++t) {
      if (expected[t] > 0.01) {
        EXPECT_GT(seen[t], 0) << "round " << round << " token " << t;
      } else if (expected[t] == 0) {
        EXPECT_EQ(seen[t], 0) << "round " << round << " token " << t;
      }
    }
  }
}

TEST(Sampler, GreedyTakesTheHighestLogitAndTheLowerId) {
  EXPECT_EQ(Pick({1, 3, 3, 2}, Plan(0)), 1);
  EXPECT_EQ(Pick({-0.0f, 0.0f}, Plan(0)), 0);
  EXPECT_EQ(Pick({0.0f, -0.0f}, Plan(0)), 0);
  EXPECT_EQ(Pick({1, kInf, 3, kInf}, Plan(0)), 1);
}

TEST(Sampler, EdgeValuesNeverLeaveTheVocabulary) {
  const std::vector<std::vector<float>> cases = {
      {0, 0, 0, 0},        {-kInf, -kInf, -kInf}, {kNan, kNan},
      {kNan, 1, kNan},     {kInf, 1, kInf},       {kInf, -kInf, kNan},
      {3.4e38f, -3.4e38f}, {1e-45f, 0},           {5}};
  for (const auto& logits : cases) {
    for (float temperature : {0.0f, 1e-45f, 1e-30f, 0.7f, 1e30f, 3e38f}) {
      for (float top_p : {1e-30f, 1e-7f, 0.5f, 1.0f}) {
        for (uint32_t top_k : {0u, 1u, 2u, 1000u}) {
          for (float min_p : {0.0f, 0.5f, 0.999f}) {
            const int32_t t = Pick(logits, Plan(temperature, top_k, top_p, min_p));
            ASSERT_GE(t, 0);
            ASSERT_LT(t, static_cast<int32_t>(logits.size()));
            const bool any_finite =
                std::any_of(logits.begin(), logits.end(), [](float l) { return l > -kInf; });
            if (any_finite) {
              EXPECT_GT(logits[t], -kInf) << "NaN or -inf picked";
            }
          }
        }
      }
    }
  }
}

TEST(Sampler, TinyTopPTopKOneAndTinyTemperatureAreGreedy) {
  std::mt19937 rng(9);
  for (int i = 0; i < 200; ++i) {
    const std::vector<float> logits = RandomLogits(&rng, 50, 2, i % 2 == 0);
    const int32_t greedy = Pick(logits, Plan(0));
    EXPECT_EQ(Pick(logits, Plan(1, 1)), greedy);
    EXPECT_EQ(Pick(logits, Plan(1, 0, 1e-9f)), greedy);
    if (i % 2 == 1) {
      EXPECT_EQ(Pick(logits, Plan(1e-30f)), greedy);
    }
  }
}

TEST(Sampler, BiasMaskAndPenaltiesInOrder) {
  SamplerScratch scratch(64);
  std::vector<float> logits(64, 0.0f);
  SamplingPlan s = Plan(0);
  PickInput in;
  in.logits = logits;
  in.sampling = &s;
  logits[10] = 5;
  logits[20] = 4;
  logits[30] = 3;
  EXPECT_EQ(PickToken(in, &scratch), 10);
  const TokenBias bias[] = {{20, 2.0f}, {20, 0.5f}};  // twice the same token: both count
  in.bias = bias;
  EXPECT_EQ(PickToken(in, &scratch), 20);
  uint32_t mask[2] = {~(1u << 20), ~0u};
  in.mask = mask;
  EXPECT_EQ(PickToken(in, &scratch), 10);
  // presence 1.5: 5 - 1.5 = 3.5 still wins over 3; with frequency 0.3 * 2 more: 2.9 loses.
  const TokenCount counts[] = {{10, 2}};
  in.counts = counts;
  s.presence_penalty = 1.5f;
  EXPECT_EQ(PickToken(in, &scratch), 10);
  s.frequency_penalty = 0.3f;
  EXPECT_EQ(PickToken(in, &scratch), 30);
  // repetition divides a positive logit and multiplies a negative one.
  s.presence_penalty = s.frequency_penalty = 0;
  s.repetition_penalty = 2;
  EXPECT_EQ(PickToken(in, &scratch), 30);  // 2.5 < 3
  // All banned: the lowest allowed id.
  uint32_t last_only[2] = {0, 1u << 31};
  in.mask = last_only;
  EXPECT_EQ(PickToken(in, &scratch), 63);
  uint32_t none[2] = {0, 0};
  in.mask = none;
  EXPECT_EQ(PickToken(in, &scratch), 0);
}

// A draft row must pick what plain decoding picks after the draft was committed.
TEST(Sampler, DraftsCountLikeCommittedTokens) {
  std::mt19937 rng(21);
  SamplerScratch scratch(32);
  for (int i = 0; i < 300; ++i) {
    const std::vector<float> logits = RandomLogits(&rng, 32, 1, false);
    SamplingPlan s = Plan(i % 2 ? 0.8f : 0.0f, 0, 0.9f);
    s.seed = i;
    s.repetition_penalty = 1.3f;
    s.presence_penalty = 0.4f;
    s.frequency_penalty = 0.2f;
    const int32_t a = rng() % 32, b = rng() % 32;
    std::map<int32_t, uint32_t> committed = {{a, 1}};
    PickInput drafted;
    drafted.logits = logits;
    drafted.sampling = &s;
    drafted.position = 50;
    const TokenCount first[] = {{a, 1}};
    const int32_t drafts[] = {b, b};
    drafted.counts = first;
    drafted.draft_tokens = drafts;
    committed[b] += 2;
    std::vector<TokenCount> all;
    for (auto [t, n] : committed) all.push_back({t, n});
    PickInput plain = drafted;
    plain.counts = all;
    plain.draft_tokens = {};
    EXPECT_EQ(PickToken(drafted, &scratch), PickToken(plain, &scratch));
  }
}

// One scratch serves rows with different lists: nothing of a call is left for the next.
TEST(Sampler, PicksDoNotDependOnWhatWasPickedBefore) {
  std::mt19937 rng(23);
  SamplerScratch shared(40);
  for (int i = 0; i < 200; ++i) {
    const std::vector<float> logits = RandomLogits(&rng, 40, 1, true);
    SamplingPlan s = Plan(i % 3 ? 1.0f : 0.0f, rng() % 5, i % 2 ? 0.7f : 1.0f);
    s.frequency_penalty = i % 2 ? 0.5f : 0.0f;
    s.seed = i;
    const TokenCount counts[] = {{static_cast<int32_t>(rng() % 40), 3}};
    PickInput in;
    in.logits = logits;
    in.sampling = &s;
    in.counts = counts;
    SamplerScratch fresh(40);
    EXPECT_EQ(PickToken(in, &shared), PickToken(in, &fresh));
  }
}

TEST(LogProbs, MatchDoubleArithmetic) {
  std::mt19937 rng(31);
  const std::vector<float> logits = RandomLogits(&rng, 8192, 3, false);
  double max = -1e300, sum = 0;
  for (float l : logits) max = std::max<double>(max, l);
  for (float l : logits) sum += std::exp(l - max);
  const LogNormalizer norm = Normalize(logits);
  for (float l : logits) EXPECT_NEAR(norm.LogProb(l), l - max - std::log(sum), 2e-5);

  SamplerScratch scratch(8192);
  TopLogprob top[kLogprobsMax];
  TopTokens(logits, kLogprobsMax, &scratch, top);
  std::vector<float> sorted = logits;
  std::sort(sorted.rbegin(), sorted.rend());
  for (uint32_t i = 0; i < kLogprobsMax; ++i) {
    EXPECT_EQ(logits[top[i].token], sorted[i]);
    EXPECT_EQ(top[i].logprob, norm.LogProb(sorted[i]));
  }
  EXPECT_EQ(top[0].token, ArgmaxLogit(logits));
}

TEST(LogProbs, TiesAndNanStayInOrder) {
  SamplerScratch scratch(5);
  const std::vector<float> logits = {1, kNan, 2, 2, 1};
  TopLogprob top[5];
  TopTokens(logits, 5, &scratch, top);
  const int32_t expected[] = {2, 3, 0, 4, 1};
  for (int i = 0; i < 5; ++i) EXPECT_EQ(top[i].token, expected[i]);
  EXPECT_EQ(ArgmaxLogit(std::vector<float>{kNan, kNan}), 0);
}

// Both builds of the exponentials give the same bits, at every length and remainder.
TEST(SamplerMath, BaseAndFmaAgree) {
  if (&GetSamplerMath() != &kSamplerMathFma) GTEST_SKIP() << "this CPU has no AVX2 and FMA";
  std::mt19937 rng(77);
  for (size_t n = 0; n < 300; ++n) {
    std::vector<float> logits = RandomLogits(&rng, n, 8, false);
    if (n > 5) logits[n / 2] = kNan, logits[n / 3] = -kInf;
    float a[canonical::kPartials] = {}, b[canonical::kPartials] = {};
    kSamplerMathBase.add_exp(logits.data(), n, 9.5f, a);
    kSamplerMathFma.add_exp(logits.data(), n, 9.5f, b);
    EXPECT_EQ(std::memcmp(a, b, sizeof(a)), 0) << n;
    std::vector<SamplerCandidate> c(n), d(n);
    for (size_t i = 0; i < n; ++i) {
      const uint32_t bits =
          canonical::BitsOf(-std::fabs(logits[i] != logits[i] ? 1.0f : logits[i]));
      c[i].key = d[i].key = static_cast<uint64_t>(~bits) << 32;
    }
    kSamplerMathBase.fill_weights(c.data(), n);
    kSamplerMathFma.fill_weights(d.data(), n);
    for (size_t i = 0; i < n; ++i) EXPECT_EQ(c[i].weight, d[i].weight);
  }
}

// The draw is the plain argmax over everything, whatever was skipped on the way.
TEST(Sampler, ShortcutsOfTheDrawChangeNothing) {
  std::mt19937 rng(99);
  for (int round = 0; round < 400; ++round) {
    const std::vector<float> logits = RandomLogits(
        &rng, 500, round % 5 == 0 ? 0.1f : 3.0f * static_cast<float>(round % 7), false);
    SamplingPlan s = Plan(1);
    s.seed = static_cast<uint64_t>(round);
    float max = -kInf, best = -kInf;
    int32_t id = -1;
    for (float l : logits) max = std::max(max, l);
    for (uint32_t t = 0; t < logits.size(); ++t) {
      const float value = (logits[t] - max) / 1.0f + canonical::Gumbel(s.seed, 7, t, 0);
      if (value > best) best = value, id = static_cast<int32_t>(t);
    }
    EXPECT_EQ(Pick(logits, s), id) << "round " << round;
  }
}

TEST(LogitsHash, SeesEveryBit) {
  std::vector<float> logits(1000, 0.5f);
  const uint64_t before = HashLogits(logits);
  logits[999] = canonical::FromBits(canonical::BitsOf(0.5f) ^ 1);
  EXPECT_NE(HashLogits(logits), before);
}

}  // namespace
}  // namespace lode
