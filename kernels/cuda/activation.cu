// Kernels that turn vectors into activations: plain quantisation, and swiglu in front of it for the
// shared expert and for listed experts. A warp takes 256 columns (quantize.h). Called by
// gpu_worker/cuda_device*.cc. Bound: latency; a few KiB per row.
#include "kernels/cuda/quantize.h"
#include "kernels/cuda/reduce.h"

namespace lode::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kBlockColumns = kThreads / 32 * kWarpColumns;

uint32_t Blocks(uint32_t n) { return (n + kBlockColumns - 1) / kBlockColumns; }

// First column of this lane, when block x of a grid covers kBlockColumns of them.
LODE_DEVICE uint32_t LaneColumn(uint32_t block) {
  return block * kBlockColumns + ThreadId() * kLaneColumns;
}

LODE_KERNEL(kThreads) QuantizeKernel(QuantizeArgs a) {
  const uint32_t row = BlockY(), column = LaneColumn(BlockX());
  const float* x = a.x + static_cast<size_t>(row) * a.stride;
  float v[kLaneColumns];
  LODE_UNROLL
  for (uint32_t i = 0; i < kLaneColumns; ++i) v[i] = column + i < a.n ? x[column + i] : 0.0f;
  FinishColumns(a.forms, a.check, {row, column, column < a.n}, row, v);
}

// Pair (entry, row) per block: the entry that holds the expert's first rows speaks for it.
LODE_KERNEL(kThreads) HiddenKernel(HiddenArgs a) {
  const uint32_t row = BlockY();
  for (uint32_t e = BlockX(); e < a.list->n_entries; e += GridX()) {
    const ExpertEntry& entry = a.list->entries[e];
    if (entry.width_begin != 0 || (entry.rows >> row & 1u) == 0) continue;
    const uint32_t pair = row * a.experts_used + entry.order[row];
    float* h = a.h + static_cast<size_t>(pair) * a.width;
    for (uint32_t at = 0; at < a.width; at += kBlockColumns) {
      const uint32_t column = at + LaneColumn(0);
      float v[kLaneColumns];
      LODE_UNROLL
      for (uint32_t i = 0; i < kLaneColumns; ++i) {
        const uint32_t c = column + i;
        v[i] = c < a.width ? h[c] : 0.0f;
        if (c < a.width && a.up != nullptr) {
          v[i] =
              canonical::Mul(canonical::Silu(v[i]), a.up[static_cast<size_t>(pair) * a.width + c]);
          h[c] = v[i];
        }
      }
      FinishColumns(a.forms, a.check, {pair, column, column < a.width}, row, v);
    }
  }
}

// The last block of a row: the shared expert's gate, sigmoid(inject . x).
LODE_KERNEL(kThreads) SharedHiddenKernel(SharedHiddenArgs a) {
  LODE_SHARED float stage[2][kDotStage];
  const uint32_t row = BlockY();
  if (BlockX() + 1 == GridX()) {
    const float dot = BlockDot(a.x + static_cast<size_t>(row) * a.hidden, a.inject_weight, a.hidden,
                               stage[0], stage[1]);
    if (ThreadId() == 0) a.inject[row] = canonical::Sigmoid(dot);
    return;
  }
  const uint32_t column = LaneColumn(BlockX());
  float* h = a.gate + static_cast<size_t>(row) * a.width;
  const float* up = a.up + static_cast<size_t>(row) * a.width;
  float v[kLaneColumns];
  LODE_UNROLL
  for (uint32_t i = 0; i < kLaneColumns; ++i) {
    v[i] = 0.0f;
    if (column + i < a.width) {
      v[i] = canonical::Mul(canonical::Silu(h[column + i]), up[column + i]);
      h[column + i] = v[i];
    }
  }
  FinishColumns(a.forms, a.check, {row, column, column < a.width}, row, v);
}

}  // namespace

void LaunchQuantize(CUstream_st* stream, const QuantizeArgs& args, uint32_t n_rows) {
  Launch(stream, {Blocks(args.n), n_rows}, kThreads, 0, &QuantizeKernel, args);
}
void LaunchHidden(CUstream_st* stream, const HiddenArgs& args, uint32_t n_rows) {
  Launch(stream, {n_rows * args.experts_used, n_rows}, kThreads, 0, &HiddenKernel, args);
}
void LaunchSharedHidden(CUstream_st* stream, const SharedHiddenArgs& args, uint32_t n_rows) {
  Launch(stream, {Blocks(args.width) + 1, n_rows}, kThreads, 0, &SharedHiddenKernel, args);
}

}  // namespace lode::cuda
