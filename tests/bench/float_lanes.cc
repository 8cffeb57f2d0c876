// See float_lanes.h. Compiled for AVX-512; called only when the avx512 table is supported.
#include "tests/bench/float_lanes.h"

#include <immintrin.h>

#include <cstring>

namespace lode::testing {
namespace {

constexpr uint32_t kRowsAtOnce =
    4;  // independent rows, so that fma latency is hidden as well as the lanes allow

__m256i Load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
float Half(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return _cvtsh_ss(h);
}
// Low half of the lanes a, high half b.
__m512 Halves(float a, float b) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_set1_ps(a)), _mm256_set1_ps(b), 1);
}

void Prefetch(const uint8_t* p, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(p + i);
}

}  // namespace

// Two blocks per register; |w| and the sign moved to the activation, since vpdpbusd wants one
// unsigned operand.
void FloatLanesQ8_0(const MatArgs& m) {
  const ActRow& act = m.acts[0];
  const uint32_t n_pairs = m.n_cols / 64;
  for (uint32_t r = 0; r + kRowsAtOnce <= m.n_rows; r += kRowsAtOnce) {
    __m512 acc[kRowsAtOnce];
    for (__m512& a : acc) a = _mm512_setzero_ps();
    const uint8_t* first = m.w + r * m.row_bytes;
    for (uint32_t b = 0; b < n_pairs; ++b) {
      Prefetch(first + kRowsAtOnce * m.row_bytes + b * kRowsAtOnce * 68, kRowsAtOnce * 68);
      const __m512i y = _mm512_loadu_si512(act.q + 64 * b);
      for (uint32_t k = 0; k < kRowsAtOnce; ++k) {
        const uint8_t* p = first + k * m.row_bytes + b * 68;
        const __m512i w =
            _mm512_inserti64x4(_mm512_castsi256_si512(Load256(p + 2)), Load256(p + 36), 1);
        const __m512i signed_y =
            _mm512_mask_sub_epi8(y, _mm512_movepi8_mask(w), _mm512_setzero_si512(), y);
        const __m512i sum =
            _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_abs_epi8(w), signed_y);
        const __m512 scale = Halves(Half(p) * act.d[2 * b], Half(p + 34) * act.d[2 * b + 1]);
        acc[k] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, acc[k]);
      }
    }
    for (uint32_t k = 0; k < kRowsAtOnce; ++k) m.out[0][r + k] = _mm512_reduce_add_ps(acc[k]);
  }
}

void FloatLanesQ4_K(const MatArgs& m) {
  const ActRow& act = m.acts[0];
  const __m512i shift = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(4), 1);
  const __m512i nibble = _mm512_set1_epi8(15);
  for (uint32_t r = 0; r + kRowsAtOnce <= m.n_rows; r += kRowsAtOnce) {
    __m512 acc[kRowsAtOnce];
    __m256 acc_min[kRowsAtOnce];
    for (__m512& a : acc) a = _mm512_setzero_ps();
    for (__m256& a : acc_min) a = _mm256_setzero_ps();
    const uint8_t* first = m.w + r * m.row_bytes;
    for (uint32_t b = 0; b < m.n_cols / 256; ++b) {
      Prefetch(first + kRowsAtOnce * m.row_bytes + b * kRowsAtOnce * 144, kRowsAtOnce * 144);
      const __m256i sums = Load256(act.sum16 + 16 * b);
      for (uint32_t k = 0; k < kRowsAtOnce; ++k) {
        const uint8_t* p = first + k * m.row_bytes + b * 144;
        uint32_t u[3];
        std::memcpy(u, p + 4, 12);
        const uint64_t s = static_cast<uint64_t>((u[2] & 0x0f0f0f0f) | ((u[0] >> 2) & 0x30303030))
                               << 32 |
                           (u[0] & 0x3f3f3f3f);
        const uint64_t mn =
            static_cast<uint64_t>(((u[2] >> 4) & 0x0f0f0f0f) | ((u[1] >> 2) & 0x30303030)) << 32 |
            (u[1] & 0x3f3f3f3f);
        const __m512i s8 =
            _mm512_castsi128_si512(_mm_cvtepu8_epi16(_mm_cvtsi64_si128(static_cast<int64_t>(s))));
        __m512i isum = _mm512_setzero_si512();
        for (int c = 0; c < 4; ++c) {
          const __m512i raw = _mm512_broadcast_i64x4(Load256(p + 16 + 32 * c));
          const __m512i w = _mm512_and_si512(_mm512_srlv_epi16(raw, shift), nibble);
          const __m512i index = _mm512_inserti64x4(
              _mm512_castsi256_si512(_mm256_set1_epi16(static_cast<int16_t>(2 * c))),
              _mm256_set1_epi16(static_cast<int16_t>(2 * c + 1)), 1);
          const __m512i pairs =
              _mm512_maddubs_epi16(w, _mm512_loadu_si512(act.q + 256 * b + 64 * c));
          isum = _mm512_dpwssd_epi32(isum, pairs, _mm512_permutexvar_epi16(index, s8));
        }
        const __m128i m8 = _mm_cvtsi64_si128(static_cast<int64_t>(mn));
        const __m256i msum =
            _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm_unpacklo_epi8(m8, m8)), sums);
        acc[k] =
            _mm512_fmadd_ps(_mm512_cvtepi32_ps(isum), _mm512_set1_ps(Half(p) * act.d[b]), acc[k]);
        acc_min[k] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(msum),
                                     _mm256_set1_ps(Half(p + 2) * act.d[b]), acc_min[k]);
      }
    }
    for (uint32_t k = 0; k < kRowsAtOnce; ++k)
      m.out[0][r + k] =
          _mm512_reduce_add_ps(acc[k]) - _mm512_reduce_add_ps(_mm512_zextps256_ps512(acc_min[k]));
  }
}

}  // namespace lode::testing
