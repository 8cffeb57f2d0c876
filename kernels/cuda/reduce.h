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

// Eight values of every lane joined at a time, each as JoinLanes does it: of every pair of lanes
// that meet, one goes on with the upper half of the values and the other with the lower one, so
// eight joins are 9 exchanges instead of 40. Lane l gets the sum of value l / 4.
LODE_DEVICE float JoinEight(const float (&p)[8]) {
  using namespace canonical;
  const uint32_t lane = ThreadId() % 32;
  float v[8];
  LODE_UNROLL
  for (uint32_t i = 0; i < 8; ++i) v[i] = p[i];
  LODE_UNROLL
  for (uint32_t w = 16, half = 4; w >= 4; w /= 2, half /= 2) {
    const bool upper = (lane & w) != 0;
    LODE_UNROLL
    for (uint32_t i = 0; i < 4; ++i) {
      if (i >= half) continue;
      const float keep = upper ? v[i + half] : v[i], give = upper ? v[i] : v[i + half];
      v[i] = Add(keep, ShuffleXor(give, w));
    }
  }
  v[0] = Add(v[0], ShuffleXor(v[0], 2));
  return Add(v[0], ShuffleXor(v[0], 1));
}

// One warp: a . b, any n. Every lane gets the result.
LODE_DEVICE float WarpDot(const float* a, const float* b, uint32_t n) {
  constexpr uint32_t kAhead = 8;  // loads of each vector in flight
  float p = 0;
  uint32_t i = ThreadId() % 32;
  for (; i + 32 * (kAhead - 1) < n; i += 32 * kAhead) {
    float u[kAhead], v[kAhead];
    LODE_UNROLL
    for (uint32_t j = 0; j < kAhead; ++j) u[j] = a[i + 32 * j], v[j] = b[i + 32 * j];
    LODE_UNROLL
    for (uint32_t j = 0; j < kAhead; ++j) p = canonical::Fma(u[j], v[j], p);
  }
  for (; i < n; i += 32) p = canonical::Fma(a[i], b[i], p);
  return JoinLanes(p);
}

// Exact maximum over the warp; NaN loses.
LODE_DEVICE float WarpMax(float x) {
  LODE_UNROLL
  for (uint32_t w = 16; w >= 1; w /= 2) x = canonical::Max(x, ShuffleXor(x, w));
  return x;
}

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
