// The loops of the sampler over the whole vocabulary, compiled
// twice: for every x86-64, and with AVX2 and FMA (canonical::Fma is emulated without the
// instruction: 20 times slower, same bits). Chosen once by CPUID. Used by sampler.cc only.
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

// The value inside a key.
LODE_FN float ValueOfKey(uint64_t key) {
  const uint32_t ordered = static_cast<uint32_t>(key >> 32);
  return canonical::FromBits(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}

}  // namespace lode
