// Float sums on the device in the canonical order: lane l of a warp is partial l, elements l, l +
// 32,
// ... in turn; partials join by the tree 16-8-4-2-1, which exchanges between lanes follow exactly
// because additions commute. Device code.
#pragma once

#include "kernels/cuda/platform.h"

namespace lode::cuda {

// Every lane gets the joined sum.
LODE_DEVICE float JoinLanes(float p) {
  LODE_UNROLL
  for (uint32_t w = 16; w >= 1; w /= 2) p = canonical::Add(p, ShuffleXor(p, w));
  return p;
}

// One warp: a . b, any n. Every lane gets the result.
LODE_DEVICE float WarpDot(const float* a, const float* b, uint32_t n) {
  float p = 0;
  for (uint32_t i = ThreadId() % 32; i < n; i += 32) p = canonical::Fma(a[i], b[i], p);
  return JoinLanes(p);
}

// Exact maximum over the warp; NaN loses.
LODE_DEVICE float WarpMax(float x) {
  LODE_UNROLL
  for (uint32_t w = 16; w >= 1; w /= 2) x = canonical::Max(x, ShuffleXor(x, w));
  return x;
}

// A whole block of threads: a . b for long vectors in device memory. All threads fetch, the first
// warp multiplies; its lanes get the result. Ends with a barrier.
inline constexpr uint32_t kDotStage = 4096;  // elements of each vector in shared memory
LODE_DEVICE float BlockDot(const float* a, const float* b, uint32_t n, float* shared_a,
                           float* shared_b) {
  const uint32_t t = ThreadId();
  float p = 0;
  for (uint32_t base = 0; base < n; base += kDotStage) {
    const uint32_t m = n - base < kDotStage ? n - base : kDotStage;
    for (uint32_t i = t; i < m; i += ThreadCount()) {
      shared_a[i] = a[base + i];
      shared_b[i] = b[base + i];
    }
    SyncBlock();
    if (t < 32) {
      for (uint32_t i = t; i < m; i += 32) p = canonical::Fma(shared_a[i], shared_b[i], p);
    }
    SyncBlock();
  }
  return t < 32 ? JoinLanes(p) : 0;
}
static_assert(kDotStage % canonical::kPartials == 0);

// The factor of rms_norm over x[n] in shared memory, for all threads of the block; `slot` is one
// shared float. Barriers before (x is complete) and after.
LODE_DEVICE float BlockRmsScale(const float* x, uint32_t n, float eps, float* slot) {
  using namespace canonical;
  SyncBlock();
  if (ThreadId() < 32) {
    const float mean = Div(WarpDot(x, x, n), static_cast<float>(n));
    if (ThreadId() == 0) *slot = InvSqrt(Add(mean, eps));
  }
  SyncBlock();
  return *slot;
}

}  // namespace lode::cuda
