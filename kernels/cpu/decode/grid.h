// Blocks of 256 weights whose magnitudes are rows of a grid and whose signs are stored apart
// (docs/design/formats.md); the contract is in decode/decode.h. Two ways to look a grid up:
//   - words: one 32-bit gather per four weights, columns in natural order;
//   - byte planes (Simd::kBytePlanes): plane j holds byte j of every grid row as a table for byte
//     permutations, so one look-up serves the four indices in a lane at once: word j of four then
//     holds columns j, 4 + j, 8 + j, 12 + j of 16, the order of Simd::ArrangeCrumbs.
#pragma once

#include "kernels/cpu/decode/decode.h"
#include "kernels/cpu/decode/grids.h"

namespace lode {
namespace {
namespace decode {

// ---- grids in the shapes that look-ups want
// ------------------------------------------------------
template <size_t kRows>
struct WordGrid {
  uint32_t word[kRows];  // four magnitudes
};
template <size_t kRows>
struct PairGrid {
  uint64_t pair[kRows];  // eight magnitudes
};
template <size_t kRows>
struct PlaneGrid {
  alignas(64) uint8_t plane[2][kRows];
};

template <uint32_t kBits>
constexpr uint8_t Level(const uint8_t* levels, uint32_t code, uint32_t j) {
  const uint32_t level = (code >> (kBits * j)) & ((1u << kBits) - 1);
  return levels[level];
}
template <uint32_t kBits, size_t kRows>
constexpr WordGrid<kRows> MakeWords(const uint16_t (&codes)[kRows], const uint8_t* levels) {
  WordGrid<kRows> grid{};
  for (size_t r = 0; r < kRows; ++r)
    for (uint32_t j = 0; j < 4; ++j)
      grid.word[r] |= uint32_t{Level<kBits>(levels, codes[r], j)} << (8 * j);
  return grid;
}

template <uint32_t kBits, size_t kRows>
constexpr PairGrid<kRows> MakePairs(const uint16_t (&codes)[kRows], const uint8_t* levels) {
  PairGrid<kRows> grid{};
  for (size_t r = 0; r < kRows; ++r)
    for (uint32_t j = 0; j < 8; ++j)
      grid.pair[r] |= uint64_t{Level<kBits>(levels, codes[r], j)} << (8 * j);
  return grid;
}

constexpr PairGrid<512> kIq2xsPairs = MakePairs<2>(kIq2xsCodes, kIq2xsLevels);
constexpr WordGrid<256> kIq3xxsWords = MakeWords<3>(kIq3xxsCodes, kIq3xxsLevels);
constexpr WordGrid<512> kIq3sWords = MakeWords<3>(kIq3sCodes, kIq3sLevels);

// Planes for byte permutations of 64 entries, which look at six bits of an index byte: a plane's
// byte holds level codes of some weights, signs are put into its free bits, and one more
// permutation turns six bits, of which some belong to other weights and do not matter, into a
// signed code.
//
// IQ3 types: plane 0 has weight 0 in bits 0..2 and weight 1 in bits 5..7, their signs go to bits 3
// and 4; plane 1 has weight 2 in bits 0..2 and weight 3 in bits 3, 4 and 7, signs in bits 5 and 6.
// Weights 1 and 3 are looked up after a shift by two.
template <size_t kRows>
constexpr PlaneGrid<kRows> MakeIq3Planes(const uint16_t (&codes)[kRows]) {
  PlaneGrid<kRows> grid{};
  for (size_t r = 0; r < kRows; ++r) {
    const uint32_t c0 = codes[r] & 7, c1 = codes[r] >> 3 & 7, c2 = codes[r] >> 6 & 7,
                   c3 = codes[r] >> 9 & 7;
    grid.plane[0][r] = static_cast<uint8_t>(c0 | c1 << 5);
    grid.plane[1][r] = static_cast<uint8_t>(c2 | (c3 & 3) << 3 | c3 >> 2 << 7);
  }
  return grid;
}
// IQ2_XS: four level codes of two bits share a byte: planes 0 and 1 are weights 0..3 and 4..7.
constexpr PlaneGrid<512> MakeIq2xsPlanes() {
  PlaneGrid<512> grid{};
  for (size_t r = 0; r < 512; ++r)
    for (uint32_t j = 0; j < 2; ++j)
      grid.plane[j][r] = static_cast<uint8_t>(kIq2xsCodes[r] >> (8 * j));
  return grid;
}
constexpr PlaneGrid<256> kIq3xxsPlanes = MakeIq3Planes(kIq3xxsCodes);
constexpr PlaneGrid<512> kIq3sPlanes = MakeIq3Planes(kIq3sCodes);
constexpr PlaneGrid<512> kIq2xsPlanes = MakeIq2xsPlanes();

// Signed codes as vpdpbusd wants them, 128 +- magnitude, by six bits of an index.
constexpr int32_t kPlaneBias = 128;
struct LevelTable {
  alignas(64) uint8_t v[64];
};
constexpr uint8_t SignedCode(uint32_t magnitude, uint32_t negative) {
  const int32_t m = static_cast<int32_t>(magnitude);
  return static_cast<uint8_t>(kPlaneBias + (negative != 0 ? -m : m));
}
// Weights 0..3 of the layout above.
constexpr LevelTable MakeIq3Levels(const uint8_t* levels, uint32_t weight) {
  LevelTable table{};
  for (uint32_t i = 0; i < 64; ++i) {
    const uint32_t level[4] = {i & 7, i >> 3, i & 7, (i >> 1 & 3) | i >> 5 << 2};
    const uint32_t negative[4] = {i >> 3 & 1, i >> 2 & 1, i >> 5 & 1, i >> 4 & 1};
    table.v[i] = SignedCode(levels[level[weight]], negative[weight]);
  }
  return table;
}
// Two level codes in bits 0..3, their signs in bits 4 and 5.
constexpr LevelTable MakeIq2xsLevels(uint32_t weight) {
  LevelTable table{};
  for (uint32_t i = 0; i < 64; ++i) {
    const uint32_t level = i >> (2 * weight) & 3;
    if (level < 3) table.v[i] = SignedCode(kIq2xsLevels[level], i >> (4 + weight) & 1);
  }
  return table;
}
struct Iq3Levels {
  LevelTable of[4];
};
constexpr Iq3Levels MakeIq3Levels(const uint8_t* levels) {
  return {{MakeIq3Levels(levels, 0), MakeIq3Levels(levels, 1), MakeIq3Levels(levels, 2),
           MakeIq3Levels(levels, 3)}};
}
constexpr Iq3Levels kIq3xxsSigned = MakeIq3Levels(kIq3xxsLevels);
constexpr Iq3Levels kIq3sSigned = MakeIq3Levels(kIq3sLevels);
constexpr LevelTable kIq2xsSigned[2] = {MakeIq2xsLevels(0), MakeIq2xsLevels(1)};

// Two planes and the signs of 16 weights -> four words of codes.
template <class S>
LODE_ALWAYS_INLINE void Iq3Codes(const Iq3Levels& levels, const typename S::Words* planes,
                                 typename S::Words signs, typename S::Words* out) {
  const typename S::Words a = S::template Select<0x18>(signs, planes[0]);
  const typename S::Words b = S::template Select<0x60>(signs, planes[1]);
  out[0] = S::Table64(levels.of[0].v, a);
  out[1] = S::Table64(levels.of[1].v, S::template Field32<2, ~0u>(a));
  out[2] = S::Table64(levels.of[2].v, b);
  out[3] = S::Table64(levels.of[3].v, S::template Field32<2, ~0u>(b));
}

// Columns in crumb order where the grid is looked up in byte planes.
struct GridOrder {
  template <class S>
  static constexpr bool kArrange = S::kBytePlanes;
  template <class S, uint32_t kN>
  static void Arrange(const int8_t* y, int8_t* out) {
    for (uint32_t i = 0; i < kN * 256; i += 64) S::ArrangeCrumbs(y + i, out + i);
  }
};

// Eight minus signs from a seven-bit index: their number is even.
inline uint32_t EvenSigns(uint32_t index) {
  return index | static_cast<uint32_t>(__builtin_popcount(index) & 1) << 7;
}
inline float SignedLevel(const uint8_t* levels, uint32_t level, bool negative) {
  const float x = static_cast<float>(levels[level]);
  return negative ? -x : x;
}

// ---- IQ3_XXS: f16 d, 64 grid indices, 8 x u32: four 7-bit sign indices and a 4-bit scale s -----
// w = d / 4 * (2 s + 1) * grid * sign
struct IQ3_XXS : GridOrder {
  static constexpr uint32_t kBlock = 256, kBytes = 98, kUnit = 1, kStep = 32, kGroup = 32;
  static constexpr bool kSigned = true, kGroupScales = true;
  static constexpr int32_t kMaxCode = 62, kOffset = 0;
  static constexpr MinKind kMins = kNoMins;
  template <class S, uint32_t kN>
  struct Raw {
    typename S::Rows rows;
    typename S::Words head[4], index[8], tail[8];
    LODE_ALWAYS_INLINE void Load(const typename S::Rows& r) {
      rows = r;
      S::LoadColumns(r, 0, head);
      LoadRun<S, 2>(r, 66, tail);
    }
    template <uint32_t, uint32_t kG>
    LODE_ALWAYS_INLINE void Codes(typename S::Words* out) {
      LoadStep<S, 8, kG>(rows, 2, index);
      const typename S::Words* lo = index + kG % 4 * 2;
      const typename S::Words signs = S::EvenSignBytes(tail[kG]);
      if constexpr (S::kBytePlanes) {
        Unroll<2>([&](auto i) __attribute__((always_inline)) {
          typename S::Words planes[2];
          S::Planes256(kIq3xxsPlanes.plane[0], lo[i], planes);
          Iq3Codes<S>(kIq3xxsSigned, planes, S::template SignsInMiddle<i>(signs), out + 4 * i);
        });
      } else {
        Unroll<4>([&](auto n) __attribute__((always_inline)) {
          S::LookupBytes(kIq3xxsWords.word, rows, 2 + 8 * kG + 2 * n, out + 2 * n);
        });
        S::ApplySigns(out, signs);
      }
    }
    template <uint32_t kG>
    LODE_ALWAYS_INLINE typename S::Words GroupScale() const {
      const typename S::Words twice = S::template Field32<27, 0x1eu>(tail[kG]);
      return S::ScaleWord(S::OrAll(twice, 1));
    }
    template <uint32_t>
    LODE_ALWAYS_INLINE typename S::RowsF Scale() const {
      return S::Mul(S::HalfLow(head[0]), S::SetAll(0.25f));
    }
  };
  static void Dequant(const uint8_t* p, float* out) {
    const float d = F16At(p);
    for (uint32_t i = 0; i < 256; ++i) {
      const uint32_t tail = U32(p + 66 + i / 32 * 4), group = i % 32 / 8;
      const float scale = canonical::Mul(d, 0.5f + static_cast<float>(tail >> 28));
      const uint32_t signs = EvenSigns((tail >> (7 * group)) & 127);
      const uint32_t level = (kIq3xxsCodes[p[2 + i / 4]] >> (3 * (i % 4))) & 7;
      out[i] = canonical::Mul(canonical::Mul(scale, 0.5f),
                              SignedLevel(kIq3xxsLevels, level, (signs >> (i % 8)) & 1));
    }
  }
};

// ---- IQ3_S: f16 d, 64 low index bytes, 8 bytes of ninth bits, 32 sign bytes, 4 bytes of scales --
// w = d * (2 s + 1) * grid * sign
struct IQ3_S : GridOrder {
  static constexpr uint32_t kBlock = 256, kBytes = 110, kUnit = 1, kStep = 32, kGroup = 32;
  static constexpr bool kSigned = true, kGroupScales = true;
  static constexpr int32_t kMaxCode = 15, kOffset = 0;
  static constexpr MinKind kMins = kNoMins;
  template <class S, uint32_t kN>
  struct Raw {
    typename S::Rows rows;
    typename S::Words head[4], index[8], a[8], b[4];  // bytes 66..97 and 94..109
    typename S::Words even, odd;                      // 2 s + 1 of groups 0, 2, 4, 6 and 1, 3, 5, 7
    LODE_ALWAYS_INLINE void Load(const typename S::Rows& r) {
      rows = r;
      S::LoadColumns(r, 0, head);
      LoadRun<S, 2>(r, 66, a);
      S::LoadColumns(r, 94, b);
      even = S::OrAll(S::template Field<-1, 0x1e>(b[3]), 0x01010101);
      odd = S::OrAll(S::template Field<3, 0x1e>(b[3]), 0x01010101);
    }
    template <uint32_t, uint32_t kG>
    LODE_ALWAYS_INLINE void Codes(typename S::Words* out) {
      LoadStep<S, 8, kG>(rows, 2, index);
      const typename S::Words* lo = index + kG % 4 * 2;
      const typename S::Words& ninth = a[kG / 4];
      const typename S::Words& signs = kG < 6 ? a[kG < 6 ? 2 + kG : 0] : b[kG < 6 ? 0 : kG - 5];
      if constexpr (S::kBytePlanes) {
        Unroll<2>([&](auto i) __attribute__((always_inline)) {
          typename S::Words planes[2];
          S::template Planes512<kG % 4, i>(kIq3sPlanes.plane[0], lo[i], ninth, planes);
          Iq3Codes<S>(kIq3sSigned, planes, S::template SignsInMiddle<i>(signs), out + 4 * i);
        });
      } else {
        Unroll<8>([&](auto n) __attribute__((always_inline)) {
          constexpr int kRight = static_cast<int>(kG % 4 * 8 + n) - 8;  // bit to bit 8
          out[n] = S::Gather(kIq3sWords.word, S::Or(S::template Field32<n % 4 * 8, 255u>(lo[n / 4]),
                                                    S::template Field32<kRight, 256u>(ninth)));
        });
        S::ApplySigns(out, signs);
      }
    }
    template <uint32_t kG>
    LODE_ALWAYS_INLINE typename S::Words GroupScale() const {
      return S::template ScaleByte<kG / 2>(kG % 2 ? odd : even);
    }
    template <uint32_t>
    LODE_ALWAYS_INLINE typename S::RowsF Scale() const {
      return S::HalfLow(head[0]);
    }
  };
  static void Dequant(const uint8_t* p, float* out) {
    const float d = F16At(p);
    for (uint32_t i = 0; i < 256; ++i) {
      const uint32_t n = i / 4, g = i / 32;
      const uint32_t index = p[2 + n] | ((p[66 + n / 8] >> (n % 8)) & 1u) << 8;
      const int s = (p[106 + g / 2] >> (4 * (g % 2))) & 15;
      const bool negative = (p[74 + i / 8] >> (i % 8)) & 1;
      const uint32_t level = (kIq3sCodes[index] >> (3 * (i % 4))) & 7;
      out[i] = canonical::Mul(canonical::Mul(d, static_cast<float>(1 + 2 * s)),
                              SignedLevel(kIq3sLevels, level, negative));
    }
  }
};

// ---- IQ2_XS: f16 d, 32 x u16: 9-bit grid index and 7-bit sign index of 8 weights, 8 bytes of
// scales (groups of 16, low nibble first). w = d / 8 * (2 s + 1) * grid * sign
struct IQ2_XS : GridOrder {
  static constexpr uint32_t kBlock = 256, kBytes = 74, kUnit = 1, kStep = 32, kGroup = 16;
  static constexpr bool kSigned = true, kGroupScales = true;
  static constexpr int32_t kMaxCode = 43, kOffset = 0;
  static constexpr MinKind kMins = kNoMins;
  template <class S, uint32_t kN>
  struct Raw {
    typename S::Rows rows;
    typename S::Words head[4], pairs[8], tail[4];
    typename S::Words even[2], odd[2];  // 2 s + 1 of even and odd groups
    LODE_ALWAYS_INLINE void Load(const typename S::Rows& r) {
      rows = r;
      S::LoadColumns(r, 0, head);
      S::LoadColumns(r, 58, tail);
      for (int i = 0; i < 2; ++i) {
        even[i] = S::OrAll(S::template Field<-1, 0x1e>(tail[2 + i]), 0x01010101);
        odd[i] = S::OrAll(S::template Field<3, 0x1e>(tail[2 + i]), 0x01010101);
      }
    }
    template <uint32_t, uint32_t kG>  // kG: 32 weights, two words of two entries
    LODE_ALWAYS_INLINE void Codes(typename S::Words* out) {
      LoadStep<S, 8, kG>(rows, 2, pairs);
      const typename S::Words* v = pairs + kG % 4 * 2;
      if constexpr (S::kBytePlanes) {
        typename S::Words entry[2];
        S::PlanesOfPairs(kIq2xsPlanes.plane[0], v, entry);
        for (int i = 0; i < 2; ++i) {
          const typename S::Words signs = S::SignsOfPair(v[i]);
          const typename S::Words front = S::template Select<0x0f>(entry[i], signs);
          const typename S::Words back = S::template Select<0x0f>(
              S::template Field32<4, ~0u>(entry[i]), S::template Field32<2, ~0u>(signs));
          for (int j = 0; j < 2; ++j) {
            out[4 * i + j] = S::Table64(kIq2xsSigned[j].v, front);
            out[4 * i + 2 + j] = S::Table64(kIq2xsSigned[j].v, back);
          }
        }
      } else {
        Unroll<4>([&](auto n) __attribute__((always_inline)) {
          S::LookupPairs(kIq2xsPairs.pair, rows, 2 + 8 * kG + 2 * n, out + 2 * n);
        });
        S::ApplySigns(out, S::EvenSignBytesOfPairs(v[0], v[1]));
      }
    }
    template <uint32_t kG>  // groups of 16: byte kG / 2, low nibble for even groups
    LODE_ALWAYS_INLINE typename S::Words GroupScale() const {
      return S::template ScaleByte<kG / 2 % 4>(kG % 2 ? odd[kG / 8] : even[kG / 8]);
    }
    template <uint32_t>
    LODE_ALWAYS_INLINE typename S::RowsF Scale() const {
      return S::Mul(S::HalfLow(head[0]), S::SetAll(0.125f));
    }
  };
  static void Dequant(const uint8_t* p, float* out) {
    const float d = F16At(p);
    for (uint32_t i = 0; i < 256; ++i) {
      const uint32_t v = U16(p + 2 + i / 8 * 2), group = i / 16;
      const int s = (p[66 + group / 2] >> (4 * (group % 2))) & 15;
      const uint32_t level = (kIq2xsCodes[v & 511] >> (2 * (i % 8))) & 3;
      const float scale = canonical::Mul(d, 0.5f + static_cast<float>(s));
      out[i] = canonical::Mul(canonical::Mul(scale, 0.25f),
                              SignedLevel(kIq2xsLevels, level, (EvenSigns(v >> 9) >> (i % 8)) & 1));
    }
  }
};

}  // namespace decode
}  // namespace
}  // namespace lode
