// THE matrix product: y[a][r] = W[r] . act[a], one template over the instruction set and the weight
// format, in the one order of docs/design/arithmetic.md. Memory-bound by design: a weight byte is
// read once, in address order apart from a row group, and decoded once for up to 8 activation rows.
// Called by the expert threads of the CPU worker and by the cpu device.
//
// The canonical order wants one fp32 accumulator per (row, activation row), blocks ascending: a
// serial chain of additions. So S::kRows rows advance side by side, one vector lane each: 16 bytes
// of every row are loaded and transposed, so that four codes of each row meet four activations in
// one instruction, integer sums need no horizontal reduction, and one vector multiplication and
// addition moves all chains. The transposition is paid once for all activation rows. A row group is
// one contiguous piece of memory (rows follow each other), so while it is worked off the next
// group's bytes are prefetched linearly, the same number per block step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/decode/affine.h"
#include "kernels/cpu/decode/codebook.h"
#include "kernels/kernel_table.h"

namespace lode {
namespace {

constexpr uint32_t kActsMax = 8;  // kWindowRowsMax: activation rows that share one decode
constexpr uint32_t kCacheLineBytes = 64;

// sum(y) over columns [first, first + n) of a row, n a multiple of 16.
inline int32_t ActSum(const ActRow& act, size_t first, uint32_t n) {
  int32_t sum = 0;
  for (uint32_t i = 0; i < n / 16; ++i) sum += act.sum16[first / 16 + i];
  return sum;
}

// Exact sums of one group of columns for all rows of the row group; offsets and the signed bias are
// taken off again.
template <class S, class F>
inline typename S::Words GroupSum(const typename S::Words* w, const int8_t* y, const ActRow& act,
                                  size_t first) {
  constexpr int kWords = F::kGroup / 4;
  if constexpr (F::kSigned) {
    const typename S::Words sum = S::template DotSigned<kWords>(w, y);
    return S::kSignedBias == 0 ? sum
                               : S::SubAll(sum, S::kSignedBias * ActSum(act, first, F::kGroup));
  } else {
    const typename S::Words sum = S::template DotUnsigned<kWords, F::kMaxCode>(w, y);
    return F::kOffset == 0 ? sum : S::SubAll(sum, F::kOffset * ActSum(act, first, F::kGroup));
  }
}

// isum[a] of one block for every activation row. A step's codes are decoded once and stay in
// registers over the activation rows.
template <class S, class F>
inline void BlockProducts(const uint8_t* const* row, size_t offset, size_t column,
                          const ActRow* acts, uint32_t n_acts, typename S::Words* isum) {
  typename S::Words scale[F::kBlock / F::kGroup];
  if constexpr (F::kGroupScales) F::template GroupScales<S>(row, offset, scale);
  for (uint32_t a = 0; a < n_acts; ++a) isum[a] = S::ZeroWords();
  for (uint32_t step = 0; step < F::kBlock / F::kStep; ++step) {
    typename S::Words w[F::kStep / 4];
    F::template Decode<S>(row, offset, step, w);
    for (uint32_t a = 0; a < n_acts; ++a) {
      const size_t first = column + step * F::kStep;
      const int8_t* y = acts[a].q + first;
      alignas(64) int8_t arranged[F::kStep];
      if constexpr (F::kCrumbOrder) {
        static_assert(F::kStep == 64);
        S::ArrangeCrumbs(y, arranged);
        y = arranged;
      }
      typename S::Words sum = isum[a];
      for (uint32_t g = 0; g < F::kStep / F::kGroup; ++g) {
        const typename S::Words group = GroupSum<S, F>(w + g * (F::kGroup / 4), y + g * F::kGroup,
                                                       acts[a], first + g * F::kGroup);
        if constexpr (F::kGroupScales) {
          sum = S::MulAdd(sum, scale[step * (F::kStep / F::kGroup) + g], group);
        } else {
          sum = group;
        }
      }
      isum[a] = sum;
    }
  }
}

// msum of one block: sum over the groups of m_g * sum_g(y).
template <class S, class F>
inline typename S::Words GroupMinSum(const typename S::Words* mins, const ActRow& act,
                                     size_t column) {
  typename S::Words msum = S::ZeroWords();
  for (uint32_t pair = 0; pair < F::kBlock / F::kGroup / 2; ++pair) {
    const size_t low = column + (pair / 2 * 4 + pair % 2) * F::kGroup, high = low + 2 * F::kGroup;
    msum =
        S::MulAddPairs(msum, mins[pair], ActSum(act, low, F::kGroup), ActSum(act, high, F::kGroup));
  }
  return msum;
}

// acc[a] += t, t = float(isum) * (d_w * d_a) [+ float(msum) * (m_w * d_a)]: multiplications and
// additions, never fused.
template <class S, class F>
inline void AddTerms(const uint8_t* const* row, size_t offset, uint32_t block, const ActRow* acts,
                     uint32_t n_acts, const typename S::Words* isum, typename S::RowsF* acc) {
  const size_t column = static_cast<size_t>(block) * F::kBlock;
  const typename S::Words head = S::LoadWords(row, offset + F::kHead);
  const typename S::RowsF d_w = F::template Scale<S>(head);
  typename S::Words mins[F::kMins == decode::kGroupMins ? F::kBlock / F::kGroup / 2 : 1];
  if constexpr (F::kMins == decode::kGroupMins) F::template GroupMins<S>(row, offset, mins);
  for (uint32_t a = 0; a < n_acts; ++a) {
    const typename S::RowsF d_a = S::SetAll(acts[a].d[block]);
    typename S::RowsF t = S::Mul(S::ToFloat(isum[a]), S::Mul(d_w, d_a));
    if constexpr (F::kMins != decode::kNoMins) {
      const typename S::RowsF m_w = F::template Min<S>(head);
      typename S::RowsF msum;
      if constexpr (F::kMins == decode::kBlockMins) {
        msum = S::SetAll(static_cast<float>(ActSum(acts[a], column, F::kBlock)));
      } else {
        msum = S::ToFloat(GroupMinSum<S, F>(mins, acts[a], column));
      }
      t = S::Add(t, S::Mul(msum, S::Mul(m_w, d_a)));
    }
    acc[a] = S::Add(acc[a], t);
  }
}

// kActs = 1 or 0 (= n_acts, known at run time): the single-row case, plain decoding, keeps its sums
// in registers.
template <class S, class F, uint32_t kActs>
void MatGroups(const MatArgs& m) {
  const uint32_t n_acts = kActs ? kActs : m.n_acts;
  const uint32_t n_blocks = m.n_cols / F::kBlock;
  constexpr size_t kStepBytes = static_cast<size_t>(S::kRows) * F::kBytes;
  for (uint32_t first = 0; first < m.n_rows; first += S::kRows) {
    const uint32_t n = m.n_rows - first < S::kRows ? m.n_rows - first : S::kRows;
    const uint8_t* row[S::kRows];  // lanes beyond the last row repeat it; their results are dropped
    for (uint32_t r = 0; r < S::kRows; ++r)
      row[r] = m.w + (first + (r < n ? r : n - 1)) * m.row_bytes;
    const bool more = m.n_rows - first > S::kRows;
    const uint8_t* ahead = m.w + (first + S::kRows) * m.row_bytes;
    typename S::RowsF acc[kActs ? kActs : kActsMax];
    for (uint32_t a = 0; a < n_acts; ++a) acc[a] = S::SetAll(0.0f);
    for (uint32_t block = 0; block < n_blocks; ++block) {
      const size_t offset = static_cast<size_t>(block) * F::kBytes;
      if (more) {
        for (size_t i = 0; i < kStepBytes; i += kCacheLineBytes) __builtin_prefetch(ahead + i);
        ahead += kStepBytes;
      }
      typename S::Words isum[kActs ? kActs : kActsMax];
      BlockProducts<S, F>(row, offset, static_cast<size_t>(block) * F::kBlock, m.acts, n_acts,
                          isum);
      AddTerms<S, F>(row, offset, block, m.acts, n_acts, isum, acc);
    }
    for (uint32_t a = 0; a < n_acts; ++a) S::StoreRows(m.out[a] + first, acc[a], n);
  }
}

// ---- float weights: 32 interleaved fma partials per (row, activation row) ----------------------
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

// ---- what the kernel table holds ---------------------------------------------------------------
template <class S, class F>
void Mat(const MatArgs& m) {
  if constexpr (F::kBlock == 1) {
    uint32_t row = 0;
    for (; row + S::kFloatRows <= m.n_rows; row += S::kFloatRows)
      FloatRows<S, F, S::kFloatRows>(m, row);
    for (; row < m.n_rows; ++row) FloatRows<S, F, 1>(m, row);
  } else if (m.n_acts == 1) {
    MatGroups<S, F, 1>(m);
  } else {
    MatGroups<S, F, 0>(m);
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
    Mat<S, F>(m);
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
