// Decode traits of formats whose weight is a table entry times a scale; the contract is in
// decode/affine.h. With a table of 16 entries the look-up is one byte shuffle, and the entries are
// int8, so the products stay exact.
#pragma once

#include "kernels/cpu/decode/affine.h"

namespace lode {
namespace {
namespace decode {

alignas(16) constexpr int8_t kIq4NlTable[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                1,    13,   25,  38,  53,  69,  89,  113};

// 32 weights: f16 d, 16 bytes of nibbles (low: weights 0..15). w = d * table[nibble].
struct IQ4_NL {
  static constexpr uint32_t kBlock = 32, kBytes = 18;
  static constexpr uint32_t kStep = 32, kGroup = 32;
  static constexpr bool kSigned = true, kGroupScales = false, kCrumbOrder = false;
  static constexpr int32_t kOffset = 0;
  static constexpr MinKind kMins = kNoMins;
  static constexpr size_t kHead = 0;
  template <class S>
  static void Decode(const uint8_t* const* row, size_t offset, uint32_t, typename S::Words* w) {
    LoadNibbles<S>(row, offset + 2, w);
    for (int i = 0; i < 8; ++i) w[i] = S::SignedCodes(S::Lookup(kIq4NlTable, w[i]));
  }
  template <class S>
  static typename S::RowsF Scale(const typename S::Words& head) {
    return S::HalfLow(head);
  }
  static void Dequant(const uint8_t* p, float* out) {
    const float d = F16At(p);
    for (int i = 0; i < 32; ++i) {
      const int nibble = (p[2 + i % 16] >> (4 * (i / 16))) & 15;
      out[i] = canonical::Mul(d, static_cast<float>(kIq4NlTable[nibble]));
    }
  }
};

}  // namespace decode
}  // namespace
}  // namespace lode
