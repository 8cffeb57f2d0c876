// Activation quantisation, the one definition for every instruction set
// (docs/design/arithmetic.md); plain loops that the compiler vectorises, which cannot change a bit.
// Called once per window row and weight block length.
//
//   amax = max |x| of the block; d = amax / 127 (IEEE division); d < 2^-100: d = 0 and all q = 0
//   q = round-to-nearest-even(x * inv), inv = 1 / d, the product rounded to fp32 first
//
// |q| <= 127 without clamping: with u = 2^-24, d >= (amax / 127)(1 - u), inv <= (1 / d)(1 + u), |x
// * inv| rounded is at most 127 (1 + u)^2 / (1 - u) < 127.0001, which rounds to 127. No
// intermediate is denormal or infinite, as 2^-100 <= d < 2^122.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/canonical.h"

namespace lode {
namespace {

constexpr float kTiniestScale = 7.888609052210118e-31f;  // 2^-100

inline void QuantizeBlock(const float* x, uint32_t block_len, float d, int8_t* q, int16_t* sum16) {
  // Adding 1.5 * 2^23 leaves the value, rounded to the nearest even integer, in the low mantissa
  // bits.
  constexpr float kMagic = 12582912.0f;
  const bool tiny = d == 0.0f;
  const float inv = tiny ? 0.0f : canonical::Div(1.0f, d);
  for (uint32_t i = 0; i < block_len; ++i) {
    const float t = canonical::Mul(x[i], inv);
    const uint32_t rounded =
        canonical::BitsOf(canonical::Add(t, kMagic)) - canonical::BitsOf(kMagic);
    q[i] = static_cast<int8_t>(rounded);
  }
  for (uint32_t g = 0; g < block_len / 16; ++g) {
    int32_t sum = 0;
    for (uint32_t i = 0; i < 16; ++i) sum += q[16 * g + i];
    sum16[g] = static_cast<int16_t>(sum);
  }
}

inline bool Quantize(const float* x, size_t n, uint32_t block_len, int8_t* q, float* d,
                     int16_t* sum16) {
  for (size_t b = 0; b < n / block_len; ++b) {
    const float* xb = x + b * block_len;
    // Magnitudes compare as integers; infinity and NaN are the largest.
    int32_t amax_bits = 0;
    for (uint32_t i = 0; i < block_len; ++i) {
      const int32_t bits = static_cast<int32_t>(canonical::BitsOf(xb[i]) & 0x7fffffffu);
      amax_bits = bits > amax_bits ? bits : amax_bits;
    }
    if (amax_bits >= 0x7f800000) return false;
    const float scale =
        canonical::Div(canonical::FromBits(static_cast<uint32_t>(amax_bits)), 127.0f);
    d[b] = scale < kTiniestScale ? 0.0f : scale;
    QuantizeBlock(xb, block_len, d[b], q + b * block_len, sum16 + b * (block_len / 16));
  }
  return true;
}

}  // namespace
}  // namespace lode
