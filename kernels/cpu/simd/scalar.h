// The vocabulary of one instruction set, in plain C++: the contracts of what simd/x86.h offers
// under the same names. Two kinds of vectors exist. Words and RowsF have one 32-bit lane per weight
// row of a row group: four bytes of codes, an integer or a float, so that kRows rows advance side
// by side, products and ordered fp32 accumulators alike. V32 holds the 32 canonical partial sums of
// a float reduction. No operation knows a weight format. Everything is exact integer arithmetic or
// one stated IEEE operation per lane. Included by one ISA translation unit only; anonymous
// namespace, so that nothing leaks between ISA builds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/canonical.h"

namespace lode {
namespace {

struct Simd {
  static constexpr const char* kName = "scalar";
  static constexpr uint32_t kRows = 4;          // weight rows of one group
  static constexpr bool kManyRegisters = true;  // 32: decoders may keep more of them alive
  // Float products: rows times activation rows of one register tile.
  static constexpr uint32_t kFloatTile = 1;
  // V32 also as even partials and odd ones (x86.h).
  static constexpr bool kPairs32 = false;
  // Signed codes enter products as SignedCodes(w), whose sums are those of w + kSignedBias; what
  // that adds is taken off by the value a sum starts from.
  static constexpr int32_t kSignedBias = 0;
  // Byte permutations of whole registers exist, so grids are looked up in byte planes.
  static constexpr bool kBytePlanes = false;
  static constexpr bool kBitMatrices = false;

  struct Words {
    uint32_t v[kRows];
  };
  struct RowsF {
    float v[kRows];
  };
  template <class Op>
  static Words PerRow(Op op) {
    Words r;
    for (uint32_t k = 0; k < kRows; ++k) r.v[k] = op(k);
    return r;
  }
  static uint32_t Byte(const Words& w, uint32_t row, uint32_t i) {
    return (w.v[row] >> (8 * i)) & 255;
  }
  template <class Op>  // op(row, byte)
  static Words PerByte(Op op) {
    return PerRow([&](uint32_t k) {
      uint32_t r = 0;
      for (uint32_t i = 0; i < 4; ++i) r |= (static_cast<uint32_t>(op(k, i)) & 255) << (8 * i);
      return r;
    });
  }
  static uint32_t WithParity(uint32_t x) {
    return x | static_cast<uint32_t>(__builtin_parity(x)) << 7;
  }
  template <class Op>
  static RowsF PerRowF(Op op) {
    RowsF r;
    for (uint32_t k = 0; k < kRows; ++k) r.v[k] = op(k);
    return r;
  }

  // ---- bytes of weights ------------------------------------------------------------------------
  // kRows rows, `s` bytes apart.
  struct Rows {
    const uint8_t* p;
    size_t s;
    void Step(size_t bytes) { p += bytes; }
  };
  static Rows RowsAt(const uint8_t* p, size_t stride) { return {p, stride}; }
  // Sixteen bytes of each row: out[i] holds bytes 4 i .. 4 i + 3.
  static void LoadColumns(const Rows& rows, uint32_t offset, Words* out) {
    for (uint32_t i = 0; i < 4; ++i)
      for (uint32_t k = 0; k < kRows; ++k)
        std::memcpy(&out[i].v[k], rows.p + k * rows.s + offset + 4 * i, 4);
  }
  static void LoadColumns2(const Rows& rows, uint32_t offset, Words* out) {  // 32 bytes
    LoadColumns(rows, offset, out);
    LoadColumns(rows, offset + 16, out + 4);
  }
  // (w >> kRight) & kMask; a negative kRight shifts to the left.
  template <int kRight, uint32_t kMask>
  static Words Field32(const Words& w) {
    return PerRow([&](uint32_t k) {
      return (kRight < 0 ? w.v[k] << (kRight < 0 ? -kRight : 0)
                         : w.v[k] >> (kRight < 0 ? 0 : kRight)) &
             kMask;
    });
  }
  // The same for every byte; the mask must drop what comes from the neighbouring byte.
  template <int kRight, uint8_t kMask>
  static Words Field(const Words& w) {
    return Field32<kRight, kMask * 0x01010101u>(w);
  }
  static Words Or(const Words& a, const Words& b) {
    return PerRow([&](uint32_t k) { return a.v[k] | b.v[k]; });
  }
  static Words OrAll(const Words& a, uint32_t x) {
    return PerRow([&](uint32_t k) { return a.v[k] | x; });
  }
  // Bytes minus kValue, modulo 256.
  template <uint8_t kValue>
  static Words SubBytes(const Words& a) {
    return PerByte([&](uint32_t k, uint32_t i) { return Byte(a, k, i) - kValue; });
  }
  // The low 16 bits of a, the high ones of b.
  static Words BlendHalves(const Words& a, const Words& b) {
    return PerRow([&](uint32_t k) { return (a.v[k] & 0xffffu) | (b.v[k] & 0xffff0000u); });
  }
  // Adds 16 to byte i of word n of eight nibbles a byte where bit 4 n + i of `bits` is set.
  static void AddFifthBits(Words* codes, const Words& bits) {
    for (uint32_t n = 0; n < 8; ++n)
      codes[n] = PerByte([&](uint32_t k, uint32_t i) {
        return Byte(codes[n], k, i) | ((bits.v[k] >> (4 * n + i)) & 1) * 16;
      });
  }
  // SignedCodes of table[code], codes 0..15; table has 16 bytes.
  static Words LookupSigned(const int8_t* table, const Words& w) {
    return PerByte(
        [&](uint32_t k, uint32_t i) { return static_cast<uint8_t>(table[Byte(w, k, i)]); });
  }
  static Words SignedCodes(const Words& w) { return w; }
  // 64 activations for codes that share bytes: out[16 b + 4 j + k] = y[16 b + 4 k + j].
  static void ArrangeCrumbs(const int8_t* y, int8_t* out) {
    for (int i = 0; i < 64; ++i) out[i] = y[i / 16 * 16 + i % 4 * 4 + i / 4 % 4];
  }

  // ---- grids and signs
  // ---------------------------------------------------------------------------
  static Words Gather(const uint32_t* table, const Words& index) {
    return PerRow([&](uint32_t k) { return table[index.v[k]]; });
  }
  // Entries of eight bytes by the lower nine of the 16 bits at `offset` of each row: out[0] has
  // their first four bytes, out[1] the others.
  static void LookupPairs(const uint64_t* table, const Rows& rows, uint32_t offset, Words* out) {
    for (uint32_t k = 0; k < kRows; ++k) {
      const uint8_t* p = rows.p + k * rows.s + offset;
      const uint64_t entry = table[(p[0] | p[1] << 8) & 511];
      out[0].v[k] = static_cast<uint32_t>(entry);
      out[1].v[k] = static_cast<uint32_t>(entry >> 32);
    }
  }
  // Entries by the two bytes at `offset` of each row.
  static void LookupBytes(const uint32_t* table, const Rows& rows, uint32_t offset, Words* out) {
    for (uint32_t i = 0; i < 2; ++i)
      for (uint32_t k = 0; k < kRows; ++k) out[i].v[k] = table[rows.p[k * rows.s + offset + i]];
  }
  // Four 7-bit fields of every lane (of bits 9..15 and 25..31 of a, then b) as bytes, bit 7 their
  // parity.
  static Words EvenSignBytes(const Words& w) {
    return PerByte([&](uint32_t k, uint32_t i) { return WithParity((w.v[k] >> (7 * i)) & 127); });
  }
  static Words EvenSignBytesOfPairs(const Words& a, const Words& b) {
    return PerByte([&](uint32_t k, uint32_t i) {
      return WithParity(((i < 2 ? a : b).v[k] >> (9 + 16 * (i % 2))) & 127);
    });
  }
  // SignedCodes of eight words of magnitudes, negative where bit 4 n + i of `signs` is set for byte
  // i of word n.
  static void ApplySigns(Words* magnitudes, const Words& signs) {
    for (uint32_t n = 0; n < 8; ++n)
      magnitudes[n] = PerByte([&](uint32_t k, uint32_t i) {
        const uint32_t m = Byte(magnitudes[n], k, i);
        return (signs.v[k] >> (4 * n + i)) & 1 ? 0u - m : m;
      });
  }

  // ---- exact integers per row ------------------------------------------------------------------
  // A group's integer scale from byte kByte (unsigned, int8) or the whole lane (below 2^15). Its
  // representation is the instruction set's own.
  template <uint32_t kByte>
  static Words ScaleByte(const Words& w) {
    return PerRow([&](uint32_t k) { return Byte(w, k, kByte); });
  }
  template <uint32_t kByte>
  static Words SignedScaleByte(const Words& w) {
    return PerRow([&](uint32_t k) {
      return static_cast<uint32_t>(int32_t{static_cast<int8_t>(Byte(w, k, kByte))});
    });
  }
  static Words ScaleWord(const Words& w) { return w; }
  // Bytes 0 and 2, or 1 and 3, as two int16.
  static Words EvenBytes(const Words& w) {
    return PerRow([&](uint32_t k) { return w.v[k] & 0x00ff00ffu; });
  }
  static Words OddBytes(const Words& w) {
    return PerRow([&](uint32_t k) { return (w.v[k] >> 8) & 0x00ff00ffu; });
  }
  // The value that sums start from, in every lane; DotScaled wants it encoded by ScaledStart.
  static Words Start(const int32_t* x) {
    return PerRow([&](uint32_t) { return static_cast<uint32_t>(*x); });
  }
  static int32_t ScaledStart(int32_t x) { return x; }
  static Words ZeroWords() { return {}; }
  // start + sum over i < 4 * kWords of code i * y[i]. Unsigned codes are at most kMaxCode, signed
  // ones (as SignedCodes) within +-kMaxCode <= 128.
  template <uint32_t kWords, int kMaxCode, bool kSigned>
  static Words Dot(const Words& start, const Words* w, const int8_t* y) {
    return PerRow([&](uint32_t k) {
      int32_t sum = static_cast<int32_t>(start.v[k]);
      for (uint32_t i = 0; i < 4 * kWords; ++i) {
        const uint32_t byte = Byte(w[i / 4], k, i % 4);
        sum += (kSigned ? int32_t{static_cast<int8_t>(byte)} : static_cast<int32_t>(byte)) * y[i];
      }
      return static_cast<uint32_t>(sum);
    });
  }
  // acc + scale * (start + that sum); start only with kStart.
  template <uint32_t kWords, int kMaxCode, bool kSigned, bool kStart>
  static Words DotScaled(const Words& acc, const Words& scale, const int32_t* start, const Words* w,
                         const int8_t* y) {
    const Words first = kStart ? Start(start) : ZeroWords();
    const Words sum = Dot<kWords, kMaxCode, kSigned>(first, w, y);
    return PerRow([&](uint32_t k) { return acc.v[k] + scale.v[k] * sum.v[k]; });
  }
  // acc + low16(a) * low16(pair) + high16(a) * high16(pair), all int16.
  static Words MulAddPairs(const Words& acc, const Words& a, const int32_t* pair) {
    const uint32_t p = static_cast<uint32_t>(*pair);
    return PerRow([&](uint32_t k) {
      const int32_t sum = static_cast<int16_t>(a.v[k]) * static_cast<int16_t>(p) +
                          static_cast<int16_t>(a.v[k] >> 16) * static_cast<int16_t>(p >> 16);
      return acc.v[k] + static_cast<uint32_t>(sum);
    });
  }

  // ---- floats per row --------------------------------------------------------------------------
  // The binary16 in the low or high half of each lane, widened exactly.
  static RowsF HalfLow(const Words& w) {
    return PerRowF([&](uint32_t k) { return canonical::FromF16(static_cast<uint16_t>(w.v[k])); });
  }
  static RowsF HalfHigh(const Words& w) {
    return PerRowF(
        [&](uint32_t k) { return canonical::FromF16(static_cast<uint16_t>(w.v[k] >> 16)); });
  }
  static RowsF ToFloat(const Words& a) {
    return PerRowF([&](uint32_t k) { return static_cast<float>(static_cast<int32_t>(a.v[k])); });
  }
  static RowsF SetAll(float x) {
    return PerRowF([&](uint32_t) { return x; });
  }
  static RowsF Mul(const RowsF& a, const RowsF& b) {
    return PerRowF([&](uint32_t k) { return canonical::Mul(a.v[k], b.v[k]); });
  }
  static RowsF Add(const RowsF& a, const RowsF& b) {
    return PerRowF([&](uint32_t k) { return canonical::Add(a.v[k], b.v[k]); });
  }
  static RowsF Negate(const RowsF& a) {
    return PerRowF([&](uint32_t k) { return -a.v[k]; });
  }
  static RowsF LoadRows(const float* p) {
    return PerRowF([&](uint32_t k) { return p[k]; });
  }
  static void StoreRows(float* out, const RowsF& a) { std::memcpy(out, a.v, sizeof(a.v)); }

  // ---- the 32 canonical partials ---------------------------------------------------------------
  struct V32 {
    float v[32];
  };
  static V32 Zero32() { return {}; }
  static V32 Load32(const float* p) {
    V32 r;
    std::memcpy(r.v, p, sizeof(r.v));
    return r;
  }
  static V32 LoadF16x32(const uint8_t* p) {
    V32 r;
    for (int i = 0; i < 32; ++i)
      r.v[i] = canonical::FromF16(static_cast<uint16_t>(p[2 * i] | p[2 * i + 1] << 8));
    return r;
  }
  static V32 LoadBf16x32(const uint8_t* p) {
    V32 r;
    for (int i = 0; i < 32; ++i)
      r.v[i] = canonical::FromBf16(static_cast<uint16_t>(p[2 * i] | p[2 * i + 1] << 8));
    return r;
  }
  // acc[i] = fma(a[i], b[i], acc[i]).
  static V32 Fma32(const V32& a, const V32& b, V32 acc) {
    for (int i = 0; i < 32; ++i) acc.v[i] = canonical::Fma(a.v[i], b.v[i], acc.v[i]);
    return acc;
  }
  // The same for i < n; the other partials keep their bits (adding a zero could turn -0 into +0).
  static V32 FmaFirst32(const V32& a, const V32& b, V32 acc, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) acc.v[i] = canonical::Fma(a.v[i], b.v[i], acc.v[i]);
    return acc;
  }
  static float Join32(V32 a) { return canonical::JoinPartials(a.v); }

  // ---- 16 independent float lanes ---------------------------------------------------------------
  struct V16 {
    float v[16];
  };
  static V16 Load16(const float* p) {
    V16 r;
    std::memcpy(r.v, p, sizeof(r.v));
    return r;
  }
  static void Store16(float* p, const V16& a) { std::memcpy(p, a.v, sizeof(a.v)); }
  static V16 SetAll16(float x) {
    V16 r;
    for (int i = 0; i < 16; ++i) r.v[i] = x;
    return r;
  }
  static V16 Mul16(V16 a, const V16& b) {
    for (int i = 0; i < 16; ++i) a.v[i] = canonical::Mul(a.v[i], b.v[i]);
    return a;
  }
  static V16 Add16(V16 a, const V16& b) {
    for (int i = 0; i < 16; ++i) a.v[i] = canonical::Add(a.v[i], b.v[i]);
    return a;
  }
  static V16 Sub16(V16 a, const V16& b) {
    for (int i = 0; i < 16; ++i) a.v[i] = canonical::Sub(a.v[i], b.v[i]);
    return a;
  }
  static V16 Fma16(const V16& a, const V16& b, V16 c) {
    for (int i = 0; i < 16; ++i) c.v[i] = canonical::Fma(a.v[i], b.v[i], c.v[i]);
    return c;
  }
};

}  // namespace
}  // namespace lode
