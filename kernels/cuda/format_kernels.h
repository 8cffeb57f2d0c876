// Kernels that exist once per weight type: products of dense matrices, products of listed experts,
// dequantised rows. A source file instantiates a family of types by LODE_CUDA_FORMAT(name), which
// defines the type's row of dispatch.cc. Split into few files, so that nvcc's time stays bearable.
#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/cuda/mat_kernels.h"
#include "kernels/cuda/product.h"

namespace lode::cuda {

// ---- listed experts
// A block's work: tiles of the list's slow entries first when it is one of the slow blocks.
struct ListWalk {
  uint32_t next, end, step;
};
LODE_DEVICE ListWalk WalkList(const ExpertProduct& p, uint32_t tiles) {
  const uint32_t n = p.list->n_entries, slow = p.list->n_slow < n ? p.list->n_slow : n;
  const uint32_t slow_blocks = slow == 0 ? 0 : (slow == n ? GridX() : p.slow_blocks);
  if (BlockX() < slow_blocks) return {BlockX(), slow * tiles, slow_blocks};
  return {slow * tiles + BlockX() - slow_blocks, n * tiles, GridX() - slow_blocks};
}
// The rows of the window that want an entry, ascending: source row and pair of each.
struct EntryActs {
  uint32_t n;
  uint32_t row[kWindowRowsMax], pair[kWindowRowsMax];
};
LODE_DEVICE void ListActs(const ExpertEntry& entry, uint32_t experts_used, EntryActs* acts) {
  uint32_t n = 0;
  for (uint32_t row = 0; row < kWindowRowsMax; ++row) {
    if ((entry.rows >> row & 1u) == 0) continue;
    acts->row[n] = row;
    acts->pair[n++] = row * experts_used + entry.order[row];
  }
  acts->n = n;
}
LODE_DEVICE uint32_t TilesOf(uint32_t rows, uint32_t tile_rows) {
  return (rows + tile_rows - 1) / tile_rows;
}

// Rows of gate and up side by side: half a tile each. The chain of additions of a value and the
// swiglu that joins two of them are different threads, so sums pass through shared memory.
template <class F>
LODE_KERNEL(kProductThreadsMax)
GateUpKernel(ExpertProduct p, uint32_t tile_rows, uint32_t span) {
  LetNextStart();
  WaitForPrevious();
  LODE_SHARED EntryActs acts;
  LODE_SHARED float sums[kTileRowsMax][kWindowRowsMax];
  const uint32_t half = tile_rows / 2, tiles = TilesOf(p.width, half);
  const ListWalk walk = WalkList(p, tiles);
  for (uint32_t item = walk.next; item < walk.end; item += walk.step) {
    const ExpertEntry& entry = p.list->entries[item / tiles];
    const uint32_t first = item % tiles * half, rows = entry.width_end - entry.width_begin;
    if (first >= rows) continue;
    SyncBlock();  // the last item's sums have been read
    if (ThreadId() == 0) ListActs(entry, p.experts_used, &acts);
    SyncBlock();
    if (acts.n == 0) continue;
    const uint32_t n = rows - first < half ? rows - first : half;
    const Tile tile = {.w = entry.gate + first * p.row_bytes,
                       .w2 = entry.up + first * p.row_bytes,
                       .row_bytes = p.row_bytes,
                       .split = n,
                       .n_rows = 2 * n,
                       .n_acts = acts.n,
                       .acts = acts.row};
    Product<F>(tile, p.source, reinterpret_cast<float*>(DynamicShared()), span,
               [&](uint32_t row, uint32_t act, float value) { sums[row][act] = value; });
    SyncBlock();
    for (uint32_t i = ThreadId(); i < n * acts.n; i += ThreadCount()) {
      const uint32_t row = i % n, act = i / n;
      p.out[static_cast<size_t>(acts.pair[act]) * p.width + entry.width_begin + first + row] =
          canonical::Mul(canonical::Silu(sums[row][act]), sums[n + row][act]);
    }
  }
}

template <class F>
LODE_KERNEL(kProductThreadsMax)
ExpertKernel(ExpertProduct p, uint32_t tile_rows, uint32_t span) {
  LetNextStart();
  WaitForPrevious();
  LODE_SHARED EntryActs acts;
  const bool down = p.matrix == ExpertMatrix::kDown;
  const uint32_t out_rows = down ? p.hidden : p.width, tiles = TilesOf(out_rows, tile_rows);
  const ListWalk walk = WalkList(p, tiles);
  for (uint32_t item = walk.next; item < walk.end; item += walk.step) {
    const ExpertEntry& entry = p.list->entries[item / tiles];
    const uint32_t begin = down ? entry.hidden_begin : entry.width_begin;
    const uint32_t rows = (down ? entry.hidden_end : entry.width_end) - begin;
    const uint32_t first = item % tiles * tile_rows;
    if (first >= rows) continue;
    SyncBlock();  // nobody reads the last item's acts or terms any more
    if (ThreadId() == 0) ListActs(entry, p.experts_used, &acts);
    SyncBlock();
    if (acts.n == 0) continue;
    const uint8_t* w = down ? entry.down : (p.matrix == ExpertMatrix::kUp ? entry.up : entry.gate);
    const Tile tile = {.w = w + first * p.row_bytes,
                       .w2 = nullptr,
                       .row_bytes = p.row_bytes,
                       .split = tile_rows,
                       .n_rows = rows - first < tile_rows ? rows - first : tile_rows,
                       .n_acts = acts.n,
                       .acts = down ? acts.pair : acts.row};
    Product<F>(tile, p.source, reinterpret_cast<float*>(DynamicShared()), span,
               [&](uint32_t row, uint32_t act, float value) {
                 p.out[static_cast<size_t>(acts.pair[act]) * out_rows + begin + first + row] =
                     value;
               });
  }
}

template <class F>
void LaunchGateUp(CUstream_st* stream, const ExpertProduct& product, const ProductShape& shape) {
  const uint32_t span = SpanOf<F>(shape.tile_rows, product.n_rows, product.source.columns);
  LaunchAhead(stream, {product.blocks}, shape.threads,
              TermBytesOf<F>(shape.tile_rows, product.n_rows, span), &GateUpKernel<F>, product,
              shape.tile_rows, span);
}
template <class F>
void LaunchExpert(CUstream_st* stream, const ExpertProduct& product, const ProductShape& shape) {
  const uint32_t span = SpanOf<F>(shape.tile_rows, product.n_rows, product.source.columns);
  LaunchAhead(stream, {product.blocks}, shape.threads,
              TermBytesOf<F>(shape.tile_rows, product.n_rows, span), &ExpertKernel<F>, product,
              shape.tile_rows, span);
}

// ---- rows of a table as floats
inline constexpr uint32_t kDequantThreads = 256;
template <class F>
LODE_KERNEL(kDequantThreads)
DequantKernel(DequantRows rows) {
  LetNextStart();
  WaitForPrevious();
  const uint32_t i = BlockX() * kDequantThreads + ThreadId(), row = BlockY();
  if (i >= rows.n) return;
  const size_t from =
      rows.tokens != nullptr ? static_cast<size_t>(rows.tokens->params.rows[row].token) : row;
  const float value =
      F::Weight(rows.table + from * rows.row_bytes + static_cast<size_t>(i / F::kBlock) * F::kBytes,
                i % F::kBlock);
  float* out = rows.out + static_cast<size_t>(row) * rows.out_stride + i;
  for (uint32_t c = 0; c < rows.copies; ++c) out[static_cast<size_t>(c) * rows.n] = value;
}
template <class F>
void LaunchDequant(CUstream_st* stream, const DequantRows& rows, uint32_t n_rows) {
  LaunchAhead(stream, {(rows.n + kDequantThreads - 1) / kDequantThreads, n_rows}, kDequantThreads,
              0, &DequantKernel<F>, rows);
}

// A type's row of the dispatch table (dispatch.cc).
#define LODE_CUDA_FORMAT(name)                                                                \
  static_assert(decode::name::kBlock == Info(Format::k##name).block_len &&                    \
                decode::name::kBytes == Info(Format::k##name).block_bytes);                   \
  extern const FormatKernels kKernelsOf##name;                                                \
  const FormatKernels kKernelsOf##name = {                                                    \
      &LaunchMat<decode::name>,    &LaunchDequant<decode::name>, &LaunchGateUp<decode::name>, \
      &LaunchExpert<decode::name>, &LaunchSwiglu<decode::name>,  &LaunchNarrow<decode::name>};

}  // namespace lode::cuda
