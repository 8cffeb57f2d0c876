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
  LetNextStart();
  WaitForPrevious();
  const uint32_t row = BlockY(), column = LaneColumn(BlockX());
  const float* x = a.x + static_cast<size_t>(row) * a.stride;
  float v[kLaneColumns];
  LODE_UNROLL
  for (uint32_t i = 0; i < kLaneColumns; ++i) v[i] = column + i < a.n ? x[column + i] : 0.0f;
  FinishColumns(a.forms, a.check, {row, column, column < a.n}, row, v);
}

// 256 columns of a pair (entry, row) per block: the entry that holds the expert's first rows speaks
// for it.
LODE_KERNEL(kThreads) HiddenKernel(HiddenArgs a) {
  LetNextStart();
  WaitForPrevious();
  LODE_SHARED float h[kThreads];
  const uint32_t row = BlockY(), t = ThreadId(), first = BlockZ() * kThreads;
  const uint32_t left = a.width - first;
  for (uint32_t e = BlockX(); e < a.list->n_entries; e += GridX()) {
    const ExpertEntry& entry = a.list->entries[e];
    if (entry.width_begin != 0 || (entry.rows >> row & 1u) == 0) continue;
    const uint32_t pair = row * a.experts_used + entry.order[row];
    SyncBlock();  // the last pair's values have been read
    if (t < left) {
      const size_t at = static_cast<size_t>(pair) * a.width + first + t;
      float v = a.h[at];
      if (a.up != nullptr) a.h[at] = v = canonical::Mul(canonical::Silu(v), a.up[at]);
      h[t] = v;
    }
    SyncBlock();
    FinishShared(a.forms, a.check, pair, row, first, left < kThreads ? left : kThreads, h);
  }
}

LODE_KERNEL(kThreads) SharedHiddenKernel(SharedHiddenArgs a) {
  LetNextStart();
  WaitForPrevious();
  LODE_SHARED float h[kThreads];
  const uint32_t row = BlockY(), t = ThreadId(), first = BlockX() * kThreads, column = first + t;
  if (column == 0) a.inject[row] = canonical::Sigmoid(a.inject[row]);
  if (column < a.width) {
    const size_t at = static_cast<size_t>(row) * a.width + column;
    float v = a.gate[at];
    if (a.up != nullptr) a.gate[at] = v = canonical::Mul(canonical::Silu(v), a.up[at]);
    h[t] = v;
  }
  SyncBlock();
  const uint32_t left = a.width - first;
  FinishShared(a.forms, a.check, row, row, first, left < kThreads ? left : kThreads, h);
}

}  // namespace

void LaunchQuantize(CUstream_st* stream, const QuantizeArgs& args, uint32_t n_rows) {
  LaunchAhead(stream, {Blocks(args.n), n_rows}, kThreads, 0, &QuantizeKernel, args);
}
void LaunchHidden(CUstream_st* stream, const HiddenArgs& args, uint32_t n_rows) {
  LaunchAhead(stream, {n_rows * args.experts_used, n_rows, (args.width + kThreads - 1) / kThreads},
              kThreads, 0, &HiddenKernel, args);
}
void LaunchSharedHidden(CUstream_st* stream, const SharedHiddenArgs& args, uint32_t n_rows) {
  LaunchAhead(stream, {(args.width + kThreads - 1) / kThreads, n_rows}, kThreads, 0,
              &SharedHiddenKernel, args);
}

}  // namespace lode::cuda
