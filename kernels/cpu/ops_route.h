// Router and combination of experts. A selection is a total order over (probability bits, lower
// id), so it is the same everywhere and never leaves the range of ids, NaN included. Included by
// kernels/cpu/ops_impl.h. Formulas: docs/design/arithmetic.md, "Operators".
#pragma once

#include "kernels/canonical.h"
#include "kernels/ops.h"

namespace lode {
namespace {

void route(const float* logits, uint32_t n, uint32_t k, float* scratch, uint16_t* ids,
           float* weights) {
  float top = canonical::FromBits(0xff800000u);
  for (uint32_t i = 0; i < n; ++i) top = canonical::Max(top, logits[i]);
  float p[canonical::kPartials];
  for (int i = 0; i < canonical::kPartials; ++i) p[i] = 0.0f;
  for (uint32_t i = 0; i < n; ++i) scratch[i] = canonical::Exp(canonical::Sub(logits[i], top));
  for (uint32_t i = 0; i < n; ++i)
    p[i % canonical::kPartials] = canonical::Add(p[i % canonical::kPartials], scratch[i]);
  const float total = canonical::JoinPartials(p);
  for (uint32_t i = 0; i < n; ++i) scratch[i] = canonical::Div(scratch[i], total);
  // k rounds of "highest probability, then lowest id"; a taken entry drops below every other, NaN
  // ranks as zero.
  float sum = 0;
  for (uint32_t r = 0; r < k; ++r) {
    uint32_t best = 0;
    int64_t best_key = -2;
    for (uint32_t i = 0; i < n; ++i) {
      const uint32_t bits = canonical::BitsOf(scratch[i]);
      const int64_t key =
          bits == 0xffffffffu ? -1 : (bits > 0x7f800000u ? 0 : static_cast<int64_t>(bits));
      if (key > best_key) {
        best_key = key;
        best = i;
      }
    }
    ids[r] = static_cast<uint16_t>(best);
    weights[r] = scratch[best];
    scratch[best] = canonical::FromBits(0xffffffffu);
    sum = canonical::Add(sum, weights[r]);
  }
  for (uint32_t r = 0; r < k; ++r) weights[r] = canonical::Div(weights[r], sum);
}

void combine(const float* const* experts, const float* weights, uint32_t k, const float* shared,
             float shared_gate, size_t n, float* y) {
  for (size_t i = 0; i < n; ++i) y[i] = 0.0f;
  for (uint32_t r = 0; r < k; ++r) {
    const float* e = experts[r];
    for (size_t i = 0; i < n; ++i) y[i] = canonical::Fma(weights[r], e[i], y[i]);
  }
  for (size_t i = 0; i < n; ++i) y[i] = canonical::Fma(shared_gate, shared[i], y[i]);
}

}  // namespace
}  // namespace lode
