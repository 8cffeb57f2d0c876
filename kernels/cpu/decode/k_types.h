// Blocks of 256 weights with an integer scale per group, codes stored as numbers or as indices into
// a table of 16 (docs/design/formats.md); the contract is in decode/decode.h.
#pragma once

#include "kernels/cpu/decode/decode.h"
#include "kernels/cpu/decode/small.h"

namespace lode {
namespace {
namespace decode {

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

// f16 d, f16 dmin, those 12 bytes: the head of Q4_K and Q5_K.
template <class S>
struct HeadK45 {
  typename S::Words half, scales[2], mins[2];
  LODE_ALWAYS_INLINE void LoadHead(const typename S::Rows& rows) {
    typename S::Words w[4];
    S::LoadColumns(rows, 0, w);
    half = w[0];
    scales[0] = S::template Field<0, 63>(w[1]);
    scales[1] = S::Or(S::template Field<0, 15>(w[3]), S::template Field<2, 48>(w[1]));
    mins[0] = S::template Field<0, 63>(w[2]);
    mins[1] = S::Or(S::template Field<4, 15>(w[3]), S::template Field<2, 48>(w[2]));
  }
  template <uint32_t kGroup>
  LODE_ALWAYS_INLINE typename S::Words GroupScale() const {
    return S::template ScaleByte<kGroup % 4>(scales[kGroup / 4]);
  }
  LODE_ALWAYS_INLINE void GroupMins(typename S::Words* m) const {
    for (int i = 0; i < 2; ++i) {
      m[2 * i] = S::EvenBytes(mins[i]);
      m[2 * i + 1] = S::OddBytes(mins[i]);
    }
  }
  template <uint32_t>
  LODE_ALWAYS_INLINE typename S::RowsF Scale() const {
    return S::HalfLow(half);
  }
  template <uint32_t>
  LODE_ALWAYS_INLINE typename S::RowsF Min() const {
    return S::Negate(S::HalfHigh(half));
  }
};

// Float weights of Q4_K and Q5_K; code(i) is weight i's integer.
template <class Code>
inline void DequantK45(const uint8_t* p, float* out, Code code) {
  const float d = F16At(p), dmin = F16At(p + 2);
  const uint64_t scales = PackedScales(p + 4), mins = PackedMins(p + 4);
  for (int g = 0; g < 8; ++g) {
    const float ds = canonical::Mul(d, static_cast<float>((scales >> (8 * g)) & 255));
    const float dm = canonical::Mul(dmin, static_cast<float>((mins >> (8 * g)) & 255));
    for (int i = 32 * g; i < 32 * g + 32; ++i)
      out[i] = canonical::Sub(canonical::Mul(ds, static_cast<float>(code(i))), dm);
  }
}

// Head, 128 bytes of nibbles: groups of 32, two per 32 bytes (low nibbles first).
// w = (d * s) * q - dmin * m.
struct Q4_K : NaturalOrder {
  static constexpr uint32_t kBlock = 256, kBytes = 144, kUnit = 1, kStep = 32, kGroup = 32;
  static constexpr bool kSigned = false, kGroupScales = true;
  static constexpr int32_t kMaxCode = 15, kOffset = 0;
  static constexpr MinKind kMins = kGroupMins;
  template <class S, uint32_t kN>
  struct Raw : HeadK45<S> {
    typename S::Rows rows;
    typename S::Words nibbles[8];  // of the current two groups
    LODE_ALWAYS_INLINE void Load(const typename S::Rows& r) {
      rows = r;
      this->LoadHead(r);
    }
    template <uint32_t, uint32_t kG>
    LODE_ALWAYS_INLINE void Codes(typename S::Words* out) {
      if constexpr (kG % 2 == 0) LoadRun<S, 2>(rows, 16 + 16 * kG, nibbles);
      for (int i = 0; i < 8; ++i) out[i] = S::template Field<kG % 2 * 4, 15>(nibbles[i]);
    }
  };
  static void Dequant(const uint8_t* p, float* out) {
    DequantK45(p, out,
               [p](int i) { return (p[16 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4)) & 15; });
  }
};

// Head, 32 bytes of fifth bits (bit g of byte i: weight i of group g), 128 bytes of nibbles as
// Q4_K.
struct Q5_K : NaturalOrder {
  static constexpr uint32_t kBlock = 256, kBytes = 176, kUnit = 1, kStep = 32, kGroup = 32;
  static constexpr bool kSigned = false, kGroupScales = true;
  static constexpr int32_t kMaxCode = 31, kOffset = 0;
  static constexpr MinKind kMins = kGroupMins;
  template <class S, uint32_t kN>
  struct Raw : HeadK45<S> {
    typename S::Rows rows;
    typename S::Words fifth[8], nibbles[8];
    LODE_ALWAYS_INLINE void Load(const typename S::Rows& r) {
      rows = r;
      this->LoadHead(r);
      LoadRun<S, 2>(r, 16, fifth);
    }
    template <uint32_t, uint32_t kG>
    LODE_ALWAYS_INLINE void Codes(typename S::Words* out) {
      if constexpr (kG % 2 == 0) LoadRun<S, 2>(rows, 48 + 16 * kG, nibbles);
      if constexpr (S::kBitMatrices) {
        MergedCodes<kG>(out);
      } else {
        constexpr int kRight = static_cast<int>(kG) - 4;  // bit kG to bit 4
        for (int i = 0; i < 8; ++i)
          out[i] = S::Or(S::template Field<kG % 2 * 4, 15>(nibbles[i]),
                         S::template Field<kRight, 16>(fifth[i]));
      }
    }
    // Two instructions a word: nibbles and fifth bits share bytes before the field is cut out. The
    // fifth bits must not lie where the nibble does: those of groups 4..7 change places first.
    template <uint32_t kG>
    LODE_ALWAYS_INLINE void MergedCodes(typename S::Words* out) {
      constexpr uint32_t kBit = kG % 4;
      for (int i = 0; i < 8; ++i) {
        if constexpr (kG == 4) fifth[i] = S::SwapNibbles(fifth[i]);
        if constexpr (kG % 2 == 0) {
          constexpr int kRight = static_cast<int>(kBit) - 4;
          out[i] = S::template Select<0x0f>(nibbles[i], S::template Field<kRight, 16>(fifth[i]));
        } else {
          out[i] =
              S::template HighNibbleAndBit<kBit>(S::template Select<0x0f>(fifth[i], nibbles[i]));
        }
      }
    }
  };
  static void Dequant(const uint8_t* p, float* out) {
    DequantK45(p, out, [p](int i) {
      const int nibble = (p[48 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4)) & 15;
      return nibble | ((p[16 + i % 32] >> (i / 32)) & 1) << 4;
    });
  }
};

// 128 bytes of low nibbles, 64 bytes of top bits, 16 x int8 scales (groups of 16), f16 d. In each
// half of 128 weights: runs of 32, low nibbles of bytes 0..31 and 32..63, then their high nibbles.
// w = (d * s) * (q - 32).
struct Q6_K : NaturalOrder {
  static constexpr uint32_t kBlock = 256, kBytes = 210, kUnit = 1, kStep = 32, kGroup = 16;
  static constexpr bool kSigned = false, kGroupScales = true;
  static constexpr int32_t kMaxCode = 63, kOffset = 32;
  static constexpr MinKind kMins = kNoMins;
  // Runs that share bytes follow each other: fewer registers are live.
  static constexpr uint32_t StepAt(uint32_t n) { return n / 4 * 4 + n % 2 * 2 + n / 2 % 2; }
  template <class S, uint32_t kN>
  struct Raw {
    typename S::Rows rows;
    typename S::Words scales[4], last[4], low[8], top[8];
    LODE_ALWAYS_INLINE void Load(const typename S::Rows& r) {
      rows = r;
      S::LoadColumns(r, 192, scales);
      S::LoadColumns(r, 194, last);  // only the word with d is used
    }
    template <uint32_t, uint32_t kRun>
    LODE_ALWAYS_INLINE void Codes(typename S::Words* out) {
      constexpr uint32_t kHalf = kRun / 4, kT = kRun % 4;
      if constexpr (kT == 0) LoadRun<S, 2>(rows, 128 + 32 * kHalf, top);
      if constexpr (kT < 2) LoadRun<S, 2>(rows, 64 * kHalf + 32 * kT, low);
      constexpr int kRight = 2 * static_cast<int>(kT) - 4;  // bits 2 kT to bits 4, 5
      for (int i = 0; i < 8; ++i) {
        if constexpr (S::kBitMatrices && kT < 2) {
          out[i] = S::template Select<0x0f>(low[i], S::template Field<kRight, 48>(top[i]));
        } else if constexpr (S::kBitMatrices) {
          out[i] = S::template Select<0x30>(S::template Field32<kRight, ~0u>(top[i]),
                                            S::template Field<4, 15>(low[i]));
        } else {
          out[i] = S::Or(S::template Field<kT / 2 * 4, 15>(low[i]),
                         S::template Field<kRight, 48>(top[i]));
        }
      }
    }
    template <uint32_t kG>
    LODE_ALWAYS_INLINE typename S::Words GroupScale() const {
      return S::template SignedScaleByte<kG % 4>(scales[kG / 4]);
    }
    template <uint32_t>
    LODE_ALWAYS_INLINE typename S::RowsF Scale() const {
      return S::HalfHigh(last[3]);
    }
  };
  static void Dequant(const uint8_t* p, float* out) {
    const float d = F16At(p + 208);
    for (int i = 0; i < 256; ++i) {
      const int half = i / 128, run = i % 128 / 32, l = i % 32;
      const int low = (p[64 * half + run % 2 * 32 + l] >> (run / 2 * 4)) & 15;
      const int q = (low | ((p[128 + 32 * half + l] >> (2 * run)) & 3) << 4) - 32;
      const float s = static_cast<float>(static_cast<int8_t>(p[192 + i / 16]));
      out[i] = canonical::Mul(canonical::Mul(d, s), static_cast<float>(q));
    }
  }
};

// f16 d, u16 high bits, 4 bytes of low nibbles of 6-bit scales, 128 bytes of nibbles, 16 bytes a
// group. w = d * (s - 32) * table[nibble].
struct IQ4_XS : NaturalOrder {
  static constexpr uint32_t kBlock = 256, kBytes = 136, kUnit = 1, kStep = 32, kGroup = 32;
  static constexpr bool kSigned = true, kGroupScales = true;
  static constexpr int32_t kMaxCode = 127, kOffset = 0;
  static constexpr MinKind kMins = kNoMins;
  template <class S, uint32_t kN>
  struct Raw {
    typename S::Rows rows;
    typename S::Words half, even, odd;  // scales of groups 0, 2, 4, 6 and 1, 3, 5, 7
    typename S::Words nibbles[8];
    LODE_ALWAYS_INLINE void Load(const typename S::Rows& r) {
      rows = r;
      typename S::Words w[4];
      S::LoadColumns(r, 0, w);
      half = w[0];
      // The 16 high bits: nibble k holds two bits of group 2 k and two of group 2 k + 1. One nibble
      // to a byte.
      typename S::Words x = S::template Field32<16, 0xffffu>(half);
      x = S::template Field32<0, 0x00ff00ffu>(S::Or(x, S::template Field32<-8, 0xff0000u>(x)));
      x = S::template Field<0, 15>(S::Or(x, S::template Field32<-4, 0x0ff00ff0u>(x)));
      even = S::Or(S::template Field<0, 15>(w[1]), S::template Field<-4, 48>(x));
      odd = S::Or(S::template Field<4, 15>(w[1]), S::template Field<-2, 48>(x));
      even = S::template SubBytes<32>(even);
      odd = S::template SubBytes<32>(odd);
    }
    template <uint32_t, uint32_t kG>
    LODE_ALWAYS_INLINE void Codes(typename S::Words* out) {
      LoadStep<S, 16, kG>(rows, 8, nibbles);
      SplitNibbles<S>(nibbles + kG % 2 * 4, out);
      for (int i = 0; i < 8; ++i) out[i] = S::LookupSigned(kIq4NlTable, out[i]);
    }
    template <uint32_t kG>
    LODE_ALWAYS_INLINE typename S::Words GroupScale() const {
      return S::template SignedScaleByte<kG / 2>(kG % 2 ? odd : even);
    }
    template <uint32_t>
    LODE_ALWAYS_INLINE typename S::RowsF Scale() const {
      return S::HalfLow(half);
    }
  };
  static void Dequant(const uint8_t* p, float* out) {
    const float d = F16At(p);
    const int high = U16(p + 2);
    for (int i = 0; i < 256; ++i) {
      const int g = i / 32;
      const int s = ((p[4 + g / 2] >> (4 * (g % 2))) & 15) | ((high >> (2 * g)) & 3) << 4;
      const int nibble = (p[8 + 16 * g + i % 16] >> (i % 32 / 16 * 4)) & 15;
      out[i] = canonical::Mul(canonical::Mul(d, static_cast<float>(s - 32)),
                              static_cast<float>(kIq4NlTable[nibble]));
    }
  }
};

}  // namespace decode
}  // namespace
}  // namespace lode
