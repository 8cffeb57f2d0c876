// Products of float weights and of the float reference mode: 32 interleaved fma partials per (row,
// activation row), joined by the canonical tree (docs/design/arithmetic.md). Called by any compute
// thread through the kernel table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/decode/decode.h"
#include "kernels/kernel_table.h"

namespace lode {
namespace {

constexpr uint32_t kActsMax = 8;  // kWindowRowsMax: activation rows that share one decode

// Products of kR rows with kA activation rows. Where two weights of two bytes share a word, words
// are split into even and odd weights by one instruction each, activations likewise, and the
// partials stand in that order until they are joined.
template <class S, class F, uint32_t kR, uint32_t kA>
struct FloatTile {
  using V = typename S::V32;
  static constexpr bool kPairs = F::template kPairs<S>;
  const uint8_t* w;
  size_t row_bytes;
  const ActRow* acts;
  V acc[kR][kA];

  static LODE_ALWAYS_INLINE V Weights(const uint8_t* p) {
    if constexpr (kPairs) return F::template LoadPairs32<S>(p);
    return F::template Load32<S>(p);
  }
  static LODE_ALWAYS_INLINE V Activations(const float* p) {
    if constexpr (kPairs) return S::SplitPairs32(S::Load32(p));
    return S::Load32(p);
  }
  const uint8_t* At(size_t r, size_t i) const { return w + r * row_bytes + i * F::kBytes; }
  // Columns [i, i + 32 kN), row by row: neighbouring lines of a row are asked for together.
  template <uint32_t kN>
  LODE_ALWAYS_INLINE void Step(size_t i) {
    V x[kN][kA];
    Unroll<kN * kA>([&](auto k) __attribute__((always_inline)) {
      x[k / kA][k % kA] = Activations(acts[k % kA].f + i + 32 * (k / kA));
    });
    Unroll<kR * kN>([&](auto k) __attribute__((always_inline)) {
      constexpr uint32_t kRow = k / kN, kPart = k % kN;
      const V v = Weights(At(kRow, i + 32 * kPart));
      Unroll<kA>([&](auto a) __attribute__((always_inline)) {
        acc[kRow][a] = S::Fma32(v, x[kPart][a], acc[kRow][a]);
      });
    });
  }
  // The last n columns, fewer than 32: the other partials are not touched.
  void Last(size_t i, uint32_t n) {
    for (uint32_t r = 0; r < kR; ++r) {
      uint8_t rest[32 * F::kBytes] = {};
      std::memcpy(rest, At(r, i), n * F::kBytes);
      for (uint32_t a = 0; a < kA; ++a) {
        float x[32] = {};
        std::memcpy(x, acts[a].f + i, n * sizeof(float));
        if constexpr (kPairs) {
          acc[r][a] = S::FmaFirstPairs32(Weights(rest), Activations(x), acc[r][a], n);
        } else {
          acc[r][a] = S::FmaFirst32(Weights(rest), Activations(x), acc[r][a], n);
        }
      }
    }
  }
  static float Join(const V& v) {
    if constexpr (kPairs) return S::JoinPairs32(v);
    return S::Join32(v);
  }
};

// Everything inlined, so that sums stay in registers.
template <class S, class F, uint32_t kR, uint32_t kA>
__attribute__((noinline, flatten)) void FloatProducts(const MatArgs& m, uint32_t row,
                                                      uint32_t act) {
  FloatTile<S, F, kR, kA> tile = {m.w + row * m.row_bytes, m.row_bytes, m.acts + act, {}};
  for (auto& of_row : tile.acc)
    for (auto& partials : of_row) partials = S::Zero32();
  size_t i = 0;
  if constexpr (S::kManyRegisters)
    for (; i + 64 <= m.n_cols; i += 64) tile.template Step<2>(i);
  for (; i + 32 <= m.n_cols; i += 32) tile.template Step<1>(i);
  if (i < m.n_cols) tile.Last(i, static_cast<uint32_t>(m.n_cols - i));
  for (uint32_t r = 0; r < kR; ++r)
    for (uint32_t a = 0; a < kA; ++a) m.out[act + a][row + r] = tile.Join(tile.acc[r][a]);
}

// Rows [row, end): tiles of S::kFloatTile accumulators.
template <class S, class F, uint32_t kA>
void FloatRows(const MatArgs& m, uint32_t row, uint32_t end, uint32_t act) {
  constexpr uint32_t kR = S::kFloatTile / kA;
  for (; row + kR <= end; row += kR) FloatProducts<S, F, kR, kA>(m, row, act);
  for (; row < end; ++row) FloatProducts<S, F, 1, kA>(m, row, act);
}

// Blocks of rows that stay in the second-level cache meet two activation rows at a time: those stay
// in the first-level cache, where eight would not fit.
template <class S, class F>
void MatPlain(const MatArgs& m) {
  constexpr uint32_t kRowsOfBlock = 16;
  for (uint32_t row = 0; row < m.n_rows; row += kRowsOfBlock) {
    const uint32_t end = m.n_rows - row < kRowsOfBlock ? m.n_rows : row + kRowsOfBlock;
    uint32_t a = 0;
    if constexpr (S::kFloatTile > 1)
      for (; a + 2 <= m.n_acts; a += 2) FloatRows<S, F, 2>(m, row, end, a);
    for (; a < m.n_acts; ++a) FloatRows<S, F, 1>(m, row, end, a);
  }
}

template <class F>
void Dequant(const uint8_t* w, size_t n, float* out) {
  for (size_t i = 0; i < n; i += F::kBlock, w += F::kBytes) F::Dequant(w, out + i);
}

// Float reference mode: dequantised pieces of a row, whole partial groups each, through the
// canonical dot.
template <class S, class F>
void MatFloat(const MatArgs& m) {
  if constexpr (F::kBlock == 1) {
    MatPlain<S, F>(m);
  } else {
    constexpr uint32_t kPiece = 256;  // a multiple of every block length and of the 32 partials
    alignas(64) float piece[kPiece];
    for (uint32_t row = 0; row < m.n_rows; ++row) {
      typename S::V32 acc[kActsMax];
      for (auto& partials : acc) partials = S::Zero32();
      const uint8_t* w = m.w + row * m.row_bytes;
      for (uint32_t col = 0; col < m.n_cols; col += kPiece) {
        const uint32_t n = m.n_cols - col < kPiece ? m.n_cols - col : kPiece;
        Dequant<F>(w + col / F::kBlock * F::kBytes, n, piece);
        for (uint32_t a = 0; a < m.n_acts; ++a)
          for (uint32_t i = 0; i < n; i += 32)
            acc[a] = S::Fma32(S::Load32(piece + i), S::Load32(m.acts[a].f + col + i), acc[a]);
      }
      for (uint32_t a = 0; a < m.n_acts; ++a) m.out[a][row] = S::Join32(acc[a]);
    }
  }
}

}  // namespace
}  // namespace lode
