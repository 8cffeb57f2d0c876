// How each computed weight type looks to a kernel: one struct per row of LODE_COMPUTED_FORMATS, by
// its name there; a row without one does not compile. A lane decodes one chunk of 32 columns at a
// time, given as two runs of 16 consecutive columns, because 16 bytes of packed codes usually hold
// two such runs (low and high halves). Layouts: docs/design/formats.md. Included by product.h.
//
// A quantised type F has
//   kBlock, kBytes, kChunks      weights and bytes of a block, chunks of 32 in it
//   kRunScales                   isum = sum over runs of scale * (dot - kOffset * sum(y)); else
//   scale 1 kMins                        kNoMins; kBlockMins: msum = sum(y); kGroupMins: sum of min
//   * sum(y) kOffset                      the integer of a code is code - kOffset kCrumbs code
//   words come in the arranged order of quantize.h Column(chunk, run)           first column of a
//   run inside the block Decode(block, chunk, code)   8 words of signed bytes: words 0..3 run 0,
//   words 4..7 run 1 Scales(block, chunk, s, m)   what kRunScales and kGroupMins need Scale, Min
//   the block's d_w and m_w Weight(block, i)             one weight as a float, in the format's own
//   order of operations
// Blocks are at even addresses; types whose blocks are whole 4 or 16 bytes are aligned to them.
#pragma once

#include "kernels/cuda/platform.h"
#include "kernels/formats.h"

namespace lode::cuda::decode {

enum MinKind { kNoMins, kBlockMins, kGroupMins };

// ---- bytes of a block
LODE_DEVICE uint32_t Half(const uint8_t* p) {
  return LoadOnce(reinterpret_cast<const uint16_t*>(p));
}
LODE_DEVICE float HalfAt(const uint8_t* p) { return HalfToFloat(Half(p)); }
LODE_DEVICE uint32_t WordAt(const uint8_t* p) {
  return LoadOnce(reinterpret_cast<const uint32_t*>(p));
}
// kWords words from any even address. Only words that hold a wanted byte are read.
template <int kWords>
LODE_DEVICE void LoadEven(const uint8_t* p, uint32_t* out) {
  const uint32_t odd = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(p)) & 2u;
  const uint32_t* from = reinterpret_cast<const uint32_t*>(p - odd);
  uint32_t word = LoadOnce(from);
  LODE_UNROLL
  for (int i = 0; i < kWords; ++i) {
    const uint32_t next = i + 1 < kWords || odd != 0 ? LoadOnce(from + i + 1) : 0;
    out[i] = FunnelRight(word, next, 8 * odd);
    word = next;
  }
}
// The same from shared memory.
template <int kWords>
LODE_DEVICE void SharedEven(const uint8_t* p, uint32_t* out) {
  const uint32_t odd = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(p)) & 2u;
  const uint32_t* from = reinterpret_cast<const uint32_t*>(p - odd);
  uint32_t word = from[0];
  LODE_UNROLL
  for (int i = 0; i < kWords; ++i) {
    const uint32_t next = i + 1 < kWords || odd != 0 ? from[i + 1] : 0;
    out[i] = FunnelRight(word, next, 8 * odd);
    word = next;
  }
}
LODE_DEVICE void Load16(const uint8_t* p, uint32_t* out) {
  const Word4 w = LoadOnce(reinterpret_cast<const Word4*>(p));
  out[0] = w.x, out[1] = w.y, out[2] = w.z, out[3] = w.w;
}
LODE_DEVICE uint32_t ByteAt(const uint8_t* p) {  // one byte through an even address
  const uintptr_t at = reinterpret_cast<uintptr_t>(p);
  const uint32_t half = LoadOnce(reinterpret_cast<const uint16_t*>(at & ~uintptr_t{1}));
  return (half >> (8 * (at & 1))) & 255u;
}
LODE_DEVICE int32_t SignedByteAt(const uint8_t* p) { return static_cast<int8_t>(ByteAt(p)); }
LODE_DEVICE float ToFloat(int32_t x) { return static_cast<float>(x); }

// 16 bytes of nibbles: the low ones are run 0, the high ones run 1.
LODE_DEVICE void SplitNibbles(const uint32_t* raw, uint32_t* code) {
  LODE_UNROLL
  for (int i = 0; i < 4; ++i) {
    code[i] = raw[i] & 0x0f0f0f0fu;
    code[4 + i] = (raw[i] >> 4) & 0x0f0f0f0fu;
  }
}
// Bits 4 i .. 4 i + 3 of `bits` become 0 or 1 in the bytes of word i: one multiplication copies the
// four bits to distances of 7.
LODE_DEVICE uint32_t SpreadBits(uint32_t bits, int word) {
  return (((bits >> (4 * word)) & 15u) * 0x00204081u) & 0x01010101u;
}

// What types of 32 weights without group scales have in common.
struct Flat {
  static constexpr uint32_t kBlock = 32, kChunks = 1;
  static constexpr bool kRunScales = false, kCrumbs = false;
  static constexpr int32_t kOffset = 0;
  static constexpr MinKind kMins = kNoMins;
  LODE_DEVICE uint32_t Column(uint32_t, uint32_t run) { return 16 * run; }
  LODE_DEVICE void Scales(const uint8_t*, uint32_t, int32_t*, int32_t*) {}
  LODE_DEVICE float Scale(const uint8_t* block) { return HalfAt(block); }
  LODE_DEVICE float Min(const uint8_t*) { return 0; }
};

// f16 d, 32 x int8. w = d * q.
struct Q8_0 : Flat {
  static constexpr uint32_t kBytes = 34;
  LODE_DEVICE void Decode(const uint8_t* block, uint32_t, uint32_t* code) {
    LoadEven<8>(block + 2, code);
  }
  // From shared memory: dense products of this type stage their rows there (dense.h).
  LODE_DEVICE void DecodeStaged(const uint8_t* block, uint32_t, uint32_t* code) {
    SharedEven<8>(block + 2, code);
  }
  LODE_DEVICE float ScaleStaged(const uint8_t* block) {
    return HalfToFloat(*reinterpret_cast<const uint16_t*>(block));
  }
  LODE_DEVICE float Weight(const uint8_t* block, uint32_t i) {
    return canonical::Mul(HalfAt(block), ToFloat(SignedByteAt(block + 2 + i)));
  }
};

// f16 d, f16 m, u32 fifth bits, 16 bytes of nibbles. w = d * q + m.
struct Q5_1 : Flat {
  static constexpr uint32_t kBytes = 24;
  static constexpr MinKind kMins = kBlockMins;
  LODE_DEVICE void Decode(const uint8_t* block, uint32_t, uint32_t* code) {
    uint32_t raw[4];
    const uint32_t high = WordAt(block + 4);
    LODE_UNROLL
    for (int i = 0; i < 4; ++i) raw[i] = WordAt(block + 8 + 4 * i);
    SplitNibbles(raw, code);
    LODE_UNROLL
    for (int i = 0; i < 8; ++i) code[i] |= SpreadBits(high, i) << 4;
  }
  LODE_DEVICE float Min(const uint8_t* block) { return HalfAt(block + 2); }
  LODE_DEVICE float Weight(const uint8_t* block, uint32_t i) {
    const uint32_t nibble = (ByteAt(block + 8 + i % 16) >> (4 * (i / 16))) & 15u;
    const uint32_t q = nibble | ((WordAt(block + 4) >> i) & 1u) << 4;
    return canonical::Add(canonical::Mul(HalfAt(block), ToFloat(static_cast<int32_t>(q))),
                          HalfAt(block + 2));
  }
};

// f16 d, 16 bytes of nibbles. w = d * (nibble - 8).
struct Q4_0 : Flat {
  static constexpr uint32_t kBytes = 18;
  static constexpr int32_t kOffset = 8;
  LODE_DEVICE void Decode(const uint8_t* block, uint32_t, uint32_t* code) {
    uint32_t raw[4];
    LoadEven<4>(block + 2, raw);
    SplitNibbles(raw, code);
  }
  LODE_DEVICE float Weight(const uint8_t* block, uint32_t i) {
    const uint32_t nibble = (ByteAt(block + 2 + i % 16) >> (4 * (i / 16))) & 15u;
    return canonical::Mul(HalfAt(block), ToFloat(static_cast<int32_t>(nibble) - 8));
  }
};

// f16 d, 16 bytes of 2-bit codes, four consecutive ones per byte. w = d * (code - 1).
struct Q2_0 : Flat {
  static constexpr uint32_t kBlock = 64, kBytes = 18, kChunks = 2;
  static constexpr bool kCrumbs = true;
  static constexpr int32_t kOffset = 1;
  LODE_DEVICE uint32_t Column(uint32_t chunk, uint32_t run) { return 32 * chunk + 16 * run; }
  LODE_DEVICE void Decode(const uint8_t* block, uint32_t chunk, uint32_t* code) {
    uint32_t raw[2];
    LoadEven<2>(block + 2 + 8 * chunk, raw);
    LODE_UNROLL
    for (int j = 0; j < 4; ++j) {
      code[j] = (raw[0] >> (2 * j)) & 0x03030303u;
      code[4 + j] = (raw[1] >> (2 * j)) & 0x03030303u;
    }
  }
  LODE_DEVICE float Weight(const uint8_t* block, uint32_t i) {
    const int32_t code = static_cast<int32_t>((ByteAt(block + 2 + i / 4) >> (2 * (i % 4))) & 3u);
    return canonical::Mul(HalfAt(block), ToFloat(code - 1));
  }
};

// Entries of IQ4_NL and IQ4_XS by nibble, as bytes of four words:
// -127 -104 -83 -65 | -49 -35 -22 -10 | 1 13 25 38 | 53 69 89 113.
LODE_DEVICE uint32_t Iq4Word(int i) {
  return i == 0 ? 0xbfad9881u : (i == 1 ? 0xf6eaddcfu : (i == 2 ? 0x26190d01u : 0x71594535u));
}
LODE_DEVICE int32_t Iq4Entry(uint32_t nibble) {
  return static_cast<int8_t>(Iq4Word(static_cast<int>(nibble / 4)) >> (8 * (nibble % 4)));
}
// Entries of the four nibbles in the low 16 bits of `nibbles`, one per byte: look up both halves of
// the table by three bits each, then choose by the fourth.
LODE_DEVICE uint32_t Iq4Lookup(uint32_t nibbles) {
  const uint32_t index = nibbles & 0x7777u;
  const uint32_t low = BytePermute(Iq4Word(0), Iq4Word(1), index);
  const uint32_t high = BytePermute(Iq4Word(2), Iq4Word(3), index);
  return BytePermute(low, high, 0x3210u | ((nibbles & 0x8888u) >> 1));
}
// 16 bytes of nibbles as table entries: the low ones are run 0, the high ones run 1.
LODE_DEVICE void LookupNibbles(const uint32_t* raw, uint32_t* code) {
  LODE_UNROLL
  for (int i = 0; i < 4; ++i) {
    // Bytes of each: low, high, low, high nibble of two bytes.
    const uint32_t first = Iq4Lookup(raw[i]), second = Iq4Lookup(raw[i] >> 16);
    code[i] = BytePermute(first, second, 0x6420u);
    code[4 + i] = BytePermute(first, second, 0x7531u);
  }
}

// f16 d, 16 bytes of nibbles. w = d * table[nibble].
struct IQ4_NL : Flat {
  static constexpr uint32_t kBytes = 18;
  LODE_DEVICE void Decode(const uint8_t* block, uint32_t, uint32_t* code) {
    uint32_t raw[4];
    LoadEven<4>(block + 2, raw);
    LookupNibbles(raw, code);
  }
  LODE_DEVICE float Weight(const uint8_t* block, uint32_t i) {
    const uint32_t nibble = (ByteAt(block + 2 + i % 16) >> (4 * (i / 16))) & 15u;
    return canonical::Mul(HalfAt(block), ToFloat(Iq4Entry(nibble)));
  }
};

// ---- plain floats: bytes of a value, and the exact widening
struct F32 {
  static constexpr uint32_t kBlock = 1, kBytes = 4;
  LODE_DEVICE float Weight(const uint8_t* p, uint32_t) {
    return LoadOnce(reinterpret_cast<const float*>(p));
  }
};
struct F16 {
  static constexpr uint32_t kBlock = 1, kBytes = 2;
  LODE_DEVICE float Weight(const uint8_t* p, uint32_t) { return HalfAt(p); }
};
struct BF16 {
  static constexpr uint32_t kBlock = 1, kBytes = 2;
  LODE_DEVICE float Weight(const uint8_t* p, uint32_t) {
    return canonical::FromBf16(static_cast<uint16_t>(Half(p)));
  }
};

}  // namespace lode::cuda::decode
