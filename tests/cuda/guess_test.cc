// The device's pick against the host's sampler, bit for bit: first index of the largest logit, and
// the numbers of its probability. Ties, zeros of both signs, infinities, NaN, every length around a
// warp, a stage and the flagship's vocabulary. On a card also what it costs.
#include "kernels/cuda/guess.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "gpu_worker/sampler.h"
#include "tests/cuda/test_card.h"

namespace lode::testing {
namespace {

constexpr uint32_t kFlagshipVocab = 248320;

class CudaGuessTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!card_.ok()) GTEST_SKIP() << card_.why_not();
  }

  // Rows of one launch; row r needs logits unless bit r of `skipped` is set.
  void Expect(const std::vector<std::vector<float>>& rows, const std::vector<int32_t>& ids = {},
              uint32_t skipped = 0) {
    const uint32_t n = static_cast<uint32_t>(rows[0].size()),
                   n_rows = static_cast<uint32_t>(rows.size());
    std::vector<float> all;
    cuda::WindowBlock block = {{}, cuda::kAllFinite};
    for (uint32_t r = 0; r < n_rows; ++r) {
      all.insert(all.end(), rows[r].begin(), rows[r].end());
      block.params.rows[r].needs_logits = skipped >> r & 1 ? 0 : 1;
    }
    const Buffer logits = card_.Upload(all), window = card_.Upload(std::vector{block});
    const Buffer parts = card_.Allocate(n_rows * cuda::kGuessParts * sizeof(uint64_t));
    const Buffer exps = card_.Allocate(all.size() * sizeof(float));
    const Buffer picked = card_.Allocate(n_rows * sizeof(cuda::GuessedToken));
    const Buffer names = ids.empty() ? Buffer() : card_.Upload(ids);
    card_.Poison(parts);
    card_.Poison(exps);
    card_.Poison(picked);
    cuda::LaunchGuess(card_.stream(),
                      {.logits = logits.as<float>(),
                       .stride = n,
                       .n = n,
                       .ids = ids.empty() ? nullptr : names.as<int32_t>(),
                       .logits_only = window.as<cuda::WindowBlock>(),
                       .parts = parts.as<uint64_t>(),
                       .exps = exps.as<float>(),
                       .picked = picked.as<cuda::GuessedToken>()},
                      n_rows);
    std::vector<cuda::GuessedToken> got(n_rows);
    card_.Download(got.data(), picked.as<void>(), n_rows * sizeof(cuda::GuessedToken));
    for (uint32_t r = 0; r < n_rows; ++r) {
      if (skipped >> r & 1) {
        EXPECT_EQ(got[r].token, 0x5a5a5a5a) << "a row that needs nothing was written";
        continue;
      }
      const int32_t best = ArgmaxLogit(rows[r]);
      const LogNormalizer norm = Normalize(rows[r], best);
      const float p = canonical::Exp(norm.LogProb(rows[r][static_cast<size_t>(best)]));
      EXPECT_EQ(got[r].token, ids.empty() ? best : ids[static_cast<size_t>(best)]) << "row " << r;
      ExpectBits(got[r].max, norm.max, "max", n);
      ExpectBits(got[r].log_sum, norm.log_sum, "log sum", n);
      ExpectBits(got[r].probability, p, "probability", n);
    }
  }
  static void ExpectBits(float got, float want, const char* what, uint32_t n) {
    if (std::isnan(want) && std::isnan(got)) return;
    EXPECT_EQ(std::memcmp(&got, &want, sizeof(float)), 0)
        << what << " of " << n << ": " << got << " for " << want;
  }

  std::vector<float> Random(uint32_t n, float scale) {
    std::vector<float> row(n);
    for (float& x : row) {
      seed_ = seed_ * 6364136223846793005ull + 1442695040888963407ull;
      x = (static_cast<float>(seed_ >> 40) / 8388608.0f - 1.0f) * scale;
    }
    return row;
  }

  TestCard card_;
  uint64_t seed_ = 7;
};

TEST_F(CudaGuessTest, EveryLength) {
  for (const uint32_t n : {1u, 2u, 31u, 32u, 33u, 255u, 257u, 4095u, 4096u, 4097u, 8192u, 12289u})
    Expect({Random(n, 12), Random(n, 0.1f), Random(n, 90)});
  Expect({Random(kFlagshipVocab, 15)});
}

TEST_F(CudaGuessTest, TiesZerosAndOddValues) {
  const float inf = INFINITY, nan = NAN;
  std::vector<float> ties = Random(9000, 3), zeros(300, -1.0f), minus(500, -inf), nans(700, nan);
  ties[8191] = ties[77] = ties[4096] = 5;
  zeros[40] = -0.0f;
  zeros[41] = 0.0f;
  nans[650] = -3;
  std::vector<float> top = Random(400, 2);
  top[399] = inf;
  Expect({ties});
  Expect({zeros});
  Expect({minus});
  Expect({nans});
  Expect({top});
  Expect({std::vector<float>(64, nan)});
}

TEST_F(CudaGuessTest, RowsThatNeedNothingAndReducedVocabulary) {
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < 3000; ++i) ids.push_back(2 * i + 5);
  std::vector<std::vector<float>> rows;
  for (int r = 0; r < 8; ++r) rows.push_back(Random(3000, 8));
  Expect(rows, ids, 0b01100101);
}

TEST_F(CudaGuessTest, Cost) {
  if (!card_.real()) GTEST_SKIP() << "time is a card's: " << card_.facts().name;
  const Buffer logits = card_.Upload(Random(kFlagshipVocab * 8, 15));
  const Buffer parts = card_.Allocate(8 * cuda::kGuessParts * sizeof(uint64_t));
  const Buffer exps = card_.Allocate(8 * kFlagshipVocab * sizeof(float));
  const Buffer picked = card_.Allocate(8 * sizeof(cuda::GuessedToken));
  cuda::Timer* const timer = cuda::NewTimer();
  for (const uint32_t n_rows : {1u, 4u, 8u}) {
    double best = 1e9;
    for (int run = 0; run < 5; ++run) {
      constexpr int kTimes = 20;
      cuda::StartTimer(timer, card_.stream());
      for (int i = 0; i < kTimes; ++i) {
        cuda::LaunchGuess(card_.stream(),
                          {.logits = logits.as<float>(),
                           .stride = kFlagshipVocab,
                           .n = kFlagshipVocab,
                           .parts = parts.as<uint64_t>(),
                           .exps = exps.as<float>(),
                           .picked = picked.as<cuda::GuessedToken>()},
                          n_rows);
      }
      best = std::min(best, cuda::StopTimer(timer, card_.stream()) * 1e3 / kTimes);
    }
    std::printf("figure: pick of %u rows of %u logits: %.1f us\n", n_rows, kFlagshipVocab, best);
  }
  cuda::DeleteTimer(timer);
}

}  // namespace
}  // namespace lode::testing
