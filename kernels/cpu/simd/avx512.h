// The vocabulary of simd/scalar.h (contracts there) for AVX-512 F, BW, DQ, VL and VNNI: 64 codes in one register, 16 rows per
// group. Signed codes are shifted to unsigned for vpdpbusd, hence kSignedBias = 128.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/canonical.h"

namespace lode {
namespace {

struct Simd {
  static constexpr const char* kName = "avx512";
  static constexpr uint32_t kRows = 16;
  static constexpr uint32_t kFloatRows = 2;  // 2 rows x 4 activation rows x 2 registers = 16 of 32 registers
  static constexpr uint32_t kFloatActs = 4;
  static constexpr int32_t kSignedBias = 128;

  using Codes = __m512i;
  using Acts = __m512i;
  using Sums = __m512i;   // 16 partial sums, 8 per half
  using Set16 = __m256i;  // 16 x int16
  using Scales = __m512i;
  using RowsI = __m512i;
  using RowsF = __m512;

  // Chosen so that ReducePairs ends in row order: registers 0..3 hold rows 0..3 and 4..7, registers 4..7 rows 8..11, 12..15.
  static constexpr uint32_t PairFirst(uint32_t k) { return k < 4 ? k : k + 4; }
  static constexpr uint32_t PairSecond(uint32_t k) { return PairFirst(k) + 4; }

  static __m128i Load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static __m256i Load256(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
  }

  // ---- codes ------------------------------------------------------------------------------------------------------------
  static Codes LoadBytes(const uint8_t* p0, const uint8_t* p1) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(Load256(p0)), Load256(p1), 1);
  }
  static Codes LoadNibbles16(const uint8_t* p0, const uint8_t* p1) {
    const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(Load128(p0)), Load128(p1), 1);
    const __m512i wide = _mm512_castsi256_si512(both);
    const __m512i twice = _mm512_shuffle_i64x2(wide, wide, _MM_SHUFFLE(1, 1, 0, 0));
    const __m512i count = _mm512_set_epi64(0x0004000400040004, 0x0004000400040004, 0, 0,
                                           0x0004000400040004, 0x0004000400040004, 0, 0);
    return _mm512_and_si512(_mm512_srlv_epi16(twice, count), _mm512_set1_epi8(15));
  }
  static Codes LoadNibbles32(const uint8_t* p) {
    const __m512i twice = _mm512_broadcast_i64x4(Load256(p));
    const __m512i count = _mm512_set_epi64(0x0004000400040004, 0x0004000400040004, 0x0004000400040004,
                                           0x0004000400040004, 0, 0, 0, 0);
    return _mm512_and_si512(_mm512_srlv_epi16(twice, count), _mm512_set1_epi8(15));
  }
  static Codes LoadCrumbs16(const uint8_t* p) {
    // Every byte four times; 16-bit shifts by 0 and 4 place codes 0 and 2 of the byte, two more bits place codes 1 and 3.
    const __m512i index = _mm512_set_epi32(0x0f0f0f0f, 0x0e0e0e0e, 0x0d0d0d0d, 0x0c0c0c0c, 0x0b0b0b0b,
                                           0x0a0a0a0a, 0x09090909, 0x08080808, 0x07070707, 0x06060606,
                                           0x05050505, 0x04040404, 0x03030303, 0x02020202, 0x01010101, 0);
    const __m512i four = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(Load128(p)), index);
    const __m512i even = _mm512_srlv_epi16(four, _mm512_set1_epi32(0x00040000));
    const __m512i odd = _mm512_srli_epi16(even, 2);
    // Bitwise select: high byte of each word from `odd`, low byte from `even`, two bits each (ternary: (m & odd) | (n & even)).
    const __m512i low = _mm512_and_si512(even, _mm512_set1_epi16(0x0003));
    return _mm512_ternarylogic_epi32(low, odd, _mm512_set1_epi16(0x0300), 0xf8);
  }
  static Codes AddWhereBit(Codes c, uint32_t bits0, uint32_t bits1, uint8_t value) {
    const __mmask64 mask = static_cast<uint64_t>(bits1) << 32 | bits0;
    return _mm512_mask_add_epi8(c, mask, c, _mm512_set1_epi8(static_cast<char>(value)));
  }
  static Codes Lookup(const int8_t* table, Codes c) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(Load128(table)), c);
  }

  // ---- activations --------------------------------------------------------------------------------------------------------
  static Acts LoadActs(const int8_t* q) { return _mm512_loadu_si512(q); }
  static Acts LoadActsTwice(const int8_t* q) { return _mm512_broadcast_i64x4(Load256(q)); }

  // ---- exact products -----------------------------------------------------------------------------------------------------
  static Sums DotUnsigned(Codes w, Acts y) {
    return _mm512_dpbusd_epi32(_mm512_setzero_si512(), w, y);
  }
  static Sums DotSigned(Codes w, Acts y) {
    const __m512i shifted = _mm512_xor_si512(w, _mm512_set1_epi8(static_cast<char>(0x80)));
    return _mm512_dpbusd_epi32(_mm512_setzero_si512(), shifted, y);
  }
  static Sums DotScaled(Sums acc, Codes w, Acts y, Scales s) {
    return _mm512_dpwssd_epi32(acc, _mm512_maddubs_epi16(w, y), s);
  }
  static Sums ZeroSums() { return _mm512_setzero_si512(); }
  static Set16 SetFromBytes8(uint64_t bytes) {
    const __m128i b = _mm_cvtsi64_si128(static_cast<int64_t>(bytes));
    return _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(b, b));
  }
  template <int kChunk>
  static Scales ChunkScales(Set16 s) {
    constexpr int64_t kOne = 0x0001000100010001;
    constexpr int64_t kBase = 4 * kChunk;
    const __m512i index =
        _mm512_set_epi64((kBase + 3) * kOne, (kBase + 3) * kOne, (kBase + 2) * kOne, (kBase + 2) * kOne,
                         (kBase + 1) * kOne, (kBase + 1) * kOne, kBase * kOne, kBase * kOne);
    return _mm512_permutexvar_epi16(index, _mm512_castsi256_si512(s));
  }
  static Sums DotSets(Set16 m0, Set16 m1, const int16_t* sum16) {
    const __m512i m = _mm512_inserti64x4(_mm512_castsi256_si512(m0), m1, 1);
    return _mm512_madd_epi16(m, _mm512_broadcast_i64x4(Load256(sum16)));
  }

  // ---- lanes per row ------------------------------------------------------------------------------------------------------
  // Four registers a, b, c, d -> per 128-bit lane the four sums [a, b, c, d].
  static __m512i Transpose4(const Sums* v) {
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  }
  // Adds 128-bit lanes 0+1 and 2+3 of a, then of b.
  static __m512i AddLanes(__m512i a, __m512i b) {
    return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, _MM_SHUFFLE(2, 0, 2, 0)),
                            _mm512_shuffle_i32x4(a, b, _MM_SHUFFLE(3, 1, 3, 1)));
  }
  static RowsI ReducePairs(const Sums* v) { return AddLanes(Transpose4(v), Transpose4(v + 4)); }
  static RowsI ReduceWhole(const Sums* v) {
    return AddLanes(AddLanes(Transpose4(v), Transpose4(v + 4)),
                    AddLanes(Transpose4(v + 8), Transpose4(v + 12)));
  }
  static __m256i LoadWords8(const uint8_t* const* row, size_t offset) {
    // Broadcast loads and immediate blends: no shuffle port is needed.
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
  static RowsI LoadWords(const uint8_t* const* row, size_t offset) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(LoadWords8(row, offset)), LoadWords8(row + 8, offset), 1);
  }
  static RowsF HalfLow(RowsI w) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(w)); }
  static RowsF HalfHigh(RowsI w) { return HalfLow(_mm512_srli_epi32(w, 16)); }
  static RowsI SubAll(RowsI a, int32_t x) { return _mm512_sub_epi32(a, _mm512_set1_epi32(x)); }
  static RowsF ToFloat(RowsI a) { return _mm512_cvtepi32_ps(a); }
  static RowsF SetAll(float x) { return _mm512_set1_ps(x); }
  static RowsF Mul(RowsF a, RowsF b) { return _mm512_mul_ps(a, b); }
  static RowsF Add(RowsF a, RowsF b) { return _mm512_add_ps(a, b); }
  static RowsF Negate(RowsF a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
  static void StoreRows(float* out, RowsF a, uint32_t n) {
    _mm512_mask_storeu_ps(out, static_cast<__mmask16>((1u << n) - 1), a);
  }

  // ---- the 32 canonical partials ------------------------------------------------------------------------------------------
  struct V32 {
    __m512 a, b;  // partials 0..15, 16..31
  };
  static V32 Zero32() { return {_mm512_setzero_ps(), _mm512_setzero_ps()}; }
  static V32 Load32(const float* p) { return {_mm512_loadu_ps(p), _mm512_loadu_ps(p + 16)}; }
  static V32 LoadF16x32(const uint8_t* p) {
    return {_mm512_cvtph_ps(Load256(p)), _mm512_cvtph_ps(Load256(p + 32))};
  }
  static __m512 WidenBf16(const uint8_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(Load256(p)), 16));
  }
  static V32 LoadBf16x32(const uint8_t* p) { return {WidenBf16(p), WidenBf16(p + 32)}; }
  static V32 Fma32(V32 a, V32 b, V32 acc) {
    return {_mm512_fmadd_ps(a.a, b.a, acc.a), _mm512_fmadd_ps(a.b, b.b, acc.b)};
  }
  static V32 FmaFirst32(V32 a, V32 b, V32 acc, uint32_t n) {
    const uint32_t mask = static_cast<uint32_t>((uint64_t{1} << n) - 1);
    return {_mm512_mask3_fmadd_ps(a.a, b.a, acc.a, static_cast<__mmask16>(mask)),
            _mm512_mask3_fmadd_ps(a.b, b.b, acc.b, static_cast<__mmask16>(mask >> 16))};
  }
  static float Join32(V32 a) {
    const __m512 w16 = _mm512_add_ps(a.a, a.b);
    const __m256 w8 = _mm256_add_ps(_mm512_castps512_ps256(w16), _mm512_extractf32x8_ps(w16, 1));
    const __m128 w4 = _mm_add_ps(_mm256_castps256_ps128(w8), _mm256_extractf128_ps(w8, 1));
    const __m128 w2 = _mm_add_ps(w4, _mm_movehl_ps(w4, w4));
    return _mm_cvtss_f32(_mm_add_ss(w2, _mm_movehdup_ps(w2)));
  }
};

}  // namespace
}  // namespace lode
