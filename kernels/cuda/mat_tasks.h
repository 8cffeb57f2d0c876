// What the products of a batch of matrices have in common: which rows of the window are wanted,
// which matrix a block of threads belongs to, and the float matrices that ride in front of the
// quantised ones. Included by mat_kernels.h and tensor_mat.h; device code, and PlaceTasks for the
// host.
#pragma once

#include "kernels/cuda/float_product.h"
#include "kernels/cuda/launch.h"

namespace lode::cuda {

constexpr bool IsFloat(Format format) {
  return format == Format::kF32 || format == Format::kF16 || format == Format::kBF16;
}
LODE_FN bool IsFloatTask(const MatTask& task) {
  return task.format == Format::kF32 || task.format == Format::kF16 || task.format == Format::kBF16;
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

// Waits for the launch ahead, with the list: before it where the list says nothing of the window.
LODE_DEVICE void WaitAndList(const MatBatch& batch, ListedRows* listed) {
  if (batch.logits_only != nullptr) WaitForPrevious();
  ListRows(batch, listed);
  if (batch.logits_only == nullptr) WaitForPrevious();
}

// Which matrix block or tile `at` belongs to.
LODE_DEVICE uint32_t TaskAt(const MatBatch& batch, uint32_t at) {
  uint32_t t = batch.n_tasks - 1;
  while (batch.tasks[t].first_block > at) --t;
  return t;
}

// A block's part of a float matrix that rides in front.
LODE_DEVICE void FloatTile(const MatBatch& batch, const FloatCut& cut, ListedRows* listed,
                           float* shared) {
  const MatTask& task = batch.tasks[TaskAt(batch, BlockX())];
  const uint32_t item = BlockX() - task.first_block;
  const uint32_t groups = (batch.n_rows + cut.acts - 1) / cut.acts;
  const uint32_t first = item / groups * cut.rows, left = task.rows - first;
  ActSource source = batch.source;
  if (task.own_x != nullptr)
    source.f = task.own_x, source.f_stride = source.columns = task.own_columns;
  StagedFloatProduct(
      task.format, task.w + first * task.row_bytes, task.row_bytes,
      left < cut.rows ? left : cut.rows, source, cut, item % groups * cut.acts, *listed, shared,
      [&] { WaitAndList(batch, listed); },
      [&](uint32_t row, uint32_t act, float value) {
        using namespace canonical;
        if (task.gate_factor != 0) value = Mul(2.0f, Sigmoid(Mul(value, task.gate_factor)));
        task.y[static_cast<size_t>(listed->row[act]) * task.rows + first + row] = value;
      });
}

// Float matrices come first: their blocks take longest. Copies the tasks with their first blocks,
// those of quantised types in tiles of tile_rows rows (with swiglu, half of them of each matrix,
// and none for the second); returns how many float matrices there are.
inline uint32_t PlaceTasks(const MatBatch& batch, uint32_t tile_rows, MatBatch* b, FloatCut* floats,
                           uint32_t* float_blocks) {
  uint32_t float_rows = 0;
  for (uint32_t t = 0; t < batch.n_tasks; ++t)
    float_rows += IsFloatTask(batch.tasks[t]) ? batch.tasks[t].rows : 0;
  *floats = CutFloats(float_rows, batch.n_rows, batch.source.columns);
  uint32_t n = 0, blocks = 0;
  for (uint32_t t = 0; t < batch.n_tasks; ++t) {
    if (!IsFloatTask(batch.tasks[t])) continue;
    b->tasks[n] = batch.tasks[t];
    b->tasks[n++].first_block = blocks;
    blocks += (batch.tasks[t].rows + floats->rows - 1) / floats->rows *
              ((batch.n_rows + floats->acts - 1) / floats->acts);
  }
  const uint32_t n_floats = n;
  *float_blocks = blocks;
  for (uint32_t t = 0; t < batch.n_tasks; ++t) {
    if (IsFloatTask(batch.tasks[t])) continue;
    const uint32_t rows = batch.swiglu ? tile_rows / 2 : tile_rows;
    b->tasks[n] = batch.tasks[t];
    b->tasks[n++].first_block = blocks;
    if (!batch.swiglu || n == n_floats + 1) blocks += (batch.tasks[t].rows + rows - 1) / rows;
  }
  return n_floats;
}

}  // namespace lode::cuda
