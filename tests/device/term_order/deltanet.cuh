// Gated DeltaNet in step form at the flagship's shape, one layer: 48 value heads x 128 keys x 128
// values, q and k from 16 heads (value head j reads head j mod 16). Per token and head:
//   S <- g S;  r[v] = sum_k kn[k] S[k][v];  S[k][v] <- fma(kn[k], beta (v - r[v]), S[k][v]);  o[v]
//   = sum_k qn[k] S[k][v]. canonical: each sum is 32 interleaved fma partials (k mod 32) joined by
//   the tree 16-8-4-2-1. free:      each lane's 32 keys in one running fma, then two shuffles.
// Columns v are independent and the state stays in registers: four lanes share a column, lane l
// holds the keys of residue l mod 4, i.e. the 8 partials l, l+4, .., l+28. Levels 16, 8, 4 of the
// tree are additions inside a lane, 2 and 1 shuffles. Bound: 4 fma-class operations per state
// element and token: 3.1 M per token, 0.1 us on 132 x 128 lanes; the dependent chain of a token
// (decay, sum, shuffles, update) is what really costs.
#pragma once

#include "kernels/canonical.h"
#include "tests/device/term_order/intrinsics.cuh"

namespace lode::term_order {

inline constexpr int kHeads = 48, kQkHeads = 16, kKeys = 128, kValues = 128;
inline constexpr int kDeltaWarps = 2, kDeltaThreads = kDeltaWarps * 32;
inline constexpr int kBlockColumns = kDeltaWarps * 8;  // value columns per block of threads
inline constexpr int kDeltaBlocks = kHeads * (kValues / kBlockColumns);
inline constexpr int kDeltaChunk = 16;  // tokens per shared-memory stage
inline constexpr int kLaneKeys = 36;    // 32 keys of one residue + 4: four lanes, four bank groups
inline constexpr int kTokenFloats =
    2 * 4 * kLaneKeys + kBlockColumns + 4;  // kn, qn by residue; v; g, beta, pad
inline constexpr int kDeltaShared = 2 * kDeltaChunk * kTokenFloats * 4;

struct DeltaArgs {
  const float* q;     // [tokens][16][128] normalised
  const float* k;     // [tokens][16][128] normalised
  const float* v;     // [tokens][48][128]
  const float* g;     // [tokens][48]
  const float* beta;  // [tokens][48]
  float* state;       // [48][128 keys][128 values], updated
  float* o;           // [tokens][48][128]
  uint32_t tokens;    // a multiple of kDeltaChunk
};

LODE_DEV void DeltaIssue(float* stage, const DeltaArgs& args, uint32_t token0, uint32_t head,
                         uint32_t column0) {
  const uint32_t qk_head = head % kQkHeads;
  for (uint32_t i = ThreadIndex(); i < kDeltaChunk * kKeys; i += kDeltaThreads) {
    const uint32_t token = i / kKeys, key = i % kKeys;
    const size_t from = (static_cast<size_t>(token0 + token) * kQkHeads + qk_head) * kKeys + key;
    float* to = stage + token * kTokenFloats + key % 4 * kLaneKeys + key / 4;
    CopyAsync4(to, args.k + from);
    CopyAsync4(to + 4 * kLaneKeys, args.q + from);
  }
  for (uint32_t i = ThreadIndex(); i < kDeltaChunk * kBlockColumns; i += kDeltaThreads) {
    const uint32_t token = i / kBlockColumns, column = i % kBlockColumns;
    CopyAsync4(stage + token * kTokenFloats + 8 * kLaneKeys + column,
               args.v + (static_cast<size_t>(token0 + token) * kHeads + head) * kValues + column0 +
                   column);
  }
  for (uint32_t token = ThreadIndex(); token < kDeltaChunk; token += kDeltaThreads) {
    float* to = stage + token * kTokenFloats + 8 * kLaneKeys + kBlockColumns;
    CopyAsync4(to, args.g + static_cast<size_t>(token0 + token) * kHeads + head);
    CopyAsync4(to + 1, args.beta + static_cast<size_t>(token0 + token) * kHeads + head);
  }
}

// Element j of a lane is key 4 j + l: partial (4 j + l) mod 32, i.e. in-lane partial j mod 8, four
// terms each (j = p, p+8, ..).
template <bool kCanonical>
LODE_DEV float ColumnSum(const float* x, const float (&s)[32]) {
  using namespace canonical;
  const float4* x4 = reinterpret_cast<const float4*>(x);
  float p[8] = {};
#pragma unroll
  for (int j = 0; j < 32; j += 4) {
    const float4 f = x4[j / 4];
    const float e[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int partial = kCanonical ? (j + i) % 8 : 0;
      p[partial] = Fma(e[i], s[j + i], p[partial]);
    }
  }
  if constexpr (kCanonical) {
#pragma unroll
    for (int w = 4; w >= 1; w /= 2) {  // tree levels 16, 8, 4: partials l + 4 p and l + 4 (p + w)
#pragma unroll
      for (int i = 0; i < w; ++i) p[i] = Add(p[i], p[i + w]);
    }
  }
  // Levels 2 and 1: residues l and l + 2, then l and l + 1. IEEE addition commutes, so every lane
  // gets the tree's bits.
  p[0] = Add(p[0], ShuffleXor(p[0], 2));
  return Add(p[0], ShuffleXor(p[0], 1));
}

template <bool kCanonical>
__global__ void __launch_bounds__(kDeltaThreads) DeltaKernel(DeltaArgs args) {
  using namespace canonical;
  float* shared = reinterpret_cast<float*>(DynamicShared());
  const uint32_t lane = ThreadIndex() % 32, l = lane % 4, local_column = ThreadIndex() / 4;
  const uint32_t head = BlockIndex() / (kValues / kBlockColumns);
  const uint32_t column0 = BlockIndex() % (kValues / kBlockColumns) * kBlockColumns,
                 column = column0 + local_column;
  float* state = args.state + static_cast<size_t>(head) * kKeys * kValues + column;
  float s[32];
#pragma unroll
  for (int j = 0; j < 32; ++j) s[j] = state[static_cast<size_t>(4 * j + l) * kValues];

  DeltaIssue(shared, args, 0, head, column0);
  CopyCommit();
  const uint32_t n_chunks = args.tokens / kDeltaChunk;
  for (uint32_t chunk = 0; chunk < n_chunks; ++chunk) {
    CopyWait<0>();
    SyncBlock();  // this chunk has arrived, and everybody has left the other stage
    if (chunk + 1 < n_chunks) {
      DeltaIssue(shared + (chunk + 1) % 2 * kDeltaChunk * kTokenFloats, args,
                 (chunk + 1) * kDeltaChunk, head, column0);
    }
    CopyCommit();
    const float* token = shared + chunk % 2 * kDeltaChunk * kTokenFloats;
    float* o =
        args.o + (static_cast<size_t>(chunk) * kDeltaChunk * kHeads + head) * kValues + column;
#pragma unroll 1
    for (int i = 0; i < kDeltaChunk; ++i, token += kTokenFloats, o += kHeads * kValues) {
      const float* scalars = token + 8 * kLaneKeys + kBlockColumns;
      const float g = scalars[0], beta = scalars[1], v = token[8 * kLaneKeys + local_column];
#pragma unroll
      for (int j = 0; j < 32; ++j) s[j] = Mul(g, s[j]);
      const float r = ColumnSum<kCanonical>(token + l * kLaneKeys, s);
      const float delta = Mul(beta, Sub(v, r));
      const float4* kn = reinterpret_cast<const float4*>(token + l * kLaneKeys);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float4 f = kn[j];
        s[4 * j] = Fma(f.x, delta, s[4 * j]);
        s[4 * j + 1] = Fma(f.y, delta, s[4 * j + 1]);
        s[4 * j + 2] = Fma(f.z, delta, s[4 * j + 2]);
        s[4 * j + 3] = Fma(f.w, delta, s[4 * j + 3]);
      }
      const float sum = ColumnSum<kCanonical>(token + (4 + l) * kLaneKeys, s);
      if (l == 0) *o = sum;
    }
  }
#pragma unroll
  for (int j = 0; j < 32; ++j) state[static_cast<size_t>(4 * j + l) * kValues] = s[j];
}

}  // namespace lode::term_order
