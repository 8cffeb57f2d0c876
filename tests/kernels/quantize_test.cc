// Activation quantisation: every table equals the reference bit for bit, the stated edge values
// hold, bad values are refused.
#include <gtest/gtest.h>

#include "tests/kernels/format_cases.h"

namespace lode::testing {
namespace {

struct Output {
  std::vector<int8_t> q;
  std::vector<float> d;
  std::vector<int16_t> sum16;
  bool finite;
};
Output QuantizeBy(const KernelTable* table, const std::vector<float>& x, uint32_t block_len) {
  Output o{std::vector<int8_t>(x.size(), 99), std::vector<float>(x.size() / block_len, 99.0f),
           std::vector<int16_t>(x.size() / 16, 99), false};
  o.finite = table->quantize(x.data(), x.size(), block_len, o.q.data(), o.d.data(), o.sum16.data());
  return o;
}

void ExpectEqualsReference(const std::vector<float>& x, const char* what) {
  for (uint32_t block_len : {32u, 64u, 256u}) {
    const reference::QuantizedRow want = reference::Quantize(x, block_len);
    for (const KernelTable* table : RunnableTables()) {
      const Output got = QuantizeBy(table, x, block_len);
      ASSERT_TRUE(got.finite) << what << " " << table->name;
      ASSERT_EQ(got.q, want.q) << what << " " << table->name << " " << block_len;
      ASSERT_EQ(got.sum16, want.sum16) << what << " " << table->name << " " << block_len;
      for (size_t b = 0; b < want.d.size(); ++b)
        ASSERT_EQ(Bits(got.d[b]), Bits(want.d[b])) << what << " " << table->name << " block " << b;
      for (int8_t q : got.q) ASSERT_GE(q, -127) << what << " " << table->name;
    }
  }
}

TEST(Quantize, EveryTableEqualsTheReference) {
  for (uint32_t seed = 0; seed < 50; ++seed)
    ExpectEqualsReference(RandomActivations(2560, seed), "gaussian");
  std::mt19937 rng(3);
  for (int round = 0; round < 200; ++round) {
    // Any finite bit pattern: blocks of wildly different sizes, denormals among them.
    std::vector<float> x(256);
    for (float& v : x) {
      do v = canonical::FromBits(rng());
      while (!std::isfinite(v));
    }
    ExpectEqualsReference(x, "random bits");
    const float scale = std::ldexp(1.0f, static_cast<int>(rng() % 250) - 140);
    for (float& v : x) v = scale * (static_cast<float>(rng() % 2001) - 1000.0f) / 1000.0f;
    ExpectEqualsReference(x, "one magnitude");
  }
}

TEST(Quantize, LargestValueOfEveryMantissaGivesAtMost127) {
  // The proof in quantize.h, over every 7th mantissa of amax.
  for (uint32_t mantissa = 0; mantissa < (1u << 23); mantissa += 7) {
    const float amax = canonical::FromBits(0x3f800000u | mantissa);
    const float inv = 1.0f / (amax / 127.0f);
    ASSERT_LT(amax * inv, 127.5f) << mantissa;
    ASSERT_GT(amax * inv, 126.5f) << mantissa;
  }
}

TEST(Quantize, TiesGoToEven) {
  std::vector<float> x(32, 0.0f);
  x[0] = 127.0f;  // d = 1
  const float ties[] = {0.5f, 1.5f, 2.5f, -0.5f, -1.5f, -2.5f, 125.5f, -126.5f};
  const int want[] = {0, 2, 2, 0, -2, -2, 126, -126};
  for (int i = 0; i < 8; ++i) x[1 + i] = ties[i];
  for (const KernelTable* table : RunnableTables()) {
    const Output o = QuantizeBy(table, x, 32);
    EXPECT_EQ(o.d[0], 1.0f);
    EXPECT_EQ(o.q[0], 127);
    for (int i = 0; i < 8; ++i) EXPECT_EQ(o.q[1 + i], want[i]) << table->name << " " << ties[i];
    EXPECT_EQ(o.sum16[0], 127 + 0 + 2 + 2 + 0 - 2 - 2 + 126 - 126);
    EXPECT_EQ(o.sum16[1], 0);
  }
}

TEST(Quantize, TinyBlocksBecomeZero) {
  const float limit = std::ldexp(127.0f, -100);  // d = 2^-100 exactly
  for (const KernelTable* table : RunnableTables()) {
    std::vector<float> x(64, 0.0f);
    x[0] = limit;
    x[32] = -std::nextafter(limit, 0.0f);
    x[33] = 1e-40f;
    const Output o = QuantizeBy(table, x, 32);
    ASSERT_TRUE(o.finite);
    EXPECT_EQ(o.d[0], std::ldexp(1.0f, -100)) << table->name;
    EXPECT_EQ(o.q[0], 127) << table->name;
    EXPECT_EQ(canonical::BitsOf(o.d[1]), 0u) << table->name;
    EXPECT_EQ(o.q[32], 0) << table->name;
    EXPECT_EQ(o.sum16[2], 0) << table->name;
  }
  ExpectEqualsReference(std::vector<float>(256, 0.0f), "zeros");
  ExpectEqualsReference(std::vector<float>(256, -0.0f), "negative zeros");
  ExpectEqualsReference(std::vector<float>(256, 3.4028235e38f), "largest");
  ExpectEqualsReference(std::vector<float>(256, -3.4028235e38f), "most negative");
  ExpectEqualsReference(std::vector<float>(256, 1e-45f), "denormals");
}

TEST(Quantize, ValuesThatAreNotFiniteAreRefusedAnywhere) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const KernelTable* table : RunnableTables()) {
    for (float bad : {inf, -inf, std::nanf("1"), -std::nanf("7")}) {
      for (size_t at : {0u, 1u, 31u, 32u, 63u, 255u}) {
        std::vector<float> x = RandomActivations(256, 1);
        x[at] = bad;
        for (uint32_t block_len : {32u, 64u, 256u})
          EXPECT_FALSE(QuantizeBy(table, x, block_len).finite) << table->name << " at " << at;
      }
    }
  }
}

TEST(ActLayout, PartsAreAlignedAndDoNotOverlap) {
  for (uint32_t block_len : {32u, 64u, 256u}) {
    for (uint32_t n = 256; n <= 4096; n += 256) {
      const ActLayout layout{n, block_len};
      EXPECT_GE(layout.d_offset(), n);
      EXPECT_GE(layout.sum16_offset(), layout.d_offset() + n / block_len * 4);
      EXPECT_GE(layout.bytes(), layout.sum16_offset() + n / 16 * 2);
      EXPECT_EQ(layout.d_offset() % 64 + layout.sum16_offset() % 64 + layout.bytes() % 64, 0u);
    }
  }
}

TEST(FloatEnvironment, IsCanonicalHereAndNoticesFlushing) {
  EXPECT_TRUE(FloatEnvironmentIsCanonical());
  const unsigned saved = __builtin_ia32_stmxcsr();
  for (unsigned bad : {0x8000u, 0x0040u, 0x2000u, 0x6000u}) {
    __builtin_ia32_ldmxcsr(saved | bad);
    const bool canonical_now = FloatEnvironmentIsCanonical();
    __builtin_ia32_ldmxcsr(saved);
    EXPECT_FALSE(canonical_now) << bad;
  }
}

}  // namespace
}  // namespace lode::testing
