// THE matrix product: y[a][r] = W[r] . act[a], one template over the instruction set and the weight
// format, in the one order of docs/design/arithmetic.md. A weight byte is read once and decoded
// once for up to 8 activation rows. Called by the expert threads of the CPU worker and by the cpu
// device.
//
// The canonical order wants one fp32 accumulator per (row, activation row), blocks ascending: a
// serial chain of additions. So S::kRows rows advance side by side, one vector lane each: 16 bytes
// of every row are loaded and transposed, so that four codes of each row meet four activations in
// one instruction, integer sums need no horizontal reduction, and one vector multiplication and
// addition moves all chains. The transposition is paid once for all activation rows. A row group is
// one contiguous piece of memory (rows follow each other), so while it is worked off the next
// group's bytes are prefetched linearly, the same number per step; during the last group those of
// the piece that the caller says comes next. Why this and not something else,
// with figures: docs/design/kernels.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/cpu/act_panel.h"
#include "kernels/cpu/decode/grid.h"
#include "kernels/cpu/decode/k_types.h"
#include "kernels/cpu/decode/small.h"
#include "kernels/cpu/mat_float.h"
#include "kernels/kernel_table.h"

namespace lode {
namespace {

constexpr uint32_t kCacheLineBytes = 64;

// Activation rows of one call. kActs = 1 or 0 (= n, known at run time): the single-row case, plain
// decoding, keeps its sums in registers.
template <uint32_t kActs>
struct Acts {
  const ActPanel* panel;
  uint32_t n;
  static constexpr uint32_t kMost = kActs ? kActs : kActsMax;
  LODE_ALWAYS_INLINE uint32_t Count() const { return kActs ? kActs : n; }
};

// isum[a] += one step of weights (kStep of them, decoded in w), for every activation row. `step`
// counts inside the block, `block` inside the panel.
template <class S, class F, uint32_t kActs, uint32_t kStep, class RawBlocks>
LODE_ALWAYS_INLINE void AddStep(const Acts<kActs>& acts, uint32_t block, const RawBlocks& raw,
                                const typename S::Words* w, typename S::Words* isum) {
  constexpr bool kStart = kBiasOf<S, F> != 0;
  constexpr uint32_t kGroups = F::kStep < F::kGroup ? 1 : F::kStep / F::kGroup;
  constexpr uint32_t kWords = F::kStep / 4 / kGroups;
  typename S::Words scale[kGroups];
  if constexpr (F::kGroupScales) {
    Unroll<kGroups>([&](auto g) __attribute__((always_inline)) {
      scale[g] = raw.template GroupScale<kStep * kGroups + g>();
    });
  }
  for (uint32_t a = 0; a < acts.Count(); ++a) {
    const ActPanel& act = acts.panel[a];
    const int8_t* y = act.y + block * F::kBlock + kStep * F::kStep;
    const int32_t* start =
        act.start + block * (F::kBlock / F::kGroup) + kStep * F::kStep / F::kGroup;
    typename S::Words sum = S::ZeroWords();
    if constexpr (kStep > 0) sum = isum[a];
    if constexpr (kStep == 0 && kStart && !F::kGroupScales) sum = S::Start(start);
    Unroll<kGroups>([&](auto g) __attribute__((always_inline)) {
      if constexpr (F::kGroupScales) {
        sum = S::template DotScaled<kWords, F::kMaxCode, F::kSigned, kStart>(
            sum, scale[g], start + g, w + g * kWords, y + 4 * kWords * g);
      } else {
        sum = S::template Dot<kWords, F::kMaxCode, F::kSigned>(sum, w, y);
      }
    });
    isum[a] = sum;
  }
}

// acc[a] += t, t = float(isum) * (d_w * d_a) [+ float(msum) * (m_w * d_a)]: multiplications and
// additions, never fused.
template <class S, class F, uint32_t kActs, uint32_t kI, class RawBlocks>
LODE_ALWAYS_INLINE void AddTerms(const Acts<kActs>& acts, uint32_t block, const RawBlocks& raw,
                                 const typename S::Words* isum, typename S::RowsF* acc) {
  const typename S::RowsF d_w = raw.template Scale<kI>();
  typename S::RowsF m_w = d_w;
  typename S::Words mins[4];
  if constexpr (F::kMins != decode::kNoMins) m_w = raw.template Min<kI>();
  if constexpr (F::kMins == decode::kGroupMins) raw.GroupMins(mins);
  for (uint32_t a = 0; a < acts.Count(); ++a) {
    const ActPanel& act = acts.panel[a];
    const typename S::RowsF d_a = S::SetAll(act.d[block]);
    typename S::RowsF t = S::Mul(S::ToFloat(isum[a]), S::Mul(d_w, d_a));
    if constexpr (F::kMins == decode::kBlockMins) {
      float msum;
      std::memcpy(&msum, &act.mins[block], sizeof(msum));
      t = S::Add(t, S::Mul(S::SetAll(msum), S::Mul(m_w, d_a)));
    } else if constexpr (F::kMins == decode::kGroupMins) {
      typename S::Words msum = S::ZeroWords();
      for (uint32_t i = 0; i < 4; ++i)
        msum = S::MulAddPairs(msum, mins[i], act.mins + 4 * block + i);
      t = S::Add(t, S::Mul(S::ToFloat(msum), S::Mul(m_w, d_a)));
    }
    acc[a] = S::Add(acc[a], t);
  }
}

// The n-th step to take: integer sums are exact, so a format may choose (step 0 comes first).
template <class F>
constexpr uint32_t StepAt(uint32_t n) {
  if constexpr (requires { F::StepAt(n); }) return F::StepAt(n);
  return n;
}

// Steps of 64 weights with several activation rows take all registers there are: nothing else may
// stay alive, and the compiler's scheduler is left to itself.
template <class F, uint32_t kActs>
constexpr bool kFullStep = F::kStep > 32 && kActs != 1;

// Fetches a stretch of memory into the second-level cache, line by line, while another is worked
// off: as many bytes per unit of blocks as the unit itself has, spread evenly over its steps. In
// one go they would take every line buffer of the core, and loads that only want the second-level
// cache would wait behind them.
struct LinearPrefetch {
  const uint8_t* next;
  template <uint32_t kStep, uint32_t kSteps, size_t kBytes, bool kFence>
  LODE_ALWAYS_INLINE void Step() const {
    constexpr size_t kLines = (kBytes + kCacheLineBytes - 1) / kCacheLineBytes;
    for (size_t i = kStep * kLines / kSteps; i < (kStep + 1) * kLines / kSteps; ++i)
      __builtin_prefetch(next + i * kCacheLineBytes, 0, 2);
    if constexpr (kFence) asm volatile("");  // the compiler would move them all to the front
  }
};

// kN blocks that are read together.
template <class S, class F, uint32_t kN, uint32_t kActs>
LODE_ALWAYS_INLINE void Blocks(const typename S::Rows& rows, uint32_t block,
                               const Acts<kActs>& acts, LinearPrefetch* ahead,
                               typename S::RowsF* acc) {
  constexpr uint32_t kSteps = F::kBlock / F::kStep;
  constexpr size_t kBytes = size_t{S::kRows} * kN * F::kBytes;
  typename F::template Raw<S, kN> raw;
  raw.Load(rows);
  Unroll<kN>([&](auto i) __attribute__((always_inline)) {
    typename S::Words isum[Acts<kActs>::kMost];
    Unroll<kSteps>([&](auto n) __attribute__((always_inline)) {
      constexpr uint32_t step = StepAt<F>(n);
      ahead->Step<i * kSteps + n, kN * kSteps, kBytes, !kFullStep<F, kActs>>();
      typename S::Words w[F::kStep / 4];
      raw.template Codes<i, step>(w);
      AddStep<S, F, kActs, step>(acts, block + i, raw, w, isum);
    });
    AddTerms<S, F, kActs, i>(acts, block + i, raw, isum, acc);
  });
  ahead->next += kBytes;
}

// Blocks that are read together while there are so many; 0: the format has no such unit, or the
// instruction set no registers for it.
template <class S, class F, uint32_t kActs>
constexpr uint32_t LongUnit() {
  if constexpr (requires { F::kLongUnit; })
    return S::kManyRegisters && !kFullStep<F, kActs> ? F::kLongUnit : 0;
  return 0;
}
template <uint32_t kN>
using Unit = std::integral_constant<uint32_t, kN>;

// n_blocks of one row group, whose sums so far are in acc. Everything called from here is inlined:
// a real call would spill all vector registers.
template <class S, class F, uint32_t kActs>
__attribute__((noinline, flatten)) void RowGroup(const uint8_t* w, size_t stride,
                                                 uint32_t first_block, uint32_t n_blocks,
                                                 LinearPrefetch ahead, Acts<kActs> acts,
                                                 typename S::RowsF* acc) {
  typename S::Rows rows = S::RowsAt(w, stride);
  // The compiler takes a store of a vector for a store to anything: sums stay here until the end.
  typename S::RowsF sums[Acts<kActs>::kMost];
  for (uint32_t a = 0; a < acts.Count(); ++a) sums[a] = acc[a];
  uint32_t b = 0;
  const auto run = [&](auto unit) __attribute__((always_inline)) {
    for (; b + unit <= n_blocks; b += unit) {
      Blocks<S, F, unit, kActs>(rows, first_block + b, acts, &ahead, sums);
      rows.Step(unit * F::kBytes);
    }
  };
  constexpr uint32_t kLong = LongUnit<S, F, kActs>();
  if constexpr (kLong != 0) run(Unit<kLong>{});
  if constexpr (F::kUnit != 1) run(Unit<F::kUnit>{});
  run(Unit<1>{});
  for (uint32_t a = 0; a < acts.Count(); ++a) acc[a] = sums[a];
}

// Fewer rows than a group: they are copied, a piece at a time, beside rows of zeros.
template <class S, class F, uint32_t kActs>
inline void FewRows(const uint8_t* w, size_t stride, uint32_t n_rows, uint32_t n_blocks,
                    const Acts<kActs>& acts, typename S::RowsF* acc) {
  constexpr uint32_t kPiece = 512 / F::kBytes / F::kUnit * F::kUnit;
  static_assert(kPiece >= F::kUnit);
  uint8_t copy[S::kRows * kPiece * F::kBytes] = {};
  for (uint32_t b = 0; b < n_blocks; b += kPiece) {
    const uint32_t n = n_blocks - b < kPiece ? n_blocks - b : kPiece;
    for (uint32_t r = 0; r < n_rows; ++r)
      std::memcpy(copy + r * kPiece * F::kBytes, w + r * stride + size_t{b} * F::kBytes,
                  size_t{n} * F::kBytes);
    RowGroup<S, F, kActs>(copy, kPiece * F::kBytes, b, n, {copy}, acts, acc);
  }
}

// Sums of one group, out[a][row + r] for r in [skip, n_rows): zero for the first columns, else so
// far.
template <class S>
LODE_ALWAYS_INLINE void LoadSums(const MatArgs& m, uint32_t row, uint32_t n_rows, bool first,
                                 typename S::RowsF* acc) {
  for (uint32_t a = 0; a < m.n_acts; ++a) {
    acc[a] = S::SetAll(0.0f);
    if (first) continue;
    float sums[S::kRows] = {};
    std::memcpy(sums, m.out[a] + row, n_rows * sizeof(float));
    acc[a] = S::LoadRows(sums);
  }
}
template <class S>
LODE_ALWAYS_INLINE void StoreSums(const MatArgs& m, uint32_t row, uint32_t skip, uint32_t n_rows,
                                  const typename S::RowsF* acc) {
  for (uint32_t a = 0; a < m.n_acts; ++a) {
    if (skip == 0 && n_rows == S::kRows) {
      S::StoreRows(m.out[a] + row, acc[a]);
      continue;
    }
    float sums[S::kRows];
    S::StoreRows(sums, acc[a]);
    std::memcpy(m.out[a] + row + skip, sums + skip, (n_rows - skip) * sizeof(float));
  }
}

// The first group of a call has nobody who fetched it: in the order of memory it comes at the full
// rate, in the order of 16 rows side by side at a quarter of it.
inline void PrefetchGroup(const uint8_t* w, size_t bytes) {
  for (size_t i = 0; i < bytes; i += kCacheLineBytes) __builtin_prefetch(w + i, 0, 2);
}

template <class S, class F, uint32_t kActs>
void MatFewRows(const MatArgs& m, size_t column, uint32_t n_blocks, const Acts<kActs>& acts) {
  typename S::RowsF acc[Acts<kActs>::kMost];
  LoadSums<S>(m, 0, m.n_rows, column == 0, acc);
  FewRows<S, F, kActs>(m.w + column / F::kBlock * F::kBytes, m.row_bytes, m.n_rows, n_blocks, acts,
                       acc);
  StoreSums<S>(m, 0, 0, m.n_rows, acc);
}

// All rows, at least a group, columns of one panel. The last group of a count that is no multiple
// of kRows overlaps the one before; rows that are already done are computed again and not stored.
template <class S, class F, uint32_t kActs>
void MatPanel(const MatArgs& m, size_t column, uint32_t n_blocks, const Acts<kActs>& acts) {
  const bool last_panel = column + size_t{n_blocks} * F::kBlock == m.n_cols;
  const uint8_t* w = m.w + column / F::kBlock * F::kBytes;
  PrefetchGroup(w, n_blocks * F::kBytes == m.row_bytes ? S::kRows * m.row_bytes : 0);
  for (uint32_t done = 0; done < m.n_rows; done += S::kRows) {
    const uint32_t left = m.n_rows - done;
    const uint32_t skip = left < S::kRows ? S::kRows - left : 0, row = done - skip;
    const uint8_t* group = w + row * m.row_bytes;
    const uint8_t* ahead = group + S::kRows * m.row_bytes;
    if (left <= S::kRows) {  // the last group: itself again, which costs nothing
      ahead = m.next != nullptr && last_panel ? m.next(m.next_context) : nullptr;
      if (ahead == nullptr) ahead = group;
    }
    typename S::RowsF acc[Acts<kActs>::kMost];
    LoadSums<S>(m, row, S::kRows, column == 0, acc);
    RowGroup<S, F, kActs>(group, m.row_bytes, 0, n_blocks, {ahead}, acts, acc);
    StoreSums<S>(m, row, skip, S::kRows, acc);
  }
}

template <class S, class F, uint32_t kActs>
void MatColumns(const MatArgs& m, size_t column, uint32_t n_cols, const ActPanel* panel) {
  const Acts<kActs> acts = {panel, m.n_acts};
  if (m.n_rows < S::kRows) return MatFewRows<S, F, kActs>(m, column, n_cols / F::kBlock, acts);
  MatPanel<S, F, kActs>(m, column, n_cols / F::kBlock, acts);
}

// ---- what the kernel table holds ---------------------------------------------------------------
template <class S, class F>
void MatQuantised(const MatArgs& m) {
  ActPanel panel[kActsMax];
  for (size_t column = 0; column < m.n_cols; column += kPanelCols) {
    const uint32_t n =
        static_cast<uint32_t>(m.n_cols - column < kPanelCols ? m.n_cols - column : kPanelCols);
    for (uint32_t a = 0; a < m.n_acts; ++a) PreparePanel<S, F>(m.acts[a], column, n, &panel[a]);
    if (m.n_acts == 1) {
      MatColumns<S, F, 1>(m, column, n, panel);
    } else if (m.n_acts == 4) {
      MatColumns<S, F, 4>(m, column, n, panel);
    } else {
      MatColumns<S, F, 0>(m, column, n, panel);
    }
  }
}

template <class S, class F>
void Mat(const MatArgs& m) {
  if constexpr (F::kBlock == 1) {
    MatPlain<S, F>(m);
  } else {
    MatQuantised<S, F>(m);
  }
}

}  // namespace
}  // namespace lode
