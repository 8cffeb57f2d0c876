// Products of float weights and of the float reference mode: 32 interleaved fma partials per (row,
// activation row), joined by the canonical tree (docs/design/arithmetic.md). Called by any compute
// thread through the kernel table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/kernel_table.h"

namespace lode {
namespace {

constexpr uint32_t kActsMax = 8;  // kWindowRowsMax: activation rows that share one decode

template <class S, class F, uint32_t kR, uint32_t kA>
void FloatTile(const uint8_t* w, size_t row_bytes, const ActRow* acts, uint32_t n,
               float* const* out, uint32_t row) {
  typename S::V32 acc[kR][kA];
  for (auto& of_row : acc)
    for (auto& partials : of_row) partials = S::Zero32();
  uint32_t i = 0;
  for (; i + 32 <= n; i += 32) {
    typename S::V32 x[kA];
    for (uint32_t a = 0; a < kA; ++a) x[a] = S::Load32(acts[a].f + i);
    for (uint32_t r = 0; r < kR; ++r) {
      const typename S::V32 v =
          F::template Load32<S>(w + r * row_bytes + static_cast<size_t>(i) * F::kBytes);
      for (uint32_t a = 0; a < kA; ++a) acc[r][a] = S::Fma32(v, x[a], acc[r][a]);
    }
  }
  if (i < n) {
    for (uint32_t r = 0; r < kR; ++r) {
      uint8_t rest[32 * F::kBytes] = {};
      std::memcpy(rest, w + r * row_bytes + static_cast<size_t>(i) * F::kBytes,
                  (n - i) * F::kBytes);
      for (uint32_t a = 0; a < kA; ++a) {
        float x[32] = {};
        std::memcpy(x, acts[a].f + i, (n - i) * sizeof(float));
        acc[r][a] = S::FmaFirst32(F::template Load32<S>(rest), S::Load32(x), acc[r][a], n - i);
      }
    }
  }
  for (uint32_t r = 0; r < kR; ++r)
    for (uint32_t a = 0; a < kA; ++a) out[a][row + r] = S::Join32(acc[r][a]);
}

template <class S, class F, uint32_t kR>
void FloatRows(const MatArgs& m, uint32_t row) {
  const uint8_t* w = m.w + row * m.row_bytes;
  uint32_t a = 0;
  for (; a + S::kFloatActs <= m.n_acts; a += S::kFloatActs)
    FloatTile<S, F, kR, S::kFloatActs>(w, m.row_bytes, m.acts + a, m.n_cols, m.out + a, row);
  for (; a < m.n_acts; ++a)
    FloatTile<S, F, kR, 1>(w, m.row_bytes, m.acts + a, m.n_cols, m.out + a, row);
}

template <class S, class F>
void MatPlain(const MatArgs& m) {
  uint32_t row = 0;
  for (; row + S::kFloatRows <= m.n_rows; row += S::kFloatRows)
    FloatRows<S, F, S::kFloatRows>(m, row);
  for (; row < m.n_rows; ++row) FloatRows<S, F, 1>(m, row);
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
