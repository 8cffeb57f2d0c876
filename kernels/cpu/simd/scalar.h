// The vocabulary of one instruction set, in plain C++: the reference for avx2.h and avx512.h, which offer the same names.
// Three kinds of vectors exist. Codes = 64 bytes: the weight codes of one stretch of 64 columns of one row, or of one 32-column
// block of two rows (a "pair": first row in the first half). Rows* = one lane per weight row of a row group, so that the
// ordered fp32 accumulators of kRows rows advance side by side. V32 = the 32 canonical partial sums of a float reduction.
// No operation knows a weight format. Everything is exact integer arithmetic or one stated IEEE operation per lane.
// Included by one ISA translation unit only; anonymous namespace, so that nothing leaks between ISA builds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/canonical.h"

namespace lode {
namespace {

struct Simd {
  static constexpr const char* kName = "scalar";
  static constexpr uint32_t kRows = 8;       // weight rows of one group (lanes of RowsI, RowsF)
  static constexpr uint32_t kFloatRows = 1;  // float products: rows and activation rows of one register tile
  static constexpr uint32_t kFloatActs = 1;
  // DotSigned returns sum((w + kSignedBias) * y); the caller takes the bias times sum(y) off again.
  static constexpr int32_t kSignedBias = 0;

  struct Codes {
    uint8_t v[64];
  };
  struct Acts {
    int8_t v[64];
  };
  struct Sums {  // exact int32 partial sums of 64 products; halves belong to different rows of a pair
    int32_t half[2];
  };
  struct Set16 {  // one int16 per 16 weights of a 256-weight block
    int16_t v[16];
  };
  struct Scales {  // one int16 per 16 codes of a Codes
    int16_t v[4];
  };
  struct RowsI {
    int32_t v[kRows];
  };
  struct RowsF {
    float v[kRows];
  };

  // Pair k of a row group holds rows PairFirst(k) and PairSecond(k), k < kRows / 2.
  static constexpr uint32_t PairFirst(uint32_t k) { return 2 * k; }
  static constexpr uint32_t PairSecond(uint32_t k) { return 2 * k + 1; }

  // ---- codes ------------------------------------------------------------------------------------------------------------
  // 32 bytes from each pointer.
  static Codes LoadBytes(const uint8_t* p0, const uint8_t* p1) {
    Codes c;
    std::memcpy(c.v, p0, 32);
    std::memcpy(c.v + 32, p1, 32);
    return c;
  }
  // 16 bytes from each pointer become 32 codes: the low nibbles, then the high ones.
  static Codes LoadNibbles16(const uint8_t* p0, const uint8_t* p1) {
    Codes c;
    for (int i = 0; i < 16; ++i) {
      c.v[i] = p0[i] & 15;
      c.v[16 + i] = p0[i] >> 4;
      c.v[32 + i] = p1[i] & 15;
      c.v[48 + i] = p1[i] >> 4;
    }
    return c;
  }
  // 32 bytes become 64 codes: the low nibbles, then the high ones.
  static Codes LoadNibbles32(const uint8_t* p) {
    Codes c;
    for (int i = 0; i < 32; ++i) {
      c.v[i] = p[i] & 15;
      c.v[32 + i] = p[i] >> 4;
    }
    return c;
  }
  // 16 bytes become 64 two-bit codes, four consecutive ones per byte, lowest bits first.
  static Codes LoadCrumbs16(const uint8_t* p) {
    Codes c;
    for (int i = 0; i < 64; ++i) c.v[i] = (p[i / 4] >> (2 * (i % 4))) & 3;
    return c;
  }
  // Adds `value` to code i of half h where bit i of bits_h is set.
  static Codes AddWhereBit(Codes c, uint32_t bits0, uint32_t bits1, uint8_t value) {
    for (int i = 0; i < 32; ++i) {
      c.v[i] = static_cast<uint8_t>(c.v[i] + ((bits0 >> i) & 1) * value);
      c.v[32 + i] = static_cast<uint8_t>(c.v[32 + i] + ((bits1 >> i) & 1) * value);
    }
    return c;
  }
  // table[code] for codes 0..15; table has 16 bytes.
  static Codes Lookup(const int8_t* table, Codes c) {
    for (int i = 0; i < 64; ++i) c.v[i] = static_cast<uint8_t>(table[c.v[i]]);
    return c;
  }

  // ---- activations --------------------------------------------------------------------------------------------------------
  static Acts LoadActs(const int8_t* q) {
    Acts a;
    std::memcpy(a.v, q, 64);
    return a;
  }
  // The same 32 codes for both rows of a pair.
  static Acts LoadActsTwice(const int8_t* q) {
    Acts a;
    std::memcpy(a.v, q, 32);
    std::memcpy(a.v + 32, q, 32);
    return a;
  }

  // ---- exact products, |y| <= 127 ---------------------------------------------------------------------------------------
  // Unsigned weight codes 0..128 (a pair of products then fits int16: 2 * 128 * 127 < 2^15).
  static Sums DotUnsigned(const Codes& w, const Acts& y) {
    Sums s{};
    for (int i = 0; i < 64; ++i) s.half[i / 32] += w.v[i] * y.v[i];
    return s;
  }
  // Signed weight codes -128..127.
  static Sums DotSigned(const Codes& w, const Acts& y) {
    Sums s{};
    for (int i = 0; i < 64; ++i) s.half[i / 32] += static_cast<int8_t>(w.v[i]) * y.v[i];
    return s;
  }
  // acc + sum over the four groups of 16: scale * sum(w * y), w as in DotUnsigned.
  static Sums DotScaled(Sums acc, const Codes& w, const Acts& y, const Scales& s) {
    for (int i = 0; i < 64; ++i) acc.half[i / 32] += s.v[i / 16] * (w.v[i] * y.v[i]);
    return acc;
  }
  static Sums ZeroSums() { return {}; }
  // Eight unsigned bytes, one per 32 weights.
  static Set16 SetFromBytes8(uint64_t bytes) {
    Set16 s;
    for (int i = 0; i < 16; ++i) s.v[i] = static_cast<int16_t>((bytes >> (8 * (i / 2))) & 255);
    return s;
  }
  // The four scales of columns 64 * kChunk ...
  template <int kChunk>
  static Scales ChunkScales(const Set16& s) {
    Scales r;
    for (int i = 0; i < 4; ++i) r.v[i] = s.v[4 * kChunk + i];
    return r;
  }
  // sum over the 16 groups of two rows: m * sum16, as a pair.
  static Sums DotSets(const Set16& m0, const Set16& m1, const int16_t* sum16) {
    Sums s{};
    for (int i = 0; i < 16; ++i) {
      s.half[0] += m0.v[i] * sum16[i];
      s.half[1] += m1.v[i] * sum16[i];
    }
    return s;
  }

  // ---- lanes per row ------------------------------------------------------------------------------------------------------
  // v[kRows / 2]: pairs.
  static RowsI ReducePairs(const Sums* v) {
    RowsI r;
    for (uint32_t k = 0; k < kRows / 2; ++k) {
      r.v[PairFirst(k)] = v[k].half[0];
      r.v[PairSecond(k)] = v[k].half[1];
    }
    return r;
  }
  // v[kRows]: both halves belong to the row.
  static RowsI ReduceWhole(const Sums* v) {
    RowsI r;
    for (uint32_t k = 0; k < kRows; ++k) r.v[k] = v[k].half[0] + v[k].half[1];
    return r;
  }
  // Four bytes of each row.
  static RowsI LoadWords(const uint8_t* const* row, size_t offset) {
    RowsI r;
    for (uint32_t k = 0; k < kRows; ++k) std::memcpy(&r.v[k], row[k] + offset, 4);
    return r;
  }
  // The binary16 in the low or high half of each lane, widened exactly.
  static RowsF HalfLow(const RowsI& w) {
    RowsF r;
    for (uint32_t k = 0; k < kRows; ++k)
      r.v[k] = canonical::FromF16(static_cast<uint16_t>(w.v[k]));
    return r;
  }
  static RowsF HalfHigh(const RowsI& w) {
    RowsF r;
    for (uint32_t k = 0; k < kRows; ++k)
      r.v[k] = canonical::FromF16(static_cast<uint16_t>(static_cast<uint32_t>(w.v[k]) >> 16));
    return r;
  }
  static RowsI SubAll(RowsI a, int32_t x) {
    for (int32_t& v : a.v) v -= x;
    return a;
  }
  static RowsF ToFloat(const RowsI& a) {
    RowsF r;
    for (uint32_t k = 0; k < kRows; ++k) r.v[k] = static_cast<float>(a.v[k]);
    return r;
  }
  static RowsF SetAll(float x) {
    RowsF r;
    for (float& v : r.v) v = x;
    return r;
  }
  static RowsF Mul(RowsF a, const RowsF& b) {
    for (uint32_t k = 0; k < kRows; ++k) a.v[k] = canonical::Mul(a.v[k], b.v[k]);
    return a;
  }
  static RowsF Add(RowsF a, const RowsF& b) {
    for (uint32_t k = 0; k < kRows; ++k) a.v[k] = canonical::Add(a.v[k], b.v[k]);
    return a;
  }
  static RowsF Negate(RowsF a) {
    for (float& v : a.v) v = -v;
    return a;
  }
  // Lanes 0..n-1.
  static void StoreRows(float* out, const RowsF& a, uint32_t n) { std::memcpy(out, a.v, n * 4); }

  // ---- the 32 canonical partials ------------------------------------------------------------------------------------------
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
};

}  // namespace
}  // namespace lode
