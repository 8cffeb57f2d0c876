// Decode traits of formats whose weight is an integer code times a scale, plus possibly a minimum (docs/design/formats.md).
// A trait says where the pieces of a block are; mat.h knows what to do with them. The contract, for a trait F:
//   kBlock, kBytes      weights and bytes of one block (32: a Codes holds the block of two rows; 64, 256: of one row)
//   kSigned             codes are int8; else unsigned 0..128 and the weight's integer is code - kOffset
//   kMins               kNoMins, kBlockMins (one minimum per block: msum = sum(y)) or kGroupMins (msum = sum_g m_g * sum_g(y))
//   kGroupScales        isum = sum_g s_g * sum_g(q * y) with small integer s_g; else isum = sum(q * y)
//   kHead, Scale, Min   four bytes at kHead of every row's block hold the binary16 scale d_w and (mins) the factor m_w
//   Decode              codes; DecodeChunk<S, c>, Scales, Mins for 256-weight blocks
//   Dequant             kBlock floats, in the stated order of operations; its bits are those of the format's definition
// Plain float types come last; their trait is the number of bytes and a widening load.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/canonical.h"

namespace lode {
namespace {
namespace decode {

enum MinKind { kNoMins, kBlockMins, kGroupMins };

inline uint16_t U16(const uint8_t* p) { return static_cast<uint16_t>(p[0] | p[1] << 8); }
inline uint32_t U32(const uint8_t* p) {
  uint32_t x;
  std::memcpy(&x, p, 4);
  return x;
}
inline float F16At(const uint8_t* p) { return canonical::FromF16(U16(p)); }

// 32 weights: f16 d, 32 x int8 (a file may hold -128). w = d * q.
struct Q8_0 {
  static constexpr uint32_t kBlock = 32, kBytes = 34;
  static constexpr bool kSigned = true, kGroupScales = false;
  static constexpr int32_t kOffset = 0;
  static constexpr MinKind kMins = kNoMins;
  static constexpr size_t kHead = 0;
  template <class S>
  static typename S::Codes Decode(const uint8_t* p0, const uint8_t* p1) {
    return S::LoadBytes(p0 + 2, p1 + 2);
  }
  template <class S>
  static typename S::RowsF Scale(const typename S::RowsI& head) {
    return S::HalfLow(head);
  }
  static void Dequant(const uint8_t* p, float* out) {
    const float d = F16At(p);
    for (int i = 0; i < 32; ++i)
      out[i] = canonical::Mul(d, static_cast<float>(static_cast<int8_t>(p[2 + i])));
  }
};

// 32 weights: f16 d, f16 m, u32 fifth bits, 16 bytes of nibbles (low: weights 0..15). w = d * q + m.
struct Q5_1 {
  static constexpr uint32_t kBlock = 32, kBytes = 24;
  static constexpr bool kSigned = false, kGroupScales = false;
  static constexpr int32_t kOffset = 0;
  static constexpr MinKind kMins = kBlockMins;
  static constexpr size_t kHead = 0;
  template <class S>
  static typename S::Codes Decode(const uint8_t* p0, const uint8_t* p1) {
    return S::AddWhereBit(S::LoadNibbles16(p0 + 8, p1 + 8), U32(p0 + 4), U32(p1 + 4), 16);
  }
  template <class S>
  static typename S::RowsF Scale(const typename S::RowsI& head) {
    return S::HalfLow(head);
  }
  template <class S>
  static typename S::RowsF Min(const typename S::RowsI& head) {
    return S::HalfHigh(head);
  }
  static void Dequant(const uint8_t* p, float* out) {
    const float d = F16At(p), m = F16At(p + 2);
    const uint32_t high = U32(p + 4);
    for (int i = 0; i < 32; ++i) {
      const int nibble = (p[8 + i % 16] >> (4 * (i / 16))) & 15;
      const int q = nibble | static_cast<int>((high >> i) & 1) << 4;
      out[i] = canonical::Add(canonical::Mul(d, static_cast<float>(q)), m);
    }
  }
};

// 64 weights: f16 d, 16 bytes of 2-bit codes, four consecutive ones per byte. w = d * (code - 1).
struct Q2_0 {
  static constexpr uint32_t kBlock = 64, kBytes = 18;
  static constexpr bool kSigned = false, kGroupScales = false;
  static constexpr int32_t kOffset = 1;
  static constexpr MinKind kMins = kNoMins;
  static constexpr size_t kHead = 0;
  template <class S>
  static typename S::Codes Decode(const uint8_t* p, const uint8_t*) {
    return S::LoadCrumbs16(p + 2);
  }
  template <class S>
  static typename S::RowsF Scale(const typename S::RowsI& head) {
    return S::HalfLow(head);
  }
  static void Dequant(const uint8_t* p, float* out) {
    const float d = F16At(p);
    for (int i = 0; i < 64; ++i) {
      const int code = (p[2 + i / 4] >> (2 * (i % 4))) & 3;
      out[i] = canonical::Mul(d, static_cast<float>(code - 1));
    }
  }
};

// The 6-bit scales and minima of Q4_K and Q5_K: 12 bytes p -> eight bytes s, eight bytes m.
//   g < 4:  s = p[g] & 63,                        m = p[4+g] & 63
//   g >= 4: s = lo(p[4+g]) | (p[g-4] >> 6) << 4,  m = hi(p[4+g]) | (p[g] >> 6) << 4
// Four groups at a time inside one word.
inline uint64_t PackedScales(const uint8_t* p) {
  const uint32_t a = U32(p), c = U32(p + 8);
  const uint32_t high = (c & 0x0f0f0f0fu) | ((a >> 2) & 0x30303030u);
  return static_cast<uint64_t>(high) << 32 | (a & 0x3f3f3f3fu);
}
inline uint64_t PackedMins(const uint8_t* p) {
  const uint32_t b = U32(p + 4), c = U32(p + 8);
  const uint32_t high = ((c >> 4) & 0x0f0f0f0fu) | ((b >> 2) & 0x30303030u);
  return static_cast<uint64_t>(high) << 32 | (b & 0x3f3f3f3fu);
}

// 256 weights: f16 d, f16 dmin, 12 bytes of packed scales, 128 bytes of nibbles; groups of 32, two per 32 bytes (low nibbles first).
// w = (d * s) * q - dmin * m.
struct Q4_K {
  static constexpr uint32_t kBlock = 256, kBytes = 144;
  static constexpr bool kSigned = false, kGroupScales = true;
  static constexpr int32_t kOffset = 0;
  static constexpr MinKind kMins = kGroupMins;
  static constexpr size_t kHead = 0;
  template <class S, int kChunk>
  static typename S::Codes DecodeChunk(const uint8_t* p) {
    return S::LoadNibbles32(p + 16 + 32 * kChunk);
  }
  template <class S>
  static typename S::Set16 Scales(const uint8_t* p) {
    return S::SetFromBytes8(PackedScales(p + 4));
  }
  template <class S>
  static typename S::Set16 Mins(const uint8_t* p) {
    return S::SetFromBytes8(PackedMins(p + 4));
  }
  template <class S>
  static typename S::RowsF Scale(const typename S::RowsI& head) {
    return S::HalfLow(head);
  }
  template <class S>
  static typename S::RowsF Min(const typename S::RowsI& head) {
    return S::Negate(S::HalfHigh(head));
  }
  static void Dequant(const uint8_t* p, float* out) {
    const float d = F16At(p), dmin = F16At(p + 2);
    const uint64_t scales = PackedScales(p + 4), mins = PackedMins(p + 4);
    for (int g = 0; g < 8; ++g) {
      const float ds = canonical::Mul(d, static_cast<float>((scales >> (8 * g)) & 255));
      const float dm = canonical::Mul(dmin, static_cast<float>((mins >> (8 * g)) & 255));
      const uint8_t* nibbles = p + 16 + 32 * (g / 2);
      for (int i = 0; i < 32; ++i) {
        const int q = (nibbles[i] >> (4 * (g % 2))) & 15;
        out[32 * g + i] = canonical::Sub(canonical::Mul(ds, static_cast<float>(q)), dm);
      }
    }
  }
};

// ---- plain floats ----------------------------------------------------------------------------------------------------------
struct F32 {
  static constexpr uint32_t kBlock = 1, kBytes = 4;
  template <class S>
  static typename S::V32 Load32(const uint8_t* p) {
    return S::Load32(reinterpret_cast<const float*>(p));
  }
  static void Dequant(const uint8_t* p, float* out) { std::memcpy(out, p, 4); }
};

struct F16 {
  static constexpr uint32_t kBlock = 1, kBytes = 2;
  template <class S>
  static typename S::V32 Load32(const uint8_t* p) {
    return S::LoadF16x32(p);
  }
  static void Dequant(const uint8_t* p, float* out) { *out = F16At(p); }
};

struct BF16 {
  static constexpr uint32_t kBlock = 1, kBytes = 2;
  template <class S>
  static typename S::V32 Load32(const uint8_t* p) {
    return S::LoadBf16x32(p);
  }
  static void Dequant(const uint8_t* p, float* out) { *out = canonical::FromBf16(U16(p)); }
};

}  // namespace decode
}  // namespace
}  // namespace lode
