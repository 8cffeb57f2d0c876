// The arithmetic of a pick, one token at a time, for host and device (kernels/cuda/sampling.cu),
// and the host's loops over the whole vocabulary, compiled twice: for every x86-64, and with AVX2
// and FMA (canonical::Fma is emulated without the instruction: 20 times slower, same bits). Chosen
// once by CPUID.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/canonical.h"

namespace lode {

struct SamplerCandidate {
  uint64_t key;     // falling value, then rising id, as one falling integer
  uint64_t weight;  // probability relative to the best one, 32 fraction bits
};

struct SamplerMath {
  // Largest value; NaN is passed over, -inf when there is nothing else. Of -0 and +0 either.
  float (*max_of)(const float* logits, size_t n);
  // partials[i % 32] += exp(logits[i] - max), i ascending; NaN counts as -inf.
  void (*add_exp)(const float* logits, size_t n, float max, float* partials);
  // weight = exp(value of key) * 2^32, rounded; values are <= 0.
  void (*fill_weights)(SamplerCandidate* candidates, size_t n);
};
const SamplerMath& GetSamplerMath();
extern const SamplerMath kSamplerMathBase, kSamplerMathFma;

// Not a number counts as impossible.
LODE_FN float CleanLogit(float logit) {
  return logit != logit ? canonical::FromBits(0xff800000u) : logit;
}
// The logit relative to the best one, by temperature: no temperature can overflow, and the best
// candidate is exactly 0.
LODE_FN float ScaledLogit(float logit, float max, float temperature) {
  return logit == max ? 0.0f : canonical::Div(canonical::Sub(logit, max), temperature);
}

// Larger key = larger value, then lower id. -0 and +0 compare equal as floats, so they share a key.
LODE_FN uint64_t KeyOf(float value, uint32_t id) {
  const uint32_t bits = canonical::BitsOf(canonical::Add(value, 0.0f));  // -0 + 0 = +0
  const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return (static_cast<uint64_t>(ordered) << 32) | (0xffffffffu - id);
}
LODE_FN uint32_t IdOfKey(uint64_t key) { return 0xffffffffu - static_cast<uint32_t>(key); }
// The value inside a key.
LODE_FN float ValueOfKey(uint64_t key) {
  const uint32_t ordered = static_cast<uint32_t>(key >> 32);
  return canonical::FromBits(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}

// Probabilities relative to the best candidate's, 32 fraction bits: 2^32 at most, so sums over 2^20
// tokens stay below 2^52. x <= 0.
inline constexpr float kWeightOne = 4294967296.0f;
LODE_FN uint64_t WeightOf(float x) {
  return static_cast<uint64_t>(canonical::Add(canonical::Mul(canonical::Exp(x), kWeightOne), 0.5f));
}
// Target of top-p: ceil(top_p * total) in whole units, at least 1. top_p < 1 has 24 significant
// bits; total < 2^52.
LODE_FN uint64_t TopPTarget(float top_p, uint64_t total) {
  const uint64_t fraction = static_cast<uint64_t>(canonical::Mul(top_p, kWeightOne));
  const uint64_t low = fraction * (total & 0xffffffffu), high = fraction * (total >> 32);
  const uint64_t target = high + ((low + 0xffffffffu) >> 32);
  return target < 1 ? 1 : target > total ? total : target;
}
LODE_FN uint64_t MinPFloor(float min_p) {
  return static_cast<uint64_t>(canonical::Mul(min_p, kWeightOne));
}

}  // namespace lode
