// The vocabulary of simd/scalar.h (contracts there) for AVX2, AVX-VNNI, AVX-512 and AVX-512 VBMI,
// built from the primitives of reg256.h or reg512.h: one register per four code bytes of each row
// of a row group. What differs between the instruction sets is in the parts: integer products
// (dot_vnni.h, dot_madd.h) and signs and grids (signs.h, byte_planes.h). The including file defines
// LODE_SIMD_NAME and, where the machine has them, LODE_SIMD_512 (with VNNI), LODE_SIMD_VNNI (256
// bits, VEX encoding) and LODE_SIMD_VBMI.
#pragma once

#ifdef LODE_SIMD_512
#include "kernels/cpu/simd/reg512.h"
#else
#include "kernels/cpu/simd/reg256.h"
#endif
#if defined(LODE_SIMD_512) || defined(LODE_SIMD_VNNI)
#include "kernels/cpu/simd/dot_vnni.h"
#else
#include "kernels/cpu/simd/dot_madd.h"
#endif
#ifdef LODE_SIMD_VBMI
#include "kernels/cpu/simd/byte_planes.h"
#else
#include "kernels/cpu/simd/signs.h"
#endif
#include "kernels/canonical.h"
#include "kernels/cpu/decode/decode.h"

namespace lode {
namespace {

struct Simd : DotOps, SignOps {
  static constexpr const char* kName = LODE_SIMD_NAME;
  static constexpr uint32_t kRows = Reg::kLanes;
  static constexpr bool kManyRegisters = Reg::kLanes == 16;
  static constexpr uint32_t kFloatTile = Reg::kFloatTile;

  using Words = Reg::I;
  using RowsF = Reg::F;
  using Rows = Reg::Rows;

  static Rows RowsAt(const uint8_t* p, size_t stride) { return Reg::RowsAt(p, stride); }

  // ---- bytes of weights ------------------------------------------------------------------------
  static void LoadColumns(const Rows& rows, uint32_t offset, Words* out) {
    Reg::LoadColumns(rows, offset, out);
  }
  static void LoadColumns2(const Rows& rows, uint32_t offset, Words* out) {
#ifdef LODE_SIMD_512
    Reg::LoadColumns2(rows, offset, out);
#else
    Reg::LoadColumns(rows, offset, out);
    Reg::LoadColumns(rows, offset + 16, out + 4);
#endif
  }
  template <int kRight, uint32_t kMask>
  static Words Field32(Words w) {
    const Words moved = Reg::Shift32<kRight>(w);
    if constexpr (kMask == ~0u) return moved;
    return Reg::And(moved, Reg::Set32(kMask));
  }
  template <int kRight, uint8_t kMask>
  static Words Field(Words w) {
#ifdef LODE_SIMD_VBMI
    if constexpr (kRight != 0) return AffineBytes<FieldMatrix<kRight, kMask>()>(w);
#endif
    return Field32<kRight, kMask * 0x01010101u>(w);
  }
  static Words Or(Words a, Words b) { return Reg::Or(a, b); }
  static Words OrAll(Words a, uint32_t x) { return Reg::Or(a, Reg::Set32(x)); }
#ifdef LODE_SIMD_512
  // In every byte: bits of a where kMask is set, else of b.
  template <uint8_t kMask>
  static Words Select(Words a, Words b) {
    return Reg::Select(Reg::Set32(kMask * 0x01010101u), a, b);
  }
#endif
  template <uint8_t kValue>
  static Words SubBytes(Words a) {
    return Reg::Sub8(a, Reg::Set32(kValue * 0x01010101u));
  }
  static Words BlendHalves(Words a, Words b) { return Reg::Blend16(a, b); }
  // Adds 16 to byte i of word n where bit 4 n + i of `bits` is set; codes are nibbles.
  static void AddFifthBits(Words* codes, Words bits) {
#ifdef LODE_SIMD_VBMI
    Unroll<8>([&](auto n) __attribute__((always_inline)) {
      codes[n] = Select<0x10>(FourBitsToBit4<n>(bits), codes[n]);
    });
#else
    const Words value = Reg::Set32(0x10101010u);
    for (uint32_t b = 0; b < 4; ++b) {
      const Words spread = SpreadBytes(bits, b * 0x01010101u);
      codes[2 * b] = Reg::AddWhere(codes[2 * b], spread, Reg::Set32(0x08040201u), value);
      codes[2 * b + 1] = Reg::AddWhere(codes[2 * b + 1], spread, Reg::Set32(0x80402010u), value);
    }
#endif
  }
  static Words LookupSigned(const int8_t* table, Words w) {
    const Words biased = SignedCodes(Reg::Broadcast128(table));  // loop-invariant
    return Reg::Shuffle8(biased, w);
  }
  static void ArrangeCrumbs(const int8_t* y, int8_t* out) {
    alignas(16) static constexpr uint8_t kIndex[16] = {0, 4, 8,  12, 1, 5, 9,  13,
                                                       2, 6, 10, 14, 3, 7, 11, 15};
    const Words index = Reg::Broadcast128(kIndex);
    for (uint32_t i = 0; i < 64; i += 4 * Reg::kLanes)
      Reg::Store(out + i, Reg::Shuffle8(Reg::Load(y + i), index));
  }

  // ---- grids and signs
  // ---------------------------------------------------------------------------
  static Words Gather(const uint32_t* table, Words index) { return Reg::Gather(table, index); }
  static void ApplySigns(Words* magnitudes, Words signs) {
    for (uint32_t b = 0; b < 4; ++b) {
      const Words spread = SpreadBytes(signs, b * 0x01010101u);
      for (uint32_t i = 0; i < 2; ++i) {
        const Words pattern = Reg::Set32(i == 0 ? 0x08040201u : 0x80402010u);
        magnitudes[2 * b + i] =
            SignedCodes(Reg::NegateWhere(magnitudes[2 * b + i], spread, pattern));
      }
    }
  }

  // ---- exact integers per row ------------------------------------------------------------------
  static Words EvenBytes(Words w) { return Reg::And(w, Reg::Set32(0x00ff00ffu)); }
  static Words OddBytes(Words w) { return Reg::Shift16<8>(w); }
  static Words ZeroWords() { return Reg::Zero(); }
  static Words MulAddPairs(Words acc, Words a, const int32_t* pair) {
    return Reg::MulAddPairs(acc, a, Start(pair));
  }

  // ---- floats per row --------------------------------------------------------------------------
  static RowsF HalfLow(Words w) { return Reg::HalfLow(w); }
  static RowsF HalfHigh(Words w) { return Reg::HalfHigh(w); }
  static RowsF ToFloat(Words a) { return Reg::ToFloat(a); }
  static RowsF SetAll(float x) { return Reg::SetAll(x); }
  static RowsF Mul(RowsF a, RowsF b) { return Reg::Mul(a, b); }
  static RowsF Add(RowsF a, RowsF b) { return Reg::Add(a, b); }
  static RowsF Negate(RowsF a) { return Reg::Negate(a); }
  static RowsF LoadRows(const float* p) { return Reg::LoadF(p); }
  static void StoreRows(float* out, RowsF a) { Reg::StoreF(out, a); }

  // ---- the 32 canonical partials ---------------------------------------------------------------
  static constexpr uint32_t kV = 32 / Reg::kLanes;
  struct V32 {
    Reg::F v[kV];
  };
  static V32 Zero32() {
    V32 r;
    for (auto& v : r.v) v = Reg::SetAll(0.0f);
    return r;
  }
  static V32 Load32(const float* p) {
    V32 r;
    for (uint32_t i = 0; i < kV; ++i) r.v[i] = Reg::LoadF(p + i * Reg::kLanes);
    return r;
  }
  static V32 LoadF16x32(const uint8_t* p) {
    V32 r;
    for (uint32_t i = 0; i < kV; ++i) r.v[i] = Reg::LoadF16(p + 2 * i * Reg::kLanes);
    return r;
  }
  static V32 LoadBf16x32(const uint8_t* p) {
    V32 r;
    for (uint32_t i = 0; i < kV; ++i) r.v[i] = Reg::LoadBf16(p + 2 * i * Reg::kLanes);
    return r;
  }
  static V32 Fma32(V32 a, V32 b, V32 acc) {
    for (uint32_t i = 0; i < kV; ++i) acc.v[i] = Reg::Fma(a.v[i], b.v[i], acc.v[i]);
    return acc;
  }
  static V32 FmaFirst32(V32 a, V32 b, V32 acc, uint32_t n) {
    for (uint32_t i = 0; i < kV; ++i)
      acc.v[i] = Reg::FmaFirst(a.v[i], b.v[i], acc.v[i], static_cast<int32_t>(n - i * Reg::kLanes));
    return acc;
  }
  static float Join32(V32 a) {
    for (uint32_t half = kV / 2; half > 0; half /= 2)
      for (uint32_t i = 0; i < half; ++i) a.v[i] = Reg::Add(a.v[i], a.v[i + half]);
    return Reg::Join(a.v[0]);
  }

  // The same as even partials and odd ones: a word of two bf16 weights gives one of each.
#ifdef LODE_SIMD_512
  static constexpr bool kPairs32 = true;
  static V32 SplitPairs32(V32 a) { return Reg::SplitWords(a); }
  static V32 LoadBf16Pairs32(const uint8_t* p) {
    Words w = Reg::Load(p);
    asm("" : "+v"(w));  // one load: the compiler would make two operands in memory of it
    return {
        { Reg::AsFloat(Reg::Shift32<-16>(w)),
          Reg::AsFloat(Reg::And(w, Reg::Set32(0xffff0000u))) }};
  }
  static V32 FmaFirstPairs32(V32 a, V32 b, V32 acc, uint32_t n) {
    return {
        { Reg::FmaFirst(a.v[0], b.v[0], acc.v[0], static_cast<int32_t>((n + 1) / 2)),
          Reg::FmaFirst(a.v[1], b.v[1], acc.v[1], static_cast<int32_t>(n / 2)) }};
  }
  static float JoinPairs32(V32 a) { return canonical::Add(Reg::Join(a.v[0]), Reg::Join(a.v[1])); }
#else
  static constexpr bool kPairs32 = false;
#endif

  // ---- 16 independent float lanes ---------------------------------------------------------------
  static constexpr uint32_t kW = 16 / Reg::kLanes;
  struct V16 {
    Reg::F v[kW];
  };
  template <class Op>
  static V16 Each(Op op) {
    V16 r;
    for (uint32_t i = 0; i < kW; ++i) r.v[i] = op(i);
    return r;
  }
  static V16 Load16(const float* p) {
    return Each([&](uint32_t i) { return Reg::LoadF(p + i * Reg::kLanes); });
  }
  static void Store16(float* p, V16 x) {
    for (uint32_t i = 0; i < kW; ++i) Reg::StoreF(p + i * Reg::kLanes, x.v[i]);
  }
  static V16 SetAll16(float x) {
    return Each([&](uint32_t) { return Reg::SetAll(x); });
  }
  static V16 Mul16(V16 x, V16 y) {
    return Each([&](uint32_t i) { return Reg::Mul(x.v[i], y.v[i]); });
  }
  static V16 Add16(V16 x, V16 y) {
    return Each([&](uint32_t i) { return Reg::Add(x.v[i], y.v[i]); });
  }
  static V16 Sub16(V16 x, V16 y) {
    return Each([&](uint32_t i) { return Reg::Sub(x.v[i], y.v[i]); });
  }
  static V16 Fma16(V16 x, V16 y, V16 z) {
    return Each([&](uint32_t i) { return Reg::Fma(x.v[i], y.v[i], z.v[i]); });
  }
};

}  // namespace
}  // namespace lode
