// See memory_reader.h. Each reader is one function with its own target attribute, called only when
// CPUID has the instructions; the loop is the same text for every width and prefetch distance.
#include "cpu_worker/bench/memory_reader.h"

#include <immintrin.h>

#include <vector>

namespace lode::bench {
namespace {

constexpr size_t kLine = 64;
// Prefetch distances besides none (the hardware's own): 100 and 400 ns of a 20 GB/s stream.
constexpr size_t kNear = 2048, kFar = 8192;

template <size_t kDistance>
inline void PrefetchStride(const uint8_t* p) {
  if constexpr (kDistance > 0) {
    for (size_t line = 0; line < kReadStride; line += kLine)
      __builtin_prefetch(p + kDistance + line);
  }
}

template <size_t kDistance>
uint64_t Read128(const uint8_t* p, size_t n) {
  __m128i a[4] = {};
  for (size_t i = 0; i + kReadStride <= n; i += kReadStride) {
    PrefetchStride<kDistance>(p + i);
    for (size_t k = 0; k < kReadStride / 16; ++k)
      a[k % 4] = _mm_xor_si128(a[k % 4],
                               _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i + 16 * k)));
  }
  const __m128i all = _mm_xor_si128(_mm_xor_si128(a[0], a[1]), _mm_xor_si128(a[2], a[3]));
  return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_xor_si128(all, _mm_srli_si128(all, 8))));
}

template <size_t kDistance>
__attribute__((target("avx2"))) uint64_t Read256(const uint8_t* p, size_t n) {
  __m256i a0 = _mm256_setzero_si256(), a1 = a0, a2 = a0, a3 = a0;
  for (size_t i = 0; i + kReadStride <= n; i += kReadStride) {
    PrefetchStride<kDistance>(p + i);
    const auto* v = reinterpret_cast<const __m256i*>(p + i);
    for (size_t k = 0; k < kReadStride / 32; k += 4) {
      a0 = _mm256_xor_si256(a0, _mm256_loadu_si256(v + k));
      a1 = _mm256_xor_si256(a1, _mm256_loadu_si256(v + k + 1));
      a2 = _mm256_xor_si256(a2, _mm256_loadu_si256(v + k + 2));
      a3 = _mm256_xor_si256(a3, _mm256_loadu_si256(v + k + 3));
    }
  }
  a0 = _mm256_xor_si256(_mm256_xor_si256(a0, a1), _mm256_xor_si256(a2, a3));
  const __m128i half = _mm_xor_si128(_mm256_castsi256_si128(a0), _mm256_extracti128_si256(a0, 1));
  return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_xor_si128(half, _mm_srli_si128(half, 8))));
}

template <size_t kDistance>
__attribute__((target("avx512f"))) uint64_t Read512(const uint8_t* p, size_t n) {
  __m512i a0 = _mm512_setzero_si512(), a1 = a0, a2 = a0, a3 = a0;
  for (size_t i = 0; i + kReadStride <= n; i += kReadStride) {
    PrefetchStride<kDistance>(p + i);
    for (size_t k = 0; k < kReadStride; k += 256) {
      a0 = _mm512_xor_si512(a0, _mm512_loadu_si512(p + i + k));
      a1 = _mm512_xor_si512(a1, _mm512_loadu_si512(p + i + k + 64));
      a2 = _mm512_xor_si512(a2, _mm512_loadu_si512(p + i + k + 128));
      a3 = _mm512_xor_si512(a3, _mm512_loadu_si512(p + i + k + 192));
    }
  }
  a0 = _mm512_xor_si512(_mm512_xor_si512(a0, a1), _mm512_xor_si512(a2, a3));
  alignas(64) uint64_t lanes[8];
  _mm512_store_si512(lanes, a0);
  uint64_t all = 0;
  for (const uint64_t lane : lanes) all ^= lane;
  return all;
}

std::vector<MemoryReader> Supported() {
  std::vector<MemoryReader> readers = {{"128 bits", Read128<0>},
                                       {"128 bits, prefetch 2 KiB", Read128<kNear>}};
  if (__builtin_cpu_supports("avx2")) {
    readers.push_back({"256 bits", Read256<0>});
    readers.push_back({"256 bits, prefetch 2 KiB", Read256<kNear>});
    readers.push_back({"256 bits, prefetch 8 KiB", Read256<kFar>});
  }
  if (__builtin_cpu_supports("avx512f")) {
    readers.push_back({"512 bits", Read512<0>});
    readers.push_back({"512 bits, prefetch 2 KiB", Read512<kNear>});
    readers.push_back({"512 bits, prefetch 8 KiB", Read512<kFar>});
  }
  return readers;
}

}  // namespace

size_t MemoryReaders(const MemoryReader** out) {
  static const std::vector<MemoryReader> readers = Supported();
  *out = readers.data();
  return readers.size();
}

}  // namespace lode::bench
