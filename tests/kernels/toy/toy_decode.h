// The decode of a format that does not exist, to show that a decode is all the code a format needs:
// 32 weights in 18 bytes, f16 d and 16 bytes of nibbles, weight 2 k low and 2 k + 1 high in byte k.
// w = d * (nibble - 8). The contract: kernels/cpu/decode/decode.h. Included by the toy's kernel
// tables.
#pragma once

#include "kernels/cpu/decode/decode.h"

namespace lode {
namespace {
namespace decode {

struct TOY {
  static constexpr uint32_t kBlock = 32, kBytes = 18, kUnit = 1, kStep = 32, kGroup = 32;
  static constexpr bool kSigned = false, kGroupScales = false;
  static constexpr int32_t kMaxCode = 15, kOffset = 8;
  static constexpr MinKind kMins = kNoMins;
  template <class S, uint32_t kN>
  struct Raw {
    typename S::Words head[4], nibbles[4];
    LODE_ALWAYS_INLINE void Load(const typename S::Rows& rows) {
      S::LoadColumns(rows, 0, head);
      S::LoadColumns(rows, 2, nibbles);
    }
    template <uint32_t, uint32_t>
    LODE_ALWAYS_INLINE void Codes(typename S::Words* out) const {
      SplitNibbles<S>(nibbles, out);
    }
    template <uint32_t>
    LODE_ALWAYS_INLINE typename S::RowsF Scale() const {
      return S::HalfLow(head[0]);
    }
  };
  template <class S>
  static constexpr bool kArrange = true;
  template <class S, uint32_t kN>
  static void Arrange(const int8_t* y, int8_t* out) {  // even columns, then odd ones
    for (int i = 0; i < 32; ++i) out[i % 2 * 16 + i / 2] = y[i];
  }
  static void Dequant(const uint8_t* p, float* out) {
    const float d = F16At(p);
    for (int i = 0; i < 32; ++i)
      out[i] = canonical::Mul(d, static_cast<float>(((p[2 + i / 2] >> (4 * (i % 2))) & 15) - 8));
  }
};

}  // namespace decode
}  // namespace
}  // namespace lode
