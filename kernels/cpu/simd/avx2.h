// The vocabulary of simd/scalar.h (contracts there) for AVX2 with FMA and F16C: 8 rows per group,
// one register per four code bytes of each. Byte products go through vpmaddubsw, whose int16 pairs
// must not saturate: hence the limits on unsigned codes.
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
  static constexpr uint32_t kFloatRows =
      1;  // 1 row x 2 activation rows x 4 registers = 8 of 16 registers
  static constexpr uint32_t kFloatActs = 2;
  static constexpr int32_t kSignedBias = 0;

  using Words = __m256i;
  using RowsF = __m256;

  static __m128i Load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static __m256i SetWord(const int8_t* y) {
    int32_t x;
    std::memcpy(&x, y, 4);
    return _mm256_set1_epi32(x);
  }

  // ---- bytes of weights ------------------------------------------------------------------------
  static Words LoadWords(const uint8_t* const* row, size_t offset) {
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
  static void LoadColumns(const uint8_t* const* row, size_t offset, Words* out) {
    // 128-bit lane l of z[i] = row 4 l + i; then a 4 x 4 transposition inside every lane.
    __m256i z[4];
    for (int i = 0; i < 4; ++i)
      z[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(Load128(row[i] + offset)),
                                     Load128(row[4 + i] + offset), 1);
    const __m256i a = _mm256_unpacklo_epi32(z[0], z[1]), b = _mm256_unpackhi_epi32(z[0], z[1]);
    const __m256i c = _mm256_unpacklo_epi32(z[2], z[3]), d = _mm256_unpackhi_epi32(z[2], z[3]);
    out[0] = _mm256_unpacklo_epi64(a, c);
    out[1] = _mm256_unpackhi_epi64(a, c);
    out[2] = _mm256_unpacklo_epi64(b, d);
    out[3] = _mm256_unpackhi_epi64(b, d);
  }
  template <int kShift, uint8_t kMask>
  static Words Field(Words w) {
    return _mm256_and_si256(kShift ? _mm256_srli_epi32(w, kShift) : w,
                            _mm256_set1_epi8(static_cast<char>(kMask)));
  }
  static Words Or(Words a, Words b) { return _mm256_or_si256(a, b); }
  template <int kNibble, uint8_t kValue>
  static Words OrWhereBit(Words codes, Words bits) {
    // Every byte of a lane gets the byte of `bits` that holds the nibble, then tests its own bit of
    // it.
    constexpr int32_t kByte = 0x01010101 * (kNibble / 2);
    const __m128i index =
        _mm_set_epi32(0x0c0c0c0c + kByte, 0x08080808 + kByte, 0x04040404 + kByte, kByte);
    const __m256i spread = _mm256_shuffle_epi8(bits, _mm256_broadcastsi128_si256(index));
    const __m256i mask =
        _mm256_set1_epi32(kNibble % 2 ? static_cast<int32_t>(0x80402010u) : 0x08040201);
    const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, mask), mask);
    return _mm256_or_si256(codes,
                           _mm256_and_si256(set, _mm256_set1_epi8(static_cast<char>(kValue))));
  }
  static Words Lookup(const int8_t* table, Words w) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(Load128(table)), w);
  }
  static Words SignedCodes(Words w) { return w; }
  static void ArrangeCrumbs(const int8_t* y, int8_t* out) {
    const __m128i index = _mm_set_epi32(0x0f0b0703, 0x0e0a0602, 0x0d090501, 0x0c080400);
    for (int b = 0; b < 64; b += 16)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + b),
                       _mm_shuffle_epi8(Load128(y + b), index));
  }

  // ---- exact integers per row ------------------------------------------------------------------
  template <int kByte>
  static Words ByteOf(Words w) {
    return _mm256_and_si256(kByte ? _mm256_srli_epi32(w, 8 * kByte) : w, _mm256_set1_epi32(255));
  }
  static Words EvenBytes(Words w) { return _mm256_and_si256(w, _mm256_set1_epi32(0x00ff00ff)); }
  static Words OddBytes(Words w) { return _mm256_srli_epi16(w, 8); }
  // One int16 lane holds kTerms products' pairs before it is widened: 2 * 127 * kMaxCode * kTerms <
  // 2^15.
  template <int kWords, int kMaxCode>
  static Words DotUnsigned(const Words* w, const int8_t* y) {
    constexpr int kFits = 32767 / (2 * 127 * kMaxCode);
    static_assert(kFits >= 1, "codes too large for vpmaddubsw");
    constexpr int kTerms = kFits < kWords ? kFits : kWords;
    __m256i sum = _mm256_setzero_si256();
    for (int i = 0; i < kWords; i += kTerms) {
      __m256i pairs = _mm256_maddubs_epi16(w[i], SetWord(y + 4 * i));
      for (int j = i + 1; j < i + kTerms && j < kWords; ++j)
        pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w[j], SetWord(y + 4 * j)));
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return sum;
  }
  // |w| as unsigned (128 for -128: 2 * 128 * 127 < 2^15) times y with w's sign: y is never -128, so
  // negating it is exact.
  template <int kWords>
  static Words DotSigned(const Words* w, const int8_t* y) {
    __m256i sum = _mm256_setzero_si256();
    for (int i = 0; i < kWords; ++i) {
      const __m256i pairs =
          _mm256_maddubs_epi16(_mm256_abs_epi8(w[i]), _mm256_sign_epi8(SetWord(y + 4 * i), w[i]));
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return sum;
  }
  static Words ZeroWords() { return _mm256_setzero_si256(); }
  static Words SubAll(Words a, int32_t x) { return _mm256_sub_epi32(a, _mm256_set1_epi32(x)); }
  static Words MulAdd(Words acc, Words a, Words b) {
    return _mm256_add_epi32(acc, _mm256_mullo_epi32(a, b));
  }
  static Words MulAddPairs(Words acc, Words a, int32_t low, int32_t high) {
    return _mm256_add_epi32(acc,
                            _mm256_madd_epi16(a, _mm256_set1_epi32((high << 16) | (low & 0xffff))));
  }

  // ---- floats per row --------------------------------------------------------------------------
  static RowsF HalfHigh(Words w) {
    // Values 0..65535 pack without saturating; lanes come out as rows 0..3 and 4..7.
    const __m256i v = _mm256_srli_epi32(w, 16);
    return _mm256_cvtph_ps(
        _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
  }
  static RowsF HalfLow(Words w) { return HalfHigh(_mm256_slli_epi32(w, 16)); }
  static RowsF ToFloat(Words a) { return _mm256_cvtepi32_ps(a); }
  static RowsF SetAll(float x) { return _mm256_set1_ps(x); }
  static RowsF Mul(RowsF a, RowsF b) { return _mm256_mul_ps(a, b); }
  static RowsF Add(RowsF a, RowsF b) { return _mm256_add_ps(a, b); }
  static RowsF Negate(RowsF a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }
  static void StoreRows(float* out, RowsF a, uint32_t n) {
    float v[kRows];
    _mm256_storeu_ps(n == kRows ? out : v, a);
    if (n != kRows) std::memcpy(out, v, n * sizeof(float));
  }

  // ---- the 32 canonical partials ---------------------------------------------------------------
  struct V32 {
    __m256 v[4];
  };
  static V32 Zero32() {
    const __m256 z = _mm256_setzero_ps();
    return {{z, z, z, z}};
  }
  static V32 Load32(const float* p) {
    return {{_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8), _mm256_loadu_ps(p + 16),
             _mm256_loadu_ps(p + 24)}};
  }
  static V32 LoadF16x32(const uint8_t* p) {
    return {{_mm256_cvtph_ps(Load128(p)), _mm256_cvtph_ps(Load128(p + 16)),
             _mm256_cvtph_ps(Load128(p + 32)), _mm256_cvtph_ps(Load128(p + 48))}};
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

  // ---- 16 independent float lanes ---------------------------------------------------------------
  struct V16 {
    __m256 a, b;  // lanes 0..7, 8..15
  };
  static V16 Load16(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void Store16(float* p, V16 x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
  }
  static V16 SetAll16(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static V16 Mul16(V16 x, V16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  static V16 Add16(V16 x, V16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
  static V16 Sub16(V16 x, V16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
  static V16 Fma16(V16 x, V16 y, V16 z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
  }
};

}  // namespace
}  // namespace lode
