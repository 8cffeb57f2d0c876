// THE matrix product: y[a][r] = W[r] . act[a], one template over the instruction set and the weight format, in the one order of
// docs/design/arithmetic.md. Memory-bound by design: a weight byte is read once, in address order apart from a row group, and
// decoded once for up to 8 activation rows. Called by the expert threads of the CPU worker and by the cpu device.
//
// The canonical order wants one fp32 accumulator per (row, activation row), blocks ascending: a serial chain of additions. So
// S::kRows rows advance side by side, one lane each: per block the exact integer sums of all rows are transposed into lanes, and
// one vector multiplication and addition moves all chains. A row group is one contiguous piece of memory (rows follow each
// other), so while it is worked off the next group's bytes are prefetched linearly, the same number per block step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/decode/affine.h"
#include "kernels/cpu/decode/codebook.h"
#include "kernels/kernel_table.h"

namespace lode {
namespace {

constexpr uint32_t kActsMax = 8;           // kWindowRowsMax: activation rows that share one decode
constexpr uint32_t kCacheLineBytes = 64;

// Exact integers of one block of one row group for every activation row, before they meet the scales.
template <class S, class F>
struct BlockSums {
  static constexpr bool kPaired = F::kBlock == 32;
  static constexpr uint32_t kVectors = kPaired ? S::kRows / 2 : S::kRows;
  typename S::Sums products[kActsMax][kVectors];
  typename S::Sums mins[F::kMins == decode::kGroupMins ? kActsMax : 1][S::kRows / 2];
};

// sum(y) over one block.
template <class F>
inline int32_t ActBlockSum(const ActRow& act, uint32_t block) {
  const int16_t* s = act.sum16 + block * (F::kBlock / 16);
  int32_t sum = 0;
  for (uint32_t i = 0; i < F::kBlock / 16; ++i) sum += s[i];
  return sum;
}

// Blocks of 32 and 64 weights: one Codes per pair of rows or per row.
template <class S, class F, class Sums>
inline void SmallBlockProducts(const uint8_t* const* row, size_t offset, uint32_t block, const ActRow* acts,
                               uint32_t n_acts, Sums* sums) {
#pragma GCC unroll 4
  for (uint32_t v = 0; v < Sums::kVectors; ++v) {
    const uint8_t* p0 = row[Sums::kPaired ? S::PairFirst(v) : v] + offset;
    const uint8_t* p1 = row[Sums::kPaired ? S::PairSecond(v) : v] + offset;
    const typename S::Codes w = F::template Decode<S>(p0, p1);
    for (uint32_t a = 0; a < n_acts; ++a) {
      const int8_t* q = acts[a].q + static_cast<size_t>(block) * F::kBlock;
      const typename S::Acts y = Sums::kPaired ? S::LoadActsTwice(q) : S::LoadActs(q);
      sums->products[a][v] = F::kSigned ? S::DotSigned(w, y) : S::DotUnsigned(w, y);
    }
  }
}

// Blocks of 256 weights with group scales: four Codes per row, scaled and summed as integers.
template <class S, class F, class Sums>
inline void SuperBlockProducts(const uint8_t* const* row, size_t offset, uint32_t block, const ActRow* acts,
                               uint32_t n_acts, Sums* sums) {
  static_assert(F::kBlock == 256 && F::kGroupScales && !F::kSigned && F::kOffset == 0);
  for (uint32_t v = 0; v < S::kRows; ++v) {
    const uint8_t* p = row[v] + offset;
    const typename S::Codes w0 = F::template DecodeChunk<S, 0>(p), w1 = F::template DecodeChunk<S, 1>(p);
    const typename S::Codes w2 = F::template DecodeChunk<S, 2>(p), w3 = F::template DecodeChunk<S, 3>(p);
    const typename S::Set16 set = F::template Scales<S>(p);
    const typename S::Scales s0 = S::template ChunkScales<0>(set), s1 = S::template ChunkScales<1>(set);
    const typename S::Scales s2 = S::template ChunkScales<2>(set), s3 = S::template ChunkScales<3>(set);
    for (uint32_t a = 0; a < n_acts; ++a) {
      const int8_t* q = acts[a].q + static_cast<size_t>(block) * 256;
      typename S::Sums sum = S::DotScaled(S::ZeroSums(), w0, S::LoadActs(q), s0);
      sum = S::DotScaled(sum, w1, S::LoadActs(q + 64), s1);
      sum = S::DotScaled(sum, w2, S::LoadActs(q + 128), s2);
      sums->products[a][v] = S::DotScaled(sum, w3, S::LoadActs(q + 192), s3);
    }
  }
  if constexpr (F::kMins == decode::kGroupMins) {
    for (uint32_t k = 0; k < S::kRows / 2; ++k) {
      const typename S::Set16 m0 = F::template Mins<S>(row[S::PairFirst(k)] + offset);
      const typename S::Set16 m1 = F::template Mins<S>(row[S::PairSecond(k)] + offset);
      for (uint32_t a = 0; a < n_acts; ++a)
        sums->mins[a][k] = S::DotSets(m0, m1, acts[a].sum16 + static_cast<size_t>(block) * 16);
    }
  }
}

// acc[a] += t, t = float(isum) * (d_w * d_a) [+ float(msum) * (m_w * d_a)]: multiplications and additions, never fused.
template <class S, class F>
inline void AddTerms(const uint8_t* const* row, size_t offset, uint32_t block, const ActRow* acts, uint32_t n_acts,
                     const BlockSums<S, F>& sums, typename S::RowsF* acc) {
  const typename S::RowsI head = S::LoadWords(row, offset + F::kHead);
  const typename S::RowsF d_w = F::template Scale<S>(head);
  constexpr int32_t kBias = F::kSigned ? S::kSignedBias : F::kOffset;
  for (uint32_t a = 0; a < n_acts; ++a) {
    const typename S::RowsF d_a = S::SetAll(acts[a].d[block]);
    typename S::RowsI isum =
        sums.kPaired ? S::ReducePairs(sums.products[a]) : S::ReduceWhole(sums.products[a]);
    if constexpr (kBias != 0) isum = S::SubAll(isum, kBias * ActBlockSum<F>(acts[a], block));
    typename S::RowsF t = S::Mul(S::ToFloat(isum), S::Mul(d_w, d_a));
    if constexpr (F::kMins == decode::kBlockMins) {
      const typename S::RowsF m_w = F::template Min<S>(head);
      const typename S::RowsF msum = S::SetAll(static_cast<float>(ActBlockSum<F>(acts[a], block)));
      t = S::Add(t, S::Mul(msum, S::Mul(m_w, d_a)));
    } else if constexpr (F::kMins == decode::kGroupMins) {
      const typename S::RowsF m_w = F::template Min<S>(head);
      const typename S::RowsF msum = S::ToFloat(S::ReducePairs(sums.mins[a]));
      t = S::Add(t, S::Mul(msum, S::Mul(m_w, d_a)));
    }
    acc[a] = S::Add(acc[a], t);
  }
}

// kActs = 1 or 0 (= n_acts, known at run time): the single-row case, plain decoding, keeps its inner loops straight.
template <class S, class F, uint32_t kActs>
void MatGroups(const MatArgs& m) {
  const uint32_t n_acts = kActs ? kActs : m.n_acts;
  const uint32_t n_blocks = m.n_cols / F::kBlock;
  constexpr size_t kStepBytes = static_cast<size_t>(S::kRows) * F::kBytes;
  BlockSums<S, F> sums;
  for (uint32_t first = 0; first < m.n_rows; first += S::kRows) {
    const uint32_t n = m.n_rows - first < S::kRows ? m.n_rows - first : S::kRows;
    const uint8_t* row[S::kRows];  // lanes beyond the last row repeat it; their results are dropped
    for (uint32_t r = 0; r < S::kRows; ++r) row[r] = m.w + (first + (r < n ? r : n - 1)) * m.row_bytes;
    const bool more = m.n_rows - first > S::kRows;
    const uint8_t* ahead = m.w + (first + S::kRows) * m.row_bytes;
    typename S::RowsF acc[kActsMax];
    for (uint32_t a = 0; a < n_acts; ++a) acc[a] = S::SetAll(0.0f);
    for (uint32_t block = 0; block < n_blocks; ++block) {
      const size_t offset = static_cast<size_t>(block) * F::kBytes;
      if (more) {
        for (size_t i = 0; i < kStepBytes; i += kCacheLineBytes) __builtin_prefetch(ahead + i);
        ahead += kStepBytes;
      }
      if constexpr (F::kBlock <= 64) {
        SmallBlockProducts<S, F>(row, offset, block, m.acts, n_acts, &sums);
      } else {
        SuperBlockProducts<S, F>(row, offset, block, m.acts, n_acts, &sums);
      }
      AddTerms<S, F>(row, offset, block, m.acts, n_acts, sums, acc);
    }
    for (uint32_t a = 0; a < n_acts; ++a) S::StoreRows(m.out[a] + first, acc[a], n);
  }
}

// ---- float weights: 32 interleaved fma partials per (row, activation row) -----------------------------------------------------
template <class S, class F, uint32_t kR, uint32_t kA>
void FloatTile(const uint8_t* w, size_t row_bytes, const ActRow* acts, uint32_t n, float* const* out, uint32_t row) {
  typename S::V32 acc[kR][kA];
  for (auto& of_row : acc)
    for (auto& partials : of_row) partials = S::Zero32();
  uint32_t i = 0;
  for (; i + 32 <= n; i += 32) {
    typename S::V32 x[kA];
    for (uint32_t a = 0; a < kA; ++a) x[a] = S::Load32(acts[a].f + i);
    for (uint32_t r = 0; r < kR; ++r) {
      const typename S::V32 v = F::template Load32<S>(w + r * row_bytes + static_cast<size_t>(i) * F::kBytes);
      for (uint32_t a = 0; a < kA; ++a) acc[r][a] = S::Fma32(v, x[a], acc[r][a]);
    }
  }
  if (i < n) {
    for (uint32_t r = 0; r < kR; ++r) {
      uint8_t rest[32 * F::kBytes] = {};
      std::memcpy(rest, w + r * row_bytes + static_cast<size_t>(i) * F::kBytes, (n - i) * F::kBytes);
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
  for (; a < m.n_acts; ++a) FloatTile<S, F, kR, 1>(w, m.row_bytes, m.acts + a, m.n_cols, m.out + a, row);
}

// ---- what the kernel table holds ----------------------------------------------------------------------------------------------
template <class S, class F>
void Mat(const MatArgs& m) {
  if constexpr (F::kBlock == 1) {
    uint32_t row = 0;
    for (; row + S::kFloatRows <= m.n_rows; row += S::kFloatRows) FloatRows<S, F, S::kFloatRows>(m, row);
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

// Float reference mode: dequantised pieces of a row, whole partial groups each, through the canonical dot.
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
