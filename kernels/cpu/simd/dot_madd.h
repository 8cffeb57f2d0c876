// The vocabulary's integer products without VNNI: vpmaddubsw (unsigned code times signed
// activation, pairs into int16), then vpmaddwd, which widens and multiplies with a group's scale in
// one instruction. int16 pairs must not saturate: hence the limits on codes. Included by
// simd/x86.h.
#pragma once

#include "kernels/cpu/simd/spread.h"

namespace lode {
namespace {

struct DotOps {
  using Words = Reg::I;
  static constexpr int32_t kSignedBias = 0;

  static Words SignedCodes(Words w) { return w; }
  // A scale is twice the same int16.
  template <uint32_t kByte>
  static Words ScaleByte(Words w) {
    return SpreadBytes(w, 0x80008000u + kByte * 0x00010001u);
  }
  template <uint32_t kByte>
  static Words SignedScaleByte(Words w) {
    return Reg::ShiftSigned16<8>(SpreadBytes(w, 0x00800080u + kByte * 0x01000100u));
  }
  static Words ScaleWord(Words w) { return Reg::Or(w, Reg::Shift32<-16>(w)); }
  // A scaled start meets the scale as two int16 whose sum it is.
  static int32_t ScaledStart(int32_t x) {
    const int32_t low = x / 2, high = x - low;
    return static_cast<int32_t>(static_cast<uint32_t>(high) << 16 |
                                (static_cast<uint32_t>(low) & 0xffffu));
  }
  static Words Start(const int32_t* x) { return Reg::Set32(static_cast<uint32_t>(*x)); }

  template <uint32_t kWords, int kMaxCode, bool kSigned>
  static Words Dot(Words start, const Words* w, const int8_t* y) {
    return MaddRun<kWords, kMaxCode, kSigned>(start, Reg::Set32(0x00010001u), w, y);
  }
  template <uint32_t kWords, int kMaxCode, bool kSigned, bool kStart>
  static Words DotScaled(Words acc, Words scale, const int32_t* start, const Words* w,
                         const int8_t* y) {
    if constexpr (kStart) acc = Reg::MulAddPairs(acc, scale, Start(start));
    return MaddRun<kWords, kMaxCode, kSigned>(acc, scale, w, y);
  }

  // Four products a lane as two int16. Signed codes: |w| as unsigned (128 for -128) times y with
  // w's sign; y is never -128, so negating it is exact.
  template <bool kSigned>
  static Words Products(Words w, const int8_t* y) {
    uint32_t x;
    std::memcpy(&x, y, 4);
    const Words four = Reg::Set32(x);
    return kSigned ? Reg::Maddubs(Reg::Abs8(w), Reg::Sign8(four, w)) : Reg::Maddubs(w, four);
  }
  // An int16 lane takes as many pairs as fit: 2 * 127 * kMaxCode each, below 2^15.
  template <uint32_t kWords, int kMaxCode, bool kSigned>
  static Words MaddRun(Words acc, Words scale, const Words* w, const int8_t* y) {
    constexpr uint32_t kFits = 32767 / (2 * 127 * kMaxCode);
    static_assert(kFits >= 1, "codes too large for vpmaddubsw");
    constexpr uint32_t kTerms = kFits >= kWords ? kWords : (kFits >= 4 ? 4 : (kFits >= 2 ? 2 : 1));
    static_assert(kWords % kTerms == 0);
    Words pairs;
#pragma GCC unroll 16
    for (uint32_t i = 0; i < kWords; ++i) {
      const Words four = Products<kSigned>(w[i], y + 4 * i);
      pairs = i % kTerms == 0 ? four : Reg::Add16(pairs, four);
      if (i % kTerms == kTerms - 1) acc = Reg::Add32(acc, Reg::Madd16(pairs, scale));
    }
    return acc;
  }
};

}  // namespace
}  // namespace lode
