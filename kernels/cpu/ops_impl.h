// The float operators of kernels/ops.h, one definition for every instruction set. Sums go through Dot (the ISA's registers, the
// canonical order); elementwise loops are left to the compiler's vectoriser, which cannot change a bit: contraction is off and
// the canonical functions are branch-free IEEE sequences. A function here has the name and type of its row in LODE_OPS.
// Included by one ISA translation unit after its Simd; called through the kernel table by any compute thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/canonical.h"
#include "kernels/ops.h"

namespace lode {
namespace {

// Sum of a[i] * b[i]: element i belongs to partial i mod 32; the last n mod 32 elements go to partials 0, 1, ...; tree join.
inline float Dot(const float* a, const float* b, size_t n) {
  Simd::V32 acc = Simd::Zero32();
  size_t i = 0;
  for (; i + 32 <= n; i += 32) acc = Simd::Fma32(Simd::Load32(a + i), Simd::Load32(b + i), acc);
  if (i < n) {
    float ra[32] = {}, rb[32] = {};
    std::memcpy(ra, a + i, (n - i) * sizeof(float));
    std::memcpy(rb, b + i, (n - i) * sizeof(float));
    acc = Simd::FmaFirst32(Simd::Load32(ra), Simd::Load32(rb), acc, static_cast<uint32_t>(n - i));
  }
  return Simd::Join32(acc);
}

float dot(const float* a, const float* b, size_t n) { return Dot(a, b, n); }

void rms_norm(const float* x, const float* w, size_t n, float eps, float* out) {
  using namespace canonical;
  const float mean = Div(Dot(x, x, n), static_cast<float>(n));
  const float scale = InvSqrt(Add(mean, eps));
  for (size_t i = 0; i < n; ++i) out[i] = Mul(Mul(x[i], scale), w[i]);
}

}  // namespace
}  // namespace lode

#include "kernels/cpu/ops_norm.h"
#include "kernels/cpu/ops_delta.h"
#include "kernels/cpu/ops_attention.h"
#include "kernels/cpu/ops_route.h"
