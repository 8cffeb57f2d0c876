// Kernels that exist once per weight type: products of dense matrices, products of listed experts,
// dequantised rows. A source file instantiates a family of types by LODE_CUDA_FORMAT(name), which
// defines the type's row of dispatch.cc. Split into few files, so that nvcc's time stays bearable.
#pragma once

#include <cstdlib>

#include "kernels/cuda/dense.h"
#include "kernels/cuda/float_product.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/product.h"

namespace lode::cuda {

template <class F>
uint32_t SpanOf(uint32_t tile_rows, uint32_t n_acts, uint32_t columns) {
  if constexpr (F::kBlock == 1) {
    return 0;
  } else {
    return SpanChunks(tile_rows, n_acts, columns / 32);
  }
}
template <class F>
size_t TermBytesOf(uint32_t tile_rows, uint32_t n_acts, uint32_t span) {
  if constexpr (F::kBlock == 1) {
    return 0;
  } else {
    return sizeof(float) * tile_rows * n_acts * TermStride(F::kChunks, span);
  }
}
constexpr bool IsFloat(Format format) {
  return format == Format::kF32 || format == Format::kF16 || format == Format::kBF16;
}
LODE_FN bool IsFloatTask(const MatTask& task) {
  return task.format == Format::kF32 || task.format == Format::kF16 || task.format == Format::kBF16;
}

// ---- dense matrices: a block of threads per tile of rows; the tasks' tiles follow each other
// What this block would wait for in device memory is on its way to the L2 before the launch ahead
// of it has ended: weights never change.
LODE_DEVICE void PrefetchTile(const uint8_t* w, size_t bytes) {
  constexpr uint32_t kLine = 128;
  for (size_t at = size_t{ThreadId()} * kLine; at < bytes; at += size_t{ThreadCount()} * kLine)
    PrefetchLine(w + at);
}

// The rows of the window that a product is for, ascending.
struct ListedRows {
  uint32_t n;
  uint32_t row[kWindowRowsMax];
};
// All threads; ends with a barrier.
LODE_DEVICE void ListRows(const MatBatch& batch, ListedRows* listed) {
  const uint32_t t = ThreadId();
  if (t < 32) {
    const bool wanted = t < batch.n_rows && (batch.logits_only == nullptr ||
                                             batch.logits_only->params.rows[t].needs_logits != 0);
    const uint32_t mask = Ballot(wanted);
    if (wanted) listed->row[PopCount(mask & ((1u << t) - 1))] = t;
    if (t == 0) listed->n = PopCount(mask);
  }
  SyncBlock();
}

// How a launch is cut. staged_at: bytes of the terms in front of staged rows; 0: not staged.
struct MatCut {
  uint32_t tile_rows, span, staged_at;
  FloatCut floats;
  bool early;
  uint32_t ahead;  // tiles: about as many as run at a time
};

// A tile of staged rows (dense.h); with swiglu half a tile of gate and half a tile of up.
template <class F>
LODE_DEVICE void StagedTile(const MatBatch& batch, const MatCut& cut, uint32_t t,
                            ListedRows* listed) {
  using namespace canonical;
  LODE_SHARED float sums[kTileRowsMax][kWindowRowsMax];
  const MatTask& task = batch.tasks[t];
  const uint32_t part = batch.swiglu ? cut.tile_rows / 2 : cut.tile_rows;
  const uint32_t first = (BlockX() - task.first_block) * part, left = task.rows - first;
  const uint32_t n = left < part ? left : part;
  const DenseTile tile = {
      .w = task.w + first * task.row_bytes,
      .row_bytes = task.row_bytes,
      .part_bytes = batch.swiglu ? static_cast<size_t>(batch.tasks[t + 1].w - task.w) : 0,
      .parts = batch.swiglu ? 2u : 1u,
      .part_rows = part,
      .valid = n};
  float* terms = reinterpret_cast<float*>(DynamicShared());
  uint8_t* staged = DynamicShared() + cut.staged_at;
  StageTile(tile, staged);
  // What a later block will copy comes into the L2 meanwhile: more bytes on their way than the
  // blocks that fit at a time can ask for.
  const uint32_t later = first + cut.ahead * part;
  if (cut.ahead != 0 && later < task.rows) {
    const uint32_t rows = task.rows - later < part ? task.rows - later : part;
    for (uint32_t p = 0; p < tile.parts; ++p)
      PrefetchTile(task.w + p * tile.part_bytes + later * task.row_bytes, rows * task.row_bytes);
  }
  if (cut.early) LetNextStart();
  WaitForPrevious();
  ListRows(batch, listed);
  const uint32_t acts = listed->n, columns = batch.source.columns;
  WaitForCopies();
  if (acts == 0) return;
  SyncBlock();
  DenseTerms<F, false>(tile, staged, batch.source.form, listed->row, acts, columns, terms);
  LetNextStart();
  SyncBlock();
  float* y = task.y + first;
  const size_t stride = task.rows;
  if (!batch.swiglu) {
    DenseChains<F>(n, acts, columns, terms, [&](uint32_t row, uint32_t act, float value) {
      y[listed->row[act] * stride + row] = value;
    });
    return;
  }
  DenseChains<F>(2 * part, acts, columns, terms,
                 [&](uint32_t row, uint32_t act, float value) { sums[row][act] = value; });
  SyncBlock();
  for (uint32_t i = ThreadId(); i < n * acts; i += ThreadCount()) {
    const uint32_t row = i % n, act = i / n;
    y[listed->row[act] * stride + row] = Mul(Silu(sums[row][act]), sums[part + row][act]);
  }
}

template <class F>
LODE_KERNEL(kProductThreadsMax)
MatKernel(MatBatch batch, MatCut cut) {
  LODE_SHARED ListedRows listed;
  uint32_t t = batch.n_tasks - 1;
  while (batch.tasks[t].first_block > BlockX()) --t;
  const MatTask& task = batch.tasks[t];
  const uint32_t item = BlockX() - task.first_block;
  float* shared = reinterpret_cast<float*>(DynamicShared());
  const auto sink_at = [&](float* y, uint32_t row, uint32_t act, float value) {
    y[static_cast<size_t>(listed.row[act]) * task.rows + row] = value;
  };
  if (IsFloatTask(task)) {
    LetNextStart();
    const uint32_t groups = (batch.n_rows + cut.floats.acts - 1) / cut.floats.acts;
    const uint32_t first = item / groups * cut.floats.rows, left = task.rows - first;
    StagedFloatProduct(
        task.format, task.w + first * task.row_bytes, task.row_bytes,
        left < cut.floats.rows ? left : cut.floats.rows, batch.source, cut.floats,
        item % groups * cut.floats.acts, listed, shared,
        [&] {
          WaitForPrevious();
          ListRows(batch, &listed);
        },
        [&](uint32_t row, uint32_t act, float value) { sink_at(task.y + first, row, act, value); });
    return;
  }
  if constexpr (kStaged<F>) {
    if (cut.staged_at != 0) {
      StagedTile<F>(batch, cut, t, &listed);
      return;
    }
  }
  if constexpr (F::kBlock != 1) {
    const uint32_t first = item * cut.tile_rows, left = task.rows - first;
    const Tile tile = {.w = task.w + first * task.row_bytes,
                       .w2 = nullptr,
                       .row_bytes = task.row_bytes,
                       .split = cut.tile_rows,
                       .n_rows = left < cut.tile_rows ? left : cut.tile_rows,
                       .n_acts = 0,
                       .acts = listed.row};
    PrefetchTile(tile.w, tile.n_rows * task.row_bytes);
    LetNextStart();
    WaitForPrevious();
    ListRows(batch, &listed);
    if (listed.n == 0) return;
    Tile ready = tile;
    ready.n_acts = listed.n;
    QuantisedProduct<F>(
        ready, batch.source, shared, cut.span,
        [&](uint32_t row, uint32_t act, float value) { sink_at(task.y + first, row, act, value); });
  }
}

// Where staged rows start in a block's shared memory; 0 when they do not fit.
template <class F>
uint32_t StagedAt(const MatBatch& b, const MatTask& task, uint32_t tile_rows, size_t* bytes) {
  if constexpr (kStaged<F>) {
    const uint32_t terms = static_cast<uint32_t>(sizeof(float)) *
                           DenseTermFloats(tile_rows, b.n_rows, b.source.columns / F::kBlock);
    const uint32_t rows = b.swiglu ? 2 * PartStageBytes(tile_rows / 2, task.row_bytes)
                                   : PartStageBytes(tile_rows, task.row_bytes);
    if (terms + rows > shared_bytes_max || std::getenv("LODE_CUDA_UNSTAGED") != nullptr) return 0;
    *bytes = terms + rows;
    return terms;
  } else {
    return 0;
  }
}

// Float matrices come first: their blocks take longest. False: swiglu is asked for and cannot be.
template <class F>
bool TryLaunchMat(CUstream_st* stream, const MatBatch& batch, const ProductShape& shape) {
  MatBatch b = batch;
  const uint32_t columns = b.source.columns;
  MatCut cut = {shape.tile_rows,
                SpanOf<F>(shape.tile_rows, b.n_rows, columns),
                0,
                CutFloats(b.n_rows, columns),
                std::getenv("LODE_CUDA_EARLY") != nullptr,
                std::getenv("LODE_CUDA_AHEAD") != nullptr
                    ? static_cast<uint32_t>(std::atoi(std::getenv("LODE_CUDA_AHEAD")))
                    : 4 * 132u};
  uint32_t n = 0, blocks = 0;
  size_t shared = TermBytesOf<F>(shape.tile_rows, b.n_rows, cut.span);
  for (uint32_t t = 0; t < batch.n_tasks; ++t) {
    if (!IsFloatTask(batch.tasks[t])) continue;
    b.tasks[n] = batch.tasks[t];
    b.tasks[n++].first_block = blocks;
    blocks += (batch.tasks[t].rows + cut.floats.rows - 1) / cut.floats.rows *
              ((b.n_rows + cut.floats.acts - 1) / cut.floats.acts);
  }
  const uint32_t n_floats = n;
  for (uint32_t t = 0; t < batch.n_tasks; ++t) {
    if (IsFloatTask(batch.tasks[t])) continue;
    if (n == n_floats) cut.staged_at = StagedAt<F>(b, batch.tasks[t], shape.tile_rows, &shared);
    const uint32_t rows = b.swiglu ? cut.tile_rows / 2 : cut.tile_rows;
    b.tasks[n] = batch.tasks[t];
    b.tasks[n++].first_block = blocks;
    // Of gate and up, gate's blocks do both.
    if (!b.swiglu || n == n_floats + 1) blocks += (batch.tasks[t].rows + rows - 1) / rows;
  }
  if (b.swiglu && cut.staged_at == 0) return false;
  const size_t staged = sizeof(float) * (cut.floats.rows + cut.floats.acts) * cut.floats.stretch;
  if (n_floats != 0 && shared < staged) shared = staged;
  const uint32_t least = kFloatWarpsMin * 32;
  LaunchAhead(stream, {blocks}, shape.threads < least ? least : shape.threads, shared,
              &MatKernel<F>, b, cut);
  return true;
}
template <class F>
void LaunchMat(CUstream_st* stream, const MatBatch& batch, const ProductShape& shape) {
  TryLaunchMat<F>(stream, batch, shape);
}
template <class F>
bool LaunchSwiglu(CUstream_st* stream, const MatBatch& batch, const ProductShape& shape) {
  MatBatch b = batch;
  b.swiglu = true;
  return kStaged<F> && shape.tile_rows % (2 * kGroupRows) == 0 && TryLaunchMat<F>(stream, b, shape);
}

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
