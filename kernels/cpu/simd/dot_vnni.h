// The vocabulary's integer products with vpdpbusd (AVX-VNNI or AVX-512 VNNI): unsigned code times
// signed activation, four at a time into int32. Signed codes enter as code + 128; what that adds is
// part of the value that a sum starts from. Included by simd/x86.h.
#pragma once

#include "kernels/cpu/simd/spread.h"

namespace lode {
namespace {

struct DotOps {
  using Words = Reg::I;
  static constexpr int32_t kSignedBias = 128;
  // A sum of so many words is two chains: each vpdpbusd waits five cycles for the one before, and
  // blocks that follow are too far off to fill the gaps.
  static constexpr uint32_t kChainWords = 16;

  static Words SignedCodes(Words w) { return Reg::Xor(w, Reg::Set32(0x80808080u)); }
  template <uint32_t kByte>
  static Words ScaleByte(Words w) {
    return SpreadBytes(w, 0x80808000u + kByte);
  }
  template <uint32_t kByte>
  static Words SignedScaleByte(Words w) {
    return Reg::ShiftSigned32<24>(Reg::Shift32<static_cast<int>(8 * kByte) - 24>(w));
  }
  static Words ScaleWord(Words w) { return w; }
  static int32_t ScaledStart(int32_t x) { return x; }
  static Words Start(const int32_t* x) { return Reg::Set32(static_cast<uint32_t>(*x)); }

  template <uint32_t kWords, int kMaxCode, bool kSigned>
  static Words Dot(Words start, const Words* w, const int8_t* y) {
    constexpr uint32_t kChains = kWords >= kChainWords ? 2 : 1;
    Words sum[2] = {start, Reg::Zero()};
#pragma GCC unroll 16
    for (uint32_t i = 0; i < kWords; ++i)
      sum[i % kChains] = Reg::DpbusdAll(sum[i % kChains], w[i], y + 4 * i);
    return kChains == 1 ? sum[0] : Reg::Add32(sum[0], sum[1]);
  }
  template <uint32_t kWords, int kMaxCode, bool kSigned, bool kStart>
  static Words DotScaled(Words acc, Words scale, const int32_t* start, const Words* w,
                         const int8_t* y) {
    const Words first = kStart ? Start(start) : Reg::Zero();
    return Reg::Add32(acc, Reg::Mul32(scale, Dot<kWords, kMaxCode, kSigned>(first, w, y)));
  }
};

}  // namespace
}  // namespace lode
