// The vocabulary of simd/scalar.h (contracts there) for AVX2 with FMA and F16C: 64 codes in two registers, 8 rows per group.
// Byte products go through vpmaddubsw; the 0..128 limit of unsigned codes keeps its int16 pairs from saturating.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/canonical.h"

namespace lode {
namespace {

struct Simd {
  static constexpr const char* kName = "avx2";
  static constexpr uint32_t kRows = 8;
  static constexpr uint32_t kFloatRows = 1;  // 1 row x 2 activation rows x 4 registers = 8 of 16 registers
  static constexpr uint32_t kFloatActs = 2;
  static constexpr int32_t kSignedBias = 0;

  struct Pair {
    __m256i h0, h1;
  };
  using Codes = Pair;
  using Acts = Pair;
  using Sums = Pair;
  using Set16 = __m256i;
  using Scales = Pair;
  using RowsI = __m256i;
  using RowsF = __m256;

  static constexpr uint32_t PairFirst(uint32_t k) { return k; }
  static constexpr uint32_t PairSecond(uint32_t k) { return k + 4; }

  static __m128i Load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static __m256i Load256(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
  }

  // ---- codes ------------------------------------------------------------------------------------------------------------
  static Codes LoadBytes(const uint8_t* p0, const uint8_t* p1) { return {Load256(p0), Load256(p1)}; }
  static __m256i Nibbles16(const uint8_t* p) {
    const __m256i twice = _mm256_broadcastsi128_si256(Load128(p));
    const __m256i count = _mm256_set_epi64x(4, 4, 0, 0);
    // A 64-bit shift by 4 moves bits between bytes; the mask drops them.
    return _mm256_and_si256(_mm256_srlv_epi64(twice, count), _mm256_set1_epi8(15));
  }
  static Codes LoadNibbles16(const uint8_t* p0, const uint8_t* p1) {
    return {Nibbles16(p0), Nibbles16(p1)};
  }
  static Codes LoadNibbles32(const uint8_t* p) {
    const __m256i raw = Load256(p);
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(raw, mask), _mm256_and_si256(_mm256_srli_epi16(raw, 4), mask)};
  }
  static __m256i Crumbs(__m256i four) {
    // `four` = every byte four times: odd words shift by 4 bits, odd bytes by two more.
    const __m256i w = _mm256_blend_epi16(four, _mm256_srli_epi16(four, 4), 0xaa);
    const __m256i low = _mm256_and_si256(w, _mm256_set1_epi16(0x0003));
    const __m256i high = _mm256_and_si256(_mm256_srli_epi16(w, 2), _mm256_set1_epi16(0x0300));
    return _mm256_or_si256(low, high);
  }
  static Codes LoadCrumbs16(const uint8_t* p) {
    const __m256i raw = _mm256_broadcastsi128_si256(Load128(p));
    const __m256i first = _mm256_set_epi32(0x07070707, 0x06060606, 0x05050505, 0x04040404, 0x03030303,
                                           0x02020202, 0x01010101, 0);
    const __m256i second = _mm256_add_epi8(first, _mm256_set1_epi8(8));
    return {Crumbs(_mm256_shuffle_epi8(raw, first)), Crumbs(_mm256_shuffle_epi8(raw, second))};
  }
  static __m256i ValueWhereBit(uint32_t bits, uint8_t value) {
    const __m256i index = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
    const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201ull));
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int32_t>(bits)), index);
    const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
    return _mm256_and_si256(set, _mm256_set1_epi8(static_cast<char>(value)));
  }
  static Codes AddWhereBit(Codes c, uint32_t bits0, uint32_t bits1, uint8_t value) {
    return {_mm256_add_epi8(c.h0, ValueWhereBit(bits0, value)),
            _mm256_add_epi8(c.h1, ValueWhereBit(bits1, value))};
  }
  static Codes Lookup(const int8_t* table, Codes c) {
    const __m256i t = _mm256_broadcastsi128_si256(Load128(table));
    return {_mm256_shuffle_epi8(t, c.h0), _mm256_shuffle_epi8(t, c.h1)};
  }

  // ---- activations --------------------------------------------------------------------------------------------------------
  static Acts LoadActs(const int8_t* q) { return {Load256(q), Load256(q + 32)}; }
  static Acts LoadActsTwice(const int8_t* q) {
    const __m256i a = Load256(q);
    return {a, a};
  }

  // ---- exact products -----------------------------------------------------------------------------------------------------
  static __m256i DotU(__m256i w, __m256i y) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(w, y), _mm256_set1_epi16(1));
  }
  // |w| as unsigned (128 for -128) times y with w's sign: y is never -128, so negating it is exact.
  static __m256i DotS(__m256i w, __m256i y) {
    return DotU(_mm256_abs_epi8(w), _mm256_sign_epi8(y, w));
  }
  static Sums DotUnsigned(Codes w, Acts y) { return {DotU(w.h0, y.h0), DotU(w.h1, y.h1)}; }
  static Sums DotSigned(Codes w, Acts y) { return {DotS(w.h0, y.h0), DotS(w.h1, y.h1)}; }
  static Sums DotScaled(Sums acc, Codes w, Acts y, Scales s) {
    return {_mm256_add_epi32(acc.h0, _mm256_madd_epi16(_mm256_maddubs_epi16(w.h0, y.h0), s.h0)),
            _mm256_add_epi32(acc.h1, _mm256_madd_epi16(_mm256_maddubs_epi16(w.h1, y.h1), s.h1))};
  }
  static Sums ZeroSums() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static Set16 SetFromBytes8(uint64_t bytes) {
    const __m128i b = _mm_cvtsi64_si128(static_cast<int64_t>(bytes));
    return _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(b, b));
  }
  template <int kChunk>
  static Scales ChunkScales(Set16 s) {
    const __m256i four = _mm256_permute4x64_epi64(s, kChunk * 0x55);
    const __m256i first = _mm256_set_epi64x(0x0302030203020302, 0x0302030203020302, 0x0100010001000100,
                                            0x0100010001000100);
    const __m256i second = _mm256_add_epi8(first, _mm256_set1_epi8(4));
    return {_mm256_shuffle_epi8(four, first), _mm256_shuffle_epi8(four, second)};
  }
  static Sums DotSets(Set16 m0, Set16 m1, const int16_t* sum16) {
    const __m256i s = Load256(sum16);
    return {_mm256_madd_epi16(m0, s), _mm256_madd_epi16(m1, s)};
  }

  // ---- lanes per row ------------------------------------------------------------------------------------------------------
  static __m256i AddUnpacked32(__m256i a, __m256i b) {
    return _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
  }
  // Four registers -> per 128-bit lane the four sums.
  static __m256i Transpose4(__m256i a, __m256i b, __m256i c, __m256i d) {
    const __m256i ab = AddUnpacked32(a, b), cd = AddUnpacked32(c, d);
    return _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
  }
  static __m256i AddLanes(__m256i a, __m256i b) {
    return _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
  }
  static RowsI ReducePairs(const Sums* v) {
    return AddLanes(Transpose4(v[0].h0, v[1].h0, v[2].h0, v[3].h0),
                    Transpose4(v[0].h1, v[1].h1, v[2].h1, v[3].h1));
  }
  static __m256i Whole(Sums v) { return _mm256_add_epi32(v.h0, v.h1); }
  static RowsI ReduceWhole(const Sums* v) {
    return AddLanes(Transpose4(Whole(v[0]), Whole(v[1]), Whole(v[2]), Whole(v[3])),
                    Transpose4(Whole(v[4]), Whole(v[5]), Whole(v[6]), Whole(v[7])));
  }
  static RowsI LoadWords(const uint8_t* const* row, size_t offset) {
    const auto word = [&](int k) {
      int32_t x;
      std::memcpy(&x, row[k] + offset, 4);
      return _mm256_set1_epi32(x);
    };
    const __m256i r01 = _mm256_blend_epi32(word(0), word(1), 0x02);
    const __m256i r23 = _mm256_blend_epi32(word(2), word(3), 0x08);
    const __m256i r45 = _mm256_blend_epi32(word(4), word(5), 0x20);
    const __m256i r67 = _mm256_blend_epi32(word(6), word(7), 0x80);
    return _mm256_blend_epi32(_mm256_blend_epi32(r01, r23, 0x0c), _mm256_blend_epi32(r45, r67, 0xc0), 0xf0);
  }
  static RowsF HalfHigh(RowsI w) {
    // Values 0..65535 pack without saturating; lanes come out as rows 0..3 and 4..7.
    const __m256i v = _mm256_srli_epi32(w, 16);
    return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
  }
  static RowsF HalfLow(RowsI w) { return HalfHigh(_mm256_slli_epi32(w, 16)); }
  static RowsI SubAll(RowsI a, int32_t x) { return _mm256_sub_epi32(a, _mm256_set1_epi32(x)); }
  static RowsF ToFloat(RowsI a) { return _mm256_cvtepi32_ps(a); }
  static RowsF SetAll(float x) { return _mm256_set1_ps(x); }
  static RowsF Mul(RowsF a, RowsF b) { return _mm256_mul_ps(a, b); }
  static RowsF Add(RowsF a, RowsF b) { return _mm256_add_ps(a, b); }
  static RowsF Negate(RowsF a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }
  static void StoreRows(float* out, RowsF a, uint32_t n) {
    float v[kRows];
    _mm256_storeu_ps(n == kRows ? out : v, a);
    if (n != kRows) std::memcpy(out, v, n * sizeof(float));
  }

  // ---- the 32 canonical partials ------------------------------------------------------------------------------------------
  struct V32 {
    __m256 v[4];
  };
  static V32 Zero32() {
    const __m256 z = _mm256_setzero_ps();
    return {{z, z, z, z}};
  }
  static V32 Load32(const float* p) {
    return {{_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8), _mm256_loadu_ps(p + 16), _mm256_loadu_ps(p + 24)}};
  }
  static V32 LoadF16x32(const uint8_t* p) {
    return {{_mm256_cvtph_ps(Load128(p)), _mm256_cvtph_ps(Load128(p + 16)), _mm256_cvtph_ps(Load128(p + 32)),
             _mm256_cvtph_ps(Load128(p + 48))}};
  }
  static __m256 WidenBf16(const uint8_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(Load128(p)), 16));
  }
  static V32 LoadBf16x32(const uint8_t* p) {
    return {{WidenBf16(p), WidenBf16(p + 16), WidenBf16(p + 32), WidenBf16(p + 48)}};
  }
  static V32 Fma32(V32 a, V32 b, V32 acc) {
    for (int i = 0; i < 4; ++i) acc.v[i] = _mm256_fmadd_ps(a.v[i], b.v[i], acc.v[i]);
    return acc;
  }
  static V32 FmaFirst32(V32 a, V32 b, V32 acc, uint32_t n) {
    const __m256i iota = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    for (int i = 0; i < 4; ++i) {
      const __m256i left = _mm256_set1_epi32(static_cast<int32_t>(n) - 8 * i);
      const __m256 use = _mm256_castsi256_ps(_mm256_cmpgt_epi32(left, iota));
      acc.v[i] = _mm256_blendv_ps(acc.v[i], _mm256_fmadd_ps(a.v[i], b.v[i], acc.v[i]), use);
    }
    return acc;
  }
  static float Join32(V32 a) {
    const __m256 w8 = _mm256_add_ps(_mm256_add_ps(a.v[0], a.v[2]), _mm256_add_ps(a.v[1], a.v[3]));
    const __m128 w4 = _mm_add_ps(_mm256_castps256_ps128(w8), _mm256_extractf128_ps(w8, 1));
    const __m128 w2 = _mm_add_ps(w4, _mm_movehl_ps(w4, w4));
    return _mm_cvtss_f32(_mm_add_ss(w2, _mm_movehdup_ps(w2)));
  }
};

}  // namespace
}  // namespace lode
