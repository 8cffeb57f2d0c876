// The contract between THE matrix product (kernels/cpu/mat.h) and a weight format, and what
// decoders share. A format is one struct F in namespace decode, named like its row in
// LODE_COMPUTED_FORMATS:
//   kBlock, kBytes   weights and bytes of one block
//   kUnit, kLongUnit blocks read together: 1 or 2 (18 and 34 bytes); optional, for 32 registers: more
//   kStep            weights decoded at once (32 or 64), kStep / 4 Words
//   kGroup           weights that share an integer scale; kBlock without group scales
//   kSigned          codes are int8 and go through Simd::SignedCodes; else 0..kMaxCode
//   kMaxCode         largest magnitude of a code (byte products must fit int16 on AVX2)
//   kOffset          the integer is code - kOffset (unsigned codes only)
//   kGroupScales     isum = sum_g s_g * sum_g(...); else isum = sum(...)
//   kMins            kNoMins, kBlockMins (msum = sum(y)), kGroupMins (msum = sum_g m_g sum_g(y))
//   Raw<S, kN>       kN blocks of every row of a group: Load(rows); Codes<block, step>(words);
//                    Scale<block>() and Min<block>() are d_w and m_w; GroupScale<group>();
//                    GroupMins(words): int16 pairs of groups (4j, 4j+2), (4j+1, 4j+3)
//   kArrange<S>      columns do not come in natural order, and
//   Arrange<S, kN>(y, out)   gives kN blocks of activations the order of Codes
//   Dequant(p, out)  kBlock floats in the format's own order of operations
//   StepAt(n)        optional: the n-th step to take, step 0 first
// tests/kernels/toy is a complete small example; docs/design/kernels.md explains it. Plain floats
// have kBlock = 1, kBytes, a widening load and kPairs<S>: LoadPairs32 splits words of two weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "kernels/canonical.h"

#define LODE_ALWAYS_INLINE inline __attribute__((always_inline))

namespace lode {
namespace {

// fn(integral_constant<0>) ... fn(integral_constant<kN - 1>), in order, without a loop.
template <uint32_t kN, class Fn>
LODE_ALWAYS_INLINE void Unroll(Fn&& fn) {
  [&]<uint32_t... kI>(std::integer_sequence<uint32_t, kI...>) __attribute__((always_inline)) {
    (fn(std::integral_constant<uint32_t, kI>{}), ...);
  }
  (std::make_integer_sequence<uint32_t, kN>{});
}

namespace decode {

enum MinKind { kNoMins, kBlockMins, kGroupMins };

// Columns come in their own order.
struct NaturalOrder {
  template <class S>
  static constexpr bool kArrange = false;
  template <class S, uint32_t kN>
  static void Arrange(const int8_t*, int8_t*) {}
};

inline uint16_t U16(const uint8_t* p) { return static_cast<uint16_t>(p[0] | p[1] << 8); }
inline uint32_t U32(const uint8_t* p) {
  uint32_t x;
  std::memcpy(&x, p, 4);
  return x;
}
inline float F16At(const uint8_t* p) { return canonical::FromF16(U16(p)); }

// Four words of nibbles -> low nibbles in w[0..3], high ones in w[4..7].
template <class S>
LODE_ALWAYS_INLINE void SplitNibbles(const typename S::Words* raw, typename S::Words* w) {
  for (int i = 0; i < 4; ++i) {
    w[i] = S::template Field<0, 15>(raw[i]);
    w[4 + i] = S::template Field<4, 15>(raw[i]);
  }
}

// kCount * 16 bytes of every row, 4 Words per 16 bytes.
template <class S, uint32_t kCount>
LODE_ALWAYS_INLINE void LoadRun(const typename S::Rows& rows, uint32_t offset,
                                typename S::Words* out) {
  Unroll<kCount / 2>([&](auto i) __attribute__((always_inline)) {
    S::LoadColumns2(rows, offset + 32 * i, out + 8 * i);
  });
  if constexpr (kCount % 2 != 0)
    S::LoadColumns(rows, offset + 16 * (kCount - 1), out + 4 * (kCount - 1));
}

// Step kStep of steps of kBytes (8 or 16) bytes from `offset` on; the words of 32 bytes
// are kept, in words[0..7].
template <class S, uint32_t kBytes, uint32_t kStep>
LODE_ALWAYS_INLINE void LoadStep(const typename S::Rows& rows, uint32_t offset,
                                 typename S::Words* words) {
  constexpr uint32_t kLoad = S::kManyRegisters ? 32 : 16, kKept = 32 / kBytes;
  constexpr uint32_t kAt = kStep * kBytes;
  if constexpr (kAt % kLoad == 0)
    LoadRun<S, kLoad / 16>(rows, offset + kAt, words + kStep % kKept * kBytes / 4);
}

// kWords words of every row, loaded kPiece words at a time (8 or 4) when they are first asked for:
// a run of blocks that has more than the registers hold. kWords is a multiple of 4.
template <class S, uint32_t kWords, uint32_t kPiece = 8>
struct RowWords {
  typename S::Rows rows;
  typename S::Words w[kWords];
  static constexpr uint32_t Loaded(uint32_t n) { return n == 0 ? 0 : ((n - 1) | (kPiece - 1)) + 1; }
  // Words below kTo are there, given that those below kFrom were asked for before.
  template <uint32_t kFrom, uint32_t kTo>
  LODE_ALWAYS_INLINE void Need() {
    Unroll<(Loaded(kTo) - Loaded(kFrom)) / kPiece>([&](auto i) __attribute__((always_inline)) {
      constexpr uint32_t first = Loaded(kFrom) + kPiece * i;
      constexpr uint32_t n = kWords - first < kPiece ? kWords - first : kPiece;
      LoadRun<S, n / 4>(rows, 4 * first, w + first);
    });
  }
};

}  // namespace decode
}  // namespace
}  // namespace lode
