// Registers of 256 bits: the primitives from which simd/x86.h builds the vocabulary, for AVX2, FMA
// and F16C; with LODE_SIMD_VNNI also AVX-VNNI (the VEX encoding of vpdpbusd), for machines without
// AVX-512. 8 weight rows stand side by side. Included by one ISA translation unit.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace lode {
namespace {

struct Reg {
  using I = __m256i;
  using F = __m256;
  static constexpr uint32_t kLanes = 8;
  static constexpr uint32_t kFloatTile = 2;  // 2 rows or 1 row x 2: 8 registers of sums of 16
#ifdef LODE_SIMD_VNNI
  static constexpr bool kVnni = true;
  static I Dpbusd(I acc, I u, I s) { return _mm256_dpbusd_avx_epi32(acc, u, s); }
  static I MulAddPairs(I acc, I a, I b) { return _mm256_dpwssd_avx_epi32(acc, a, b); }
  static I DpbusdAll(I acc, I u, const int8_t* s) {
    uint32_t four;
    std::memcpy(&four, s, sizeof(four));
    return Dpbusd(acc, u, Set32(four));
  }
#else
  static constexpr bool kVnni = false;
  static I MulAddPairs(I acc, I a, I b) { return Add32(acc, _mm256_madd_epi16(a, b)); }
#endif

  // Addresses of 8 rows as a base and multiples of the stride that addressing modes can add.
  struct Rows {
    const uint8_t* p;
    size_t s, s3, s5, s7;
    void Step(size_t bytes) { p += bytes; }
  };
  static Rows RowsAt(const uint8_t* p, size_t stride) {
    return {p, stride, 3 * stride, 5 * stride, 7 * stride};
  }
  static I Load2(const uint8_t* a, const uint8_t* b) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(Load128(a)), Load128(b), 1);
  }
  static void LoadColumns(const Rows& r, uint32_t offset, I* out) {
    const uint8_t* p = r.p + offset;
    const I z0 = Load2(p, p + 4 * r.s), z1 = Load2(p + r.s, p + r.s5);
    const I z2 = Load2(p + 2 * r.s, p + 2 * r.s3), z3 = Load2(p + r.s3, p + r.s7);
    // A 4 x 4 transposition of words inside both 128-bit lanes.
    const I a = _mm256_unpacklo_epi32(z0, z1), b = _mm256_unpackhi_epi32(z0, z1);
    const I c = _mm256_unpacklo_epi32(z2, z3), d = _mm256_unpackhi_epi32(z2, z3);
    out[0] = _mm256_unpacklo_epi64(a, c);
    out[1] = _mm256_unpackhi_epi64(a, c);
    out[2] = _mm256_unpacklo_epi64(b, d);
    out[3] = _mm256_unpackhi_epi64(b, d);
  }

  static __m128i Load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static I Load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static void Store(void* p, I a) { _mm256_storeu_si256(static_cast<__m256i*>(p), a); }
  static I Broadcast128(const void* p) { return _mm256_broadcastsi128_si256(Load128(p)); }
  static I Zero() { return _mm256_setzero_si256(); }
  static I Set32(uint32_t x) { return _mm256_set1_epi32(static_cast<int32_t>(x)); }

  static I And(I a, I b) { return _mm256_and_si256(a, b); }
  static I Or(I a, I b) { return _mm256_or_si256(a, b); }
  static I Xor(I a, I b) { return _mm256_xor_si256(a, b); }
  template <int kRight>
  static I Shift32(I a) {
    if constexpr (kRight > 0) return _mm256_srli_epi32(a, kRight);
    if constexpr (kRight < 0) return _mm256_slli_epi32(a, -kRight);
    return a;
  }
  template <int kRight>
  static I Shift16(I a) {
    return _mm256_srli_epi16(a, kRight);
  }
  template <int kRight>
  static I ShiftSigned16(I a) {
    return _mm256_srai_epi16(a, kRight);
  }
  template <int kRight>
  static I ShiftSigned32(I a) {
    return _mm256_srai_epi32(a, kRight);
  }
  // Even 16-bit lanes of a, odd ones of b.
  static I Blend16(I a, I b) { return _mm256_blend_epi16(a, b, 0xaa); }
  // Pairs of words, rows 0, 1 (4, 5; ...) in a and 2, 3 (6, 7; ...) in b: first words, last words.
  static void SplitPairs(I a, I b, I* out) {
    const F x = _mm256_castsi256_ps(a), y = _mm256_castsi256_ps(b);
    out[0] = _mm256_castps_si256(_mm256_shuffle_ps(x, y, 0x88));
    out[1] = _mm256_castps_si256(_mm256_shuffle_ps(x, y, 0xdd));
  }
  static I Shuffle8(I a, I index) { return _mm256_shuffle_epi8(a, index); }
  static I Add8(I a, I b) { return _mm256_add_epi8(a, b); }
  static I Sub8(I a, I b) { return _mm256_sub_epi8(a, b); }
  static I Add16(I a, I b) { return _mm256_add_epi16(a, b); }
  static I Add32(I a, I b) { return _mm256_add_epi32(a, b); }
  static I Mul32(I a, I b) { return _mm256_mullo_epi32(a, b); }
  static I Madd16(I a, I b) { return _mm256_madd_epi16(a, b); }
  static I Maddubs(I u, I s) { return _mm256_maddubs_epi16(u, s); }
  static I Abs8(I a) { return _mm256_abs_epi8(a); }
  static I Sign8(I a, I sign) { return _mm256_sign_epi8(a, sign); }
  // Bytes whose bits in `where` under `pattern` (one bit a byte) are set: negated, or `value`
  // added.
  static I NegateWhere(I a, I where, I pattern) {
    const I mask = _mm256_cmpeq_epi8(And(where, pattern), pattern);
    return Sub8(Xor(a, mask), mask);
  }
  static I AddWhere(I a, I where, I pattern, I value) {
    return Or(a, And(_mm256_cmpeq_epi8(And(where, pattern), pattern), value));
  }
  static I Gather(const uint32_t* table, I index) {
    return _mm256_i32gather_epi32(reinterpret_cast<const int*>(table), index, 4);
  }

  static F ToFloat(I a) { return _mm256_cvtepi32_ps(a); }
  static F HalfLow(I a) {
    // Values 0..65535 pack without saturating; the low halves of both 128-bit lanes are then
    // joined.
    const I v = And(a, Set32(0xffff));
    return _mm256_cvtph_ps(
        _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
  }
  static F HalfHigh(I a) { return HalfLow(Shift32<16>(a)); }
  static F SetAll(float x) { return _mm256_set1_ps(x); }
  static F Mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F Add(F a, F b) { return _mm256_add_ps(a, b); }
  static F Sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F Fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F Negate(F a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }
  static F LoadF(const float* p) { return _mm256_loadu_ps(p); }
  static void StoreF(float* p, F a) { _mm256_storeu_ps(p, a); }
  static F LoadF16(const uint8_t* p) { return _mm256_cvtph_ps(Load128(p)); }
  static F LoadBf16(const uint8_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(Load128(p)), 16));
  }
  // fma in lanes below n, c elsewhere.
  static F FmaFirst(F a, F b, F c, int32_t n) {
    const I iota = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    const F use = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), iota));
    return _mm256_blendv_ps(c, _mm256_fmadd_ps(a, b, c), use);
  }
  // Tree 4, 2, 1 over the lanes.
  static float Join(F a) {
    const __m128 w4 = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 w2 = _mm_add_ps(w4, _mm_movehl_ps(w4, w4));
    return _mm_cvtss_f32(_mm_add_ss(w2, _mm_movehdup_ps(w2)));
  }
};

}  // namespace
}  // namespace lode
