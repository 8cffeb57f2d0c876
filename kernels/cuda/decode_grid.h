// Decodes of the i-types: blocks of 256 weights whose magnitudes are rows of a grid and whose signs
// are stored apart. The grids are those of the cpu kernels (kernels/cpu/decode/grids.h), expanded
// at compile time to four magnitudes a word. The contract is in decode.h; every magnitude is at
// least 1, so a byte is negated without a carry into its neighbour.
#pragma once

#include "kernels/cpu/decode/grids.h"
#include "kernels/cuda/decode.h"

namespace lode::cuda::decode {

template <uint32_t kRows>
struct Grid {
  uint32_t word[kRows];
};
// Magnitudes kFirst .. kFirst + 3 of every grid row; a level code has kBits bits.
template <uint32_t kBits, uint32_t kFirst, uint32_t kRows>
constexpr Grid<kRows> Expand(const uint16_t (&codes)[kRows], const uint8_t* levels) {
  Grid<kRows> grid{};
  for (uint32_t r = 0; r < kRows; ++r) {
    for (uint32_t j = 0; j < 4; ++j) {
      const uint32_t level = (codes[r] >> (kBits * (kFirst + j))) & ((1u << kBits) - 1);
      grid.word[r] |= static_cast<uint32_t>(levels[level]) << (8 * j);
    }
  }
  return grid;
}
LODE_DEVICE_TABLE Grid<512> kIq2Low =
    Expand<2, 0>(lode::decode::kIq2xsCodes, lode::decode::kIq2xsLevels);
LODE_DEVICE_TABLE Grid<512> kIq2High =
    Expand<2, 4>(lode::decode::kIq2xsCodes, lode::decode::kIq2xsLevels);
LODE_DEVICE_TABLE Grid<256> kIq3Xxs =
    Expand<3, 0>(lode::decode::kIq3xxsCodes, lode::decode::kIq3xxsLevels);
LODE_DEVICE_TABLE Grid<512> kIq3 =
    Expand<3, 0>(lode::decode::kIq3sCodes, lode::decode::kIq3sLevels);

// Four magnitudes with the signs in bits 4 half .. 4 half + 3.
LODE_DEVICE uint32_t Signed(uint32_t magnitudes, uint32_t signs, int half) {
  const uint32_t minus = SpreadBits(signs, half);
  return (magnitudes ^ (minus * 255u)) + minus;
}
// Eight signs from seven bits: their number is even.
LODE_DEVICE uint32_t EvenSigns(uint32_t index) { return index | (PopCount(index) & 1u) << 7; }

// Natural order of columns; a run has a scale of its own or both have the group's.
struct GridBlock {
  static constexpr uint32_t kBlock = 256, kChunks = 8;
  static constexpr bool kRunScales = true, kCrumbs = false;
  static constexpr int32_t kOffset = 0;
  static constexpr MinKind kMins = kNoMins;
  LODE_DEVICE uint32_t Column(uint32_t chunk, uint32_t run) { return 32 * chunk + 16 * run; }
  LODE_DEVICE float Min(const uint8_t*) { return 0; }
};
// (d_w * s) * code
template <class F>
LODE_DEVICE float GridWeight(const uint8_t* block, uint32_t i) {
  uint32_t code[8];
  int32_t s[2], m[2];
  F::Decode(block, i / 32, code);
  F::Scales(block, i / 32, s, m);
  const int32_t q = static_cast<int8_t>(code[i % 32 / 4] >> (8 * (i % 4)));
  return canonical::Mul(canonical::Mul(F::Scale(block), ToFloat(i % 32 < 16 ? s[0] : s[1])),
                        ToFloat(q));
}

// f16 d, 32 x u16 (9-bit grid index, 7-bit sign index of 8 weights), 8 bytes of scales for groups
// of
// 16. w = d / 8 * (2 s + 1) * grid * sign.
struct IQ2_XS : GridBlock {
  static constexpr uint32_t kBytes = 74;
  LODE_DEVICE void Decode(const uint8_t* block, uint32_t chunk, uint32_t* code) {
    uint32_t raw[2];
    LoadEven<2>(block + 2 + 8 * chunk, raw);
    LODE_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t v = (raw[i / 2] >> (16 * (i % 2))) & 0xffffu;
      const uint32_t signs = EvenSigns(v >> 9);
      code[2 * i] = Signed(kIq2Low.word[v & 511u], signs, 0);
      code[2 * i + 1] = Signed(kIq2High.word[v & 511u], signs, 1);
    }
  }
  LODE_DEVICE void Scales(const uint8_t* block, uint32_t chunk, int32_t* s, int32_t*) {
    const uint32_t byte = ByteAt(block + 66 + chunk);
    s[0] = static_cast<int32_t>(2 * (byte & 15u) + 1);
    s[1] = static_cast<int32_t>(2 * (byte >> 4) + 1);
  }
  LODE_DEVICE float Scale(const uint8_t* block) { return canonical::Mul(HalfAt(block), 0.125f); }
  LODE_DEVICE float Weight(const uint8_t* block, uint32_t i) {
    return GridWeight<IQ2_XS>(block, i);
  }
};

// f16 d, 64 grid indices, 8 x u32: four 7-bit sign indices and a 4-bit scale s. w = d / 4 * (2 s +
// 1)
// * grid * sign.
struct IQ3_XXS : GridBlock {
  static constexpr uint32_t kBytes = 98;
  LODE_DEVICE void Decode(const uint8_t* block, uint32_t chunk, uint32_t* code) {
    uint32_t index[2], tail;
    LoadEven<2>(block + 2 + 8 * chunk, index);
    LoadEven<1>(block + 66 + 4 * chunk, &tail);
    LODE_UNROLL
    for (int i = 0; i < 8; ++i) {
      const uint32_t signs = EvenSigns((tail >> (7 * (i / 2))) & 127u);
      code[i] = Signed(kIq3Xxs.word[(index[i / 4] >> (8 * (i % 4))) & 255u], signs, i % 2);
    }
  }
  LODE_DEVICE void Scales(const uint8_t* block, uint32_t chunk, int32_t* s, int32_t*) {
    s[0] = s[1] = static_cast<int32_t>(2 * (Half(block + 68 + 4 * chunk) >> 12) + 1);
  }
  LODE_DEVICE float Scale(const uint8_t* block) { return canonical::Mul(HalfAt(block), 0.25f); }
  LODE_DEVICE float Weight(const uint8_t* block, uint32_t i) {
    return GridWeight<IQ3_XXS>(block, i);
  }
};

// f16 d, 64 low index bytes, 8 bytes of ninth bits, 32 sign bytes, 4 bytes of scales. w = d * (2 s
// + 1) * grid * sign.
struct IQ3_S : GridBlock {
  static constexpr uint32_t kBytes = 110;
  LODE_DEVICE void Decode(const uint8_t* block, uint32_t chunk, uint32_t* code) {
    uint32_t index[2], signs;
    LoadEven<2>(block + 2 + 8 * chunk, index);
    LoadEven<1>(block + 74 + 4 * chunk, &signs);
    const uint32_t ninth = ByteAt(block + 66 + chunk);
    LODE_UNROLL
    for (int i = 0; i < 8; ++i) {
      const uint32_t at = ((index[i / 4] >> (8 * (i % 4))) & 255u) | ((ninth >> i) & 1u) << 8;
      code[i] = Signed(kIq3.word[at], signs, i);
    }
  }
  LODE_DEVICE void Scales(const uint8_t* block, uint32_t chunk, int32_t* s, int32_t*) {
    const uint32_t byte = ByteAt(block + 106 + chunk / 2);
    s[0] = s[1] = static_cast<int32_t>(2 * ((byte >> (4 * (chunk % 2))) & 15u) + 1);
  }
  LODE_DEVICE float Scale(const uint8_t* block) { return HalfAt(block); }
  LODE_DEVICE float Weight(const uint8_t* block, uint32_t i) { return GridWeight<IQ3_S>(block, i); }
};

}  // namespace lode::cuda::decode
