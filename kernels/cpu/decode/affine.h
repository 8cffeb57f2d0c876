// Decode traits of formats whose weight is an integer code times a scale, plus possibly a minimum
// (docs/design/formats.md). A trait says where the pieces of a block are; mat.h knows what to do
// with them. The contract, for a trait F:
//   kBlock, kBytes   weights and bytes of one block
//   kStep            weights decoded at once: kStep / 4 Words, word i = codes of columns 4 i .. 4 i
//   + 3 of the step kGroup           weights that share an integer scale (kBlock without group
//   scales) kSigned          codes are int8 (decoded through SignedCodes); else unsigned
//   0..kMaxCode, the integer is code - kOffset kGroupScales     isum = sum_g s_g * sum_g((code -
//   kOffset) * y) with GroupScales' s_g; else isum = sum((code - kOffset) * y) kMins kNoMins,
//   kBlockMins (msum = sum(y)) or kGroupMins (msum = sum_g m_g * sum_g(y), GroupMins) kHead, Scale,
//   Min   four bytes at kHead of every row's block hold the binary16 scale d_w and (mins) the
//   factor m_w Decode           codes of step `step` of the block that starts `offset` bytes into
//   every row GroupMins        pairs of int16 per lane: Words 2 j and 2 j + 1 hold groups (4 j, 4 j
//   + 2) and (4 j + 1, 4 j + 3) kCrumbOrder      columns inside every 16 come in the order of
//   Simd::ArrangeCrumbs, so activations are rearranged to match Dequant          kBlock floats, in
//   the stated order of operations; its bits are those of the format's definition
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

// 16 bytes of nibbles: columns 0..15 in the low ones, 16..31 in the high ones.
template <class S>
inline void LoadNibbles(const uint8_t* const* row, size_t offset, typename S::Words* w) {
  typename S::Words raw[4];
  S::LoadColumns(row, offset, raw);
  for (int i = 0; i < 4; ++i) {
    w[i] = S::template Field<0, 15>(raw[i]);
    w[4 + i] = S::template Field<4, 15>(raw[i]);
  }
}

// 32 weights: f16 d, 32 x int8 (a file may hold -128). w = d * q.
struct Q8_0 {
  static constexpr uint32_t kBlock = 32, kBytes = 34;
  static constexpr uint32_t kStep = 32, kGroup = 32;
  static constexpr bool kSigned = true, kGroupScales = false, kCrumbOrder = false;
  static constexpr int32_t kOffset = 0;
  static constexpr MinKind kMins = kNoMins;
  static constexpr size_t kHead = 0;
  template <class S>
  static void Decode(const uint8_t* const* row, size_t offset, uint32_t, typename S::Words* w) {
    S::LoadColumns(row, offset + 2, w);
    S::LoadColumns(row, offset + 18, w + 4);
    for (int i = 0; i < 8; ++i) w[i] = S::SignedCodes(w[i]);
  }
  template <class S>
  static typename S::RowsF Scale(const typename S::Words& head) {
    return S::HalfLow(head);
  }
  static void Dequant(const uint8_t* p, float* out) {
    const float d = F16At(p);
    for (int i = 0; i < 32; ++i)
      out[i] = canonical::Mul(d, static_cast<float>(static_cast<int8_t>(p[2 + i])));
  }
};

// 32 weights: f16 d, f16 m, u32 fifth bits, 16 bytes of nibbles (low: weights 0..15). w = d * q +
// m.
struct Q5_1 {
  static constexpr uint32_t kBlock = 32, kBytes = 24;
  static constexpr uint32_t kStep = 32, kGroup = 32;
  static constexpr bool kSigned = false, kGroupScales = false, kCrumbOrder = false;
  static constexpr int32_t kOffset = 0, kMaxCode = 31;
  static constexpr MinKind kMins = kBlockMins;
  static constexpr size_t kHead = 0;
  template <class S>
  static void Decode(const uint8_t* const* row, size_t offset, uint32_t, typename S::Words* w) {
    LoadNibbles<S>(row, offset + 8, w);
    const typename S::Words high = S::LoadWords(row, offset + 4);
    w[0] = S::template OrWhereBit<0, 16>(w[0], high);
    w[1] = S::template OrWhereBit<1, 16>(w[1], high);
    w[2] = S::template OrWhereBit<2, 16>(w[2], high);
    w[3] = S::template OrWhereBit<3, 16>(w[3], high);
    w[4] = S::template OrWhereBit<4, 16>(w[4], high);
    w[5] = S::template OrWhereBit<5, 16>(w[5], high);
    w[6] = S::template OrWhereBit<6, 16>(w[6], high);
    w[7] = S::template OrWhereBit<7, 16>(w[7], high);
  }
  template <class S>
  static typename S::RowsF Scale(const typename S::Words& head) {
    return S::HalfLow(head);
  }
  template <class S>
  static typename S::RowsF Min(const typename S::Words& head) {
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
// One shift of four bytes yields columns j, 4 + j, 8 + j, 12 + j of 16: cheaper to rearrange the
// activations once than every weight.
struct Q2_0 {
  static constexpr uint32_t kBlock = 64, kBytes = 18;
  static constexpr uint32_t kStep = 64, kGroup = 64;
  static constexpr bool kSigned = false, kGroupScales = false, kCrumbOrder = true;
  static constexpr int32_t kOffset = 1, kMaxCode = 3;
  static constexpr MinKind kMins = kNoMins;
  static constexpr size_t kHead = 0;
  template <class S>
  static void Decode(const uint8_t* const* row, size_t offset, uint32_t, typename S::Words* w) {
    typename S::Words raw[4];
    S::LoadColumns(row, offset + 2, raw);
    for (int i = 0; i < 4; ++i) {
      w[4 * i] = S::template Field<0, 3>(raw[i]);
      w[4 * i + 1] = S::template Field<2, 3>(raw[i]);
      w[4 * i + 2] = S::template Field<4, 3>(raw[i]);
      w[4 * i + 3] = S::template Field<6, 3>(raw[i]);
    }
  }
  template <class S>
  static typename S::RowsF Scale(const typename S::Words& head) {
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

// Four bytes of every lane, one Words each.
template <class S>
inline void SpreadBytes(const typename S::Words& w, typename S::Words* out) {
  out[0] = S::template ByteOf<0>(w);
  out[1] = S::template ByteOf<1>(w);
  out[2] = S::template ByteOf<2>(w);
  out[3] = S::template ByteOf<3>(w);
}

// 256 weights: f16 d, f16 dmin, 12 bytes of packed scales, 128 bytes of nibbles; groups of 32, two
// per 32 bytes (low nibbles first). w = (d * s) * q - dmin * m.
struct Q4_K {
  static constexpr uint32_t kBlock = 256, kBytes = 144;
  static constexpr uint32_t kStep = 64, kGroup = 32;
  static constexpr bool kSigned = false, kGroupScales = true, kCrumbOrder = false;
  static constexpr int32_t kOffset = 0, kMaxCode = 15;
  static constexpr MinKind kMins = kGroupMins;
  static constexpr size_t kHead = 0;
  template <class S>
  static void Decode(const uint8_t* const* row, size_t offset, uint32_t step,
                     typename S::Words* w) {
    typename S::Words raw[8];
    S::LoadColumns(row, offset + 16 + 32 * step, raw);
    S::LoadColumns(row, offset + 32 + 32 * step, raw + 4);
    for (int i = 0; i < 8; ++i) {
      w[i] = S::template Field<0, 15>(raw[i]);
      w[8 + i] = S::template Field<4, 15>(raw[i]);
    }
  }
  template <class S>
  static void GroupScales(const uint8_t* const* row, size_t offset, typename S::Words* s) {
    const typename S::Words a = S::LoadWords(row, offset + 4), c = S::LoadWords(row, offset + 12);
    SpreadBytes<S>(S::template Field<0, 63>(a), s);
    SpreadBytes<S>(S::Or(S::template Field<0, 15>(c), S::template Field<2, 48>(a)), s + 4);
  }
  template <class S>
  static void GroupMins(const uint8_t* const* row, size_t offset, typename S::Words* m) {
    const typename S::Words b = S::LoadWords(row, offset + 8), c = S::LoadWords(row, offset + 12);
    const typename S::Words low = S::template Field<0, 63>(b);
    const typename S::Words high = S::Or(S::template Field<4, 15>(c), S::template Field<2, 48>(b));
    m[0] = S::EvenBytes(low);
    m[1] = S::OddBytes(low);
    m[2] = S::EvenBytes(high);
    m[3] = S::OddBytes(high);
  }
  template <class S>
  static typename S::RowsF Scale(const typename S::Words& head) {
    return S::HalfLow(head);
  }
  template <class S>
  static typename S::RowsF Min(const typename S::Words& head) {
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

// ---- plain floats ------------------------------------------------------------------------------
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
