// The vocabulary of one instruction set, in plain C++: the reference for avx2.h and avx512.h, which
// offer the same names. Two kinds of vectors exist. Words and RowsF have one 32-bit lane per weight
// row of a row group: four bytes of codes, an integer or a float, so that kRows rows advance side
// by side, products and ordered fp32 accumulators alike. V32 holds the 32 canonical partial sums of
// a float reduction. No operation knows a weight format. Everything is exact integer arithmetic or
// one stated IEEE operation per lane. Included by one ISA translation unit only; anonymous
// namespace, so that nothing leaks between ISA builds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/canonical.h"

namespace lode {
namespace {

struct Simd {
  static constexpr const char* kName = "scalar";
  static constexpr uint32_t kRows = 4;  // weight rows of one group
  static constexpr uint32_t kFloatRows =
      1;  // float products: rows and activation rows of one register tile
  static constexpr uint32_t kFloatActs = 1;
  // Signed codes enter products as SignedCodes(w), whose sums are those of w + kSignedBias; the
  // caller takes the bias off again.
  static constexpr int32_t kSignedBias = 0;

  struct Words {
    uint32_t v[kRows];
  };
  struct RowsF {
    float v[kRows];
  };
  template <class Op>
  static Words PerRow(Op op) {
    Words r;
    for (uint32_t k = 0; k < kRows; ++k) r.v[k] = op(k);
    return r;
  }
  template <class Op>
  static RowsF PerRowF(Op op) {
    RowsF r;
    for (uint32_t k = 0; k < kRows; ++k) r.v[k] = op(k);
    return r;
  }

  // ---- bytes of weights ------------------------------------------------------------------------
  // Four bytes of each row.
  static Words LoadWords(const uint8_t* const* row, size_t offset) {
    Words r;
    for (uint32_t k = 0; k < kRows; ++k) std::memcpy(&r.v[k], row[k] + offset, 4);
    return r;
  }
  // Sixteen bytes of each row: out[i] holds bytes 4 i .. 4 i + 3.
  static void LoadColumns(const uint8_t* const* row, size_t offset, Words* out) {
    for (uint32_t i = 0; i < 4; ++i) out[i] = LoadWords(row, offset + 4 * i);
  }
  // Per byte: (w >> kShift) & kMask; the mask must drop what comes from the neighbouring byte.
  template <int kShift, uint8_t kMask>
  static Words Field(const Words& w) {
    return PerRow([&](uint32_t k) { return (w.v[k] >> kShift) & (kMask * 0x01010101u); });
  }
  static Words Or(const Words& a, const Words& b) {
    return PerRow([&](uint32_t k) { return a.v[k] | b.v[k]; });
  }
  // Sets kValue in byte i where bit 4 * kNibble + i of `bits` is set.
  template <int kNibble, uint8_t kValue>
  static Words OrWhereBit(const Words& codes, const Words& bits) {
    return PerRow([&](uint32_t k) {
      const uint32_t four = (bits.v[k] >> (4 * kNibble)) & 15;
      // Copies of the four bits at distances of 7 put bit i at position 8 i.
      return codes.v[k] | ((four * 0x00204081u) & 0x01010101u) * kValue;
    });
  }
  // table[code] for codes 0..15; table has 16 bytes.
  static Words Lookup(const int8_t* table, const Words& w) {
    return PerRow([&](uint32_t k) {
      uint32_t r = 0;
      for (int i = 0; i < 4; ++i)
        r |= static_cast<uint32_t>(static_cast<uint8_t>(table[(w.v[k] >> (8 * i)) & 15]))
             << (8 * i);
      return r;
    });
  }
  static Words SignedCodes(const Words& w) { return w; }
  // 64 activations for 2-bit codes that share bytes: out[16 b + 4 j + k] = y[16 b + 4 k + j].
  static void ArrangeCrumbs(const int8_t* y, int8_t* out) {
    for (int i = 0; i < 64; ++i) out[i] = y[i / 16 * 16 + i % 4 * 4 + i / 4 % 4];
  }

  // ---- exact integers per row ------------------------------------------------------------------
  // Byte kByte of each lane.
  template <int kByte>
  static Words ByteOf(const Words& w) {
    return PerRow([&](uint32_t k) { return (w.v[k] >> (8 * kByte)) & 255; });
  }
  // Bytes 0 and 2, or 1 and 3, as two int16.
  static Words EvenBytes(const Words& w) {
    return PerRow([&](uint32_t k) { return w.v[k] & 0x00ff00ffu; });
  }
  static Words OddBytes(const Words& w) {
    return PerRow([&](uint32_t k) { return (w.v[k] >> 8) & 0x00ff00ffu; });
  }
  // sum over i < 4 * kWords of code i * y[i], codes unsigned and at most kMaxCode <= 128.
  template <int kWords, int kMaxCode>
  static Words DotUnsigned(const Words* w, const int8_t* y) {
    return PerRow([&](uint32_t k) {
      int32_t sum = 0;
      for (int i = 0; i < 4 * kWords; ++i)
        sum += static_cast<int32_t>((w[i / 4].v[k] >> (8 * (i % 4))) & 255) * y[i];
      return static_cast<uint32_t>(sum);
    });
  }
  // The same for SignedCodes.
  template <int kWords>
  static Words DotSigned(const Words* w, const int8_t* y) {
    return PerRow([&](uint32_t k) {
      int32_t sum = 0;
      for (int i = 0; i < 4 * kWords; ++i)
        sum += static_cast<int8_t>(w[i / 4].v[k] >> (8 * (i % 4))) * y[i];
      return static_cast<uint32_t>(sum);
    });
  }
  static Words ZeroWords() { return {}; }
  static Words SubAll(const Words& a, int32_t x) {
    return PerRow([&](uint32_t k) { return a.v[k] - static_cast<uint32_t>(x); });
  }
  // acc + a * b, integers.
  static Words MulAdd(const Words& acc, const Words& a, const Words& b) {
    return PerRow([&](uint32_t k) { return acc.v[k] + a.v[k] * b.v[k]; });
  }
  // acc + low16(a) * low + high16(a) * high, all int16.
  static Words MulAddPairs(const Words& acc, const Words& a, int32_t low, int32_t high) {
    return PerRow([&](uint32_t k) {
      const int32_t sum =
          static_cast<int16_t>(a.v[k]) * low + static_cast<int16_t>(a.v[k] >> 16) * high;
      return acc.v[k] + static_cast<uint32_t>(sum);
    });
  }

  // ---- floats per row --------------------------------------------------------------------------
  // The binary16 in the low or high half of each lane, widened exactly.
  static RowsF HalfLow(const Words& w) {
    return PerRowF([&](uint32_t k) { return canonical::FromF16(static_cast<uint16_t>(w.v[k])); });
  }
  static RowsF HalfHigh(const Words& w) {
    return PerRowF(
        [&](uint32_t k) { return canonical::FromF16(static_cast<uint16_t>(w.v[k] >> 16)); });
  }
  static RowsF ToFloat(const Words& a) {
    return PerRowF([&](uint32_t k) { return static_cast<float>(static_cast<int32_t>(a.v[k])); });
  }
  static RowsF SetAll(float x) {
    return PerRowF([&](uint32_t) { return x; });
  }
  static RowsF Mul(const RowsF& a, const RowsF& b) {
    return PerRowF([&](uint32_t k) { return canonical::Mul(a.v[k], b.v[k]); });
  }
  static RowsF Add(const RowsF& a, const RowsF& b) {
    return PerRowF([&](uint32_t k) { return canonical::Add(a.v[k], b.v[k]); });
  }
  static RowsF Negate(const RowsF& a) {
    return PerRowF([&](uint32_t k) { return -a.v[k]; });
  }
  // Lanes 0..n-1.
  static void StoreRows(float* out, const RowsF& a, uint32_t n) { std::memcpy(out, a.v, n * 4); }

  // ---- the 32 canonical partials ---------------------------------------------------------------
  struct V32 {
    float v[32];
  };
  static V32 Zero32() { return {}; }
  static V32 Load32(const float* p) {
    V32 r;
    std::memcpy(r.v, p, sizeof(r.v));
    return r;
  }
  static V32 LoadF16x32(const uint8_t* p) {
    V32 r;
    for (int i = 0; i < 32; ++i)
      r.v[i] = canonical::FromF16(static_cast<uint16_t>(p[2 * i] | p[2 * i + 1] << 8));
    return r;
  }
  static V32 LoadBf16x32(const uint8_t* p) {
    V32 r;
    for (int i = 0; i < 32; ++i)
      r.v[i] = canonical::FromBf16(static_cast<uint16_t>(p[2 * i] | p[2 * i + 1] << 8));
    return r;
  }
  // acc[i] = fma(a[i], b[i], acc[i]).
  static V32 Fma32(const V32& a, const V32& b, V32 acc) {
    for (int i = 0; i < 32; ++i) acc.v[i] = canonical::Fma(a.v[i], b.v[i], acc.v[i]);
    return acc;
  }
  // The same for i < n; the other partials keep their bits (adding a zero could turn -0 into +0).
  static V32 FmaFirst32(const V32& a, const V32& b, V32 acc, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) acc.v[i] = canonical::Fma(a.v[i], b.v[i], acc.v[i]);
    return acc;
  }
  static float Join32(V32 a) { return canonical::JoinPartials(a.v); }

  // ---- 16 independent float lanes ---------------------------------------------------------------
  struct V16 {
    float v[16];
  };
  static V16 Load16(const float* p) {
    V16 r;
    std::memcpy(r.v, p, sizeof(r.v));
    return r;
  }
  static void Store16(float* p, const V16& a) { std::memcpy(p, a.v, sizeof(a.v)); }
  static V16 SetAll16(float x) {
    V16 r;
    for (int i = 0; i < 16; ++i) r.v[i] = x;
    return r;
  }
  static V16 Mul16(V16 a, const V16& b) {
    for (int i = 0; i < 16; ++i) a.v[i] = canonical::Mul(a.v[i], b.v[i]);
    return a;
  }
  static V16 Add16(V16 a, const V16& b) {
    for (int i = 0; i < 16; ++i) a.v[i] = canonical::Add(a.v[i], b.v[i]);
    return a;
  }
  static V16 Sub16(V16 a, const V16& b) {
    for (int i = 0; i < 16; ++i) a.v[i] = canonical::Sub(a.v[i], b.v[i]);
    return a;
  }
  static V16 Fma16(const V16& a, const V16& b, V16 c) {
    for (int i = 0; i < 16; ++i) c.v[i] = canonical::Fma(a.v[i], b.v[i], c.v[i]);
    return c;
  }
};

}  // namespace
}  // namespace lode
