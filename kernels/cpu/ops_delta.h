// Gated DeltaNet: causal convolution, gates and one step of the recurrence S <- g S + k (x) beta (v
// - k^T g S), o = q^T S. A step works on one block of kDeltaColumns value columns, packed
// [key][column]: 8 KiB for 128 keys, which stays in the first-level cache over all rows of a
// window. Columns are independent, so blocks spread over threads freely. Roofline: 5 flops per
// state value and row; bound by the first-level cache, about 1 us per block and row with AVX-512.
// Included by kernels/cpu/ops_impl.h. Formulas: docs/design/arithmetic.md, "Operators".
#pragma once

#include "kernels/canonical.h"
#include "kernels/ops.h"

namespace lode {
namespace {

void conv_silu(const float* const* x, uint32_t taps, const float* w, size_t w_stride, size_t n,
               float* out) {
  for (size_t i = 0; i < n; ++i) out[i] = 0.0f;
  for (uint32_t t = 0; t < taps; ++t) {
    if (x[t] == nullptr) continue;  // before the sequence: a zero term
    const float* xt = x[t];
    const float* wt = w + t * w_stride;
    for (size_t i = 0; i < n; ++i) out[i] = canonical::Fma(wt[i], xt[i], out[i]);
  }
  for (size_t i = 0; i < n; ++i) out[i] = canonical::Silu(out[i]);
}

void delta_gates(const float* b, const float* a, const float* ssm_a, const float* ssm_dt, size_t n,
                 float* beta, float* g) {
  for (size_t i = 0; i < n; ++i) {
    beta[i] = canonical::Sigmoid(b[i]);
    g[i] = canonical::Exp(
        canonical::Mul(ssm_a[i], canonical::Softplus(canonical::Add(a[i], ssm_dt[i]))));
  }
}

static_assert(kDeltaColumns == 16, "delta_step works on Simd::V16");

// The join tree 16-8-4-2-1 of the partials, depth first: with kLive partials alive, partial i is
// the sum of partials i and i + kLive one level further out; at 32 they are the leaves. So six
// vectors are live at most, never all 32.
template <int kLive, typename Leaf>
inline __attribute__((always_inline)) Simd::V16 JoinTree(const Leaf& leaf, uint32_t i) {
  if constexpr (kLive == canonical::kPartials) {
    return leaf(i);
  } else {
    const Simd::V16 low = JoinTree<2 * kLive>(leaf, i);
    return Simd::Add16(low, JoinTree<2 * kLive>(leaf, i + kLive));
  }
}

void delta_step(float* s, uint32_t keys, const float* kn, const float* qn, const float* v,
                float beta, float g, float* out) {
  const Simd::V16 decay = Simd::SetAll16(g);
  // Decay, and the value that the decayed state predicts for this key.
  const auto predict = [&](uint32_t first) __attribute__((always_inline)) {
    Simd::V16 p = Simd::SetAll16(0.0f);
    for (uint32_t k = first; k < keys; k += canonical::kPartials) {
      float* row = s + static_cast<size_t>(k) * kDeltaColumns;
      const Simd::V16 decayed = Simd::Mul16(decay, Simd::Load16(row));
      Simd::Store16(row, decayed);
      p = Simd::Fma16(Simd::SetAll16(kn[k]), decayed, p);
    }
    return p;
  };
  const Simd::V16 error = Simd::Sub16(Simd::Load16(v), JoinTree<1>(predict, 0));
  const Simd::V16 delta = Simd::Mul16(Simd::SetAll16(beta), error);
  const auto update = [&](uint32_t k) __attribute__((always_inline)) {
    float* row = s + static_cast<size_t>(k) * kDeltaColumns;
    const Simd::V16 updated = Simd::Fma16(Simd::SetAll16(kn[k]), delta, Simd::Load16(row));
    Simd::Store16(row, updated);
    return updated;
  };
  if (qn == nullptr) {  // folding an accepted row: nobody reads its output
    for (uint32_t k = 0; k < keys; ++k) update(k);
    return;
  }
  const auto answer = [&](uint32_t first) __attribute__((always_inline)) {
    Simd::V16 p = Simd::SetAll16(0.0f);
    for (uint32_t k = first; k < keys; k += canonical::kPartials) {
      p = Simd::Fma16(Simd::SetAll16(qn[k]), update(k), p);
    }
    return p;
  };
  Simd::Store16(out, JoinTree<1>(answer, 0));
}

}  // namespace
}  // namespace lode
