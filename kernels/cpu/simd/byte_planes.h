// AVX-512 VBMI's part of the vocabulary (simd/x86.h): tables of up to 512 bytes looked up for 64
// bytes at once by vpermi2b (128 entries an instruction) and blends by the upper index bits. A grid
// of 512 rows costs eight look-ups for 64 indices, where gathers fetch 16. Used by decode/grid.h.
#pragma once

#include "kernels/cpu/simd/reg512.h"
#include "kernels/cpu/simd/spread.h"

namespace lode {
namespace {

struct ByteTable128 {
  alignas(64) uint8_t v[128];
};
// Entry i = i with its parity in bit 7.
constexpr ByteTable128 MakeEvenSigns() {
  ByteTable128 table{};
  for (uint32_t i = 0; i < 128; ++i)
    table.v[i] = static_cast<uint8_t>(i | static_cast<uint32_t>(__builtin_popcount(i) & 1) << 7);
  return table;
}
constexpr ByteTable128 kEvenSigns = MakeEvenSigns();

struct ByteIndex {
  alignas(64) uint8_t v[64];
};
// Byte k of every lane comes from byte b[k] of the same lane of the first register, 64 + b[k] of
// the second.
constexpr ByteIndex MakeByteIndex(uint32_t b0, uint32_t b1, uint32_t b2, uint32_t b3) {
  ByteIndex index{};
  const uint32_t b[4] = {b0, b1, b2, b3};
  for (uint32_t i = 0; i < 64; ++i) index.v[i] = static_cast<uint8_t>(b[i % 4] + i / 4 * 4);
  return index;
}
constexpr ByteIndex kLowOfPairs = MakeByteIndex(0, 2, 64, 66);
constexpr ByteIndex kHighOfPairs = MakeByteIndex(1, 3, 65, 67);
constexpr ByteIndex kFrontBytes = MakeByteIndex(0, 64, 1, 65);
constexpr ByteIndex kBackBytes = MakeByteIndex(2, 66, 3, 67);

struct SignOps {
  using Words = Reg::I;
  static constexpr bool kBytePlanes = true;

  // table[index % 64], table[index % 128], table[index].
  static Words Table64(const uint8_t* table, Words index) {
    return _mm512_permutexvar_epi8(index, Reg::Load(table));
  }
  static Words Table128(const uint8_t* table, Words index) {
    return _mm512_permutex2var_epi8(Reg::Load(table), index, Reg::Load(table + 64));
  }
  static Words Plane256(const uint8_t* table, Words index) {
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), Table128(table, index),
                                  Table128(table + 128, index));
  }
  static Words Plane512(const uint8_t* table, Words low, __mmask64 ninth) {
    return _mm512_mask_blend_epi8(ninth, Plane256(table, low), Plane256(table + 256, low));
  }
  // out[t] = plane t at (low | ninth bit << 8), t = 0, 1. The ninth bits of the word's four bytes
  // are bits 4 * kWord .. 4 * kWord + 3 of byte kByte of `ninth`.
  template <uint32_t kByte, uint32_t kWord>
  static void Planes512(const uint8_t* planes, Words low, Words ninth, Words* out) {
    const __mmask64 high = _mm512_test_epi8_mask(SpreadBytes(ninth, kByte * 0x01010101u),
                                                 Reg::Set32(0x08040201u << (4 * kWord)));
    out[0] = Plane512(planes, low, high);
    out[1] = Plane512(planes + 512, low, high);
  }
  // Two lanes of two 16-bit entries with 9-bit indices: out[i] has, for both entries of v[i], their
  // byte of plane 0 and of plane 1.
  static void PlanesOfPairs(const uint8_t* planes, const Words* v, Words* out) {
    const Words low = _mm512_permutex2var_epi8(v[0], Reg::Load(kLowOfPairs.v), v[1]);
    const Words high = _mm512_permutex2var_epi8(v[0], Reg::Load(kHighOfPairs.v), v[1]);
    const __mmask64 ninth = _mm512_test_epi8_mask(high, Reg::Set32(0x01010101u));
    const Words a = Plane512(planes, low, ninth), b = Plane512(planes + 512, low, ninth);
    out[0] = _mm512_permutex2var_epi8(a, Reg::Load(kFrontBytes.v), b);
    out[1] = _mm512_permutex2var_epi8(a, Reg::Load(kBackBytes.v), b);
  }
  // Words in crumb order (word 4 i + j: columns 16 i + j, + 4, + 8, + 12), biased by 128: negating
  // a byte turns 128 + m into 128 - m.
  static void NegateCrumbs(Words* w, Words signs) {
    for (uint32_t i = 0; i < 2; ++i) {
      const Words spread = SpreadBytes(signs, 0x01010000u + i * 0x02020202u);
      for (uint32_t j = 0; j < 4; ++j)
        w[4 * i + j] = Reg::NegateWhere(w[4 * i + j], spread, Reg::Set32(0x10011001u << j));
    }
  }
  // vpmultishiftqb cuts four 7-bit fields out of every lane, and vpermi2b, which ignores the eighth
  // bit, adds the parity.
  static Words EvenSignBytes(Words w) {
    const Words fields = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x352e2720150e0700), w);
    return Table128(kEvenSigns.v, fields);
  }
  static Words EvenSignBytesOfPairs(Words a, Words b) {
    const Words high = _mm512_permutex2var_epi8(a, Reg::Load(kHighOfPairs.v), b);
    return Table128(kEvenSigns.v, Reg::Shift16<1>(high));
  }
};

}  // namespace
}  // namespace lode
