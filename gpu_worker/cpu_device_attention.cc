// Sparse attention on the cpu device. All rows of the window store their cells first, then every
// row selects and attends up to its own position: a row reads its window neighbours exactly as the
// cache holds them. A pooled index key is written when the row that completes its block is
// computed; should that row be rejected, its successor at the same position writes it anew.
// Formulas: docs/design/model.md.
#include <algorithm>
#include <cstring>

#include "gpu_worker/cpu_device_scratch.h"

namespace lode {
namespace {

size_t IndexRingAt(uint32_t slot, uint32_t position, size_t width) {
  return (static_cast<size_t>(slot) * kConvRing + position % kConvRing) * width;
}

}  // namespace

// First byte of the KV block that holds `position` of the row's sequence.
uint8_t* CpuDevice::CellBlock(const AttentionState& state, const StepRow& row,
                              uint32_t position) const {
  const uint32_t* table = state.block_tables + static_cast<size_t>(params_.seqs[row.seq].slot) *
                                                   state.blocks_per_sequence;
  return state.pool + state.layout.bytes * table[position / kKvBlockCells];
}

void CpuDevice::AttentionInput(const AttentionWeights& w, const AttentionState& state,
                               const float* x) {
  Scratch& s = *scratch_;
  Mat(std::initializer_list<MatJob>{{&w.q, s.q.data()},
                                    {&w.k, s.k.data()},
                                    {&w.v, s.v.data()},
                                    {&w.index_q, s.index_q.data()},
                                    {&w.index_k, s.index_k.data()}},
      x);
  const uint64_t values = (config_.heads + 2 * config_.kv_heads) * config_.head_dim;
  pool_.ParallelFor(params_.n_rows, 8ull * params_.n_rows * values,
                    [&](uint32_t row, uint32_t) { StoreAttentionRow(w, state, row); });
  for (uint32_t row = 0; row < params_.n_rows; ++row) {
    if ((params_.rows[row].position + 1) % config_.index_block == 0) PoolIndexBlock(w, state, row);
  }
}

// Norm and rotation of the row's queries and keys; its cell and raw index key.
void CpuDevice::StoreAttentionRow(const AttentionWeights& w, const AttentionState& state,
                                  uint32_t row) {
  Scratch& s = *scratch_;
  const StepRow& r = params_.rows[row];
  const uint32_t dim = config_.head_dim, pairs = config_.rope_dims / 2;
  const auto norm_rope = [&](float* head, const float* weight, uint32_t n) {
    kernels_->rms_norm(head, weight, n, config_.rms_eps, head);
    kernels_->rope(head, pairs, s.sin.row(row), s.cos.row(row));
  };
  for (uint32_t h = 0; h < config_.heads; ++h) norm_rope(s.q.row(row) + 2 * h * dim, w.q_norm, dim);
  for (uint32_t h = 0; h < config_.index_heads; ++h) {
    norm_rope(s.index_q.row(row) + h * config_.index_dim, w.index_q_norm, config_.index_dim);
  }
  uint8_t* block = CellBlock(state, r, r.position);
  const KvBlockLayout& l = state.layout;
  bool finite = true;
  for (uint32_t h = 0; h < config_.kv_heads; ++h) {
    const size_t cell = static_cast<size_t>(h) * kKvBlockCells + r.position % kKvBlockCells;
    norm_rope(s.k.row(row) + h * dim, w.k_norm, dim);
    finite &= kernels_->kv_store(s.k.row(row) + h * dim, dim, l.type, block + cell * l.cell_bytes,
                                 reinterpret_cast<float*>(block + l.k_scales) + cell);
    finite &=
        kernels_->kv_store(s.v.row(row) + h * dim, dim, l.type, block + l.v + cell * l.cell_bytes,
                           reinterpret_cast<float*>(block + l.v_scales) + cell);
  }
  if (!finite) ReportNotFinite(row);
  std::memcpy(
      state.raw_index + IndexRingAt(params_.seqs[r.seq].slot, r.position, config_.index_dim),
      s.index_k.row(row), config_.index_dim * sizeof(float));
}

// The row completes an index block: mean of its raw keys, then norm, then rotation at the block's
// first position.
void CpuDevice::PoolIndexBlock(const AttentionWeights& w, const AttentionState& state,
                               uint32_t row) {
  const StepRow& r = params_.rows[row];
  const uint32_t size = config_.index_block, dim = config_.index_dim, pairs = config_.rope_dims / 2;
  const uint32_t first = r.position + 1 - size;
  const float* raw[kIndexBlockMax];
  for (uint32_t i = 0; i < size; ++i) {
    raw[i] = state.raw_index + IndexRingAt(params_.seqs[r.seq].slot, first + i, dim);
  }
  const size_t in_block = first % kKvBlockCells / size;
  float* key =
      reinterpret_cast<float*>(CellBlock(state, r, first) + state.layout.index) + in_block * dim;
  float sin[kHeadDimMax / 2], cos[kHeadDimMax / 2];
  kernels_->rope_table(first, scratch_->rope_inv_freq.data(), pairs, sin, cos);
  kernels_->index_pool(raw, size, dim, key);
  kernels_->rms_norm(key, w.index_k_norm, dim, config_.rms_eps, key);
  kernels_->rope(key, pairs, sin, cos);
}

void CpuDevice::AttentionSelect(const AttentionState& state) {
  Scratch& s = *scratch_;
  const uint32_t size = config_.index_block, best = config_.IndexBlocksMax(),
                 per_kv = kKvBlockCells / size;
  // Scores are needed only where there are more complete blocks than the budget.
  const auto complete = [&](uint32_t row) { return (params_.rows[row].position + 1) / size; };
  uint32_t kv_blocks = 0;
  uint64_t operations = 0;
  for (uint32_t row = 0; row < params_.n_rows; ++row) {
    if (complete(row) <= best) continue;
    kv_blocks = std::max(kv_blocks, (complete(row) + per_kv - 1) / per_kv);
    operations += static_cast<uint64_t>(complete(row)) * config_.index_heads * config_.index_dim;
  }
  pool_.ParallelFor(params_.n_rows * kv_blocks, operations, [&](uint32_t unit, uint32_t) {
    const uint32_t row = unit / kv_blocks, first = unit % kv_blocks * per_kv, n = complete(row);
    if (n <= best || first >= n) return;
    const uint8_t* block = CellBlock(state, params_.rows[row], first * size);
    kernels_->index_scores(s.index_q.row(row), config_.index_heads, config_.index_dim,
                           reinterpret_cast<const float*>(block + state.layout.index),
                           std::min(per_kv, n - first), s.block_scores.row(row) + first);
  });
  pool_.ParallelFor(
      params_.n_rows, 8 * operations / std::max(1u, config_.index_dim),
      [&](uint32_t row, uint32_t) {
        const uint32_t n = complete(row), end = params_.rows[row].position + 1;
        uint32_t* cells = s.cells.data() + row * s.cells_max;
        uint32_t* blocks = s.selected_blocks.data() + row * s.blocks_max;
        uint32_t count = 0;
        const uint32_t n_selected =
            n <= best ? 0 : kernels_->select_blocks(s.block_scores.row(row), n, best, blocks);
        for (uint32_t i = 0; i < n_selected; ++i) {
          for (uint32_t j = 0; j < size; ++j) cells[count++] = blocks[i] * size + j;
        }
        // Everything when the budget holds it, else the tail behind the last complete block.
        for (uint32_t position = n <= best ? 0 : n * size; position < end; ++position)
          cells[count++] = position;
        s.n_cells[row] = count;
      });
}

void CpuDevice::AttentionOutput(const AttentionWeights& w, const AttentionState& state, float* y) {
  Scratch& s = *scratch_;
  const uint32_t heads = config_.heads, dim = config_.head_dim;
  const KvBlockLayout& l = state.layout;
  uint64_t operations = 0;
  for (uint32_t row = 0; row < params_.n_rows; ++row)
    operations += 2ull * s.n_cells[row] * heads * dim;
  pool_.ParallelFor(params_.n_rows * heads, operations, [&](uint32_t unit, uint32_t thread) {
    const uint32_t row = unit / heads, h = unit % heads;
    const size_t first_cell = static_cast<size_t>(h / (heads / config_.kv_heads)) * kKvBlockCells;
    const float* query = s.q.row(row) + 2 * static_cast<size_t>(h) * dim;
    const uint32_t slot = params_.seqs[params_.rows[row].seq].slot;
    kernels_->attend(
        {.q = query,
         .gate = query + dim,
         .head_dim = dim,
         .type = l.type,
         .cells = s.cells.data() + row * s.cells_max,
         .n_cells = s.n_cells[row],
         .blocks = state.block_tables + static_cast<size_t>(slot) * state.blocks_per_sequence,
         .k = state.pool + first_cell * l.cell_bytes,
         .v = state.pool + l.v + first_cell * l.cell_bytes,
         .k_scales = state.pool + l.k_scales + first_cell * sizeof(float),
         .v_scales = state.pool + l.v_scales + first_cell * sizeof(float),
         .block_stride = l.bytes,
         .cell_bytes = l.cell_bytes,
         .scores = s.attend_scores.data() + thread * s.cells_max,
         .out = s.attended.row(row) + static_cast<size_t>(h) * dim});
  });
  Mat(std::initializer_list<MatJob>{{&w.out, y}}, s.attended.data());
}

}  // namespace lode
