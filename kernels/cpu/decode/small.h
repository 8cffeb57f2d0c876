// Blocks of 32 or 64 weights (docs/design/formats.md); the contract is in decode/decode.h. Blocks
// of 18 and 34 bytes are read in pairs: the pair is a whole number of words, and the word that
// holds the first block's first codes and the one that holds its last codes blend into one word of
// four, so the first block's columns come rotated by what two bytes hold, and Arrange rotates the
// activations alike, once for all rows.
#pragma once

#include "kernels/cpu/decode/decode.h"

namespace lode {
namespace {
namespace decode {

// ---- 34 bytes: f16 d, 32 x int8 (a file may hold -128). w = d * q ------------------------------
struct Q8_0 {
  static constexpr uint32_t kBlock = 32, kBytes = 34, kUnit = 2, kLongUnit = 8, kStep = 32,
                            kGroup = 32;
  static constexpr bool kSigned = true, kGroupScales = false;
  static constexpr int32_t kMaxCode = 128, kOffset = 0;
  static constexpr MinKind kMins = kNoMins;

  template <class S, uint32_t kN>
  struct Raw;
  template <class S>
  struct Raw<S, 2> {
    typename S::Words w[20];  // words 0..16 of the pair; word 16 comes from 16 bytes that end there
    LODE_ALWAYS_INLINE void Load(const typename S::Rows& rows) {
      LoadRun<S, 4>(rows, 0, w);
      typename S::Words last[4];
      S::LoadColumns(rows, 52, last);
      w[16] = last[3];
    }
    template <uint32_t kI, uint32_t>
    LODE_ALWAYS_INLINE void Codes(typename S::Words* out) const {
      for (int i = 0; i < 7; ++i) out[i] = w[kI == 0 ? 1 + i : 9 + i];
      out[7] = kI == 0 ? S::BlendHalves(w[8], w[0]) : w[16];
      for (int i = 0; i < 8; ++i) out[i] = S::SignedCodes(out[i]);
    }
    template <uint32_t kI>
    LODE_ALWAYS_INLINE typename S::RowsF Scale() const {
      return kI == 0 ? S::HalfLow(w[0]) : S::HalfHigh(w[8]);
    }
  };
  // Four pairs: 272 bytes, a whole number of pieces.
  template <class S>
  struct Raw<S, 8> : RowWords<S, 68> {
    LODE_ALWAYS_INLINE void Load(const typename S::Rows& r) { this->rows = r; }
    template <uint32_t kI, uint32_t>
    LODE_ALWAYS_INLINE void Codes(typename S::Words* out) {
      constexpr uint32_t kFirst = kI / 2 * 17, kOdd = kI % 2;
      this->template Need<kFirst + 9 * kOdd, kFirst + (kOdd ? 17 : 9)>();
      for (uint32_t i = 0; i < 7; ++i) out[i] = this->w[kFirst + (kOdd ? 9 : 1) + i];
      out[7] = kOdd ? this->w[kFirst + 16] : S::BlendHalves(this->w[kFirst + 8], this->w[kFirst]);
      for (int i = 0; i < 8; ++i) out[i] = S::SignedCodes(out[i]);
    }
    template <uint32_t kI>
    LODE_ALWAYS_INLINE typename S::RowsF Scale() const {
      return kI % 2 ? S::HalfHigh(this->w[kI / 2 * 17 + 8]) : S::HalfLow(this->w[kI / 2 * 17]);
    }
  };
  template <class S>
  struct Raw<S, 1> {
    typename S::Words w[8], head[4];
    LODE_ALWAYS_INLINE void Load(const typename S::Rows& rows) {
      S::LoadColumns(rows, 0, head);
      LoadRun<S, 2>(rows, 2, w);
    }
    template <uint32_t, uint32_t>
    LODE_ALWAYS_INLINE void Codes(typename S::Words* out) const {
      for (int i = 0; i < 8; ++i) out[i] = S::SignedCodes(w[i]);
    }
    template <uint32_t>
    LODE_ALWAYS_INLINE typename S::RowsF Scale() const {
      return S::HalfLow(head[0]);
    }
  };

  template <class S>
  static constexpr bool kArrange = true;
  template <class S, uint32_t kN>
  static void Arrange(const int8_t* y, int8_t* out) {
    if constexpr (kN == 2) {
      std::memcpy(out, y + 2, 30);
      std::memcpy(out + 30, y, 2);
      std::memcpy(out + 32, y + 32, 32);
    } else {
      std::memcpy(out, y, 32);
    }
  }
  static void Dequant(const uint8_t* p, float* out) {
    const float d = F16At(p);
    for (int i = 0; i < 32; ++i)
      out[i] = canonical::Mul(d, static_cast<float>(static_cast<int8_t>(p[2 + i])));
  }
};

// ---- 18 bytes: f16 d, 16 bytes of codes ---------------------------------------------------------
// Four code words of each block, whatever the codes are; loaded kPiece words at a time.
template <class S, uint32_t kN, uint32_t kPiece = 8>
struct Raw18;
template <class S, uint32_t kPiece>
struct Raw18<S, 2, kPiece> {
  typename S::Words w[9];
  LODE_ALWAYS_INLINE void Load(const typename S::Rows& rows) {
    for (uint32_t i = 0; i < 8; i += kPiece) LoadRun<S, kPiece / 4>(rows, 4 * i, w + i);
    typename S::Words last[4];
    S::LoadColumns(rows, 20, last);
    w[8] = last[3];
  }
  // Bytes 2..13 of the first block's codes, then 14, 15, 0, 1.
  template <uint32_t kI>
  LODE_ALWAYS_INLINE void Bytes(typename S::Words* out) {
    for (int i = 0; i < 3; ++i) out[i] = w[kI == 0 ? 1 + i : 5 + i];
    out[3] = kI == 0 ? S::BlendHalves(w[4], w[0]) : w[8];
  }
  template <uint32_t kI>
  LODE_ALWAYS_INLINE typename S::RowsF Scale() const {
    return kI == 0 ? S::HalfLow(w[0]) : S::HalfHigh(w[4]);
  }
};
// Four pairs: 144 bytes, a whole number of pieces.
template <class S, uint32_t kPiece>
struct Raw18<S, 8, kPiece> : RowWords<S, 36, kPiece> {
  LODE_ALWAYS_INLINE void Load(const typename S::Rows& r) { this->rows = r; }
  template <uint32_t kI>
  LODE_ALWAYS_INLINE void Bytes(typename S::Words* out) {
    constexpr uint32_t kFirst = kI / 2 * 9, kOdd = kI % 2;
    this->template Need<kFirst + 5 * kOdd, kFirst + (kOdd ? 9 : 5)>();
    for (uint32_t i = 0; i < 3; ++i) out[i] = this->w[kFirst + (kOdd ? 5 : 1) + i];
    out[3] = kOdd ? this->w[kFirst + 8] : S::BlendHalves(this->w[kFirst + 4], this->w[kFirst]);
  }
  template <uint32_t kI>
  LODE_ALWAYS_INLINE typename S::RowsF Scale() const {
    return kI % 2 ? S::HalfHigh(this->w[kI / 2 * 9 + 4]) : S::HalfLow(this->w[kI / 2 * 9]);
  }
};
template <class S, uint32_t kPiece>
struct Raw18<S, 1, kPiece> {
  typename S::Words w[4], head[4];
  LODE_ALWAYS_INLINE void Load(const typename S::Rows& rows) {
    S::LoadColumns(rows, 0, head);
    S::LoadColumns(rows, 2, w);
  }
  template <uint32_t>
  LODE_ALWAYS_INLINE void Bytes(typename S::Words* out) {
    for (int i = 0; i < 4; ++i) out[i] = w[i];
  }
  template <uint32_t>
  LODE_ALWAYS_INLINE typename S::RowsF Scale() const {
    return S::HalfLow(head[0]);
  }
};

// Columns of two such blocks of nibbles, the first with its bytes rotated by two.
struct Nibbles18Order {
  template <class S>
  static constexpr bool kArrange = true;
  template <class S, uint32_t kN>
  static void Arrange(const int8_t* y, int8_t* out) {
    std::memcpy(out, y, kN * 32);
    if constexpr (kN == 2) {
      for (int half = 0; half < 32; half += 16) {
        std::memcpy(out + half, y + half + 2, 14);
        std::memcpy(out + half + 14, y + half, 2);
      }
    }
  }
};

// Nibbles (low: weights 0..15). w = d * (nibble - 8).
struct Q4_0 : Nibbles18Order {
  static constexpr uint32_t kBlock = 32, kBytes = 18, kUnit = 2, kLongUnit = 8, kStep = 32,
                            kGroup = 32;
  static constexpr bool kSigned = false, kGroupScales = false;
  static constexpr int32_t kMaxCode = 15, kOffset = 8;
  static constexpr MinKind kMins = kNoMins;
  template <class S, uint32_t kN>
  struct Raw : Raw18<S, kN> {
    template <uint32_t kI, uint32_t>
    LODE_ALWAYS_INLINE void Codes(typename S::Words* out) {
      typename S::Words raw[4];
      this->template Bytes<kI>(raw);
      SplitNibbles<S>(raw, out);
    }
  };
  static void Dequant(const uint8_t* p, float* out) {
    const float d = F16At(p);
    for (int i = 0; i < 32; ++i) {
      const int nibble = (p[2 + i % 16] >> (4 * (i / 16))) & 15;
      out[i] = canonical::Mul(d, static_cast<float>(nibble - 8));
    }
  }
};

alignas(16) constexpr int8_t kIq4NlTable[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                1,    13,   25,  38,  53,  69,  89,  113};

// Nibbles (low: weights 0..15). w = d * table[nibble].
struct IQ4_NL : Nibbles18Order {
  static constexpr uint32_t kBlock = 32, kBytes = 18, kUnit = 2, kLongUnit = 8, kStep = 32,
                            kGroup = 32;
  static constexpr bool kSigned = true, kGroupScales = false;
  static constexpr int32_t kMaxCode = 127, kOffset = 0;
  static constexpr MinKind kMins = kNoMins;
  template <class S, uint32_t kN>
  struct Raw : Raw18<S, kN> {
    template <uint32_t kI, uint32_t>
    LODE_ALWAYS_INLINE void Codes(typename S::Words* out) {
      typename S::Words raw[4];
      this->template Bytes<kI>(raw);
      SplitNibbles<S>(raw, out);
      for (int i = 0; i < 8; ++i) out[i] = S::LookupSigned(kIq4NlTable, out[i]);
    }
  };
  static void Dequant(const uint8_t* p, float* out) {
    const float d = F16At(p);
    for (int i = 0; i < 32; ++i) {
      const int nibble = (p[2 + i % 16] >> (4 * (i / 16))) & 15;
      out[i] = canonical::Mul(d, static_cast<float>(kIq4NlTable[nibble]));
    }
  }
};

// 64 weights: 2-bit codes, four consecutive ones per byte. w = d * (code - 1). One shift of a word
// yields columns j, 4 + j, 8 + j, 12 + j of 16: cheaper to rearrange the activations once.
struct Q2_0 {
  static constexpr uint32_t kBlock = 64, kBytes = 18, kUnit = 2, kLongUnit = 8, kStep = 64,
                            kGroup = 64;
  static constexpr bool kSigned = false, kGroupScales = false;
  static constexpr int32_t kMaxCode = 3, kOffset = 1;
  static constexpr MinKind kMins = kNoMins;
  // Bound by the ports of vector instructions, not by loads: 16 bytes at a time want fewer of them.
  template <class S, uint32_t kN>
  struct Raw : Raw18<S, kN, 4> {
    template <uint32_t kI, uint32_t>
    LODE_ALWAYS_INLINE void Codes(typename S::Words* out) {
      typename S::Words raw[4];
      this->template Bytes<kI>(raw);
      for (int i = 0; i < 4; ++i) {
        out[4 * i] = S::template Field<0, 3>(raw[i]);
        out[4 * i + 1] = S::template Field<2, 3>(raw[i]);
        out[4 * i + 2] = S::template Field<4, 3>(raw[i]);
        out[4 * i + 3] = S::template Field<6, 3>(raw[i]);
      }
    }
  };
  template <class S>
  static constexpr bool kArrange = true;
  template <class S, uint32_t kN>
  static void Arrange(const int8_t* y, int8_t* out) {
    if constexpr (kN == 2) {
      int8_t rotated[64];  // two code bytes are eight weights
      std::memcpy(rotated, y + 8, 56);
      std::memcpy(rotated + 56, y, 8);
      S::ArrangeCrumbs(rotated, out);
      S::ArrangeCrumbs(y + 64, out + 64);
    } else {
      S::ArrangeCrumbs(y, out);
    }
  }
  static void Dequant(const uint8_t* p, float* out) {
    const float d = F16At(p);
    for (int i = 0; i < 64; ++i) {
      const int code = (p[2 + i / 4] >> (2 * (i % 4))) & 3;
      out[i] = canonical::Mul(d, static_cast<float>(code - 1));
    }
  }
};

// ---- 24 bytes: f16 d, f16 m, u32 fifth bits, 16 bytes of nibbles. w = d * q + m ----------------
struct Q5_1 : NaturalOrder {
  static constexpr uint32_t kBlock = 32, kBytes = 24, kUnit = 2, kStep = 32, kGroup = 32;
  static constexpr bool kSigned = false, kGroupScales = false;
  static constexpr int32_t kMaxCode = 31, kOffset = 0;
  static constexpr MinKind kMins = kBlockMins;
  template <class S, uint32_t kN>
  struct Raw {
    typename S::Words w[12];  // six words a block
    LODE_ALWAYS_INLINE void Load(const typename S::Rows& rows) {
      if constexpr (kN == 2) {
        LoadRun<S, 3>(rows, 0, w);
      } else {
        typename S::Words last[4];
        S::LoadColumns(rows, 0, w);
        S::LoadColumns(rows, 8, last);
        w[4] = last[2];
        w[5] = last[3];
      }
    }
    template <uint32_t kI, uint32_t>
    LODE_ALWAYS_INLINE void Codes(typename S::Words* out) const {
      SplitNibbles<S>(w + 6 * kI + 2, out);
      S::AddFifthBits(out, w[6 * kI + 1]);
    }
    template <uint32_t kI>
    LODE_ALWAYS_INLINE typename S::RowsF Scale() const {
      return S::HalfLow(w[6 * kI]);
    }
    template <uint32_t kI>
    LODE_ALWAYS_INLINE typename S::RowsF Min() const {
      return S::HalfHigh(w[6 * kI]);
    }
  };
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

// ---- plain floats ------------------------------------------------------------------------------
struct Unsplit {  // no two weights in a word, or nothing gained by splitting it
  template <class S>
  static constexpr bool kPairs = false;
};

struct F32 : Unsplit {
  static constexpr uint32_t kBlock = 1, kBytes = 4;
  template <class S>
  static typename S::V32 Load32(const uint8_t* p) {
    return S::Load32(reinterpret_cast<const float*>(p));
  }
  static void Dequant(const uint8_t* p, float* out) { std::memcpy(out, p, 4); }
};

struct F16 : Unsplit {
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
  template <class S>
  static constexpr bool kPairs = S::kPairs32;
  template <class S>
  static typename S::V32 LoadPairs32(const uint8_t* p) {
    return S::LoadBf16Pairs32(p);
  }
  static void Dequant(const uint8_t* p, float* out) { *out = canonical::FromBf16(U16(p)); }
};

}  // namespace decode
}  // namespace
}  // namespace lode
