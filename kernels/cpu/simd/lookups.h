// The vocabulary's grid look-ups without byte permutations of whole registers: indices are read
// from the weights' bytes, entries loaded one by one and put into lanes. On current CPUs that takes
// about half the time of a gather, whose lanes are loaded one by one too. Included by simd/x86.h
// for AVX2, AVX-VNNI and AVX-512 without VBMI.
#pragma once

#include <cstring>

namespace lode {
namespace {

// The entry that the two bytes at p name, as eight bytes.
struct PairEntry {  // by the lower nine of their bits
  const uint64_t* table;
  uint64_t operator()(const uint8_t* p) const {
    uint16_t index;
    std::memcpy(&index, p, sizeof(index));
    return table[index & 511];
  }
};
struct TwoEntries {  // one entry of four bytes by each
  const uint32_t* table;
  uint64_t operator()(const uint8_t* p) const { return table[p[0]] | uint64_t{table[p[1]]} << 32; }
};

template <class Entry>
inline __m256i FourEntries(const Entry& entry, const uint8_t* a, const uint8_t* b, const uint8_t* c,
                           const uint8_t* d) {
  const auto two = [&](const uint8_t* p, const uint8_t* q) {
    return _mm_insert_epi64(_mm_cvtsi64_si128(static_cast<int64_t>(entry(p))),
                            static_cast<int64_t>(entry(q)), 1);
  };
  return _mm256_inserti128_si256(_mm256_castsi128_si256(two(a, b)), two(c, d), 1);
}

// Eight rows from p: entries of rows 0, 1, 4, 5 in one register, 2, 3, 6, 7 in the other.
struct EntriesOf8 {
  __m256i a, b;
  template <class Entry>
  EntriesOf8(const Entry& entry, const uint8_t* p, const Reg::Rows& r)
      : a(FourEntries(entry, p, p + r.s, p + 4 * r.s, p + r.s5)),
        b(FourEntries(entry, p + 2 * r.s, p + r.s3, p + 2 * r.s3, p + r.s7)) {}
};

struct LookupOps {
  static void LookupPairs(const uint64_t* table, const Reg::Rows& rows, uint32_t offset,
                          Reg::I* out) {
    Lookup(PairEntry{table}, rows, offset, out);
  }
  static void LookupBytes(const uint32_t* table, const Reg::Rows& rows, uint32_t offset,
                          Reg::I* out) {
    Lookup(TwoEntries{table}, rows, offset, out);
  }

 private:
  template <class Entry>
  static void Lookup(const Entry& entry, const Reg::Rows& rows, uint32_t offset, Reg::I* out) {
    const EntriesOf8 x(entry, rows.p + offset, rows);
#ifdef LODE_SIMD_512
    const EntriesOf8 y(entry, rows.q + offset, rows);
    Reg::SplitPairs(_mm512_inserti64x4(_mm512_castsi256_si512(x.a), y.a, 1),
                    _mm512_inserti64x4(_mm512_castsi256_si512(x.b), y.b, 1), out);
#else
    Reg::SplitPairs(x.a, x.b, out);
#endif
  }
};

}  // namespace
}  // namespace lode
