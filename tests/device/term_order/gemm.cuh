// Prompt-row product of the term-order measurement: Q8_0 weights (GGUF bytes) times many int8 rows
// on the s8 tensor cores.
//   ordered: per block of 32 columns one integer fragment -> float(isum) * (d_w * d_a), added in
//   ascending block order into
//            one fp32 accumulator set: the bits of the matrix-vector kernels.
//   integer: int32 accumulation over all columns, no scales: what the same loads and tensor
//   instructions could do at most.
// A block of threads computes 128 weight rows x 64 activation rows, 8 warps of 32 x 32; two
// shared-memory stages of 8 blocks. Per 32 x 32 tile and block the ordered variant adds 4 float
// operations per output to 8 tensor instructions: it is bound by those (128 lanes per clock and
// multiprocessor), not by the tensor cores.
#pragma once

#include "tests/device/term_order/gemv.cuh"

namespace lode::term_order {

inline constexpr int kGemmRows = 128, kGemmActs = 64, kGemmThreads = 256;
inline constexpr int kStageBlocks = 8;  // blocks of 32 columns per stage
inline constexpr int kGemmWStride =
    kStageBlocks * 34;  // 272: 4 banks per row, conflict-free fragments
inline constexpr int kGemmAStride =
    kStageBlocks * 32 + 32;  // 288: 8 banks per row, conflict-free 8-byte fragments
inline constexpr int kGemmWBytes = kGemmRows * kGemmWStride;
inline constexpr int kGemmABytes = kGemmActs * kGemmAStride;
inline constexpr int kGemmStage = kGemmWBytes + kGemmABytes + kStageBlocks * kGemmActs * 4;
inline constexpr int kGemmShared = 2 * kGemmStage;
static_assert(kQ8Blocks % kStageBlocks == 0 && 2 * (kGemmShared + 1024) <= 228 * 1024,
              "two blocks per multiprocessor");

// codes: [act][2560], each block permuted (CodeAtPosition), its words in the order 0 4 1 5 2 6 3 7
// so that a lane's two fragment words are neighbours. scales: [80 blocks][n_acts].
LODE_DEV void GemmIssue(uint8_t* stage, const uint8_t* w, const int8_t* codes, const float* scales,
                        uint32_t n_acts, uint32_t act0, uint32_t step) {
  for (uint32_t i = ThreadIndex(); i < kGemmRows * (kGemmWStride / 16); i += kGemmThreads) {
    const uint32_t row = i / (kGemmWStride / 16), at = i % (kGemmWStride / 16) * 16;
    CopyAsync16(stage + row * kGemmWStride + at,
                w + static_cast<size_t>(row) * kQ8RowBytes + step * kGemmWStride + at);
  }
  stage += kGemmWBytes;
  for (uint32_t i = ThreadIndex(); i < kGemmActs * 16; i += kGemmThreads) {
    const uint32_t act = i / 16, at = i % 16 * 16;
    CopyAsync16(stage + act * kGemmAStride + at,
                codes + static_cast<size_t>(act0 + act) * kColumns + step * 256 + at);
  }
  stage += kGemmABytes;
  for (uint32_t i = ThreadIndex(); i < kStageBlocks * (kGemmActs / 4); i += kGemmThreads) {
    const uint32_t block = i / (kGemmActs / 4), at = i % (kGemmActs / 4) * 4;
    CopyAsync16(stage + (block * kGemmActs + at) * 4,
                scales + static_cast<size_t>(step * kStageBlocks + block) * n_acts + act0 + at);
  }
}

// Weight fragment of 16 rows (g and g + 8 of `rows`) for block b, and the two rows' scales.
LODE_DEV void LoadWeightFragment(const uint8_t* rows, uint32_t b, uint32_t g, uint32_t t,
                                 uint32_t (&a)[4], float (&d)[2]) {
  const uint32_t* low = reinterpret_cast<const uint32_t*>(rows + g * kGemmWStride) + Q8FirstWord(b);
  const uint32_t* high =
      reinterpret_cast<const uint32_t*>(rows + (g + 8) * kGemmWStride) + Q8FirstWord(b);
  const uint32_t low0 = low[0], high0 = high[0];
  const uint32_t low_straddle = BytePermute(low0, low[8], Q8Selector(b));
  const uint32_t high_straddle = BytePermute(high0, high[8], Q8Selector(b));
  a[0] = t == 0 ? low_straddle : low[t];
  a[1] = t == 0 ? high_straddle : high[t];
  a[2] = low[4 + t];
  a[3] = high[4 + t];
  d[0] = Q8Scale(b, low0);
  d[1] = Q8Scale(b, high0);
}

// Grid: (n_rows / 128, n_acts / 64). y: [act][n_rows], float for ordered, int32 for integer.
template <bool kOrdered>
__global__ void __launch_bounds__(kGemmThreads, 2)
    GemmKernel(const uint8_t* __restrict__ w, const int8_t* __restrict__ codes,
               const float* __restrict__ scales, uint32_t* __restrict__ y, uint32_t n_rows,
               uint32_t n_acts) {
  uint8_t* shared = DynamicShared();
  const uint32_t lane = ThreadIndex() % 32, warp = ThreadIndex() / 32, g = lane / 4, t = lane % 4;
  const uint32_t warp_row = warp % 4 * 32, warp_act = warp / 4 * 32;
  const uint32_t row0 = BlockIndex() * kGemmRows, act0 = BlockIndexY() * kGemmActs;
  const uint8_t* w0 = w + static_cast<size_t>(row0) * kQ8RowBytes;
  constexpr uint32_t kSteps = kQ8Blocks / kStageBlocks;
  const int magic[4] = {kMagicBits, kMagicBits, kMagicBits, kMagicBits};
  float acc[2][4][4] = {};
  int total[2][4][4] = {};

  GemmIssue(shared, w0, codes, scales, n_acts, act0, 0);
  CopyCommit();
  for (uint32_t step = 0; step < kSteps; ++step) {
    CopyWait<0>();
    SyncBlock();  // stage `step` is complete, and everybody has left the stage that is refilled now
    if (step + 1 < kSteps)
      GemmIssue(shared + (step + 1) % 2 * kGemmStage, w0, codes, scales, n_acts, act0, step + 1);
    CopyCommit();
    const uint8_t* stage = shared + step % 2 * kGemmStage;
    const uint8_t* acts = stage + kGemmWBytes + (warp_act + g) * kGemmAStride + t * 8;
    const float* stage_scales =
        reinterpret_cast<const float*>(stage + kGemmWBytes + kGemmABytes) + warp_act + 2 * t;
#pragma unroll 2
    for (uint32_t b = 0; b < kStageBlocks; ++b) {
      uint32_t a[2][4];
      float dw[2][2];
#pragma unroll
      for (int m = 0; m < 2; ++m)
        LoadWeightFragment(stage + (warp_row + 16 * m) * kGemmWStride, b, g, t, a[m], dw[m]);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const uint2 fragment =
            *reinterpret_cast<const uint2*>(acts + n * 8 * kGemmAStride + b * 32);
        const uint32_t bb[2] = {fragment.x, fragment.y};
        const float2 da = *reinterpret_cast<const float2*>(stage_scales + b * kGemmActs + n * 8);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          if constexpr (kOrdered) {
            using namespace canonical;
            int isum[4];
            MmaS8(isum, a[m], bb, magic);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              acc[m][n][i] = Add(acc[m][n][i],
                                 Mul(FromMagic(isum[i]), Mul(dw[m][i / 2], i % 2 ? da.y : da.x)));
            }
          } else {
            MmaS8(total[m][n], a[m], bb, total[m][n]);
          }
        }
      }
    }
  }
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t row = row0 + warp_row + 16 * m + g + 8 * (i / 2),
                       act = act0 + warp_act + 8 * n + 2 * t + i % 2;
        const uint32_t bits =
            kOrdered ? canonical::BitsOf(acc[m][n][i]) : static_cast<uint32_t>(total[m][n][i]);
        y[static_cast<size_t>(act) * n_rows + row] = bits;
      }
    }
  }
}

}  // namespace lode::term_order
