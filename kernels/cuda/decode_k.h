// Decodes of types with blocks of 256 weights in scaled groups: the K types and IQ4_XS. The
// contract is in decode.h.
#pragma once

#include "kernels/cuda/decode.h"

namespace lode::cuda::decode {

// ---- 256 weights in 8 groups of 32 with 6-bit scales and minima
// 16 bytes: f16 d, f16 dmin, 12 bytes of packed scales.
struct KHead {
  uint32_t scales[2], mins[2];  // a byte per group
};
LODE_DEVICE KHead UnpackK(const uint8_t* block) {
  uint32_t head[4];
  Load16(block, head);
  return {{head[1] & 0x3f3f3f3fu, (head[3] & 0x0f0f0f0fu) | ((head[1] >> 2) & 0x30303030u)},
          {head[2] & 0x3f3f3f3fu, ((head[3] >> 4) & 0x0f0f0f0fu) | ((head[2] >> 2) & 0x30303030u)}};
}
LODE_DEVICE int32_t ByteOf(const uint32_t* words, uint32_t i) {
  const uint32_t word = i < 4 ? words[0] : words[1];
  return static_cast<int32_t>((word >> (8 * (i % 4))) & 255u);
}

// Chunk 2 p + h: bytes 16 h .. 16 h + 15 of the 32 bytes that hold groups 2 p and 2 p + 1.
struct KGroups {
  static constexpr uint32_t kBlock = 256, kChunks = 8;
  static constexpr bool kRunScales = true, kCrumbs = false;
  static constexpr int32_t kOffset = 0;
  static constexpr MinKind kMins = kGroupMins;
  LODE_DEVICE uint32_t Column(uint32_t chunk, uint32_t run) {
    return 64 * (chunk / 2) + 16 * (chunk % 2) + 32 * run;
  }
  LODE_DEVICE void Scales(const uint8_t* block, uint32_t chunk, int32_t* s, int32_t* m) {
    const KHead head = UnpackK(block);
    const uint32_t group = chunk / 2 * 2;
    s[0] = ByteOf(head.scales, group), s[1] = ByteOf(head.scales, group + 1);
    m[0] = ByteOf(head.mins, group), m[1] = ByteOf(head.mins, group + 1);
  }
  LODE_DEVICE float Scale(const uint8_t* block) { return HalfAt(block); }
  LODE_DEVICE float Min(const uint8_t* block) { return -HalfAt(block + 2); }
  // ((d * s) * q) - (dmin * m)
  LODE_DEVICE float Value(const uint8_t* block, uint32_t group, uint32_t q) {
    const KHead head = UnpackK(block);
    const float ds = canonical::Mul(HalfAt(block), ToFloat(ByteOf(head.scales, group)));
    const float dm = canonical::Mul(HalfAt(block + 2), ToFloat(ByteOf(head.mins, group)));
    return canonical::Sub(canonical::Mul(ds, ToFloat(static_cast<int32_t>(q))), dm);
  }
};

// The head, 128 bytes of nibbles.
struct Q4_K : KGroups {
  static constexpr uint32_t kBytes = 144;
  LODE_DEVICE void Decode(const uint8_t* block, uint32_t chunk, uint32_t* code) {
    uint32_t raw[4];
    Load16(block + 16 + 16 * chunk, raw);
    SplitNibbles(raw, code);
  }
  LODE_DEVICE float Weight(const uint8_t* block, uint32_t i) {
    const uint32_t group = i / 32, byte = ByteAt(block + 16 + 32 * (group / 2) + i % 32);
    return Value(block, group, (byte >> (4 * (group % 2))) & 15u);
  }
};

// The head, 32 bytes of fifth bits (bit g of byte l: weight l of group g), 128 bytes of nibbles.
struct Q5_K : KGroups {
  static constexpr uint32_t kBytes = 176;
  LODE_DEVICE void Decode(const uint8_t* block, uint32_t chunk, uint32_t* code) {
    uint32_t raw[4], high[4];
    Load16(block + 48 + 16 * chunk, raw);
    Load16(block + 16 + 16 * (chunk % 2), high);
    SplitNibbles(raw, code);
    const uint32_t group = chunk / 2 * 2;
    LODE_UNROLL
    for (int i = 0; i < 4; ++i) {
      code[i] |= ((high[i] >> group) & 0x01010101u) << 4;
      code[4 + i] |= ((high[i] >> (group + 1)) & 0x01010101u) << 4;
    }
  }
  LODE_DEVICE float Weight(const uint8_t* block, uint32_t i) {
    const uint32_t group = i / 32, byte = ByteAt(block + 48 + 32 * (group / 2) + i % 32);
    const uint32_t high = (ByteAt(block + 16 + i % 32) >> group) & 1u;
    return Value(block, group, ((byte >> (4 * (group % 2))) & 15u) | high << 4);
  }
};

// 128 bytes of low nibbles, 64 bytes of high bit pairs, 16 x int8 scales, f16 d. w = d * s * (q -
// 32). Half h of the block: nibble bytes 64 h .. 64 h + 63 hold weights 0..63 low, 64..127 high.
// Chunk 4 h + m: bytes 16 m .. 16 m + 15 of them.
struct Q6_K {
  static constexpr uint32_t kBlock = 256, kBytes = 210, kChunks = 8;
  static constexpr bool kRunScales = true, kCrumbs = false;
  static constexpr int32_t kOffset = 32;
  static constexpr MinKind kMins = kNoMins;
  LODE_DEVICE uint32_t Column(uint32_t chunk, uint32_t run) {
    return 128 * (chunk / 4) + 16 * (chunk % 4) + 64 * run;
  }
  LODE_DEVICE void Decode(const uint8_t* block, uint32_t chunk, uint32_t* code) {
    uint32_t raw[4], high[4];
    LoadEven<4>(block + 16 * chunk, raw);
    LoadEven<4>(block + 128 + 32 * (chunk / 4) + 16 * (chunk % 2), high);
    SplitNibbles(raw, code);
    const uint32_t shift = chunk % 4 / 2 * 2;
    LODE_UNROLL
    for (int i = 0; i < 4; ++i) {
      code[i] |= ((high[i] >> shift) & 0x03030303u) << 4;
      code[4 + i] |= ((high[i] >> (shift + 4)) & 0x03030303u) << 4;
    }
  }
  LODE_DEVICE void Scales(const uint8_t* block, uint32_t chunk, int32_t* s, int32_t*) {
    const uint8_t* scales = block + 192 + 8 * (chunk / 4) + chunk % 4;
    s[0] = SignedByteAt(scales), s[1] = SignedByteAt(scales + 4);
  }
  LODE_DEVICE float Scale(const uint8_t* block) { return HalfAt(block + 208); }
  LODE_DEVICE float Min(const uint8_t*) { return 0; }
  LODE_DEVICE float Weight(const uint8_t* block, uint32_t i) {
    const uint32_t h = i / 128, t = i % 128 / 32, l = i % 32;
    const uint32_t byte = ByteAt(block + 64 * h + 32 * (t % 2) + l);
    const uint32_t top = (ByteAt(block + 128 + 32 * h + l) >> (2 * t)) & 3u;
    const uint32_t q = (t < 2 ? byte & 15u : byte >> 4) | top << 4;
    return canonical::Mul(canonical::Mul(Scale(block), ToFloat(SignedByteAt(block + 192 + i / 16))),
                          ToFloat(static_cast<int32_t>(q) - 32));
  }
};

// f16 d, u16 high scale bits, 4 bytes of low ones, 128 bytes of nibbles; groups of 32, scale s
// - 32. w = d * (s - 32) * table[nibble].
struct IQ4_XS {
  static constexpr uint32_t kBlock = 256, kBytes = 136, kChunks = 8;
  static constexpr bool kRunScales = true, kCrumbs = false;
  static constexpr int32_t kOffset = 0;
  static constexpr MinKind kMins = kNoMins;
  LODE_DEVICE uint32_t Column(uint32_t chunk, uint32_t run) { return 32 * chunk + 16 * run; }
  LODE_DEVICE void Decode(const uint8_t* block, uint32_t chunk, uint32_t* code) {
    uint32_t raw[4];
    LODE_UNROLL
    for (int i = 0; i < 4; ++i) raw[i] = WordAt(block + 8 + 16 * chunk + 4 * i);
    LookupNibbles(raw, code);
  }
  LODE_DEVICE int32_t GroupScale(const uint8_t* block, uint32_t group) {
    const uint32_t low = (WordAt(block + 4) >> (4 * group)) & 15u;
    const uint32_t high = (Half(block + 2) >> (2 * group)) & 3u;
    return static_cast<int32_t>(low | high << 4) - 32;
  }
  LODE_DEVICE void Scales(const uint8_t* block, uint32_t chunk, int32_t* s, int32_t*) {
    s[0] = s[1] = GroupScale(block, chunk);
  }
  LODE_DEVICE float Scale(const uint8_t* block) { return HalfAt(block); }
  LODE_DEVICE float Min(const uint8_t*) { return 0; }
  LODE_DEVICE float Weight(const uint8_t* block, uint32_t i) {
    const uint32_t group = i / 32, byte = ByteAt(block + 8 + 16 * group + i % 16);
    const uint32_t nibble = i % 32 < 16 ? byte & 15u : byte >> 4;
    return canonical::Mul(canonical::Mul(HalfAt(block), ToFloat(GroupScale(block, group))),
                          ToFloat(Iq4Entry(nibble)));
  }
};

}  // namespace lode::cuda::decode
