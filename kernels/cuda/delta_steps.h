// What the kernels of the Gated DeltaNet recurrence share: where ring entries lie, the canonical
// sum over a column's keys, and the end of a launch that folded accepted rows into the state. Four
// lanes share a value column and hold its keys of one residue mod 4 in registers. Device code,
// included by delta.cu and delta_mix.cu.
#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/cuda/reduce.h"

namespace lode::cuda {

inline constexpr uint32_t kLanesPerColumn = 4;
inline constexpr float kL2Eps = 1e-6f;  // inside the root, added to the sum

LODE_DEVICE size_t RingAt(uint32_t slot, uint32_t position, size_t width) {
  return (static_cast<size_t>(slot) * kConvRing + position % kConvRing) * width;
}

// The lane's keys of a vector in shared memory: of x[k], those with k mod 4 = l.
template <uint32_t kJ>
LODE_DEVICE void LaneKeys(const float* x, uint32_t l, float (&own)[kJ]) {
  LODE_UNROLL
  for (uint32_t j = 0; j < kJ; ++j) own[j] = x[kLanesPerColumn * j + l];
}

// The canonical sum over a column's keys of x[k] * s[k], both as the lane's keys. Lane l's belong
// to partials l, l + 4, ..: levels 16, 8, 4 of the tree are additions inside the lane, 2 and 1 are
// exchanges.
template <uint32_t kJ>
LODE_DEVICE float ColumnSum(const float (&x)[kJ], const float (&s)[kJ]) {
  using namespace canonical;
  float p[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  LODE_UNROLL
  for (uint32_t j = 0; j < kJ; ++j) p[j % 8] = Fma(x[j], s[j], p[j % 8]);
  LODE_UNROLL
  for (uint32_t w = 4; w >= 1; w /= 2) {
    LODE_UNROLL
    for (uint32_t i = 0; i < 4; ++i) {
      if (i < w) p[i] = Add(p[i], p[i + w]);
    }
  }
  p[0] = Add(p[0], ShuffleXor(p[0], 2));
  return Add(p[0], ShuffleXor(p[0], 1));
}

// The state after one row: decayed, then moved along the row's key by what its value lacks.
template <uint32_t kJ>
LODE_DEVICE void StepState(const float (&key)[kJ], float v, float beta, float decay,
                           float (&s)[kJ]) {
  using namespace canonical;
  LODE_UNROLL
  for (uint32_t j = 0; j < kJ; ++j) s[j] = Mul(decay, s[j]);
  const float delta = Mul(beta, Sub(v, ColumnSum<kJ>(key, s)));
  LODE_UNROLL
  for (uint32_t j = 0; j < kJ; ++j) s[j] = Fma(key[j], delta, s[j]);
}

// One thread of every block, behind a barrier that follows the block's last look at the old count,
// and behind the wait for the launch ahead. The last block to come says that accepted rows are
// folded: all have read the old count, which is all that the counter has to order; the state itself
// is for launches behind the answer of the layer, which is started strictly (cuda_lanes.cc). Blocks
// of sequences that the window has not got (y beyond n_seqs) do not come.
LODE_DEVICE void ArriveFolded(const WindowBlock* window, uint32_t* folded, uint32_t* finished) {
  const StepParams& p = window->params;
  if (AtomicAdd(finished, 1) + 1 != GridX() * p.n_seqs) return;
  *finished = 0;
  for (uint32_t i = 0; i < p.n_seqs; ++i) folded[p.seqs[i].slot] = p.seqs[i].committed;
}
LODE_DEVICE void FinishFolding(const WindowBlock* window, uint32_t* folded, uint32_t* finished) {
  SyncBlock();
  if (ThreadId() == 0) ArriveFolded(window, folded, finished);
}

}  // namespace lode::cuda
