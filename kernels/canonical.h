// One arithmetic: every elementary operation of the model, defined once for both compilers (docs/design/arithmetic.md).
// Each function is a fixed sequence of IEEE-754 binary32/binary64 operations, round to nearest even, no flush to zero, no
// contraction: the same bits on every instruction set and on CUDA. No libm. Branch-free, so loops over them vectorise
// without changing a bit. Everything is internal to its translation unit (no weak symbol may leak between ISA builds).
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define LODE_FN static __forceinline__ __host__ __device__
#else
#define LODE_FN static inline __attribute__((always_inline, unused))
#endif

namespace lode {

// Raised when any sum, order, rounding, tie or edge value below or in the kernels changes: old arenas, checkpoints and hashes
// then refuse to mix with new ones.
inline constexpr uint32_t kArithmeticVersion = 1;

namespace canonical {

inline constexpr int kPartials = 32;  // interleaved partial sums of every float reduction

// ---- bit casts and the seven IEEE operations ---------------------------------------------------------------------------
LODE_FN uint32_t BitsOf(float x) { return __builtin_bit_cast(uint32_t, x); }
LODE_FN float FromBits(uint32_t x) { return __builtin_bit_cast(float, x); }
LODE_FN uint64_t BitsOfDouble(double x) { return __builtin_bit_cast(uint64_t, x); }
LODE_FN double DoubleFromBits(uint64_t x) { return __builtin_bit_cast(double, x); }

#if defined(__CUDA_ARCH__)
LODE_FN float Add(float a, float b) { return __fadd_rn(a, b); }
LODE_FN float Sub(float a, float b) { return __fsub_rn(a, b); }
LODE_FN float Mul(float a, float b) { return __fmul_rn(a, b); }
LODE_FN float Div(float a, float b) { return __fdiv_rn(a, b); }
LODE_FN float Sqrt(float a) { return __fsqrt_rn(a); }
LODE_FN float Fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
LODE_FN double AddD(double a, double b) { return __dadd_rn(a, b); }
LODE_FN double MulD(double a, double b) { return __dmul_rn(a, b); }
#else
LODE_FN float Add(float a, float b) { return a + b; }
LODE_FN float Sub(float a, float b) { return a - b; }
LODE_FN float Mul(float a, float b) { return a * b; }
LODE_FN float Div(float a, float b) { return a / b; }
LODE_FN float Sqrt(float a) { return __builtin_sqrtf(a); }
LODE_FN double AddD(double a, double b) { return a + b; }
LODE_FN double MulD(double a, double b) { return a * b; }
#if defined(__FMA__)
LODE_FN float Fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#else
// No FMA instruction: the product of two floats is exact in double; the sum is rounded to odd in double (error by TwoSum),
// after which the conversion to float rounds once, as a fused operation would.
LODE_FN float Fma(float a, float b, float c) {
  const double p = static_cast<double>(a) * static_cast<double>(b);
  const double s = p + static_cast<double>(c);
  const double bb = s - p;
  const double err = (p - (s - bb)) + (static_cast<double>(c) - bb);
  uint64_t bits = BitsOfDouble(s);
  const bool finite = (bits & 0x7ff0000000000000ull) != 0x7ff0000000000000ull;
  if (finite && err != 0 && (bits & 1) == 0) {
    // The exact sum lies strictly between two doubles: take the odd one of them.
    bits += ((err > 0) == (s > 0)) ? 1 : -1;
  }
  return static_cast<float>(DoubleFromBits(bits));
}
#endif
#endif

// ---- selections (NaN loses every comparison) ---------------------------------------------------------------------------
LODE_FN float Max(float a, float b) { return b > a ? b : a; }
LODE_FN float Min(float a, float b) { return b < a ? b : a; }
LODE_FN float Abs(float x) { return FromBits(BitsOf(x) & 0x7fffffffu); }
LODE_FN bool IsFinite(float x) { return (BitsOf(x) & 0x7f800000u) != 0x7f800000u; }

// ---- exponential, logarithm and what follows from them --------------------------------------------------------------------
// exp: n = rint(x log2 e), r = x - n ln2 (two-part), degree-6 polynomial, scaled by 2^n in two exact steps (denormal results are
// right). <= 2 ulp. exp(-inf) = 0, exp(+inf) = +inf, NaN stays NaN.
LODE_FN float Exp(float x) {
  const float clamped = x < -104.0f ? -104.0f : (x > 89.0f ? 89.0f : x);
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  const float t = Add(Mul(clamped, 1.44269504088896341f), magic);
  const int32_t n = static_cast<int32_t>(BitsOf(t) - BitsOf(magic));
  const float nf = Sub(t, magic);
  float r = Fma(nf, -0.693359375f, clamped);
  r = Fma(nf, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = Fma(p, r, 1.3981999507e-3f);
  p = Fma(p, r, 8.3334519073e-3f);
  p = Fma(p, r, 4.1665795894e-2f);
  p = Fma(p, r, 1.6666665459e-1f);
  p = Fma(p, r, 5.0000001201e-1f);
  const float y = Add(Fma(p, Mul(r, r), r), 1.0f);
  const int32_t half = n >> 1;
  const float s1 = FromBits(static_cast<uint32_t>(half + 127) << 23);
  const float s2 = FromBits(static_cast<uint32_t>(n - half + 127) << 23);
  const float z = Mul(Mul(y, s1), s2);
  return x != x ? x : z;
}

// log of a positive finite number (denormals included), <= 2 ulp. log(0) = -inf, log(+inf) = +inf, negative or NaN: NaN.
LODE_FN float Log(float x) {
  const bool tiny = x < 1.17549435e-38f;
  const float scaled = tiny ? Mul(x, 8388608.0f) : x;
  const uint32_t bits = BitsOf(scaled);
  // Shift the mantissa interval to [sqrt(1/2), sqrt(2)).
  const uint32_t shifted = bits - 0x3f3504f3u;
  const int32_t e = static_cast<int32_t>(shifted) >> 23;
  const float m = Sub(FromBits((shifted & 0x007fffffu) + 0x3f3504f3u), 1.0f);
  const float ef = static_cast<float>(e - (tiny ? 23 : 0));
  float p = 7.0376836292e-2f;
  p = Fma(p, m, -1.1514610310e-1f);
  p = Fma(p, m, 1.1676998740e-1f);
  p = Fma(p, m, -1.2420140846e-1f);
  p = Fma(p, m, 1.4249322787e-1f);
  p = Fma(p, m, -1.6668057665e-1f);
  p = Fma(p, m, 2.0000714765e-1f);
  p = Fma(p, m, -2.4999993993e-1f);
  p = Fma(p, m, 3.3333331174e-1f);
  const float z = Mul(m, m);
  float y = Mul(Mul(p, m), z);
  y = Fma(ef, -2.12194440e-4f, y);
  y = Fma(z, -0.5f, y);
  y = Add(m, y);
  y = Fma(ef, 0.693359375f, y);
  const float inf = FromBits(0x7f800000u);
  y = x == 0.0f ? -inf : y;
  y = x == inf ? inf : y;
  return x < 0.0f || x != x ? FromBits(0x7fc00000u) : y;
}

// log(1 + x) for x >= 0: the rounding error of 1 + x is put back by a first-order correction.
LODE_FN float Log1p(float x) {
  const float u = Add(1.0f, x);
  const float c = Div(Sub(x, Sub(u, 1.0f)), u);
  const float y = Add(Log(u), c);
  return u == FromBits(0x7f800000u) ? u : y;
}

LODE_FN float Sigmoid(float x) { return Div(1.0f, Add(1.0f, Exp(-x))); }
LODE_FN float Silu(float x) { return Mul(x, Sigmoid(x)); }
LODE_FN float Softplus(float x) {
  const float y = Log1p(Exp(x > 20.0f ? 20.0f : x));
  return x > 20.0f ? x : y;
}
// 1/sqrt is an IEEE square root, then an IEEE division.
LODE_FN float InvSqrt(float x) { return Div(1.0f, Sqrt(x)); }

// ---- joins of partial sums ---------------------------------------------------------------------------------------------
// The 32 partials of every float reduction are joined by the tree 16-8-4-2-1: p[i] += p[i + w] for w = 16, 8, 4, 2, 1.
LODE_FN float JoinPartials(float* p) {
  for (int w = kPartials / 2; w >= 1; w /= 2) {
    for (int i = 0; i < w; ++i) p[i] = Add(p[i], p[i + w]);
  }
  return p[0];
}

// ---- 16-bit floats -------------------------------------------------------------------------------------------------------
// Exact widening, denormals and infinities included (NaN payloads are kept).
LODE_FN float FromBf16(uint16_t h) { return FromBits(static_cast<uint32_t>(h) << 16); }
LODE_FN float FromF16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t mag = h & 0x7fffu;
  // Normal numbers: rebias. Denormals: mag * 2^-24 is exact. Infinity and NaN: exponent all ones.
  const uint32_t normal = (mag << 13) + 0x38000000u;
  const uint32_t special = (mag << 13) | 0x7f800000u;
  const uint32_t denormal = BitsOf(Mul(static_cast<float>(static_cast<int32_t>(mag)), 5.9604644775390625e-8f));
  const uint32_t bits = mag >= 0x7c00u ? special : (mag >= 0x0400u ? normal : denormal);
  return FromBits(bits | sign);
}
// Round to nearest even; overflow gives infinity, NaN a quiet NaN, small values denormals.
LODE_FN uint16_t ToF16(float x) {
  const uint32_t bits = BitsOf(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t mag = bits & 0x7fffffffu;
  const uint32_t rounded = mag + 0xfffu + ((mag >> 13) & 1u);
  const uint32_t normal = (rounded - 0x38000000u) >> 13;
  // Below 2^-14: adding 0.5 aligns the binary point at 2^-24, so the IEEE addition itself rounds.
  const uint32_t denormal = BitsOf(Add(FromBits(mag), 0.5f)) - 0x3f000000u;
  uint32_t h = mag < 0x38800000u ? denormal : normal;
  h = rounded >= 0x47800000u ? 0x7c00u : h;
  h = mag > 0x7f800000u ? 0x7e00u : h;
  return static_cast<uint16_t>(h | sign);
}

// ---- counter-based random numbers --------------------------------------------------------------------------------------
struct Random4 {
  uint32_t v[4];
};
// Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
LODE_FN Random4 Philox(uint64_t key, uint64_t counter_lo, uint64_t counter_hi) {
  uint32_t c0 = static_cast<uint32_t>(counter_lo), c1 = static_cast<uint32_t>(counter_lo >> 32);
  uint32_t c2 = static_cast<uint32_t>(counter_hi), c3 = static_cast<uint32_t>(counter_hi >> 32);
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c0;
    const uint64_t p1 = static_cast<uint64_t>(0xCD9E8D57u) * c2;
    const uint32_t n0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    const uint32_t n2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c0 = n0;
    c1 = static_cast<uint32_t>(p1);
    c2 = n2;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// A uniform number strictly inside (0, 1): 23 random bits and a half, exact in float.
LODE_FN float UniformOpen(uint32_t bits) {
  return Mul(Add(static_cast<float>(static_cast<int32_t>(bits >> 9)), 0.5f), 1.1920928955078125e-7f);
}
// The Gumbel variate of (seed, position, token, stream): argmax over tokens of logit/T + Gumbel is a draw from the softmax.
LODE_FN float Gumbel(uint64_t seed, uint32_t position, uint32_t token, uint32_t stream) {
  const Random4 r = Philox(seed, (static_cast<uint64_t>(position) << 32) | token, stream);
  return -Log(-Log(UniformOpen(r.v[0])));
}

}  // namespace canonical
}  // namespace lode
