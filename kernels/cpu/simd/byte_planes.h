// AVX-512 VBMI's part of the vocabulary (simd/x86.h): tables of up to 512 bytes looked up for 64
// bytes at once by vpermi2b (128 entries an instruction) and blends by the upper index bits. A grid
// of 512 rows costs eight look-ups for 64 indices, where gathers fetch 16. Fields of bytes and
// parities are one vgf2p8affineqb (GFNI, which every CPU with VBMI and VNNI has). Used by
// decode/grid.h.
#pragma once

#include "kernels/cpu/simd/reg512.h"
#include "kernels/cpu/simd/spread.h"

namespace lode {
namespace {

// An 8 x 8 bit matrix for vgf2p8affineqb: bit i of a result is the parity of the argument's bits
// under rows[i].
struct BitRows {
  uint8_t rows[8];
};
constexpr uint64_t BitMatrix(const BitRows& m) {
  uint64_t matrix = 0;
  for (uint32_t i = 0; i < 8; ++i) matrix |= uint64_t{m.rows[i]} << (8 * (7 - i));
  return matrix;
}
template <uint64_t kMatrix>
inline Reg::I AffineBytes(Reg::I w) {
  return _mm512_gf2p8affine_epi64_epi8(w, _mm512_set1_epi64(static_cast<int64_t>(kMatrix)), 0);
}
// A field inside every byte: bits where the mask is set, moved right by kRight.
template <int kRight, uint8_t kMask>
constexpr uint64_t FieldMatrix() {
  BitRows m = {};
  for (int i = 0; i < 8; ++i)
    if (kMask >> i & 1) m.rows[i] = static_cast<uint8_t>(1u << (i + kRight));
  return BitMatrix(m);
}
// Bits 4..7 to 0..3, bit kBit to bit 4.
template <uint32_t kBit>
constexpr uint64_t HighNibbleMatrix() {
  return BitMatrix({16, 32, 64, 128, static_cast<uint8_t>(1u << kBit), 0, 0, 0});
}
constexpr uint64_t kSwapNibbles = BitMatrix({16, 32, 64, 128, 1, 2, 4, 8});
// The identity with the parity of bits 0..6 in bit 7.
constexpr uint64_t kEvenSigns = BitMatrix({1, 2, 4, 8, 16, 32, 64, 127});
// Bits 5, 6, 7 and the parity of bits 1..7, to bits 4..7.
constexpr uint64_t kLastEvenSigns = BitMatrix({0, 0, 0, 0, 32, 64, 128, 254});

struct SignOps {
  using Words = Reg::I;
  static constexpr bool kBytePlanes = true;
  static constexpr bool kBitMatrices = true;

  static Words SwapNibbles(Words w) { return AffineBytes<kSwapNibbles>(w); }
  // In every byte: the high nibble, and bit kBit as bit 4.
  template <uint32_t kBit>
  static Words HighNibbleAndBit(Words w) {
    return AffineBytes<HighNibbleMatrix<kBit>()>(w);
  }

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
  // Two planes of 256 bytes at `index`.
  static void Planes256(const uint8_t* planes, Words index, Words* out) {
    for (uint32_t t = 0; t < 2; ++t) out[t] = Plane256(planes + 256 * t, index);
  }
  // Two planes of 512 bytes at (low | ninth bit << 8). The ninth bits of the word's four bytes are
  // bits 4 * kWord .. 4 * kWord + 3 of byte kByte of `ninth`.
  template <uint32_t kByte, uint32_t kWord>
  static void Planes512(const uint8_t* planes, Words low, Words ninth, Words* out) {
    const __mmask64 high = _mm512_test_epi8_mask(SpreadBytes(ninth, kByte * 0x01010101u),
                                                 Reg::Set32(0x08040201u << (4 * kWord)));
    for (uint32_t t = 0; t < 2; ++t) out[t] = Plane512(planes + 512 * t, low, high);
  }
  // Two lanes of two 16-bit entries with 9-bit indices: out[i] has, for both entries of v[i], their
  // byte of plane 0 and of plane 1.
  static void PlanesOfPairs(const uint8_t* planes, const Words* v, Words* out) {
    const Words even = Reg::Set32(0x00ff00ffu);
    const Words low = Reg::Select(even, v[0], Reg::Shift32<-8>(v[1]));
    const Words high = Reg::Select(even, Reg::Shift32<8>(v[0]), v[1]);
    const __mmask64 ninth = _mm512_test_epi8_mask(high, Reg::Set32(0x01010101u));
    const Words a = Plane512(planes, low, ninth), b = Plane512(planes + 512, low, ninth);
    out[0] = Reg::Select(even, a, Reg::Shift32<-8>(b));
    out[1] = Reg::Select(even, Reg::Shift32<8>(a), b);
  }
  // Entries of a pair (bits 9..15 of a half word: seven sign bits): in bits 4..7 of a byte the
  // signs of four weights, the even byte first; the eighth sign is the parity of the others.
  static Words SignsOfPair(Words v) {
    return Reg::Select(Reg::Set32(0x00ff00ffu), Reg::Shift32<5>(v), AffineBytes<kLastEvenSigns>(v));
  }
  // Sign bytes of 32 weights -> for 16 of them, four weights to a byte: signs in bits 3..6.
  template <uint32_t kHalf>
  static Words SignsInMiddle(Words signs) {
    constexpr uint64_t kFirst = kHalf == 0 ? 0x0905013d : 0x1915110d;
    return _mm512_multishift_epi64_epi8(
        _mm512_set1_epi64(static_cast<int64_t>((kFirst ^ 0x20202020) << 32 | kFirst)), signs);
  }
  // Bits 4 n .. 4 n + 3 of every lane, one to a byte, where they are bit 4; other bits are
  // anything.
  template <uint32_t n>
  static Words FourBitsToBit4(Words w) {
    // The eight bits from 60 + 4 n on, modulo 64, have bit 4 n as bit 4.
    constexpr auto at = [](uint64_t i) { return (60 + 4 * n + i) % 64 << (8 * i); };
    constexpr uint64_t kLow = at(0) | at(1) | at(2) | at(3);
    return _mm512_multishift_epi64_epi8(
        _mm512_set1_epi64(static_cast<int64_t>((kLow ^ 0x20202020) << 32 | kLow)), w);
  }
  // Four 7-bit fields of every lane -> bytes with the parity in bit 7.
  static Words EvenSignBytes(Words w) {
    return AffineBytes<kEvenSigns>(
        _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x352e2720150e0700), w));
  }
};

}  // namespace
}  // namespace lode
