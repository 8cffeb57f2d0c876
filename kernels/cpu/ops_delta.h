// Gated DeltaNet: causal convolution, gates and one step of the recurrence S <- g S + k (x) beta (v - k^T g S), o = q^T S.
// A step works on one block of kDeltaColumns value columns, packed [key][column]: 8 KiB for 128 keys, which stays in the
// first-level cache over all rows of a window. Columns are independent, so blocks spread over threads freely.
// Roofline: 5 flops per state value and row; bound by the first-level cache, about 1 us per block and row with AVX-512.
// Included by kernels/cpu/ops_impl.h. Formulas: docs/design/arithmetic.md, "Operators".
#pragma once

#include "kernels/canonical.h"
#include "kernels/ops.h"

namespace lode {
namespace {

void conv_silu(const float* const* x, uint32_t taps, const float* w, size_t w_stride, size_t n, float* out) {
  for (size_t i = 0; i < n; ++i) out[i] = 0.0f;
  for (uint32_t t = 0; t < taps; ++t) {
    if (x[t] == nullptr) continue;  // before the sequence: a zero term
    const float* xt = x[t];
    const float* wt = w + t * w_stride;
    for (size_t i = 0; i < n; ++i) out[i] = canonical::Fma(wt[i], xt[i], out[i]);
  }
  for (size_t i = 0; i < n; ++i) out[i] = canonical::Silu(out[i]);
}

void delta_gates(const float* b, const float* a, const float* ssm_a, const float* ssm_dt, size_t n, float* beta,
                 float* g) {
  for (size_t i = 0; i < n; ++i) {
    beta[i] = canonical::Sigmoid(b[i]);
    g[i] = canonical::Exp(canonical::Mul(ssm_a[i], canonical::Softplus(canonical::Add(a[i], ssm_dt[i]))));
  }
}

// One value column block as the compiler keeps it in registers.
struct DeltaColumns {
  float c[kDeltaColumns];
};

// The join tree 16-8-4-2-1 over partials, depth first: leaves come in bit-reversed order, and after leaf number i as many
// levels join as i + 1 has trailing zero bits. Six blocks are live at most, never all 32.
template <typename Leaf>
inline __attribute__((always_inline)) void SumPartials(const Leaf& leaf, float* out) {
  static_assert(canonical::kPartials == 32);
  DeltaColumns stack[6];
  int depth = 0;
#pragma GCC unroll 32
  for (int i = 0; i < 32; ++i) {
    const int index = ((i & 1) << 4) | ((i & 2) << 2) | (i & 4) | ((i & 8) >> 2) | ((i & 16) >> 4);
    leaf(index, stack[depth].c);
    ++depth;
    for (int bits = i + 1; (bits & 1) == 0; bits >>= 1) {
      float* a = stack[depth - 2].c;
      const float* b = stack[depth - 1].c;
      for (uint32_t c = 0; c < kDeltaColumns; ++c) a[c] = canonical::Add(a[c], b[c]);
      --depth;
    }
  }
  for (uint32_t c = 0; c < kDeltaColumns; ++c) out[c] = stack[0].c[c];
}

void delta_step(float* s, uint32_t keys, const float* kn, const float* qn, const float* v, float beta, float g,
                float* out) {
  alignas(64) float r[kDeltaColumns];
  // Decay, and the value that the decayed state predicts for this key.
  SumPartials(
      [&](int first, float* p) __attribute__((always_inline)) {
        for (uint32_t c = 0; c < kDeltaColumns; ++c) p[c] = 0.0f;
        for (uint32_t k = first; k < keys; k += canonical::kPartials) {
          float* row = s + static_cast<size_t>(k) * kDeltaColumns;
          for (uint32_t c = 0; c < kDeltaColumns; ++c) {
            row[c] = canonical::Mul(g, row[c]);
            p[c] = canonical::Fma(kn[k], row[c], p[c]);
          }
        }
      },
      r);
  alignas(64) float delta[kDeltaColumns];
  for (uint32_t c = 0; c < kDeltaColumns; ++c) delta[c] = canonical::Mul(beta, canonical::Sub(v[c], r[c]));
  if (qn == nullptr) {  // folding an accepted row: nobody reads its output
    for (uint32_t k = 0; k < keys; ++k) {
      float* row = s + static_cast<size_t>(k) * kDeltaColumns;
      for (uint32_t c = 0; c < kDeltaColumns; ++c) row[c] = canonical::Fma(kn[k], delta[c], row[c]);
    }
    return;
  }
  SumPartials(
      [&](int first, float* p) __attribute__((always_inline)) {
        for (uint32_t c = 0; c < kDeltaColumns; ++c) p[c] = 0.0f;
        for (uint32_t k = first; k < keys; k += canonical::kPartials) {
          float* row = s + static_cast<size_t>(k) * kDeltaColumns;
          for (uint32_t c = 0; c < kDeltaColumns; ++c) {
            row[c] = canonical::Fma(kn[k], delta[c], row[c]);
            p[c] = canonical::Fma(qn[k], row[c], p[c]);
          }
        }
      },
      out);
}

}  // namespace
}  // namespace lode
