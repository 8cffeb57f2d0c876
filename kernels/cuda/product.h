// The matrix product of one block of threads: n rows of W times up to 8 activation rows, in the one
// order of docs/design/arithmetic.md. Device code, included by format_kernels.h.
//
// Quantised types: the integers of a block are free, the order of its terms is not. So threads
// share out (group of 4 weight rows) x (chunk of 32 columns) freely, decode the 4 chunks once for
// all activation rows, reduce the integers of a block over its lanes, and leave every term in
// shared memory; then one thread per (row, activation row) adds its terms in ascending order.
// Columns are worked off in spans that bound the shared memory. Roofline: weight bytes over device
// bandwidth; a chain of additions (about 5 clocks a block) overlaps with other blocks of the same
// multiprocessor.
//
// Float types: lane l of a warp is partial l of the canonical sum, one row per warp at a time.
#pragma once

#include "kernels/cuda/decode.h"
#include "kernels/cuda/forms.h"
#include "kernels/cuda/reduce.h"
#include "shared/base/limits.h"

namespace lode::cuda {

inline constexpr uint32_t kGroupRows = 4;     // weight rows that a thread decodes together
inline constexpr uint32_t kTileRowsMax = 16;  // weight rows of one block of threads
inline constexpr uint32_t kProductThreadsMax = 512;
inline constexpr uint32_t kTermBytes =
    40 * 1024;  // of shared memory: several blocks fit everywhere

// Rows of one product: weights from the tile's first row on, and which activation rows. Rows from
// `split` on come from a second matrix of the same type (gate and up in one product).
struct Tile {
  const uint8_t* w;
  const uint8_t* w2;
  size_t row_bytes;
  uint32_t split;
  uint32_t n_rows;       // 1..kTileRowsMax
  uint32_t n_acts;       // 1..kWindowRowsMax
  const uint32_t* acts;  // [n_acts] rows of the source (shared memory or registers)
};

LODE_DEVICE const uint8_t* RowOf(const Tile& tile, uint32_t row) {
  const uint32_t r = row < tile.n_rows ? row : tile.n_rows - 1;
  return r < tile.split ? tile.w + r * tile.row_bytes : tile.w2 + (r - tile.split) * tile.row_bytes;
}

// Chunks of 32 columns whose terms fit kTermBytes: whole blocks of every type. The odd stride of a
// chain keeps one float per row free.
LODE_FN uint32_t SpanChunks(uint32_t tile_rows, uint32_t n_acts, uint32_t n_chunks) {
  const uint32_t fit = (kTermBytes / (sizeof(float) * tile_rows * n_acts) - 1) / 8 * 8;
  return n_chunks < fit ? n_chunks : fit;
}
// Terms of one (row, activation row) lie this many floats apart: odd, so that neighbouring chains
// meet different banks.
LODE_FN uint32_t TermStride(uint32_t chunks_per_block, uint32_t span_chunks) {
  return (span_chunks / chunks_per_block) | 1u;
}

// Sums of four rows over the kChunks lanes of a block: lane k ends with row k % 4 in v[0], and, of
// a block of two lanes, row 2 + k in v[1]. Every exchange halves what a lane holds.
template <uint32_t kChunks>
LODE_DEVICE void ReduceRows(int32_t (&v)[kGroupRows], uint32_t k) {
  static_assert(kChunks == 1 || kChunks == 2 || kChunks == 8);
  if constexpr (kChunks > 1) {
    const bool odd = (k & 1) != 0;
    v[0] = (odd ? v[1] : v[0]) + ShuffleXor(odd ? v[0] : v[1], 1);
    v[1] = (odd ? v[3] : v[2]) + ShuffleXor(odd ? v[2] : v[3], 1);
  }
  if constexpr (kChunks == 8) {
    const bool high = (k & 2) != 0;
    v[0] = (high ? v[1] : v[0]) + ShuffleXor(high ? v[0] : v[1], 2);
    v[0] += ShuffleXor(v[0], 4);
  }
}

template <class F>
struct DecodedRows {
  uint32_t code[kGroupRows][8];
  int32_t scale[kGroupRows][2], min[kGroupRows][2];
  float d[kGroupRows], m[kGroupRows];  // of the rows whose terms this lane makes
};
// Rows whose terms a lane of a block makes, and which the i-th of them is.
template <class F>
inline constexpr uint32_t kLaneTerms = F::kChunks == 1 ? 4 : (F::kChunks == 2 ? 2 : 1);
template <class F>
LODE_DEVICE uint32_t TermRow(uint32_t k, uint32_t i) {
  return F::kChunks == 1 ? i : (F::kChunks == 2 ? 2 * i + k : k % kGroupRows);
}

template <class F>
LODE_DEVICE void DecodeRows(const Tile& tile, uint32_t group, size_t offset, uint32_t k,
                            DecodedRows<F>* out) {
  LODE_UNROLL
  for (uint32_t r = 0; r < kGroupRows; ++r) {
    const uint32_t row = group * kGroupRows + r;
    const uint8_t* block = RowOf(tile, row) + offset;
    F::Decode(block, k, out->code[r]);
    if constexpr (F::kRunScales) F::Scales(block, k, out->scale[r], out->min[r]);
  }
  LODE_UNROLL
  for (uint32_t i = 0; i < kLaneTerms<F>; ++i) {
    const uint32_t row = group * kGroupRows + TermRow<F>(k, i);
    const uint8_t* block = RowOf(tile, row) + offset;
    out->d[i] = F::Scale(block);
    if constexpr (F::kMins != decode::kNoMins) out->m[i] = F::Min(block);
  }
}

// The two runs of 16 activations that meet a chunk.
struct ActRuns {
  uint32_t y[8];
  int32_t sum[2];
  float d;
};
template <class F>
LODE_DEVICE ActRuns LoadRuns(const ActForm& form, uint32_t act, uint32_t block, uint32_t k) {
  ActRuns runs;
  const uint8_t* row = form.base + static_cast<size_t>(act) * form.stride;
  const uint8_t* codes = row + (F::kCrumbs ? form.crumb_offset : 0);
  LODE_UNROLL
  for (uint32_t run = 0; run < 2; ++run) {
    const uint32_t column = block * F::kBlock + F::Column(k, run);
    decode::Load16(codes + column, runs.y + 4 * run);
    if constexpr (F::kOffset != 0 || F::kMins != decode::kNoMins) {
      runs.sum[run] = static_cast<int16_t>(
          LoadOnce(reinterpret_cast<const uint16_t*>(row + form.sum_offset) + column / 16));
    }
  }
  runs.d = LoadOnce(reinterpret_cast<const float*>(row + form.d_offset) + block);
  return runs;
}

template <class F>
LODE_DEVICE int32_t ChunkSum(const uint32_t* code, const int32_t* scale, const ActRuns& runs) {
  int32_t dot[2] = {0, 0};
  LODE_UNROLL
  for (int i = 0; i < 4; ++i) {
    dot[0] = Dp4a(code[i], runs.y[i], dot[0]);
    dot[1] = Dp4a(code[4 + i], runs.y[4 + i], dot[1]);
  }
  if constexpr (F::kOffset != 0) {
    dot[0] -= F::kOffset * runs.sum[0];
    dot[1] -= F::kOffset * runs.sum[1];
  }
  if constexpr (F::kRunScales) return scale[0] * dot[0] + scale[1] * dot[1];
  return dot[0] + dot[1];
}

// Terms of one unit (group of rows, chunk) for every activation row. All lanes of the warp call it;
// a lane that is not active has repeated another's unit and writes nothing.
template <class F>
LODE_DEVICE void UnitTerms(const Tile& tile, const ActForm& form, uint32_t group, uint32_t chunk,
                           uint32_t first_block, bool active, uint32_t stride, float* terms) {
  using namespace canonical;
  const uint32_t block = chunk / F::kChunks, k = chunk % F::kChunks;
  DecodedRows<F> rows;
  DecodeRows<F>(tile, group, static_cast<size_t>(block) * F::kBytes, k, &rows);
  LODE_NO_UNROLL
  for (uint32_t a = 0; a < tile.n_acts; ++a) {
    const ActRuns runs = LoadRuns<F>(form, tile.acts[a], block, k);
    int32_t isum[kGroupRows], msum[kGroupRows];
    LODE_UNROLL
    for (uint32_t r = 0; r < kGroupRows; ++r) {
      isum[r] = ChunkSum<F>(rows.code[r], rows.scale[r], runs);
      if constexpr (F::kMins == decode::kGroupMins)
        msum[r] = rows.min[r][0] * runs.sum[0] + rows.min[r][1] * runs.sum[1];
      if constexpr (F::kMins == decode::kBlockMins) msum[r] = runs.sum[0] + runs.sum[1];
    }
    ReduceRows<F::kChunks>(isum, k);
    if constexpr (F::kMins != decode::kNoMins) ReduceRows<F::kChunks>(msum, k);
    LODE_UNROLL
    for (uint32_t i = 0; i < kLaneTerms<F>; ++i) {
      float t = Mul(static_cast<float>(isum[i]), Mul(rows.d[i], runs.d));
      if constexpr (F::kMins != decode::kNoMins)
        t = Add(t, Mul(static_cast<float>(msum[i]), Mul(rows.m[i], runs.d)));
      const uint32_t row = group * kGroupRows + TermRow<F>(k, i);
      if (active && k < kGroupRows && row < tile.n_rows)
        terms[(row * tile.n_acts + a) * stride + (block - first_block)] = t;
    }
  }
}

// terms[0..n) added in order to `sum`. The next terms are read while these are added.
LODE_DEVICE float AddTerms(float sum, const float* terms, uint32_t n) {
  constexpr uint32_t kBatch = 8;
  float t[kBatch];
  uint32_t i = 0;
  if (n >= kBatch) {
    LODE_UNROLL
    for (uint32_t j = 0; j < kBatch; ++j) t[j] = terms[j];
    for (; i + 2 * kBatch <= n; i += kBatch) {
      float next[kBatch];
      LODE_UNROLL
      for (uint32_t j = 0; j < kBatch; ++j) next[j] = terms[i + kBatch + j];
      LODE_UNROLL
      for (uint32_t j = 0; j < kBatch; ++j) sum = canonical::Add(sum, t[j]);
      LODE_UNROLL
      for (uint32_t j = 0; j < kBatch; ++j) t[j] = next[j];
    }
    LODE_UNROLL
    for (uint32_t j = 0; j < kBatch; ++j) sum = canonical::Add(sum, t[j]);
    i += kBatch;
  }
  for (; i < n; ++i) sum = canonical::Add(sum, terms[i]);
  return sum;
}

// sink(row, act, value) is called once for each, by some thread. The block's threads all call this;
// ThreadCount() >= n_rows * n_acts. `terms`: n_rows * n_acts * TermStride floats of shared memory,
// free again behind the next barrier; span: SpanChunks of the launch.
template <class F, class Sink>
LODE_DEVICE void QuantisedProduct(const Tile& tile, const ActSource& source, float* terms,
                                  uint32_t span_chunks, const Sink& sink) {
  const uint32_t n_chunks = source.columns / 32;
  const uint32_t groups = (tile.n_rows + kGroupRows - 1) / kGroupRows;
  const uint32_t stride = TermStride(F::kChunks, span_chunks);
  const uint32_t chain = ThreadId(), chains = tile.n_rows * tile.n_acts;
  float sum = 0;
  for (uint32_t first = 0; first < n_chunks; first += span_chunks) {
    const uint32_t span = n_chunks - first < span_chunks ? n_chunks - first : span_chunks;
    const uint32_t units = groups * span;
    if (first != 0) SyncBlock();  // the terms of the last span have been added
    for (uint32_t base = ThreadId() / 32 * 32; base < units; base += ThreadCount()) {
      const uint32_t mine = base + ThreadId() % 32;
      const bool active = mine < units;
      // A lane beyond the end repeats a chunk with its own place in a block of lanes, so that the
      // exchanges of its neighbours stay among themselves.
      const uint32_t chunk = active ? mine % span : mine % F::kChunks;
      UnitTerms<F>(tile, source.form, active ? mine / span : 0, first + chunk, first / F::kChunks,
                   active, stride, terms);
    }
    SyncBlock();
    if (chain < chains) sum = AddTerms(sum, terms + chain * stride, span / F::kChunks);
  }
  if (chain < chains) sink(chain / tile.n_acts, chain % tile.n_acts, sum);
}

// kActs activation rows of one weight row by one warp. Rows beyond n_acts repeat the last.
template <class F, uint32_t kActs, class Sink>
LODE_DEVICE void FloatRow(const Tile& tile, const ActSource& source, uint32_t row,
                          uint32_t first_act, const Sink& sink) {
  constexpr uint32_t kAhead = 8;  // loads in flight per lane
  const uint32_t lane = ThreadId() % 32;
  const uint8_t* w = RowOf(tile, row);
  const float* x[kActs];
  float p[kActs];
  LODE_UNROLL
  for (uint32_t a = 0; a < kActs; ++a) {
    const uint32_t act = first_act + a < tile.n_acts ? first_act + a : tile.n_acts - 1;
    x[a] = source.f + static_cast<size_t>(tile.acts[act]) * source.f_stride;
    p[a] = 0.0f;
  }
  uint32_t i = lane;
  for (; i + 32 * (kAhead - 1) < source.columns; i += 32 * kAhead) {
    float v[kAhead];
    LODE_UNROLL
    for (uint32_t j = 0; j < kAhead; ++j) v[j] = F::Weight(w + (i + 32 * j) * F::kBytes, 0);
    LODE_UNROLL
    for (uint32_t a = 0; a < kActs; ++a) {
      LODE_UNROLL
      for (uint32_t j = 0; j < kAhead; ++j) p[a] = canonical::Fma(v[j], x[a][i + 32 * j], p[a]);
    }
  }
  for (; i < source.columns; i += 32) {
    const float v = F::Weight(w + i * F::kBytes, 0);
    LODE_UNROLL
    for (uint32_t a = 0; a < kActs; ++a) p[a] = canonical::Fma(v, x[a][i], p[a]);
  }
  LODE_UNROLL
  for (uint32_t a = 0; a < kActs; ++a) {
    const float y = JoinLanes(p[a]);
    if (lane == 0 && first_act + a < tile.n_acts) sink(row, first_act + a, y);
  }
}

template <class F, class Sink>
LODE_DEVICE void FloatProduct(const Tile& tile, const ActSource& source, const Sink& sink) {
  for (uint32_t row = ThreadId() / 32; row < tile.n_rows; row += ThreadCount() / 32) {
    uint32_t a = 0;
    for (; a + 1 < tile.n_acts; a += 4) FloatRow<F, 4>(tile, source, row, a, sink);
    if (a < tile.n_acts) FloatRow<F, 1>(tile, source, row, a, sink);
  }
}

template <class F, class Sink>
LODE_DEVICE void Product(const Tile& tile, const ActSource& source, float* terms,
                         uint32_t span_chunks, const Sink& sink) {
  if constexpr (F::kBlock == 1) {
    FloatProduct<F>(tile, source, sink);
  } else {
    QuantisedProduct<F>(tile, source, terms, span_chunks, sink);
  }
}

}  // namespace lode::cuda
