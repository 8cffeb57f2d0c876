// Registers of 512 bits: the primitives from which simd/x86.h builds the vocabulary, for AVX-512
// F, BW, DQ, VL and VNNI. 16 weight rows stand side by side. Included by one ISA translation unit.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace lode {
namespace {

// Bytes kFirst and kFirst + 1 of 16 words.
struct HalfIndex {
  uint8_t v[32];
};
constexpr HalfIndex MakeHalfIndex(uint32_t first) {
  HalfIndex index{};
  for (uint32_t i = 0; i < 32; ++i) index.v[i] = static_cast<uint8_t>(i / 2 * 4 + first + i % 2);
  return index;
}

struct Reg {
  using I = __m512i;
  using F = __m512;
  static constexpr uint32_t kLanes = 16;
  static constexpr uint32_t kFloatTile = 8;  // 8 rows or 4 rows x 2: 16 registers of sums of 32
  static constexpr bool kVnni = true;

  // Addresses of 16 rows as two bases and multiples of the stride that addressing modes can add.
  struct Rows {
    const uint8_t *p, *q;
    size_t s, s3, s5, s7;
    void Step(size_t bytes) {
      p += bytes;
      q += bytes;
    }
  };
  static Rows RowsAt(const uint8_t* p, size_t stride) {
    return {p, p + 8 * stride, stride, 3 * stride, 5 * stride, 7 * stride};
  }
  // Rows k, 4 + k, 8 + k, 12 + k, each 16 bytes: one plain load and three that blend; no shuffle.
  static I Load4(const uint8_t* a, const uint8_t* b, const uint8_t* c, const uint8_t* d) {
    I z = _mm512_castsi128_si512(Load128(a));
    z = _mm512_mask_broadcast_i32x4(z, 0x00f0, Load128(b));
    z = _mm512_mask_broadcast_i32x4(z, 0x0f00, Load128(c));
    return _mm512_mask_broadcast_i32x4(z, 0xf000, Load128(d));
  }
  static void LoadColumns(const Rows& r, uint32_t offset, I* out) {
    const uint8_t *p = r.p + offset, *q = r.q + offset;
    const I z0 = Load4(p, p + 4 * r.s, q, q + 4 * r.s);
    const I z1 = Load4(p + r.s, p + r.s5, q + r.s, q + r.s5);
    const I z2 = Load4(p + 2 * r.s, p + 2 * r.s3, q + 2 * r.s, q + 2 * r.s3);
    const I z3 = Load4(p + r.s3, p + r.s7, q + r.s3, q + r.s7);
    Transpose4(z0, z1, z2, z3, out);
  }
  // A 4 x 4 transposition of words inside every 128-bit lane.
  static void Transpose4(I z0, I z1, I z2, I z3, I* out) {
    const I a = _mm512_unpacklo_epi32(z0, z1), b = _mm512_unpackhi_epi32(z0, z1);
    const I c = _mm512_unpacklo_epi32(z2, z3), d = _mm512_unpackhi_epi32(z2, z3);
    out[0] = _mm512_unpacklo_epi64(a, c);
    out[1] = _mm512_unpackhi_epi64(a, c);
    out[2] = _mm512_unpacklo_epi64(b, d);
    out[3] = _mm512_unpackhi_epi64(b, d);
  }
  // 32 bytes of every row at once: half the loads of two LoadColumns and a fifth fewer vector
  // instructions, for one more round of shuffles.
  static I Load2(const uint8_t* a, const uint8_t* b) {
    return _mm512_mask_broadcast_i64x4(_mm512_castsi256_si512(Load256(a)), 0xf0, Load256(b));
  }
  static void LoadColumns2(const Rows& r, uint32_t offset, I* out) {
    const uint8_t *p = r.p + offset, *q = r.q + offset;
    I u[4], v[4];  // words 0..3 of rows 0..3, words 4..7 of them, the same of rows 4..7; rows 8..15
    Transpose4(Load2(p, p + 4 * r.s), Load2(p + r.s, p + r.s5), Load2(p + 2 * r.s, p + 2 * r.s3),
               Load2(p + r.s3, p + r.s7), u);
    Transpose4(Load2(q, q + 4 * r.s), Load2(q + r.s, q + r.s5), Load2(q + 2 * r.s, q + 2 * r.s3),
               Load2(q + r.s3, q + r.s7), v);
    for (int i = 0; i < 4; ++i) {
      out[i] = _mm512_shuffle_i64x2(u[i], v[i], 0x88);
      out[4 + i] = _mm512_shuffle_i64x2(u[i], v[i], 0xdd);
    }
  }

  static __m128i Load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static __m256i Load256(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
  }
  static I Load(const void* p) { return _mm512_loadu_si512(p); }
  static void Store(void* p, I a) { _mm512_storeu_si512(p, a); }
  static I Broadcast128(const void* p) { return _mm512_broadcast_i32x4(Load128(p)); }
  static I Zero() { return _mm512_setzero_si512(); }
  static I Set32(uint32_t x) { return _mm512_set1_epi32(static_cast<int32_t>(x)); }

  static I And(I a, I b) { return _mm512_and_si512(a, b); }
  static I Or(I a, I b) { return _mm512_or_si512(a, b); }
  static I Xor(I a, I b) { return _mm512_xor_si512(a, b); }
  // Bits of a where the mask is set, else of b, whose register takes the result.
  static I Select(I mask, I a, I b) { return _mm512_ternarylogic_epi32(b, a, mask, 0xd8); }
  template <int kRight>
  static I Shift32(I a) {
    if constexpr (kRight > 0) return _mm512_srli_epi32(a, kRight);
    if constexpr (kRight < 0) return _mm512_slli_epi32(a, -kRight);
    return a;
  }
  template <int kRight>
  static I Shift16(I a) {
    return _mm512_srli_epi16(a, kRight);
  }
  template <int kRight>
  static I ShiftSigned32(I a) {
    return _mm512_srai_epi32(a, kRight);
  }
  // Even 16-bit lanes of a, odd ones of b.
  static I Blend16(I a, I b) { return _mm512_mask_blend_epi16(0xaaaaaaaau, a, b); }
  // Pairs of words, rows 0, 1 (4, 5; ...) in a and 2, 3 (6, 7; ...) in b: first words, last words.
  static void SplitPairs(I a, I b, I* out) {
    const F x = _mm512_castsi512_ps(a), y = _mm512_castsi512_ps(b);
    out[0] = _mm512_castps_si512(_mm512_shuffle_ps(x, y, 0x88));
    out[1] = _mm512_castps_si512(_mm512_shuffle_ps(x, y, 0xdd));
  }
  static I Shuffle8(I a, I index) { return _mm512_shuffle_epi8(a, index); }
  static I Add8(I a, I b) { return _mm512_add_epi8(a, b); }
  static I Sub8(I a, I b) { return _mm512_sub_epi8(a, b); }
  static I Add32(I a, I b) { return _mm512_add_epi32(a, b); }
  static I Mul32(I a, I b) { return _mm512_mullo_epi32(a, b); }
  static I MulAddPairs(I acc, I a, I b) { return _mm512_dpwssd_epi32(acc, a, b); }
  // With four bytes at `s` in every lane. One instruction: the compiler makes two of it.
  static I DpbusdAll(I acc, I u, const int8_t* s) {
    typedef uint32_t Four __attribute__((may_alias, aligned(1)));
    asm("vpdpbusd %2%{1to16%}, %1, %0"
        : "+v"(acc)
        : "v"(u), "m"(*reinterpret_cast<const Four*>(s)));
    return acc;
  }
  // Bytes whose bits in `where` under `pattern` are set: negated, or `value` added.
  static I NegateWhere(I a, I where, I pattern) {
    return _mm512_mask_sub_epi8(a, _mm512_test_epi8_mask(where, pattern), Zero(), a);
  }
  static I AddWhere(I a, I where, I pattern, I value) {
    return _mm512_mask_add_epi8(a, _mm512_test_epi8_mask(where, pattern), a, value);
  }
  static I Gather(const uint32_t* table, I index) {
    return _mm512_i32gather_epi32(index, table, 4);
  }

  static F ToFloat(I a) { return _mm512_cvtepi32_ps(a); }
#ifdef LODE_SIMD_VBMI
  // One byte permutation brings the halves together; narrowing words takes two, and a shift.
  template <uint32_t kFirst>
  static F Half(I a) {
    alignas(32) static constexpr HalfIndex kIndex = MakeHalfIndex(kFirst);
    const I index = _mm512_castsi256_si512(Load256(kIndex.v));
    return _mm512_cvtph_ps(_mm512_castsi512_si256(_mm512_permutexvar_epi8(index, a)));
  }
  static F HalfLow(I a) { return Half<0>(a); }
  static F HalfHigh(I a) { return Half<2>(a); }
#else
  static F HalfLow(I a) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(a)); }
  static F HalfHigh(I a) { return HalfLow(Shift32<16>(a)); }
#endif
  static F AsFloat(I a) { return _mm512_castsi512_ps(a); }
  // Two registers in a.v -> their even words, their odd words. Both are loaded once: the compiler
  // would make operands in memory of them, twice.
  template <class V>
  static V SplitWords(V a) {
    asm("" : "+v"(a.v[0]), "+v"(a.v[1]));
    return {{_mm512_permutex2var_ps(a.v[0], Iota(0), a.v[1]),
             _mm512_permutex2var_ps(a.v[0], Iota(1), a.v[1])}};
  }
  static I Iota(int i) {  // i, i + 2, ..., i + 30
    return _mm512_add_epi32(_mm512_set1_epi32(i), _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16,
                                                                    18, 20, 22, 24, 26, 28, 30));
  }
  static F SetAll(float x) { return _mm512_set1_ps(x); }
  static F Mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F Add(F a, F b) { return _mm512_add_ps(a, b); }
  static F Sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F Fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F Negate(F a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
  static F LoadF(const float* p) { return _mm512_loadu_ps(p); }
  static void StoreF(float* p, F a) { _mm512_storeu_ps(p, a); }
  static F LoadF16(const uint8_t* p) { return _mm512_cvtph_ps(Load256(p)); }
  static F LoadBf16(const uint8_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(Load256(p)), 16));
  }
  // fma in lanes below n, c elsewhere.
  static F FmaFirst(F a, F b, F c, int32_t n) {
    const uint32_t mask = n >= 16 ? 0xffffu : (n <= 0 ? 0u : (1u << n) - 1);
    return _mm512_mask3_fmadd_ps(a, b, c, static_cast<__mmask16>(mask));
  }
  // Tree 8, 4, 2, 1 over the lanes.
  static float Join(F a) {
    const __m256 w8 = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    const __m128 w4 = _mm_add_ps(_mm256_castps256_ps128(w8), _mm256_extractf128_ps(w8, 1));
    const __m128 w2 = _mm_add_ps(w4, _mm_movehl_ps(w4, w4));
    return _mm_cvtss_f32(_mm_add_ss(w2, _mm_movehdup_ps(w2)));
  }
};

}  // namespace
}  // namespace lode
