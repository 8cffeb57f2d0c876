// The sum of a long row of floats in the canonical 32 partials, by one block: 31 warps fetch, one
// adds. The partials are chains of n / 32 dependent additions (7,760 at a vocabulary of 248,320,
// some 17 us), so nothing may stand between two of them: the adding warp reads shared memory only,
// which the others fill one stage ahead of it, having asked device memory for the stage after that.
// Called behind the exponentials of a row of logits, by the model's picks (sampling.cu) and the
// draft head's (guess.cu). Device code.
#pragma once

#include "kernels/cuda/reduce.h"

namespace lode::cuda {

inline constexpr uint32_t kRowSumThreads = 1024;                   // of the calling block
inline constexpr uint32_t kRowSumProducers = kRowSumThreads - 32;  // threads that fetch
inline constexpr uint32_t kRowSumEach = 4;  // floats of a fetching thread and stage
inline constexpr uint32_t kRowSumStage = kRowSumEach * kRowSumProducers;
inline constexpr uint32_t kRowSumBytes = 2 * kRowSumStage * sizeof(float);  // shared memory, 31 KiB
static_assert(kRowSumStage % canonical::kPartials == 0);

// What a fetching thread brings of a stage; zeros beyond the end.
struct RowSumFetched {
  float v[kRowSumEach];
};
LODE_DEVICE RowSumFetched RowSumFetch(const float* x, uint32_t n, uint32_t stage) {
  RowSumFetched f;
  LODE_UNROLL
  for (uint32_t k = 0; k < kRowSumEach; ++k) {
    const uint32_t i = stage * kRowSumStage + k * kRowSumProducers + ThreadId() - 32;
    f.v[k] = i < n ? x[i] : 0.0f;
  }
  return f;
}

// x[n], no partial of which may become -0 (exponentials: none is), since zeros are added behind the
// end. `staged`: kRowSumBytes of shared memory, of no use to anybody else meanwhile. Every thread
// of a block of kRowSumThreads calls it; the first warp gets the sum, the others 0. Round r: the
// fetching warps store stage r, the first warp adds stage r - 1.
LODE_DEVICE float RowSum(const float* x, uint32_t n, float* staged) {
  const uint32_t t = ThreadId(), stages = (n + kRowSumStage - 1) / kRowSumStage;
  float p = 0;
  RowSumFetched now = {};
  if (t >= 32) now = RowSumFetch(x, n, 0);
  for (uint32_t r = 0; r <= stages; ++r) {
    if (t >= 32) {
      const RowSumFetched next = RowSumFetch(x, n, r + 1);
      float* to = staged + r % 2 * kRowSumStage;
      LODE_UNROLL
      for (uint32_t k = 0; k < kRowSumEach; ++k) to[k * kRowSumProducers + t - 32] = now.v[k];
      now = next;
    } else if (r > 0) {
      const float* from = staged + (r - 1) % 2 * kRowSumStage;
      LODE_UNROLL
      for (uint32_t j = 0; j < kRowSumStage / 32; ++j) p = canonical::Add(p, from[j * 32 + t]);
    }
    SyncBlock();
  }
  return t < 32 ? JoinLanes(p) : 0;
}

}  // namespace lode::cuda
