// The device's look at logits against the host's sampler: argmax, log-softmax sum, picks and draws
// under bias, mask, penalties, temperature, top-k, top-p, min-p. Equal with ==, over logits with
// ties, infinities, NaN, one value only, and vocabularies that are no multiple of anything. Runs on
// a card (cuda_kernels_test) and on the emulated device (cuda_emulated_test).
#include "kernels/cuda/sampling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>

#include "gpu_worker/sampler.h"
#include "gpu_worker/sampler_math.h"
#include "kernels/canonical.h"
#include "kernels/cuda/runtime.h"
#include "tests/cuda/test_card.h"

namespace lode::testing {
namespace {

const float kInf = std::numeric_limits<float>::infinity();

// Eight rows of different character.
std::vector<float> Logits(uint32_t vocab, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> all(size_t{vocab} * kWindowRowsMax);
  for (uint32_t row = 0; row < kWindowRowsMax; ++row) {
    float* l = &all[size_t{row} * vocab];
    for (uint32_t i = 0; i < vocab; ++i) {
      const float x = normal(random);
      switch (row) {
        case 0:
          l[i] = 3 * x;
          break;
        case 1:
          l[i] = std::round(2 * x);
          break;  // many ties
        case 2:
          l[i] = 7.0f;
          break;  // nothing but ties
        case 3:
          l[i] = i % 3 == 0 ? -kInf : 4 * x;
          break;  // impossible tokens
        case 4:
          l[i] = 1e-4f * x;
          break;  // flat: every step-1 bucket is one
        case 5:
          l[i] = 60 * x;
          break;  // most weights are zero
        case 6:
          l[i] = x > 0 ? 0.0f : -0.0f;
          break;  // zeros of both signs
        default:
          l[i] = i == vocab / 2 ? NAN : x - 20;
          break;
      }
    }
  }
  return all;
}

struct Numbers {
  float temperature, top_p, min_p;
  uint32_t top_k;
};
const Numbers kNumbers[] = {{1, 1, 0, 0},      {0.7f, 0.9f, 0, 0},    {1.3f, 0.5f, 0.1f, 40},
                            {1, 1, 0, 1},      {0.01f, 0.99f, 0, 0},  {100, 0.999f, 0, 1000000},
                            {2, 1, 0.3f, 0},   {1, 1e-7f, 0, 0},      {1e-30f, 0.9f, 0, 7},
                            {1, 0.95f, 0, 33}, {0.8f, 0.3f, 0.9f, 5}, {1, 0.9999999f, 0, 2}};

// What changes a row's logits, as the plan would say it.
struct Changes {
  std::vector<uint32_t> mask;
  std::vector<TokenBias> bias;
  std::vector<TokenCount> counts;
  std::vector<int32_t> drafts;
  float repetition = 1, presence = 0, frequency = 0;
};

// Row `row` of case `c`: nothing, a mask, biases, penalties, all of them, nothing allowed, nothing
// finite allowed. Half of the tokens are among the row's best, so that picks feel it.
Changes ChangesOf(uint32_t c, uint32_t row, std::span<const float> logits) {
  const auto vocab = static_cast<uint32_t>(logits.size());
  std::mt19937 random(1000 * c + row);
  std::vector<uint64_t> keys;
  for (uint32_t i = 0; i < vocab; ++i) keys.push_back(KeyOf(CleanLogit(logits[i]), i));
  std::sort(keys.begin(), keys.end(), std::greater<>());
  const auto best = [&](uint32_t n) { return static_cast<int32_t>(IdOfKey(keys[n % vocab])); };
  const auto token = [&] {
    return random() % 2 == 0 ? best(random() % 12) : static_cast<int32_t>(random() % vocab);
  };
  const uint32_t kind = (c + row) % 7;
  Changes out;
  if (kind == 1 || kind == 4 || kind == 6) {
    for (uint32_t w = 0; w < (vocab + 31) / 32; ++w) out.mask.push_back(random() | random());
  }
  if (kind == 5) out.mask.assign((vocab + 31) / 32, 0);
  if (kind == 2 || kind == 4) {
    for (uint32_t i = 0; i < 40; ++i)
      out.bias.push_back({token(), 8.0f - static_cast<float>(i % 17)});
    out.bias.push_back({token(), -kInf});
    // One token thrice: only in the list's order it ends as the best, 50.
    for (const float b : {1e30f, -1e30f, 50.0f}) out.bias.push_back({best(1), b});
  }
  if (kind == 3 || kind == 4) {
    // Under kind 3 the best token is counted as a draft only.
    for (uint32_t i = 0; i < 300; ++i)
      out.counts.push_back({kind == 3 ? best(1 + random() % 50) : token(), i % 5});
    out.counts.push_back(out.counts[7]);
    out.drafts = {best(0), out.counts[9].token, token(), best(0)};
    out.repetition = 1.3f;
    out.presence = c % 2 == 0 ? 0.9f : 0.0f;
    out.frequency = c % 3 == 0 ? 0.25f : -0.1f;
  }
  // -inf - (-inf): no number, which the sampler passes over.
  if (kind == 3 && c % 4 == 3) {
    out.bias.push_back({best(2), -kInf});
    out.counts.push_back({best(2), 2});
    out.frequency = -3e38f;
  }
  if (kind == 6) {
    for (uint32_t i = 0; i < vocab; ++i) out.bias.push_back({static_cast<int32_t>(i), -kInf});
  }
  return out;
}

template <class T>
uint32_t Append(const std::vector<T>& list, std::vector<uint8_t>* bytes) {
  bytes->resize((bytes->size() + 7) / 8 * 8);
  const auto at = static_cast<uint32_t>(bytes->size());
  bytes->resize(at + list.size() * sizeof(T));
  if (!list.empty()) std::memcpy(bytes->data() + at, list.data(), list.size() * sizeof(T));
  return at;
}

void AddChanges(const Changes& c, RowWants* wants, std::vector<uint8_t>* bytes) {
  wants->mask = c.mask.empty() ? kNoChange : Append(c.mask, bytes);
  wants->bias = Append(c.bias, bytes);
  wants->counts = Append(c.counts, bytes);
  wants->drafts = Append(c.drafts, bytes);
  wants->n_bias = static_cast<uint32_t>(c.bias.size());
  wants->n_counts = static_cast<uint32_t>(c.counts.size());
  wants->n_drafts = static_cast<uint32_t>(c.drafts.size());
  wants->changed = !c.mask.empty() || !c.bias.empty() || !c.counts.empty();
  wants->repetition_penalty = c.repetition;
  wants->presence_penalty = c.presence;
  wants->frequency_penalty = c.frequency;
}

// One row's report against the host's sampler; whether the pick left the argmax.
bool CompareRow(const cuda::PickReport& got, std::span<const float> row, const RowWants& wants,
                const Changes& changes, SamplerScratch* host) {
  SamplingPlan plan = {.seed = wants.seed,
                       .temperature = wants.draw != 0 ? wants.temperature : 0,
                       .top_p = wants.top_p,
                       .min_p = wants.min_p,
                       .top_k = wants.top_k,
                       .repetition_penalty = changes.repetition,
                       .presence_penalty = changes.presence,
                       .frequency_penalty = changes.frequency,
                       .stream = wants.stream};
  PickInput in;
  in.logits = row;
  in.mask = changes.mask.empty() ? nullptr : changes.mask.data();
  in.bias = changes.bias;
  in.counts = changes.counts;
  in.draft_tokens = changes.drafts;
  in.position = wants.position;
  in.sampling = &plan;
  const int32_t token = PickToken(in, host), argmax = ArgmaxLogit(row);
  const LogNormalizer norm = Normalize(row, argmax);
  EXPECT_EQ(static_cast<int32_t>(IdOfKey(got.best)), argmax);
  const LogNormalizer device_norm = NormalizerOf(got.max, got.sum);
  EXPECT_EQ(canonical::BitsOf(device_norm.log_sum), canonical::BitsOf(norm.log_sum));
  EXPECT_EQ(canonical::BitsOf(got.max), canonical::BitsOf(norm.max));
  EXPECT_EQ(canonical::BitsOf(got.target_logit), canonical::BitsOf(row[wants.target]));
  const bool finite = got.pick_best != 0 && ValueOfKey(got.pick_best) > -kInf;
  if (wants.draw == 0 || !finite) {
    EXPECT_EQ(got.pick_best != 0 ? static_cast<int32_t>(IdOfKey(got.pick_best)) : 0, token);
    EXPECT_EQ(canonical::BitsOf(got.pick_logit), canonical::BitsOf(row[token]));
    return token != argmax;
  }
  const cuda::DrawPart* best = &got.draws[0];
  for (uint32_t p = 1; p < cuda::PickParts(static_cast<uint32_t>(row.size())); ++p)
    best = got.draws[p].key > best->key ? &got.draws[p] : best;
  EXPECT_NE(best->key, 0u);
  if (best->key == 0) return false;
  EXPECT_EQ(static_cast<int32_t>(IdOfKey(best->key)), token);
  EXPECT_EQ(canonical::BitsOf(best->logit), canonical::BitsOf(row[IdOfKey(best->key)]));
  return token != argmax;
}

class DeviceSampling : public ::testing::TestWithParam<uint32_t> {};

TEST_P(DeviceSampling, IsTheHostsSampler) {
  TestCard card;
  if (!card.ok()) GTEST_SKIP() << card.why_not();
  const uint32_t vocab = GetParam();
  const std::vector<float> logits = Logits(vocab, vocab);
  const Buffer device_logits = card.Upload(logits);
  const Buffer scratch = card.Allocate(kWindowRowsMax * cuda::PickScratchBytes(vocab));
  cuda::WindowBlock block = {};
  for (uint32_t r = 0; r < kWindowRowsMax; ++r) block.params.rows[r].needs_logits = 1;
  const Buffer window = card.Upload(std::vector<cuda::WindowBlock>{block});
  SamplerScratch host(vocab);
  uint32_t different = 0;  // picks that are not the argmax
  for (uint32_t c = 0; c < std::size(kNumbers); ++c) {
    const Numbers& n = kNumbers[c];
    std::vector<RowWants> wants(kWindowRowsMax);
    std::vector<Changes> changes(kWindowRowsMax);
    std::vector<uint8_t> bytes(8);
    for (uint32_t r = 0; r < kWindowRowsMax; ++r) {
      RowWants& w = wants[r] = {};
      w.draw = (c + r) % 4 != 3;
      w.position = 17 * c + r;
      w.target = static_cast<int32_t>(r * vocab / 9);
      w.seed = 99 + c;
      w.temperature = n.temperature;
      w.top_p = n.top_p;
      w.min_p = n.min_p;
      w.top_k = n.top_k;
      w.stream = c % 2;
      changes[r] = ChangesOf(c, r, std::span(&logits[size_t{r} * vocab], vocab));
      AddChanges(changes[r], &wants[r], &bytes);
    }
    const Buffer device_wants = card.Upload(wants);
    const Buffer device_changes = card.Upload(bytes);
    const Buffer reports = card.Allocate(kWindowRowsMax * sizeof(cuda::PickReport));
    card.Poison(reports);
    card.Poison(scratch);
    cuda::LaunchPick(card.stream(),
                     {.window = window.as<cuda::WindowBlock>(),
                      .wants = device_wants.as<RowWants>(),
                      .changes = device_changes.as<uint8_t>(),
                      .logits = device_logits.as<float>(),
                      .vocab = vocab,
                      .reports = reports.as<cuda::PickReport>(),
                      .scratch = scratch.as<uint8_t>()},
                     kWindowRowsMax);
    std::vector<cuda::PickReport> got(kWindowRowsMax);
    card.Download(got.data(), reports.as<void>(), reports.bytes());
    for (uint32_t r = 0; r < kWindowRowsMax; ++r) {
      SCOPED_TRACE(::testing::Message() << "numbers " << c << ", row " << r);
      const std::span<const float> row(&logits[size_t{r} * vocab], vocab);
      different += CompareRow(got[r], row, wants[r], changes[r], &host) ? 1 : 0;
    }
  }
  // Changes and draws did something.
  if (vocab > 100) {
    EXPECT_GT(different, 20u);
  }
}

// What a window of a flagship vocabulary pays for its picks: greedy, under a mask, and drawn under
// a mask, biases and penalties.
TEST(DeviceSamplingCost, OfAWindow) {
  TestCard card;
  if (!card.ok()) GTEST_SKIP() << card.why_not();
  if (!card.real()) GTEST_SKIP() << "time is a card's: " << card.facts().name;
  constexpr uint32_t kVocab = 248'320;
  // Rows like those of a model: most of the weight on a few tokens.
  std::vector<float> logits(size_t{kVocab} * kWindowRowsMax);
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  for (float& l : logits) l = 2.5f * normal(random);
  const Buffer device_logits = card.Upload(logits);
  const Buffer scratch = card.Allocate(kWindowRowsMax * cuda::PickScratchBytes(kVocab));
  const Buffer reports = card.Allocate(kWindowRowsMax * sizeof(cuda::PickReport));
  cuda::WindowBlock block = {};
  for (uint32_t r = 0; r < kWindowRowsMax; ++r) block.params.rows[r].needs_logits = 1;
  const Buffer window = card.Upload(std::vector<cuda::WindowBlock>{block});
  cuda::Timer* const timer = cuda::NewTimer();
  const char* const names[] = {"greedy", "greedy, mask", "drawn",
                               "drawn, mask, 40 biases, 300 penalties"};
  for (uint32_t kind = 0; kind < std::size(names); ++kind) {
    std::vector<RowWants> wants(kWindowRowsMax);
    std::vector<uint8_t> bytes(8);
    for (uint32_t r = 0; r < kWindowRowsMax; ++r) {
      wants[r] = {};
      wants[r].draw = kind >= 2;
      wants[r].temperature = 0.7f;
      wants[r].top_p = 0.8f;
      wants[r].top_k = 20;
      Changes changes;
      if (kind == 1) changes.mask.assign((kVocab + 31) / 32, ~0u);
      if (kind == 3) {
        changes.mask.assign((kVocab + 31) / 32, ~2u);
        for (int32_t i = 0; i < 300; ++i) {
          if (i < 40) changes.bias.push_back({i * 5003, 0.1f * static_cast<float>(i)});
          changes.counts.push_back({i * 811, 1});
        }
        changes.repetition = 1.1f;
        changes.presence = 0.5f;
      }
      AddChanges(changes, &wants[r], &bytes);
    }
    const Buffer device_wants = card.Upload(wants), device_changes = card.Upload(bytes);
    for (const uint32_t n_rows : {1u, 4u}) {
      constexpr int kTimes = 50;
      double best = 1e9;
      for (int run = 0; run < 3; ++run) {
        cuda::StartTimer(timer, card.stream());
        for (int i = 0; i < kTimes; ++i) {
          cuda::LaunchPick(card.stream(),
                           {.window = window.as<cuda::WindowBlock>(),
                            .wants = device_wants.as<RowWants>(),
                            .changes = device_changes.as<uint8_t>(),
                            .logits = device_logits.as<float>(),
                            .vocab = kVocab,
                            .reports = reports.as<cuda::PickReport>(),
                            .scratch = scratch.as<uint8_t>()},
                           n_rows);
        }
        best = std::min(best, cuda::StopTimer(timer, card.stream()) * 1e3 / kTimes);
      }
      std::printf("figure: picks of %u rows of %u logits, %s: %.1f us\n", n_rows, kVocab,
                  names[kind], best);
    }
  }
  cuda::DeleteTimer(timer);
}

INSTANTIATE_TEST_SUITE_P(Vocabularies, DeviceSampling,
                         ::testing::Values(1u, 31u, 256u, 4099u, 8192u, 20011u),
                         [](const auto& info) { return std::to_string(info.param); });

}  // namespace
}  // namespace lode::testing
