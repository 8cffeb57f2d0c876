// Matrix-vector kernels of the term-order measurement: W (Q8_0 or Q4_K, GGUF bytes, 2,560 columns)
// times 1..8 quantised rows.
//   Dp4a<ordered>: exact block sums by dp4a, block terms added in ascending block order into one
//   fp32 accumulator. Dp4a<free>:    the same loads and block sums, per-lane fp32 partial sums
//   (fma) and a shuffle tree. Mma (ordered): exact block sums on the s8 tensor cores; every output
//   lives in one lane, so the order costs nothing.
// All share one skeleton: a warp owns a tile of weight rows, pulls it step by step through a
// private ring of shared memory (cp.async), no block-wide barrier after the start. Roofline: weight
// bytes / device bandwidth (2.1 GB: 0.5 ms at 4.3 TB/s). Unaligned Q8_0 blocks: a block is 34
// bytes, so odd blocks start in the middle of a word. Both parities read the nine aligned words
// that cover the block; codes are permuted inside the block (CodeAtPosition) so that one byte
// permute per block suffices. Activations are permuted alike; an integer sum does not care.
#pragma once

#include "kernels/canonical.h"
#include "tests/device/term_order/intrinsics.cuh"

namespace lode::term_order {

inline constexpr int kColumns = 2560;
inline constexpr int kQ8Blocks = kColumns / 32;
inline constexpr int kQ8RowBytes = kQ8Blocks * 34;
inline constexpr int kQ4Blocks = kColumns / 256;
inline constexpr int kQ4BlockBytes = 144;
inline constexpr int kQ4RowBytes = kQ4Blocks * kQ4BlockBytes;
inline constexpr int kActsMax = 8;
inline constexpr int kRowTile = 16;                    // rows of W must be a multiple
inline constexpr size_t kSharedBytesMax = 227 * 1024;  // dynamic shared memory of one sm_90 block

// Q8_0: which code of its block (0..31) sits at `position` of the permuted order; word 0 is the one
// that straddles.
inline constexpr int CodeAtPosition(bool odd_block, int position) {
  const int word = position / 4, byte = position % 4;
  if (odd_block) return word == 0 ? 28 + byte : 4 * (word - 1) + byte;
  return word == 0 ? (byte < 2 ? byte : 28 + byte) : 4 * word - 2 + byte;
}
// First of the nine aligned words that cover block b of a word-aligned row (34 b bytes = 8.5 b
// words).
LODE_DEV uint32_t Q8FirstWord(uint32_t b) { return (17 * b) >> 1; }
LODE_DEV uint32_t Q8Selector(uint32_t b) { return (b & 1) ? 0x7654u : 0x5432u; }
LODE_DEV float Q8Scale(uint32_t b, uint32_t word0) {
  return HalfBitsToFloat((b & 1) ? word0 >> 16 : word0 & 0xffffu);
}

// Integer -> float through the mantissa: exact for |x| < 2^22; a Q8_0 block sum is at most 32 * 128
// * 127 = 520,192.
inline constexpr int kMagicBits = 0x4b400000;  // 1.5 * 2^23
LODE_DEV float FromMagic(int bits) {
  return canonical::Sub(canonical::FromBits(static_cast<uint32_t>(bits)), 12582912.0f);
}

// Eight 6-bit scales and minima of a Q4_K block as bytes: s[0] groups 0..3, s[1] groups 4..7, m
// alike.
struct Q4Scales {
  uint32_t s[2], m[2];
  float d, dmin;
};
LODE_DEV Q4Scales DecodeQ4(uint4 header) {
  Q4Scales out;
  out.d = HalfBitsToFloat(header.x & 0xffffu);
  out.dmin = HalfBitsToFloat(header.x >> 16);
  out.s[0] = header.y & 0x3f3f3f3fu;
  out.m[0] = header.z & 0x3f3f3f3fu;
  out.s[1] = (header.w & 0x0f0f0f0fu) | ((header.y >> 2) & 0x30303030u);
  out.m[1] = ((header.w >> 4) & 0x0f0f0f0fu) | ((header.z >> 2) & 0x30303030u);
  return out;
}
LODE_DEV int ByteOf(const uint32_t (&words)[2], int i) {
  return static_cast<int>((words[i / 4] >> (8 * (i % 4))) & 0xffu);
}
LODE_DEV float Q4Term(int isum, int msum, float d, float dmin, float d_act) {
  using namespace canonical;
  return Sub(Mul(static_cast<float>(isum), Mul(d, d_act)),
             Mul(static_cast<float>(msum), Mul(dmin, d_act)));
}

// ---- the skeleton ----
// K: kWarps, kStages, kRows (rows of a tile), kPiece (bytes of a row per step), kStride (the same
// in shared memory), kSteps, kRowBytes, kActBytes (packed activations), kScratch (bytes per warp);
// State, Step, Finish.
template <class K>
inline constexpr size_t kGemvShared = K::kActBytes +
                                      K::kWarps*(K::kStages* K::kRows* K::kStride + K::kScratch);

template <class K>
LODE_DEV void IssuePiece(uint8_t* slot, const uint8_t* tile, uint32_t step, uint32_t lane) {
  constexpr uint32_t kChunks = K::kPiece / 16;
  const uint8_t* from = tile + step * K::kPiece;
#pragma unroll
  for (uint32_t k = 0; k < (K::kRows * kChunks + 31) / 32; ++k) {
    const uint32_t i = lane + 32 * k, row = i / kChunks, at = i % kChunks * 16;
    if (row < K::kRows)
      CopyAsync16(slot + row * K::kStride + at,
                  from + static_cast<size_t>(row) * K::kRowBytes + at);
  }
}

template <class K>
__global__ void __launch_bounds__(K::kWarps * 32, 1)
    GemvKernel(const uint8_t* __restrict__ w, const uint8_t* __restrict__ packed_acts,
               float* __restrict__ y, uint32_t n_rows) {
  static_assert(K::kPiece % 16 == 0 && K::kStride % 16 == 0 && K::kActBytes % 16 == 0 &&
                K::kScratch % 16 == 0);
  uint8_t* shared = DynamicShared();
  const uint32_t lane = ThreadIndex() % 32, warp = ThreadIndex() / 32;
  for (uint32_t i = ThreadIndex(); i < K::kActBytes / 16; i += K::kWarps * 32) {
    reinterpret_cast<uint4*>(shared)[i] = reinterpret_cast<const uint4*>(packed_acts)[i];
  }
  SyncBlock();
  constexpr uint32_t kSlot = K::kRows * K::kStride;
  uint8_t* ring = shared + K::kActBytes + warp * (K::kStages * kSlot + K::kScratch);
  float* scratch = reinterpret_cast<float*>(ring + K::kStages * kSlot);

  const uint32_t n_tiles = n_rows / K::kRows, stride = BlockCount() * K::kWarps;
  uint32_t tile = BlockIndex() * K::kWarps + warp;          // being computed
  uint32_t next_tile = tile, next_step = 0, next_slot = 0;  // being copied
  const auto issue = [&] {
    if (next_tile < n_tiles) {
      IssuePiece<K>(ring + next_slot * kSlot,
                    w + static_cast<size_t>(next_tile) * K::kRows * K::kRowBytes, next_step, lane);
    }
    CopyCommit();  // an empty group keeps the count right at the end
    next_slot = next_slot + 1 == K::kStages ? 0 : next_slot + 1;
    if (++next_step == K::kSteps) {
      next_step = 0;
      next_tile += stride;
    }
  };
  for (int i = 0; i < K::kStages - 1; ++i) issue();
  uint32_t slot = 0;
  typename K::State state;
  for (; tile < n_tiles; tile += stride) {
    for (uint32_t step = 0; step < K::kSteps; ++step) {
      CopyWait<K::kStages - 2>();
      SyncWarp();  // the piece is visible to all lanes, and all lanes have left the slot that is
                   // refilled now
      issue();
      K::Step(state, ring + slot * kSlot, step, shared, scratch, lane);
      slot = slot + 1 == K::kStages ? 0 : slot + 1;
    }
    K::Finish(state, y, tile * K::kRows, n_rows, lane);
  }
}

// ---- Q8_0 by dp4a ----
// A step is 16 block columns of 8 rows: lane = (half h, column c) holds one block of four rows.
// Packed activations: codes [act][word half][80 columns][16 bytes], then scales [act][80].
template <int kActs, bool kOrdered, int kW, int kS>
struct Q8Dp4a {
  static constexpr int kWarps = kW, kStages = kS, kRows = 8, kPiece = 16 * 34, kStride = kPiece,
                       kSteps = 5;
  static constexpr int kRowBytes = kQ8RowBytes, kActBytes = kActs * (kColumns + kQ8Blocks * 4);
  static constexpr int kChains = kRows * kActs;  // chain = act * 8 + row
  static constexpr int kTermStride =
      20;  // 16 terms + 4: both the writes by column and the float4 reads by chain
  static constexpr int kScratch = kOrdered ? kChains * kTermStride * 4 : 0;
  static constexpr int kAccs = kOrdered ? (kChains + 31) / 32 : 4 * kActs;
  struct State {
    float acc[kAccs];
  };
  // Rows of the two halves are two apart: 16 banks, which makes the nine word loads free of bank
  // conflicts.
  LODE_DEV uint32_t Row(uint32_t h, int r) { return (r >> 1) * 4 + h * 2 + (r & 1); }

  LODE_DEV void Step(State& state, const uint8_t* stage, uint32_t step, const uint8_t* acts,
                     float* scratch, uint32_t lane) {
    const uint32_t c = lane % 16, h = lane / 16, column = step * 16 + c;
    uint32_t code[4][8];
    float dw[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const uint32_t* words =
          reinterpret_cast<const uint32_t*>(stage + Row(h, r) * kStride) + Q8FirstWord(c);
      const uint32_t w0 = words[0];
#pragma unroll
      for (int i = 1; i < 8; ++i) code[r][i] = words[i];
      code[r][0] = BytePermute(w0, words[8], Q8Selector(c));
      dw[r] = Q8Scale(c, w0);
    }
    if (step == 0) {
#pragma unroll
      for (int i = 0; i < kAccs; ++i) state.acc[i] = 0.0f;
    }
    const uint4* q = reinterpret_cast<const uint4*>(acts) + column;
    const float* d = reinterpret_cast<const float*>(acts + kActs * kColumns) + column;
#pragma unroll
    for (int a = 0; a < kActs; ++a) {
      const uint4 lo = q[(2 * a) * kQ8Blocks], hi = q[(2 * a + 1) * kQ8Blocks];
      const float da = d[a * kQ8Blocks];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        int isum = Dp4a(code[r][0], lo.x, 0);
        isum = Dp4a(code[r][1], lo.y, isum);
        isum = Dp4a(code[r][2], lo.z, isum);
        isum = Dp4a(code[r][3], lo.w, isum);
        isum = Dp4a(code[r][4], hi.x, isum);
        isum = Dp4a(code[r][5], hi.y, isum);
        isum = Dp4a(code[r][6], hi.z, isum);
        isum = Dp4a(code[r][7], hi.w, isum);
        const float f = static_cast<float>(isum);
        if constexpr (kOrdered) {
          scratch[(a * 8 + Row(h, r)) * kTermStride + c] =
              canonical::Mul(f, canonical::Mul(dw[r], da));
        } else {
          state.acc[r * kActs + a] = canonical::Fma(f, dw[r] * da, state.acc[r * kActs + a]);
        }
      }
    }
    if constexpr (kOrdered) AddInOrder(state, scratch, lane);
  }

  LODE_DEV void AddInOrder(State& state, const float* scratch, uint32_t lane) {
    SyncWarp();
#pragma unroll
    for (int i = 0; i < kAccs; ++i) {
      const uint32_t chain = lane + 32 * i;
      if (chain >= kChains) continue;
      const float4* terms = reinterpret_cast<const float4*>(scratch + chain * kTermStride);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float4 t = terms[k];
        state.acc[i] = canonical::Add(state.acc[i], t.x);
        state.acc[i] = canonical::Add(state.acc[i], t.y);
        state.acc[i] = canonical::Add(state.acc[i], t.z);
        state.acc[i] = canonical::Add(state.acc[i], t.w);
      }
    }
    // The next step's barrier (before its terms are written) keeps these reads and those writes
    // apart.
  }

  LODE_DEV void Finish(State& state, float* y, uint32_t row0, uint32_t n_rows, uint32_t lane) {
    if constexpr (kOrdered) {
#pragma unroll
      for (int i = 0; i < kAccs; ++i) {
        const uint32_t chain = lane + 32 * i;
        if (chain < kChains)
          y[static_cast<size_t>(chain / 8) * n_rows + row0 + chain % 8] = state.acc[i];
      }
    } else {
      FinishFree(state, y, row0, n_rows, lane);
    }
  }

  // Sums over the 16 lanes of a half. While a lane holds several values, each exchange also halves
  // their number, so the tree costs about one shuffle per value.
  LODE_DEV void FinishFree(State& state, float* y, uint32_t row0, uint32_t n_rows, uint32_t lane) {
    constexpr int kValues = 4 * kActs;
    int first = 0;
    int held = kValues;
    bool writes = true;
#pragma unroll
    for (int level = 0; level < 4; ++level) {
      const uint32_t mask = 8u >> level;
      const bool upper = (lane & mask) != 0;
      if (held > 1) {
        held /= 2;
        if (upper) first += held;
#pragma unroll
        for (int i = 0; i < kValues / 2; ++i) {
          if (i >= held) continue;
          const float keep = upper ? state.acc[i + held] : state.acc[i];
          const float send = upper ? state.acc[i] : state.acc[i + held];
          state.acc[i] = keep + ShuffleXor(send, mask);
        }
      } else {
        state.acc[0] += ShuffleXor(state.acc[0], mask);
        writes = writes && !upper;
      }
    }
    constexpr int kLeft = kValues >= 16 ? kValues / 16 : 1;
#pragma unroll
    for (int i = 0; i < kLeft; ++i) {
      const uint32_t a = (first + i) % kActs, row = Row(lane / 16, (first + i) / kActs);
      if (writes) y[static_cast<size_t>(a) * n_rows + row0 + row] = state.acc[i];
    }
  }
};

// ---- Q4_K by dp4a ----
// A step is 2 block columns of 16 rows: lane = (column c, row r) holds one whole block. Packed
// activations: codes [act][10][272 bytes] (16 bytes of padding against bank conflicts), int16 sums
// of 32 [act][10][8], scales [act][10].
inline constexpr int kQ4ActStride = 272;
template <int kActs>
inline constexpr int kQ4ActBytes = kActs* kQ4Blocks*(kQ4ActStride + 16) +
                                   (kActs * kQ4Blocks * 4 + 15) / 16 * 16;

template <int kActs, bool kOrdered, int kW, int kS>
struct Q4Dp4a {
  static constexpr int kWarps = kW, kStages = kS, kRows = 16, kPiece = 2 * kQ4BlockBytes,
                       kStride = kPiece + 16, kSteps = 5;
  static constexpr int kRowBytes = kQ4RowBytes, kActBytes = kQ4ActBytes<kActs>, kScratch = 0;
  struct State {
    float acc[kActs];
  };

  LODE_DEV void Step(State& state, const uint8_t* stage, uint32_t step, const uint8_t* acts, float*,
                     uint32_t lane) {
    const uint32_t r = lane % 16, c = lane / 16, column = step * 2 + c;
    const uint4* block = reinterpret_cast<const uint4*>(stage + r * kStride + c * kQ4BlockBytes);
    const Q4Scales w = DecodeQ4(block[0]);
    int isum[kActs] = {}, msum[kActs] = {};
    const uint8_t* codes = acts + column * kQ4ActStride;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const uint4 q0 = block[1 + 2 * p], q1 = block[2 + 2 * p];
      const uint32_t q[8] = {q0.x, q0.y, q0.z, q0.w, q1.x, q1.y, q1.z, q1.w};
      const int s_low = ByteOf(w.s, 2 * p), s_high = ByteOf(w.s, 2 * p + 1);
#pragma unroll
      for (int a = 0; a < kActs; ++a) {
        const uint4* act =
            reinterpret_cast<const uint4*>(codes + a * kQ4Blocks * kQ4ActStride + p * 64);
        const uint4 a0 = act[0], a1 = act[1], a2 = act[2], a3 = act[3];
        const uint32_t low[8] = {a0.x, a0.y, a0.z, a0.w, a1.x, a1.y, a1.z, a1.w};
        const uint32_t high[8] = {a2.x, a2.y, a2.z, a2.w, a3.x, a3.y, a3.z, a3.w};
        int dot_low = 0, dot_high = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          dot_low = Dp4a(q[i] & 0x0f0f0f0fu, low[i], dot_low);
          dot_high = Dp4a((q[i] >> 4) & 0x0f0f0f0fu, high[i], dot_high);
        }
        isum[a] += s_low * dot_low + s_high * dot_high;
      }
    }
    const uint4* sums =
        reinterpret_cast<const uint4*>(acts + kActs * kQ4Blocks * kQ4ActStride) + column;
    const float* d =
        reinterpret_cast<const float*>(acts + kActs * kQ4Blocks * (kQ4ActStride + 16)) + column;
    float term[kActs];
#pragma unroll
    for (int a = 0; a < kActs; ++a) {
      const uint4 b = sums[a * kQ4Blocks];
      msum[a] = Dp2aHigh(b.y, w.m[0], Dp2aLow(b.x, w.m[0], 0));
      msum[a] = Dp2aHigh(b.w, w.m[1], Dp2aLow(b.z, w.m[1], msum[a]));
      if constexpr (kOrdered) term[a] = Q4Term(isum[a], msum[a], w.d, w.dmin, d[a * kQ4Blocks]);
    }
    if (step == 0) {
#pragma unroll
      for (int a = 0; a < kActs; ++a) state.acc[a] = 0.0f;
    }
#pragma unroll
    for (int a = 0; a < kActs; ++a) {
      if constexpr (kOrdered) {
        AddPair(state, term, a, c);
      } else {
        const float da = d[a * kQ4Blocks];
        state.acc[a] = canonical::Fma(static_cast<float>(isum[a]), w.d * da, state.acc[a]);
        state.acc[a] = canonical::Fma(-static_cast<float>(msum[a]), w.dmin * da, state.acc[a]);
      }
    }
  }

  // The two lanes of a row share the acts (even ones column 0's lane, odd ones column 1's): one
  // shuffle serves two chains.
  LODE_DEV void AddPair(State& state, const float (&term)[kActs], int a, uint32_t c) {
    if (a % 2 != 0) return;
    const float mine = (c == 0 || a + 1 >= kActs) ? term[a] : term[(a + 1) % kActs];
    const float given = (c == 0 && a + 1 < kActs) ? term[(a + 1) % kActs] : term[a];
    const float other = ShuffleXor(given, 16);
    const float first = c == 0 ? mine : other, second = c == 0 ? other : mine;
    state.acc[a] = canonical::Add(canonical::Add(state.acc[a], first), second);
  }

  LODE_DEV void Finish(State& state, float* y, uint32_t row0, uint32_t n_rows, uint32_t lane) {
    const uint32_t r = lane % 16, c = lane / 16;
#pragma unroll
    for (int a = 0; a < kActs; ++a) {
      if constexpr (kOrdered) {
        const uint32_t act = a + c;  // acc[a] of an even a holds act a (column 0's lane) or a + 1
        if (a % 2 == 0 && act < kActs)
          y[static_cast<size_t>(act) * n_rows + row0 + r] = state.acc[a];
      } else {
        const float sum = state.acc[a] + ShuffleXor(state.acc[a], 16);
        if (c == 0) y[static_cast<size_t>(a) * n_rows + row0 + r] = sum;
      }
    }
  }
};

// ---- both formats on the tensor cores ----
// 16 rows
// x 8 activation rows per warp (unused activation rows are zero and not stored). Packed
// activations, both formats: fragments [32-column group][lane] of two words, then per block what
// the epilogue needs.
inline constexpr int kFragmentBytes = kColumns * kActsMax;

template <int kActs>
LODE_DEV void StoreFragment(const float (&acc)[4], float* y, uint32_t row0, uint32_t n_rows,
                            uint32_t lane) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t act = 2 * (lane % 4) + i % 2, row = lane / 4 + 8 * (i / 2);
    if (act < kActs) y[static_cast<size_t>(act) * n_rows + row0 + row] = acc[i];
  }
}

template <int kActs, int kW, int kS>
struct Q8Mma {
  static constexpr int kWarps = kW, kStages = kS, kRows = 16, kPiece = 16 * 34,
                       kStride = kPiece + 16, kSteps = 5;
  static constexpr int kRowBytes = kQ8RowBytes,
                       kActBytes = kFragmentBytes + kQ8Blocks * kActsMax * 4, kScratch = 0;
  struct State {
    float acc[4];
  };

  LODE_DEV void Step(State& state, const uint8_t* stage, uint32_t step, const uint8_t* acts, float*,
                     uint32_t lane) {
    const uint32_t g = lane / 4, t = lane % 4;
    if (step == 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) state.acc[i] = 0.0f;
    }
    const uint32_t* row_low = reinterpret_cast<const uint32_t*>(stage + g * kStride);
    const uint32_t* row_high = reinterpret_cast<const uint32_t*>(stage + (g + 8) * kStride);
    const uint2* fragments = reinterpret_cast<const uint2*>(acts) + step * 16 * 32 + lane;
    const float2* scales =
        reinterpret_cast<const float2*>(acts + kFragmentBytes) + step * 16 * 4 + t;
    const int magic[4] = {kMagicBits, kMagicBits, kMagicBits, kMagicBits};
#pragma unroll 4
    for (uint32_t b = 0; b < 16; ++b) {
      const uint32_t* low = row_low + Q8FirstWord(b);
      const uint32_t* high = row_high + Q8FirstWord(b);
      const uint32_t low0 = low[0], high0 = high[0];
      uint32_t a[4] = {low[t], high[t], low[4 + t], high[4 + t]};
      const uint32_t low_straddle = BytePermute(low0, low[8], Q8Selector(b));
      const uint32_t high_straddle = BytePermute(high0, high[8], Q8Selector(b));
      a[0] = t == 0 ? low_straddle : a[0];
      a[1] = t == 0 ? high_straddle : a[1];
      const uint2 fragment = fragments[b * 32];
      const uint32_t bb[2] = {fragment.x, fragment.y};
      int isum[4];
      MmaS8(isum, a, bb, magic);
      const float d_low = Q8Scale(b, low0), d_high = Q8Scale(b, high0);
      const float2 da = scales[b * 4];
      using namespace canonical;
      state.acc[0] = Add(state.acc[0], Mul(FromMagic(isum[0]), Mul(d_low, da.x)));
      state.acc[1] = Add(state.acc[1], Mul(FromMagic(isum[1]), Mul(d_low, da.y)));
      state.acc[2] = Add(state.acc[2], Mul(FromMagic(isum[2]), Mul(d_high, da.x)));
      state.acc[3] = Add(state.acc[3], Mul(FromMagic(isum[3]), Mul(d_high, da.y)));
    }
  }

  LODE_DEV void Finish(State& state, float* y, uint32_t row0, uint32_t n_rows, uint32_t lane) {
    StoreFragment<kActs>(state.acc, y, row0, n_rows, lane);
  }
};

template <int kActs, int kW, int kS>
struct Q4Mma {
  static constexpr int kWarps = kW, kStages = kS, kRows = 16, kPiece = 2 * kQ4BlockBytes,
                       kStride = kPiece + 16, kSteps = 5;
  static constexpr int kRowBytes = kQ4RowBytes, kScratch = 0;
  static constexpr int kSumBytes = kQ4Blocks * kActsMax * 16;  // int16 sums of 32, [block][act][8]
  static constexpr int kActBytes = kFragmentBytes + kSumBytes + kQ4Blocks * kActsMax * 4;
  struct State {
    float acc[4];
  };

  LODE_DEV void Step(State& state, const uint8_t* stage, uint32_t step, const uint8_t* acts, float*,
                     uint32_t lane) {
    const uint32_t g = lane / 4, t = lane % 4;
    if (step == 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) state.acc[i] = 0.0f;
    }
    const int zero[4] = {0, 0, 0, 0};
#pragma unroll
    for (uint32_t c = 0; c < 2; ++c) {
      const uint32_t column = step * 2 + c;
      const uint8_t* low = stage + g * kStride + c * kQ4BlockBytes;
      const uint8_t* high = low + 8 * kStride;
      const Q4Scales w[2] = {DecodeQ4(*reinterpret_cast<const uint4*>(low)),
                             DecodeQ4(*reinterpret_cast<const uint4*>(high))};
      const uint32_t* q_low = reinterpret_cast<const uint32_t*>(low + 16) + t;
      const uint32_t* q_high = reinterpret_cast<const uint32_t*>(high + 16) + t;
      const uint2* fragments = reinterpret_cast<const uint2*>(acts) + column * 8 * 32 + lane;
      int isum[4] = {0, 0, 0, 0};
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const uint32_t q[4] = {q_low[8 * p], q_high[8 * p], q_low[8 * p + 4], q_high[8 * p + 4]};
#pragma unroll
        for (int n = 0; n < 2; ++n) {  // low nibbles: group 2p, high nibbles: group 2p + 1
          const uint32_t a[4] = {(q[0] >> (4 * n)) & 0x0f0f0f0fu, (q[1] >> (4 * n)) & 0x0f0f0f0fu,
                                 (q[2] >> (4 * n)) & 0x0f0f0f0fu, (q[3] >> (4 * n)) & 0x0f0f0f0fu};
          const uint2 fragment = fragments[(2 * p + n) * 32];
          const uint32_t bb[2] = {fragment.x, fragment.y};
          int dot[4];
          MmaS8(dot, a, bb, zero);
#pragma unroll
          for (int i = 0; i < 4; ++i) isum[i] += ByteOf(w[i / 2].s, 2 * p + n) * dot[i];
        }
      }
      const uint4* sums =
          reinterpret_cast<const uint4*>(acts + kFragmentBytes) + column * kActsMax + 2 * t;
      const float* d = reinterpret_cast<const float*>(acts + kFragmentBytes + kSumBytes) +
                       column * kActsMax + 2 * t;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 s = sums[i % 2];
        const Q4Scales& row = w[i / 2];
        int msum = Dp2aHigh(s.y, row.m[0], Dp2aLow(s.x, row.m[0], 0));
        msum = Dp2aHigh(s.w, row.m[1], Dp2aLow(s.z, row.m[1], msum));
        state.acc[i] =
            canonical::Add(state.acc[i], Q4Term(isum[i], msum, row.d, row.dmin, d[i % 2]));
      }
    }
  }

  LODE_DEV void Finish(State& state, float* y, uint32_t row0, uint32_t n_rows, uint32_t lane) {
    StoreFragment<kActs>(state.acc, y, row0, n_rows, lane);
  }
};

}  // namespace lode::term_order
