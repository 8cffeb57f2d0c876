// Norms, hyper-connections, gates and rotary embedding: the element-wise operators of the model and
// their reductions. Included by kernels/cpu/ops_impl.h once per instruction set, after `dot` and
// `rms_norm`; loops are written so that the compiler vectorises them, which cannot change a bit
// (canonical.h). Formulas: docs/design/arithmetic.md, "Operators".
#pragma once

#include "kernels/canonical.h"
#include "kernels/canonical_trig.h"
#include "kernels/ops.h"

namespace lode {
namespace {

namespace cn = canonical;

void l2_norm(const float* x, size_t n, float eps, float scale, float* out) {
  const float length = cn::Sqrt(cn::Add(dot(x, x, n), eps));
  for (size_t i = 0; i < n; ++i) out[i] = cn::Mul(cn::Div(x[i], length), scale);
}

void rms_norm_gate(const float* x, const float* w, const float* z, size_t n, float eps,
                   float* out) {
  rms_norm(x, w, n, eps, out);
  for (size_t i = 0; i < n; ++i) out[i] = cn::Mul(out[i], cn::Sigmoid(z[i]));
}

void hc_gate(const float* l, size_t n, float inv_streams, float* u) {
  for (size_t i = 0; i < n; ++i) u[i] = cn::Silu(cn::Mul(l[i], inv_streams));
}

void hc_mix(const float* up, const float* norm, uint32_t streams, size_t stride, size_t n,
            float inv_streams, float* x) {
  for (size_t i = 0; i < n; ++i) x[i] = cn::Mul(cn::Sigmoid(up[i]), norm[i]);
  for (uint32_t s = 1; s < streams; ++s) {
    const float* up_s = up + s * stride;
    const float* norm_s = norm + s * stride;
    for (size_t i = 0; i < n; ++i) x[i] = cn::Add(x[i], cn::Mul(cn::Sigmoid(up_s[i]), norm_s[i]));
  }
  for (size_t i = 0; i < n; ++i) x[i] = cn::Mul(x[i], inv_streams);
}

float hc_inject(const float* norm, const float* w, size_t n, float inv_streams) {
  return cn::Mul(2.0f, cn::Sigmoid(cn::Mul(dot(norm, w, n), inv_streams)));
}

void hc_write(const float* y, float inject, size_t n, float* r) {
  for (size_t i = 0; i < n; ++i) r[i] = cn::Fma(inject, y[i], r[i]);
}

void swiglu(const float* gate, const float* up, size_t n, float* out) {
  for (size_t i = 0; i < n; ++i) out[i] = cn::Mul(cn::Silu(gate[i]), up[i]);
}

float sigmoid_dot(const float* x, const float* w, size_t n) { return cn::Sigmoid(dot(x, w, n)); }

void rope_table(uint32_t position, const float* inv_freq, uint32_t pairs, float* sin, float* cos) {
  const float p =
      static_cast<float>(static_cast<int32_t>(position));  // exact: positions stay below 2^20
  for (uint32_t i = 0; i < pairs; ++i) {
    const cn::SinCosResult r = cn::SinCos(cn::Mul(p, inv_freq[i]));
    sin[i] = r.sin;
    cos[i] = r.cos;
  }
}

void rope(float* x, uint32_t pairs, const float* sin, const float* cos) {
  float* y = x + pairs;
  for (uint32_t i = 0; i < pairs; ++i) {
    const float a = x[i], b = y[i];
    x[i] = cn::Sub(cn::Mul(a, cos[i]), cn::Mul(b, sin[i]));
    y[i] = cn::Add(cn::Mul(b, cos[i]), cn::Mul(a, sin[i]));
  }
}

// ---- n-gram layer
void ple_gate(const float* key, const float* query, const float* value, size_t n, float* out) {
  const float d =
      cn::Mul(dot(key, query, n), cn::InvSqrt(static_cast<float>(static_cast<int32_t>(n))));
  const float root = cn::Sqrt(cn::Max(1e-6f, cn::Abs(d)));
  const float signed_root = d > 0.0f ? root : (d < 0.0f ? -root : 0.0f);
  const float gate = cn::Sigmoid(signed_root);
  for (size_t i = 0; i < n; ++i) out[i] = cn::Mul(gate, value[i]);
}

void ple_add(const float* gated, const float* z, size_t n, float* r) {
  for (size_t i = 0; i < n; ++i) r[i] = cn::Add(cn::Add(r[i], gated[i]), z[i]);
}

bool all_finite(const float* x, size_t n) {
  uint32_t bad = 0;
  for (size_t i = 0; i < n; ++i) bad |= cn::IsFinite(x[i]) ? 0u : 1u;
  return bad == 0;
}

}  // namespace
}  // namespace lode
