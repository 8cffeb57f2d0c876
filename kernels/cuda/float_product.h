// Dense matrices of float types on the device: a block of threads fetches a few rows of W and the
// activations of a stretch of columns into shared memory, all loads in flight at once, then its
// warps multiply: lane l of a warp is partial l of the canonical sum, a warp has some (weight row,
// activation row) pairs. F32, F16 and BF16 are told apart at run time, while they are widened, so
// such a matrix can ride in any product's launch. Bound: latency of one fetch per stretch; a few
// MiB of weights. Device code, included by format_kernels.h.
#pragma once

#include "kernels/cuda/decode.h"
#include "kernels/cuda/forms.h"
#include "kernels/cuda/reduce.h"
#include "shared/base/limits.h"

namespace lode::cuda {

inline constexpr uint32_t kFloatTileRows = 2;
inline constexpr uint32_t kFloatStageBytes = 40 * 1024;
inline constexpr uint32_t kFloatWarpsMin = 2;  // of a block
inline constexpr uint32_t kFloatPairs =
    kFloatTileRows * kWindowRowsMax / kFloatWarpsMin;  // a warp's
inline constexpr uint32_t kFetchAhead = 4;             // loads of four values in flight per thread

// Columns of one stretch: a multiple of the 32 partials.
LODE_FN uint32_t StretchColumns(uint32_t n_acts, uint32_t columns) {
  const uint32_t fit = kFloatStageBytes / (sizeof(float) * (kFloatTileRows + n_acts)) / 32 * 32;
  const uint32_t all = (columns + 31) / 32 * 32;
  return all < fit ? all : fit;
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

// n columns from `first` of `rows` vectors into to[row][stretch]; row_of(r) is where vector r lies.
template <class RowOf>
LODE_DEVICE void FetchRows(Format format, uint32_t rows, uint32_t first, uint32_t n,
                           uint32_t stretch, bool whole, float* to, const RowOf& row_of) {
  if (!whole) {
    for (uint32_t i = ThreadId(); i < rows * n; i += ThreadCount())
      to[i / n * stretch + i % n] = LoadValue(format, row_of(i / n), first + i % n);
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

// y[act][row] for n_rows <= kFloatTileRows weight rows from w on; acts[] names the source's rows.
// All threads call it, at least kFloatWarpsMin warps. stretch: StretchColumns of the launch's rows.
// sink(row, act, value) once for each.
template <class Sink>
LODE_DEVICE void StagedFloatProduct(Format format, const uint8_t* w, size_t row_bytes,
                                    uint32_t n_rows, const ActSource& source, const uint32_t* acts,
                                    uint32_t n_acts, uint32_t stretch, float* stage,
                                    const Sink& sink) {
  const uint32_t columns = source.columns;
  const uint32_t warp = ThreadId() / 32, warps = ThreadCount() / 32, lane = ThreadId() % 32;
  float* x = stage + kFloatTileRows * stretch;
  // Rows of whole 16 bytes keep every row aligned.
  const bool whole = columns % 8 == 0 && source.f_stride % 4 == 0;
  float p[kFloatPairs];
  LODE_UNROLL
  for (uint32_t k = 0; k < kFloatPairs; ++k) p[k] = 0.0f;
  for (uint32_t first = 0; first < columns; first += stretch) {
    const uint32_t n = columns - first < stretch ? columns - first : stretch;
    if (first != 0) SyncBlock();
    FetchRows(format, n_rows, first, n, stretch, whole, stage,
              [&](uint32_t r) { return w + r * row_bytes; });
    FetchRows(Format::kF32, n_acts, first, n, stretch, whole, x, [&](uint32_t a) {
      return reinterpret_cast<const uint8_t*>(source.f +
                                              static_cast<size_t>(acts[a]) * source.f_stride);
    });
    SyncBlock();
    LODE_UNROLL
    for (uint32_t k = 0; k < kFloatPairs; ++k) {
      const uint32_t pair = warp + k * warps;
      if (pair >= n_rows * n_acts) continue;
      const float* wr = stage + pair % n_rows * stretch;
      const float* xa = x + pair / n_rows * stretch;
      float sum = p[k];
      uint32_t i = lane;
      for (; i + 32 * 7 < n; i += 32 * 8) {
        float a[8], b[8];
        LODE_UNROLL
        for (uint32_t j = 0; j < 8; ++j) a[j] = wr[i + 32 * j], b[j] = xa[i + 32 * j];
        LODE_UNROLL
        for (uint32_t j = 0; j < 8; ++j) sum = canonical::Fma(a[j], b[j], sum);
      }
      for (; i < n; i += 32) sum = canonical::Fma(wr[i], xa[i], sum);
      p[k] = sum;
    }
  }
  LODE_UNROLL
  for (uint32_t k = 0; k < kFloatPairs; ++k) {
    const uint32_t pair = warp + k * warps;
    if (pair >= n_rows * n_acts) continue;
    const float y = JoinLanes(p[k]);
    if (lane == 0) sink(pair % n_rows, pair / n_rows, y);
  }
}

}  // namespace lode::cuda
