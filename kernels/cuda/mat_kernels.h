// Dense matrices on the device, one or several of the same input in a launch: MatKernel, whose
// blocks have a tile of rows each, for every type; StagedMatKernel, whose blocks have several and
// copy one while they multiply another, for types that can be decoded from shared memory (dense.h).
// Float matrices ride in front of both (float_product.h). Device code and its launches, included by
// format_kernels.h.
#pragma once

#include <type_traits>

#include "kernels/cuda/dense.h"
#include "kernels/cuda/float_product.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/mat_tasks.h"
#include "kernels/cuda/product.h"
#include "kernels/cuda/tensor_mat.h"
#include "kernels/cuda/tensor_narrow.h"

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
// ---- dense matrices: a block of threads per tile of rows; the tasks' tiles follow each other
// What this block would wait for in device memory is on its way to the L2 before the launch ahead
// of it has ended: weights never change.
LODE_DEVICE void PrefetchTile(const uint8_t* w, size_t bytes) {
  constexpr uint32_t kLine = 128;
  for (size_t at = size_t{ThreadId()} * kLine; at < bytes; at += size_t{ThreadCount()} * kLine)
    PrefetchLine(w + at);
}

// How a launch is cut. The first float_blocks blocks have float matrices.
struct MatCut {
  uint32_t tile_rows, span;
  FloatCut floats;
  uint32_t float_blocks;
  // Staged rows only: tiles in all, bytes of the terms in front of the stages, bytes of one stage,
  // and how many stages there are: 2 where blocks have several tiles.
  uint32_t tiles, staged_at, stage_bytes, stages;
};

template <class F>
LODE_KERNEL(kProductThreadsMax)
MatKernel(MatBatch batch, MatCut cut) {
  LODE_SHARED ListedRows listed;
  LetNextStart();
  float* shared = reinterpret_cast<float*>(DynamicShared());
  if (BlockX() < cut.float_blocks) {
    FloatTile(batch, cut.floats, &listed, shared);
    return;
  }
  if constexpr (F::kBlock != 1) {
    const MatTask& task = batch.tasks[TaskAt(batch, BlockX())];
    const uint32_t first = (BlockX() - task.first_block) * cut.tile_rows;
    const uint32_t left = task.rows - first;
    Tile tile = {.w = task.w + first * task.row_bytes,
                 .w2 = nullptr,
                 .row_bytes = task.row_bytes,
                 .split = cut.tile_rows,
                 .n_rows = left < cut.tile_rows ? left : cut.tile_rows,
                 .n_acts = 0,
                 .acts = listed.row};
    PrefetchTile(tile.w, tile.n_rows * task.row_bytes);
    WaitAndList(batch, &listed);
    tile.n_acts = listed.n;
    if (tile.n_acts == 0) return;
    QuantisedProduct<F>(
        tile, batch.source, shared, cut.span, [&](uint32_t row, uint32_t act, float value) {
          task.y[static_cast<size_t>(listed.row[act]) * task.rows + first + row] = value;
        });
  }
}

// ---- staged rows (dense.h): few blocks, each with several tiles; one is copied while another is
// multiplied
LODE_DEVICE DenseTile TileAt(const MatBatch& batch, const MatCut& cut, uint32_t at) {
  const uint32_t t = TaskAt(batch, cut.float_blocks + at);
  const MatTask& task = batch.tasks[t];
  const uint32_t rows = batch.swiglu ? cut.tile_rows / 2 : cut.tile_rows;
  const uint32_t first = (cut.float_blocks + at - task.first_block) * rows;
  const uint32_t left = task.rows - first;
  return {.w = task.w + first * task.row_bytes,
          .row_bytes = task.row_bytes,
          .part_bytes = batch.swiglu ? static_cast<size_t>(batch.tasks[t + 1].w - task.w) : 0,
          .parts = batch.swiglu ? 2u : 1u,
          .part_rows = rows,
          .valid = left < rows ? left : rows};
}

// Adds the terms of a tile; with swiglu, half a tile of gate and half a tile of up become one.
template <class F>
LODE_DEVICE void FinishTile(const MatBatch& batch, const MatCut& cut, uint32_t at,
                            const DenseTile& tile, const ListedRows& listed, const float* terms) {
  using namespace canonical;
  LODE_SHARED float sums[kTileRowsMax][kWindowRowsMax];
  const MatTask& task = batch.tasks[TaskAt(batch, cut.float_blocks + at)];
  const uint32_t columns = batch.source.columns;
  float* y = task.y + (cut.float_blocks + at - task.first_block) * tile.part_rows;
  const size_t stride = task.rows;
  if (!batch.swiglu) {
    DenseChains<F>(tile.valid, listed.n, columns, terms,
                   [&](uint32_t row, uint32_t act, float value) {
                     y[listed.row[act] * stride + row] = value;
                   });
    return;
  }
  DenseChains<F>(2 * tile.part_rows, listed.n, columns, terms,
                 [&](uint32_t row, uint32_t act, float value) { sums[row][act] = value; });
  SyncBlock();
  for (uint32_t i = ThreadId(); i < tile.valid * listed.n; i += ThreadCount()) {
    const uint32_t row = i % tile.valid, act = i / tile.valid;
    y[listed.row[act] * stride + row] = Mul(Silu(sums[row][act]), sums[tile.part_rows + row][act]);
  }
}

template <class F>
LODE_KERNEL_FITTING(kStagedThreadsMax, 2)
StagedMatKernel(MatBatch batch, MatCut cut) {
  LODE_SHARED ListedRows listed;
  float* terms = reinterpret_cast<float*>(DynamicShared());
  if (BlockX() < cut.float_blocks) {
    LetNextStart();
    FloatTile(batch, cut.floats, &listed, terms);
    return;
  }
  uint8_t* stages = DynamicShared() + cut.staged_at;
  const uint32_t step = GridX() - cut.float_blocks;
  // Every round ends a group of copies, also an empty one: the count stays right.
  const auto stage = [&](uint32_t at, uint32_t round) {
    if (at < cut.tiles)
      StageTile(TileAt(batch, cut, at), stages + round % cut.stages * cut.stage_bytes);
    EndCopyGroup();
  };
  uint32_t at = BlockX() - cut.float_blocks;
  stage(at, 0);
  stage(cut.stages == 2 ? at + step : cut.tiles, 1);
  WaitAndList(batch, &listed);
  if (listed.n == 0) {
    WaitForCopies();
    return;
  }
  for (uint32_t round = 0; at < cut.tiles; ++round, at += step) {
    WaitForEarlierCopies();
    SyncBlock();  // the tile is there, and the last one's terms have been added
    const DenseTile tile = TileAt(batch, cut, at);
    DenseTerms<F, false>(tile, stages + round % cut.stages * cut.stage_bytes, batch.source.form,
                         listed.row, listed.n, batch.source.columns, terms);
    if (at + step >= cut.tiles) LetNextStart();
    SyncBlock();
    stage(cut.stages == 2 ? at + 2 * step : cut.tiles, round);
    FinishTile<F>(batch, cut, at, tile, listed, terms);
  }
}

// Fills in what staged rows need; false: they do not fit.
template <class F>
bool CutStaged(const MatBatch& b, size_t row_bytes, uint32_t tiles, MatCut* cut, size_t* shared) {
  cut->tiles = tiles;
  cut->staged_at = static_cast<uint32_t>(sizeof(float)) *
                   DenseTermFloats(cut->tile_rows, b.n_rows, b.source.columns / F::kBlock);
  cut->stage_bytes = b.swiglu ? 2 * PartStageBytes(cut->tile_rows / 2, row_bytes)
                              : PartStageBytes(cut->tile_rows, row_bytes);
  // One tile per block where all blocks find room at once.
  cut->stages = tiles > 2 * multiprocessors ? 2 : 1;
  if (cut->staged_at + cut->stages * cut->stage_bytes > shared_bytes_max) cut->stages = 1;
  *shared = cut->staged_at + cut->stages * cut->stage_bytes;
  return *shared <= shared_bytes_max;
}

// Float matrices come first: their blocks take longest. False: swiglu is asked for and cannot be.
template <class F>
bool TryLaunchMat(CUstream_st* stream, const MatBatch& batch, const ProductShape& shape) {
  MatBatch b = batch;
  const uint32_t columns = b.source.columns;
  if constexpr (std::is_same_v<F, decode::Q8_0>) {
    if (LaunchTensorMat<F>(stream, batch)) return true;
  }
  MatCut cut = {};
  cut.tile_rows = shape.tile_rows;
  cut.span = SpanOf<F>(shape.tile_rows, b.n_rows, columns);
  const uint32_t n_floats = PlaceTasks(batch, cut.tile_rows, &b, &cut.floats, &cut.float_blocks);
  uint32_t blocks = cut.float_blocks;
  if (n_floats != b.n_tasks) {
    // Of gate and up, gate's blocks do both.
    const MatTask& last = b.tasks[b.swiglu ? n_floats : b.n_tasks - 1];
    const uint32_t rows = b.swiglu ? cut.tile_rows / 2 : cut.tile_rows;
    blocks = last.first_block + (last.rows + rows - 1) / rows;
  }
  const size_t floats =
      n_floats == 0 ? 0 : sizeof(float) * (cut.floats.rows + cut.floats.acts) * cut.floats.stretch;
  uint32_t threads = shape.threads < kFloatWarpsMin * 32 ? kFloatWarpsMin * 32 : shape.threads;
  size_t shared = 0;
  if constexpr (kStaged<F>) {
    if (b.n_tasks != n_floats &&
        CutStaged<F>(b, b.tasks[n_floats].row_bytes, blocks - cut.float_blocks, &cut, &shared)) {
      if (shared < floats) shared = floats;
      if (threads > kStagedThreadsMax) threads = kStagedThreadsMax;
      const uint32_t by_shared = shared_bytes_max / static_cast<uint32_t>(shared);
      const uint32_t by_threads = 2 * kStagedThreadsMax / threads;
      const uint32_t together = multiprocessors * (by_shared < by_threads ? by_shared : by_threads);
      const uint32_t tile_blocks = cut.stages == 2 && together < cut.tiles ? together : cut.tiles;
      LaunchAhead(stream, {cut.float_blocks + tile_blocks}, threads, shared, &StagedMatKernel<F>, b,
                  cut);
      return true;
    }
  }
  if (b.swiglu) return false;
  shared = TermBytesOf<F>(shape.tile_rows, b.n_rows, cut.span);
  LaunchAhead(stream, {blocks}, threads, shared < floats ? floats : shared, &MatKernel<F>, b, cut);
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
  ProductShape whole = shape;  // half a tile is whole groups of rows
  whole.tile_rows = (shape.tile_rows + 2 * kGroupRows - 1) / (2 * kGroupRows) * 2 * kGroupRows;
  const uint32_t units = whole.tile_rows / kGroupRows * (batch.source.columns / 32);
  whole.threads = units < kStagedThreadsMax ? (units + 31) / 32 * 32 : kStagedThreadsMax;
  return kStaged<F> && TryLaunchMat<F>(stream, b, whole);
}

}  // namespace lode::cuda
