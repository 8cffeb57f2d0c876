// The elementary functions of kernels/canonical.h against the C library in double precision (only
// here may libm judge), the emulated fused multiply-add against the hardware's meaning, 16-bit
// floats exhaustively, Philox against its published vectors.
#include "kernels/canonical.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <limits>
#include <random>

#include "kernels/canonical_trig.h"

namespace lode::canonical {
namespace {

// Distance of a float result from the exact value in units of the last place of the float nearest
// to it (denormals included).
double UlpError(float got, double exact) {
  const float nearest = static_cast<float>(exact);
  if (std::isinf(nearest) || std::isnan(nearest)) return BitsOf(got) == BitsOf(nearest) ? 0 : 1e9;
  int exponent;
  std::frexp(nearest, &exponent);
  const double ulp = std::ldexp(1.0, std::max(exponent - 24, -149));
  return std::fabs(static_cast<double>(got) - exact) / ulp;
}

// Visits floats from `lo` to `hi` (same sign) with a prime step of bit patterns, the ends included.
template <class Visit>
void ForFloats(float lo, float hi, uint32_t step, Visit visit) {
  uint64_t a = BitsOf(lo), b = BitsOf(hi);
  if (a > b) std::swap(a, b);
  for (uint64_t bits = a; bits <= b; bits += step) visit(FromBits(static_cast<uint32_t>(bits)));
  visit(hi);
}

constexpr uint32_t kStep = 499;
const float kInf = std::numeric_limits<float>::infinity();

// A dense scan (every third float) finds 1.01 ulp at worst; this sample must not be worse.
TEST(Canonical, ExpIsWithinOneUlp) {
  double worst = 0;
  const auto check = [&](float x) {
    worst = std::max(worst, UlpError(Exp(x), std::exp(static_cast<double>(x))));
  };
  ForFloats(0.0f, 88.72283f, kStep, check);
  ForFloats(-0.0f, -87.3f, kStep, check);
  std::printf("exp: worst error %.3f ulp\n", worst);
  EXPECT_LE(worst, 1.01);
  // Denormal results are rounded a second time when the last scaling makes them denormal: half a
  // unit more.
  ForFloats(-87.3f, -110.0f, 97, check);
  std::printf("exp with denormal results: worst error %.3f ulp\n", worst);
  EXPECT_LE(worst, 1.5);
  EXPECT_EQ(Exp(0.0f), 1.0f);
  EXPECT_EQ(BitsOf(Exp(-kInf)), 0u);
  EXPECT_EQ(Exp(kInf), kInf);
  EXPECT_EQ(Exp(89.0f), kInf);
  EXPECT_EQ(Exp(1e30f), kInf);
  EXPECT_EQ(Exp(-1e30f), 0.0f);
  EXPECT_TRUE(std::isnan(Exp(std::nanf(""))));
}

TEST(Canonical, LogIsWithinOneUlp) {
  double worst = 0;
  ForFloats(std::numeric_limits<float>::denorm_min(), std::numeric_limits<float>::max(), kStep,
            [&](float x) {
              worst = std::max(worst, UlpError(Log(x), std::log(static_cast<double>(x))));
            });
  ForFloats(0.9f, 1.1f, 1, [&](float x) {
    worst = std::max(worst, UlpError(Log(x), std::log(static_cast<double>(x))));
  });
  std::printf("log: worst error %.3f ulp\n", worst);
  EXPECT_LE(worst, 1.0);
  EXPECT_EQ(BitsOf(Log(1.0f)), 0u);
  EXPECT_EQ(Log(0.0f), -kInf);
  EXPECT_EQ(Log(-0.0f), -kInf);
  EXPECT_EQ(Log(kInf), kInf);
  EXPECT_TRUE(std::isnan(Log(-1.0f)));
  EXPECT_TRUE(std::isnan(Log(-kInf)));
  EXPECT_TRUE(std::isnan(Log(std::nanf(""))));
}

// sigmoid = 1 / (1 + exp(-x)): the errors of exp (1 ulp of a term that is at most the sum), of the
// addition and of the division (half each) add up to 2; silu rounds once more; softplus =
// log1p(exp) carries exp's and log's errors.
TEST(Canonical, DerivedFunctionsStayClose) {
  double sigmoid = 0, silu = 0, softplus = 0, log1p = 0, inv_sqrt = 0;
  const auto check = [&](float x) {
    const double e = x;
    sigmoid = std::max(sigmoid, UlpError(Sigmoid(x), 1 / (1 + std::exp(-e))));
    silu = std::max(silu, UlpError(Silu(x), e / (1 + std::exp(-e))));
    softplus = std::max(softplus, UlpError(Softplus(x), std::log1p(std::exp(e))));
  };
  ForFloats(1e-6f, 80.0f, kStep, check);
  ForFloats(-1e-6f, -80.0f, kStep, check);
  ForFloats(1e-30f, 1e30f, kStep, [&](float x) {
    log1p = std::max(log1p, UlpError(Log1p(x), std::log1p(static_cast<double>(x))));
    inv_sqrt = std::max(inv_sqrt, UlpError(InvSqrt(x), 1 / std::sqrt(static_cast<double>(x))));
  });
  std::printf("worst error in ulp: sigmoid %.2f silu %.2f softplus %.2f log1p %.2f invsqrt %.2f\n",
              sigmoid, silu, softplus, log1p, inv_sqrt);
  EXPECT_LE(sigmoid, 2.5);
  EXPECT_LE(silu, 3.0);
  EXPECT_LE(softplus, 3.0);
  EXPECT_LE(log1p, 2.0);
  EXPECT_LE(inv_sqrt, 1.5);
  EXPECT_EQ(Log1p(0.0f), 0.0f);
  EXPECT_EQ(Log1p(kInf), kInf);
  EXPECT_EQ(Softplus(25.0f), 25.0f);
  EXPECT_EQ(Sigmoid(-kInf), 0.0f);
  EXPECT_EQ(Sigmoid(kInf), 1.0f);
}

float RandomBits(std::mt19937_64& rng) { return FromBits(static_cast<uint32_t>(rng())); }
bool SameFloat(float a, float b) { return BitsOf(a) == BitsOf(b) || (a != a && b != b); }

// This file is built without FMA instructions, so Fma is the emulation; std::fma is correctly
// rounded by definition.
TEST(Canonical, FmaEmulationIsAFusedOperation) {
  std::mt19937_64 rng(1);
  for (int i = 0; i < 4'000'000; ++i) {
    const float a = RandomBits(rng), b = RandomBits(rng), c = RandomBits(rng);
    ASSERT_TRUE(SameFloat(Fma(a, b, c), std::fma(a, b, c))) << a << " " << b << " " << c;
  }
  // Operands of similar size, and a sum that nearly cancels: where double rounding would show.
  for (int i = 0; i < 4'000'000; ++i) {
    const float a = FromBits(0x3f800000u | (rng() & 0x7fffffu)),
                b = FromBits(0x3f800000u | (rng() & 0x7fffffu));
    const int shift = static_cast<int>(rng() % 60) - 30;
    const float c =
        std::ldexp(FromBits(0x3f800000u | (rng() & 0x7fffffu)), shift) * (rng() % 2 ? 1.0f : -1.0f);
    ASSERT_TRUE(SameFloat(Fma(a, b, c), std::fma(a, b, c))) << a << " " << b << " " << c;
    ASSERT_TRUE(SameFloat(Fma(a, b, -(a * b)), std::fma(a, b, -(a * b))));
    const float tiny = std::ldexp(a, -75), tiny2 = std::ldexp(b, -65), tiny3 = std::ldexp(c, -140);
    ASSERT_TRUE(SameFloat(Fma(tiny, tiny2, tiny3), std::fma(tiny, tiny2, tiny3)))
        << "denormal result";
  }
}

TEST(Canonical, EveryBinary16Converts) {
  for (uint32_t h = 0; h < 65536; ++h) {
    const int exponent = (h >> 10) & 31;
    const double mantissa = h & 1023;
    const float got = FromF16(static_cast<uint16_t>(h));
    if (exponent == 31) {
      EXPECT_EQ(BitsOf(got), (h & 0x8000) << 16 | 0x7f800000u | (h & 1023) << 13);
    } else {
      const double magnitude =
          exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24);
      EXPECT_EQ(BitsOf(got), BitsOf(static_cast<float>(h & 0x8000 ? -magnitude : magnitude))) << h;
    }
    if (exponent != 31 || mantissa == 0) {
      EXPECT_EQ(ToF16(got), h);
    }
    EXPECT_EQ(BitsOf(FromBf16(static_cast<uint16_t>(h))), h << 16);
  }
}

// Every float: ToF16 is the nearest binary16, ties to even. Between neighbours a < b the midpoint
// decides.
TEST(Canonical, ToF16RoundsToNearestEven) {
  for (uint32_t h = 0; h < 0x7c00; ++h) {
    const double a = FromF16(static_cast<uint16_t>(h));
    const double b = h == 0x7bff ? 65536.0 : FromF16(static_cast<uint16_t>(h + 1));
    const float middle = static_cast<float>((a + b) / 2);  // exact in float
    const uint16_t even = static_cast<uint16_t>(h % 2 ? h + 1 : h);
    for (uint16_t sign : {0x0000, 0x8000}) {
      const float s = sign ? -1.0f : 1.0f;
      ASSERT_EQ(ToF16(s * middle), even | sign) << h;
      ASSERT_EQ(ToF16(s * std::nextafter(middle, 0.0f)), h | sign) << h;
      ASSERT_EQ(ToF16(s * std::nextafter(middle, kInf)), (h + 1) | sign) << h;
    }
  }
  EXPECT_EQ(ToF16(kInf), 0x7c00);
  EXPECT_EQ(ToF16(3e38f), 0x7c00);
  EXPECT_EQ(ToF16(-3e38f), 0xfc00);
  EXPECT_EQ(ToF16(1e-40f), 0);
  EXPECT_EQ(ToF16(std::nanf("")) & 0x7fff, 0x7e00);
}

TEST(Canonical, PartialsAreJoinedByTheTree) {
  float p[kPartials];
  for (int i = 0; i < kPartials; ++i)
    p[i] = std::ldexp(1.0f + static_cast<float>(i) / 37.0f, i % 7);
  float q[kPartials];
  std::copy(p, p + kPartials, q);
  const auto at = [&](int i) { return ((q[i] + q[i + 16]) + (q[i + 8] + q[i + 24])); };
  const auto four = [&](int i) { return at(i) + at(i + 4); };
  EXPECT_EQ(JoinPartials(p), (four(0) + four(2)) + (four(1) + four(3)));
}

TEST(Canonical, PhiloxKnownAnswers) {
  const Random4 zero = Philox(0, 0, 0);
  const uint32_t want_zero[] = {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8};
  const Random4 ones = Philox(~0ull, ~0ull, ~0ull);
  const uint32_t want_ones[] = {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd};
  const Random4 pi = Philox(0x299f31d0a4093822ull, 0x85a308d3243f6a88ull, 0x0370734413198a2eull);
  const uint32_t want_pi[] = {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1};
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(zero.v[i], want_zero[i]);
    EXPECT_EQ(ones.v[i], want_ones[i]);
    EXPECT_EQ(pi.v[i], want_pi[i]);
  }
}

TEST(Canonical, UniformIsOpenAndGumbelFinite) {
  EXPECT_GT(UniformOpen(0), 0.0f);
  EXPECT_LT(UniformOpen(~0u), 1.0f);
  double sum = 0;
  constexpr int kDraws = 200'000;
  for (int i = 0; i < kDraws; ++i) {
    const float g = Gumbel(7, static_cast<uint32_t>(i), 3, 0);
    ASSERT_TRUE(IsFinite(g));
    sum += g;
  }
  // Mean of a Gumbel variate: Euler's constant; its deviation is pi / sqrt(6) = 1.28, here 5
  // standard errors.
  EXPECT_NEAR(sum / kDraws, 0.57721566, 5 * 1.2825 / std::sqrt(kDraws));
}

// One rounding of a double value that is itself good to about 1e-12 (relative to 1 at small
// results: the reduction's absolute error below 2^26 is under 1e-15 * |k| and shows only where sin
// or cos is near zero).
TEST(Canonical, SinCosIsCorrectlyRoundedUpToDoubleError) {
  double worst = 0;
  const auto check = [&](float x) {
    const SinCosResult r = SinCos(x);
    worst = std::max({worst, UlpError(r.sin, std::sin(static_cast<double>(x))),
                      UlpError(r.cos, std::cos(static_cast<double>(x)))});
  };
  ForFloats(1e-20f, 1048576.0f, kStep, check);
  ForFloats(-1e-20f, -1048576.0f, kStep, check);
  ForFloats(1048576.0f, 67108863.0f, 97, check);
  for (int position = 0; position < 300'000; ++position) check(static_cast<float>(position));
  std::printf("sin, cos: worst error %.4f ulp\n", worst);
  EXPECT_LE(worst, 0.51);
  EXPECT_EQ(SinCos(0.0f).sin, 0.0f);
  EXPECT_EQ(SinCos(0.0f).cos, 1.0f);
}

TEST(Canonical, RopeFrequencies) {
  for (double theta : {1e4, 1e6, 1e7}) {
    for (uint32_t dims : {64u, 128u, 256u}) {
      for (uint32_t pair = 0; pair < dims / 2; ++pair) {
        const double exact = std::pow(theta, -2.0 * pair / dims);
        EXPECT_LE(UlpError(RopeInvFreq(theta, pair, dims), exact), 0.5001)
            << theta << " " << dims << " " << pair;
      }
    }
  }
}

}  // namespace
}  // namespace lode::canonical
