// Float operators of the model as each instruction set exports them: one list, one definition (kernels/cpu/ops_impl.h),
// compiled once per ISA with that ISA's dot product. An operator works on one row of a window and one unit (head, stream,
// value column range), so that a device may spread units over threads without changing a bit.
// Formulas and orders: docs/design/arithmetic.md. All vectors are contiguous floats unless said otherwise.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lode {

// X(return type, name, (arguments))
#define LODE_OPS(X)                                                                                                      \
  /* sum of a[i]*b[i]: 32 interleaved fma partials, tree join. Any n. */                                                 \
  X(float, dot, (const float* a, const float* b, size_t n))                                                             \
  /* out = x * (1/sqrt(mean(x^2) + eps)) * w; out may be x */                                                           \
  X(void, rms_norm, (const float* x, const float* w, size_t n, float eps, float* out))

}  // namespace lode
