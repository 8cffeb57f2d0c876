// The vocabulary of simd/scalar.h (contracts there) for AVX-512 F, BW, DQ, VL and VNNI: 16 rows per
// group, one register per four code bytes of each. Signed codes are shifted to unsigned for
// vpdpbusd.
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
  static constexpr uint32_t kFloatRows =
      2;  // 2 rows x 4 activation rows x 2 registers = 16 of 32 registers
  static constexpr uint32_t kFloatActs = 4;
  static constexpr int32_t kSignedBias = 128;

  using Words = __m512i;
  using RowsF = __m512;

  static __m128i Load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static __m256i Load256(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
  }
  static __m512i SetWord(const int8_t* y) {
    int32_t x;
    std::memcpy(&x, y, 4);
    return _mm512_set1_epi32(x);
  }

  // ---- bytes of weights ------------------------------------------------------------------------
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
    return _mm256_blend_epi32(_mm256_blend_epi32(r01, r23, 0x0c),
                              _mm256_blend_epi32(r45, r67, 0xc0), 0xf0);
  }
  static Words LoadWords(const uint8_t* const* row, size_t offset) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(LoadWords8(row, offset)),
                              LoadWords8(row + 8, offset), 1);
  }
  static void LoadColumns(const uint8_t* const* row, size_t offset, Words* out) {
    // 128-bit lane l of z[i] = row 4 l + i; then a 4 x 4 transposition inside every lane.
    __m512i z[4];
    for (int i = 0; i < 4; ++i) {
      const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(Load128(row[i] + offset)),
                                                  Load128(row[4 + i] + offset), 1);
      const __m256i high = _mm256_inserti128_si256(
          _mm256_castsi128_si256(Load128(row[8 + i] + offset)), Load128(row[12 + i] + offset), 1);
      z[i] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    }
    const __m512i a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpackhi_epi32(z[0], z[1]);
    const __m512i c = _mm512_unpacklo_epi32(z[2], z[3]), d = _mm512_unpackhi_epi32(z[2], z[3]);
    out[0] = _mm512_unpacklo_epi64(a, c);
    out[1] = _mm512_unpackhi_epi64(a, c);
    out[2] = _mm512_unpacklo_epi64(b, d);
    out[3] = _mm512_unpackhi_epi64(b, d);
  }
  template <int kShift, uint8_t kMask>
  static Words Field(Words w) {
    return _mm512_and_si512(kShift ? _mm512_srli_epi32(w, kShift) : w,
                            _mm512_set1_epi8(static_cast<char>(kMask)));
  }
  static Words Or(Words a, Words b) { return _mm512_or_si512(a, b); }
  template <int kNibble, uint8_t kValue>
  static Words OrWhereBit(Words codes, Words bits) {
    // Every byte of a lane gets the byte of `bits` that holds the nibble, then tests its own bit of
    // it.
    constexpr int32_t kByte = 0x01010101 * (kNibble / 2);
    const __m128i index =
        _mm_set_epi32(0x0c0c0c0c + kByte, 0x08080808 + kByte, 0x04040404 + kByte, kByte);
    const __m512i spread = _mm512_shuffle_epi8(bits, _mm512_broadcast_i32x4(index));
    const __m512i mask =
        _mm512_set1_epi32(kNibble % 2 ? static_cast<int32_t>(0x80402010u) : 0x08040201);
    return _mm512_mask_add_epi8(codes, _mm512_test_epi8_mask(spread, mask), codes,
                                _mm512_set1_epi8(static_cast<char>(kValue)));
  }
  static Words Lookup(const int8_t* table, Words w) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(Load128(table)), w);
  }
  static Words SignedCodes(Words w) {
    return _mm512_xor_si512(w, _mm512_set1_epi8(static_cast<char>(0x80)));
  }
  static void ArrangeCrumbs(const int8_t* y, int8_t* out) {
    const __m128i index = _mm_set_epi32(0x0f0b0703, 0x0e0a0602, 0x0d090501, 0x0c080400);
    _mm512_storeu_si512(out,
                        _mm512_shuffle_epi8(_mm512_loadu_si512(y), _mm512_broadcast_i32x4(index)));
  }

  // ---- exact integers per row ------------------------------------------------------------------
  template <int kByte>
  static Words ByteOf(Words w) {
    return _mm512_and_si512(kByte ? _mm512_srli_epi32(w, 8 * kByte) : w, _mm512_set1_epi32(255));
  }
  static Words EvenBytes(Words w) { return _mm512_and_si512(w, _mm512_set1_epi32(0x00ff00ff)); }
  static Words OddBytes(Words w) { return _mm512_srli_epi16(w, 8); }
  template <int kWords, int kMaxCode>
  static Words DotUnsigned(const Words* w, const int8_t* y) {
    // Two chains hide half of the latency; other activation rows hide the rest.
    __m512i even = _mm512_setzero_si512(), odd = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int i = 0; i < kWords; i += 2) {
      even = _mm512_dpbusd_epi32(even, w[i], SetWord(y + 4 * i));
      odd = _mm512_dpbusd_epi32(odd, w[i + 1], SetWord(y + 4 * i + 4));
    }
    return _mm512_add_epi32(even, odd);
  }
  template <int kWords>
  static Words DotSigned(const Words* w, const int8_t* y) {
    return DotUnsigned<kWords, 255>(w, y);
  }
  static Words ZeroWords() { return _mm512_setzero_si512(); }
  static Words SubAll(Words a, int32_t x) { return _mm512_sub_epi32(a, _mm512_set1_epi32(x)); }
  static Words MulAdd(Words acc, Words a, Words b) {
    return _mm512_add_epi32(acc, _mm512_mullo_epi32(a, b));
  }
  static Words MulAddPairs(Words acc, Words a, int32_t low, int32_t high) {
    return _mm512_dpwssd_epi32(acc, a, _mm512_set1_epi32((high << 16) | (low & 0xffff)));
  }

  // ---- floats per row --------------------------------------------------------------------------
  static RowsF HalfLow(Words w) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(w)); }
  static RowsF HalfHigh(Words w) { return HalfLow(_mm512_srli_epi32(w, 16)); }
  static RowsF ToFloat(Words a) { return _mm512_cvtepi32_ps(a); }
  static RowsF SetAll(float x) { return _mm512_set1_ps(x); }
  static RowsF Mul(RowsF a, RowsF b) { return _mm512_mul_ps(a, b); }
  static RowsF Add(RowsF a, RowsF b) { return _mm512_add_ps(a, b); }
  static RowsF Negate(RowsF a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
  static void StoreRows(float* out, RowsF a, uint32_t n) {
    _mm512_mask_storeu_ps(out, static_cast<__mmask16>((1u << n) - 1), a);
  }

  // ---- the 32 canonical partials ---------------------------------------------------------------
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

  // ---- 16 independent float lanes ---------------------------------------------------------------
  using V16 = __m512;
  static V16 Load16(const float* p) { return _mm512_loadu_ps(p); }
  static void Store16(float* p, V16 x) { _mm512_storeu_ps(p, x); }
  static V16 SetAll16(float x) { return _mm512_set1_ps(x); }
  static V16 Mul16(V16 x, V16 y) { return _mm512_mul_ps(x, y); }
  static V16 Add16(V16 x, V16 y) { return _mm512_add_ps(x, y); }
  static V16 Sub16(V16 x, V16 y) { return _mm512_sub_ps(x, y); }
  static V16 Fma16(V16 x, V16 y, V16 z) { return _mm512_fmadd_ps(x, y, z); }
};

}  // namespace
}  // namespace lode
