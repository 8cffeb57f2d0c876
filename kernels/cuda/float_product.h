// Dense matrices of float types on the device: a block of threads fetches one or two rows of W and
// one or two activation rows into shared memory, all loads in flight at once, then its warps
// multiply: lane l of a warp is partial l of the canonical sum, a warp has some (weight row,
// activation row) pairs. Many small blocks, because what counts is the number of fetches one behind
// the other; rows longer than a stage are worked off in stretches. F32, F16 and BF16 are told apart
// at run time, while they are widened, so such a matrix can ride in any product's launch. Device
// code, included by format_kernels.h.
#pragma once

#include "kernels/cuda/decode.h"
#include "kernels/cuda/forms.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/reduce.h"
#include "shared/base/limits.h"

namespace lode::cuda {

inline constexpr uint32_t kFloatStageBytes = 40 * 1024;  // several blocks fit everywhere
inline constexpr uint32_t kFloatStageMost = 88 * 1024;   // for one long row at a time
inline constexpr uint32_t kFloatWarpsMin = 2;            // of a block
// Rows of W, and activation rows, of a block; more where there are many rows, so that each is
// fetched less often.
inline constexpr uint32_t kFloatTile = 2, kFloatTileMax = 4, kFloatManyRows = 256;
inline constexpr uint32_t kFloatPairs = kFloatTileMax * kFloatTileMax / kFloatWarpsMin;  // a warp's
inline constexpr uint32_t kFetchAhead = 8;  // loads of four values in flight per thread

// How float matrices of one launch are cut.
struct FloatCut {
  uint32_t rows, acts;  // of one block
  uint32_t stretch;     // columns of one stage: a multiple of the 32 partials
};
// rows: of all float matrices of the launch.
inline FloatCut CutFloats(uint32_t rows, uint32_t n_acts, uint32_t columns) {
  const uint32_t all = (columns + 31) / 32 * 32, fit = kFloatStageBytes / sizeof(float);
  const auto cut_by = [&](uint32_t tile) {
    const uint32_t acts = n_acts < tile ? n_acts : tile;
    const uint32_t most = fit / (tile + acts) / 32 * 32;
    return FloatCut{tile, acts, all < most ? all : most};
  };
  FloatCut cut = cut_by(kFloatTileMax);
  if (rows >= kFloatManyRows && 2 * cut.stretch >= all) return cut;
  cut = cut_by(kFloatTile);
  if (cut.stretch >= all) return cut;
  cut = {1, 1, all};
  const uint32_t most = shared_bytes_max < kFloatStageMost ? shared_bytes_max : kFloatStageMost;
  const uint32_t half = most / sizeof(float) / 2 / 32 * 32;
  if (half < all) cut.stretch = half;
  return cut;
}

struct Float4 {
  float v[4];
};
// Four consecutive values of a row as floats; `at` is a multiple of 4 and the row 16-byte aligned.
LODE_DEVICE Float4 LoadFour(Format format, const uint8_t* row, uint32_t at) {
  using namespace canonical;
  Float4 out;
  if (format == Format::kF32) {
    const Word4 w = LoadOnce(reinterpret_cast<const Word4*>(row + at * sizeof(float)));
    out = {{FromBits(w.x), FromBits(w.y), FromBits(w.z), FromBits(w.w)}};
    return out;
  }
  uint32_t w[2];
  w[0] = decode::WordAt(row + at * sizeof(uint16_t));
  w[1] = decode::WordAt(row + at * sizeof(uint16_t) + sizeof(uint32_t));
  LODE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint32_t half = (w[i / 2] >> (16 * (i % 2))) & 0xffffu;
    out.v[i] = format == Format::kF16 ? HalfToFloat(half) : FromBits(half << 16);
  }
  return out;
}
LODE_DEVICE float LoadValue(Format format, const uint8_t* row, uint32_t at) {
  if (format == Format::kF32) return decode::F32::Weight(row + at * sizeof(float), 0);
  const uint32_t half = decode::Half(row + at * sizeof(uint16_t));
  return format == Format::kF16 ? HalfToFloat(half) : canonical::FromBits(half << 16);
}

// Behind WaitForCopies and a barrier: n columns from `first` of `rows` vectors in to[row][stretch];
// row_of(r) is where vector r lies.
template <class RowOf>
LODE_DEVICE void FetchRows(Format format, uint32_t rows, uint32_t first, uint32_t n,
                           uint32_t stretch, bool whole, float* to, const RowOf& row_of) {
  if (!whole) {
    for (uint32_t i = ThreadId(); i < rows * n; i += ThreadCount())
      to[i / n * stretch + i % n] = LoadValue(format, row_of(i / n), first + i % n);
    return;
  }
  if (format == Format::kF32) {
    for (uint32_t r = 0; r < rows; ++r) {
      const float* from = reinterpret_cast<const float*>(row_of(r)) + first;
      for (uint32_t i = 4 * ThreadId(); i < n; i += 4 * ThreadCount())
        CopyAhead16(to + r * stretch + i, from + i);
    }
    return;
  }
  const uint32_t fours = n / 4, all = rows * fours;
  for (uint32_t base = ThreadId(); base < all; base += kFetchAhead * ThreadCount()) {
    Float4 v[kFetchAhead];
    LODE_UNROLL
    for (uint32_t k = 0; k < kFetchAhead; ++k) {
      const uint32_t i = base + k * ThreadCount();
      if (i < all) v[k] = LoadFour(format, row_of(i / fours), first + i % fours * 4);
    }
    LODE_UNROLL
    for (uint32_t k = 0; k < kFetchAhead; ++k) {
      const uint32_t i = base + k * ThreadCount();
      if (i < all) *reinterpret_cast<Float4*>(to + i / fours * stretch + i % fours * 4) = v[k];
    }
  }
}

// The sum so far of one (weight row, activation row) pair over n more columns, by one warp.
LODE_DEVICE float AddStretch(float sum, const float* w, const float* x, uint32_t n) {
  constexpr uint32_t kBatch = 8;
  uint32_t i = ThreadId() % 32;
  float a[kBatch], b[kBatch];
  if (n >= 32 * kBatch) {
    LODE_UNROLL
    for (uint32_t j = 0; j < kBatch; ++j) a[j] = w[i + 32 * j], b[j] = x[i + 32 * j];
    for (; i + 32 * (2 * kBatch - 1) < n; i += 32 * kBatch) {
      float c[kBatch], d[kBatch];  // on their way while a and b are added
      LODE_UNROLL
      for (uint32_t j = 0; j < kBatch; ++j)
        c[j] = w[i + 32 * (kBatch + j)], d[j] = x[i + 32 * (kBatch + j)];
      LODE_UNROLL
      for (uint32_t j = 0; j < kBatch; ++j) sum = canonical::Fma(a[j], b[j], sum);
      LODE_UNROLL
      for (uint32_t j = 0; j < kBatch; ++j) a[j] = c[j], b[j] = d[j];
    }
    LODE_UNROLL
    for (uint32_t j = 0; j < kBatch; ++j) sum = canonical::Fma(a[j], b[j], sum);
    i += 32 * kBatch;
  }
  for (; i < n; i += 32) sum = canonical::Fma(w[i], x[i], sum);
  return sum;
}

// y[act][row] for n_rows <= cut.rows weight rows from w on and activation rows first_act.. of
// acts[n_acts]. All threads call it, at least kFloatWarpsMin warps. `ready` is called once, before
// the first look at activations or acts. sink(row, act, value) once for each, `act` counted in
// acts[].
template <class Acts, class Ready, class Sink>
LODE_DEVICE void StagedFloatProduct(Format format, const uint8_t* w, size_t row_bytes,
                                    uint32_t n_rows, const ActSource& source, const FloatCut& cut,
                                    uint32_t first_act, const Acts& acts_of, float* stage,
                                    const Ready& ready, const Sink& sink) {
  const uint32_t columns = source.columns, stretch = cut.stretch;
  const uint32_t warp = ThreadId() / 32, warps = ThreadCount() / 32, lane = ThreadId() % 32;
  float* x = stage + cut.rows * stretch;
  // Rows of whole 16 bytes keep every row aligned.
  const bool whole = columns % 8 == 0 && source.f_stride % 4 == 0;
  float p[kFloatPairs];
  LODE_UNROLL
  for (uint32_t k = 0; k < kFloatPairs; ++k) p[k] = 0.0f;
  uint32_t n_acts = 0;
  for (uint32_t first = 0; first < columns; first += stretch) {
    const uint32_t n = columns - first < stretch ? columns - first : stretch;
    if (first != 0) SyncBlock();
    FetchRows(format, n_rows, first, n, stretch, whole, stage,
              [&](uint32_t r) { return w + r * row_bytes; });
    if (first == 0) {
      ready();
      const uint32_t all = acts_of.n;
      if (first_act >= all) return;  // the same for all threads
      n_acts = all - first_act < cut.acts ? all - first_act : cut.acts;
    }
    FetchRows(Format::kF32, n_acts, first, n, stretch, whole, x, [&](uint32_t a) {
      return reinterpret_cast<const uint8_t*>(
          source.f + static_cast<size_t>(acts_of.row[first_act + a]) * source.f_stride);
    });
    WaitForCopies();
    SyncBlock();
    LODE_UNROLL
    for (uint32_t k = 0; k < kFloatPairs; ++k) {
      const uint32_t pair = warp + k * warps;
      if (pair < n_rows * n_acts)
        p[k] = AddStretch(p[k], stage + pair % n_rows * stretch, x + pair / n_rows * stretch, n);
    }
  }
  LODE_UNROLL
  for (uint32_t k = 0; k < kFloatPairs; ++k) {
    const uint32_t pair = warp + k * warps;
    if (pair >= n_rows * n_acts) continue;
    const float y = JoinLanes(p[k]);
    if (lane == 0) sink(pair % n_rows, first_act + pair / n_rows, y);
  }
}

}  // namespace lode::cuda
