// The vocabulary's sign bytes without byte permutations of whole registers (AVX2, AVX-512 without
// VBMI): fields by shifts, parity by a table of 16. Included by simd/x86.h.
#pragma once

#include "kernels/cpu/simd/lookups.h"
#include "kernels/cpu/simd/spread.h"

namespace lode {
namespace {

struct SignOps : LookupOps {
  using Words = Reg::I;
  static constexpr bool kBytePlanes = false;
  static constexpr bool kBitMatrices = false;

  template <int kRight, uint32_t kMask>
  static Words Cut(Words w) {
    return Reg::And(Reg::Shift32<kRight>(w), Reg::Set32(kMask));
  }
  static Words Or4(Words a, Words b, Words c, Words d) {
    return Reg::Or(Reg::Or(a, b), Reg::Or(c, d));
  }
  // Sets bit 7 of every byte to the parity of the others.
  static Words WithParity(Words bytes) {
    alignas(16) static constexpr uint8_t kParity[16] = {0,   128, 128, 0,   128, 0,   0,   128,
                                                        128, 0,   0,   128, 0,   128, 128, 0};
    const Words parity = Reg::Broadcast128(kParity);
    return Reg::Or(bytes, Reg::Xor(Reg::Shuffle8(parity, Cut<0, 0x0f0f0f0fu>(bytes)),
                                   Reg::Shuffle8(parity, Cut<4, 0x0f0f0f0fu>(bytes))));
  }
  static Words EvenSignBytes(Words w) {
    return WithParity(
        Or4(Cut<0, 0x7fu>(w), Cut<-1, 0x7f00u>(w), Cut<-2, 0x7f0000u>(w), Cut<-3, 0x7f000000u>(w)));
  }
  static Words EvenSignBytesOfPairs(Words a, Words b) {
    return WithParity(
        Or4(Cut<9, 0x7fu>(a), Cut<17, 0x7f00u>(a), Cut<-7, 0x7f0000u>(b), Cut<1, 0x7f000000u>(b)));
  }
};

}  // namespace
}  // namespace lode
