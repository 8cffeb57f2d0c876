// The device's look at logits against the host's sampler: argmax, log-softmax sum, draws under
// temperature, top-k, top-p, min-p. Equal with ==, over logits with ties, infinities, NaN, one
// value only, and vocabularies that are no multiple of anything. Runs on a card (cuda_kernels_test)
// and on the emulated device (cuda_emulated_test).
#include "kernels/cuda/sampling.h"

#include <gtest/gtest.h>

#include <cmath>
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

// One row's report against the host's sampler; whether the draw left the argmax.
bool CompareRow(const cuda::PickReport& got, std::span<const float> row, const RowWants& wants,
                SamplerScratch* host) {
  SamplingPlan plan = {.seed = wants.seed,
                       .temperature = wants.temperature,
                       .top_p = wants.top_p,
                       .min_p = wants.min_p,
                       .top_k = wants.top_k,
                       .repetition_penalty = 1,
                       .presence_penalty = 0,
                       .frequency_penalty = 0,
                       .stream = wants.stream};
  PickInput in;
  in.logits = row;
  in.position = wants.position;
  in.sampling = &plan;
  const int32_t token = PickToken(in, host), argmax = ArgmaxLogit(row);
  const LogNormalizer norm = Normalize(row, argmax);
  EXPECT_EQ(static_cast<int32_t>(IdOfKey(got.best)), argmax);
  const LogNormalizer device_norm = NormalizerOf(got.max, got.sum);
  EXPECT_EQ(canonical::BitsOf(device_norm.log_sum), canonical::BitsOf(norm.log_sum));
  EXPECT_EQ(canonical::BitsOf(got.max), canonical::BitsOf(norm.max));
  EXPECT_EQ(canonical::BitsOf(got.target_logit), canonical::BitsOf(row[wants.target]));
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
  uint32_t different = 0;  // draws that are not the argmax
  for (uint32_t c = 0; c < std::size(kNumbers); ++c) {
    const Numbers& n = kNumbers[c];
    std::vector<RowWants> wants(kWindowRowsMax);
    for (uint32_t r = 0; r < kWindowRowsMax; ++r) {
      wants[r] = {.whole = 0,
                  .draw = 1,
                  .position = 17 * c + r,
                  .target = static_cast<int32_t>(r * vocab / 9),
                  .seed = 99 + c,
                  .temperature = n.temperature,
                  .top_p = n.top_p,
                  .min_p = n.min_p,
                  .top_k = n.top_k,
                  .stream = c % 2,
                  .unused = 0};
    }
    const Buffer device_wants = card.Upload(wants);
    const Buffer reports = card.Allocate(kWindowRowsMax * sizeof(cuda::PickReport));
    card.Poison(reports);
    card.Poison(scratch);
    cuda::LaunchPick(card.stream(),
                     {.window = window.as<cuda::WindowBlock>(),
                      .wants = device_wants.as<RowWants>(),
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
      different += CompareRow(got[r], row, wants[r], &host) ? 1 : 0;
    }
  }
  // The draws did draw.
  if (vocab > 100) {
    EXPECT_GT(different, 20u);
  }
}

INSTANTIATE_TEST_SUITE_P(Vocabularies, DeviceSampling,
                         ::testing::Values(1u, 31u, 256u, 4099u, 8192u, 20011u),
                         [](const auto& info) { return std::to_string(info.param); });

}  // namespace
}  // namespace lode::testing
