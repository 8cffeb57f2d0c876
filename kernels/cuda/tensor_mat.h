// Dense matrices of Q8_0 on the integer tensor cores. One instruction multiplies the 32 codes of
// one block of eight weight rows with those of eight activation rows, exactly, in int32: what
// arithmetic.md calls isum. A warp owns eight weight rows over all columns: the terms of its blocks
// come in ascending order and are added in registers, so nothing of a sum ever leaves its lane. The
// weights pass through a ring of shared memory that each warp fills for itself, 16 bytes at a time
// and several segments ahead, beginning before the launch ahead has ended. Blocks of 34 bytes are
// read as they lie: two of them are 17 whole words, and since the order inside a block is free, the
// activations are arranged to match. Bound: weight bytes over device bandwidth. Needs columns in
// whole segments and compute capability 8.0; mat_kernels.h has the rest. Device code and its
// launch.
#pragma once

#include <type_traits>

#include "kernels/cuda/float_product.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/mat_tasks.h"
#include "kernels/cuda/product.h"

namespace lode::cuda {

inline constexpr uint32_t kTensorRows = 8;      // weight rows of a warp
inline constexpr uint32_t kTensorWarps = 8;     // of a block of threads
inline constexpr uint32_t kTensorTilesMin = 4;  // per multiprocessor
inline constexpr uint32_t kSegmentColumns = 256;
inline constexpr uint32_t kBlockBytes = 34;  // of Q8_0
inline constexpr uint32_t kPairBytes = 2 * kBlockBytes, kPairWords = kPairBytes / 4;
inline constexpr uint32_t kSegmentPairs = kSegmentColumns / 64;
// Of one row. Rows follow each other without a gap: 68 words from row to row put the four words of
// eight rows that a warp reads at a time into 32 different banks.
inline constexpr uint32_t kSegmentBytes = kSegmentPairs * kPairBytes;
inline constexpr uint32_t kSegmentPieces = kTensorRows * kSegmentBytes / 16;
inline constexpr uint32_t kLanePieces = (kSegmentPieces + 31) / 32;
static_assert(kSegmentBytes % 16 == 0);

// How a launch is cut. The first float_blocks blocks have float matrices.
struct TensorCut {
  FloatCut floats;
  uint32_t float_blocks;
  uint32_t tiles;    // of all matrices
  uint32_t warps;    // of a block that have tiles; all help to arrange activations
  uint32_t ring_at;  // bytes of the arranged activations in front of the rings
};

// Arranged activations: per pair of blocks and activation row four lanes' words, 16 bytes each (two
// of the even block, two of the odd one); behind all of them the pairs' scales.
LODE_FN uint32_t ArrangedBytes(uint32_t columns, uint32_t n_acts) {
  return columns / 64 * n_acts * 64;
}
LODE_FN uint32_t TensorActBytes(uint32_t columns, uint32_t n_acts) {
  return (ArrangedBytes(columns, n_acts) + columns / 64 * n_acts * 8 + 15) / 16 * 16;
}

// What a lane copies of its warp's tiles, segment after segment.
struct TensorFeed {
  uint32_t tile, segment;
  const uint8_t* base;  // of the tile's segment
  uint32_t offset[kLanePieces];
};
LODE_DEVICE void FeedTile(const MatBatch& batch, const TensorCut& cut, TensorFeed* feed) {
  if (feed->tile >= cut.tiles) return;
  const MatTask& task = batch.tasks[TaskAt(batch, cut.float_blocks + feed->tile)];
  const uint32_t first = (cut.float_blocks + feed->tile - task.first_block) * kTensorRows;
  const uint32_t valid = task.rows - first;
  feed->base = task.w + first * task.row_bytes;
  LODE_UNROLL
  for (uint32_t j = 0; j < kLanePieces; ++j) {
    const uint32_t piece = ThreadId() % 32 + 32 * j, row = piece / (kSegmentBytes / 16);
    // Rows that do not exist repeat the last.
    feed->offset[j] = (row < valid ? row : valid - 1) * static_cast<uint32_t>(task.row_bytes) +
                      piece % (kSegmentBytes / 16) * 16;
  }
}
// Starts the copies of one more segment; every call ends a group of copies, also an empty one.
LODE_DEVICE void FeedSegment(const MatBatch& batch, const TensorCut& cut, uint32_t segments,
                             uint32_t step, uint8_t* slot, TensorFeed* feed) {
  if (feed->tile < cut.tiles) {
    LODE_UNROLL
    for (uint32_t j = 0; j < kLanePieces; ++j) {
      const uint32_t piece = ThreadId() % 32 + 32 * j;
      if (piece < kSegmentPieces) CopyAhead16(slot + piece * 16, feed->base + feed->offset[j]);
    }
    feed->base += kSegmentBytes;
    if (++feed->segment == segments) {
      feed->segment = 0;
      feed->tile += step;
      FeedTile(batch, cut, feed);
    }
  }
  EndCopyGroup();
}

// Codes and scales of the listed rows, in the order in which the words of two blocks lie: word 0 is
// the even block's scale and codes 0, 1; words 1 to 7 its codes 2 to 29; word 8 codes 30, 31 and
// the odd block's scale; words 9 to 16 the odd block's codes. Lane t of four has words 1 + t, 5 + t
// (of t = 3 the halves of words 0 and 8), 9 + t and 13 + t.
struct PairOfActs {
  uint32_t y[16];
  float d[2];
};
LODE_DEVICE void ArrangeActs(const ActForm& form, const ListedRows& listed, uint32_t columns,
                             uint8_t* arranged) {
  constexpr uint32_t kAhead = 2;  // pairs whose loads are in flight
  const uint32_t pairs = columns / 64, all = pairs * listed.n, n = ThreadCount();
  float* scales = reinterpret_cast<float*>(arranged + ArrangedBytes(columns, listed.n));
  LODE_NO_UNROLL
  for (uint32_t first = ThreadId(); first < all; first += kAhead * n) {
    PairOfActs of[kAhead];
    LODE_UNROLL
    for (uint32_t j = 0; j < kAhead; ++j) {
      const uint32_t i = first + j * n < all ? first + j * n : first, pair = i % pairs;
      const uint8_t* row = form.base + static_cast<size_t>(listed.row[i / pairs]) * form.stride;
      LODE_UNROLL
      for (uint32_t k = 0; k < 4; ++k) decode::Load16(row + pair * 64 + 16 * k, of[j].y + 4 * k);
      const float* d = reinterpret_cast<const float*>(row + form.d_offset) + 2 * pair;
      of[j].d[0] = LoadOnce(d), of[j].d[1] = LoadOnce(d + 1);
    }
    LODE_UNROLL
    for (uint32_t j = 0; j < kAhead; ++j) {
      const uint32_t i = first + j * n, to = i % pairs * listed.n + i / pairs;
      if (i >= all) continue;
      const uint32_t(&y)[16] = of[j].y;
      LODE_UNROLL
      for (uint32_t t = 0; t < 4; ++t) {
        const uint32_t high =
            t == 3 ? BytePermute(y[0], y[7], 0x7610u) : FunnelRight(y[4 + t], y[5 + t], 16);
        reinterpret_cast<Word4*>(arranged)[to * 4 + t] =
            Word4{FunnelRight(y[t], y[t + 1], 16), high, y[8 + t], y[12 + t]};
      }
      scales[2 * to] = of[j].d[0];
      scales[2 * to + 1] = of[j].d[1];
    }
  }
}

// Adds the terms of one segment: rows 2 t and 2 t + 1 of the tile with activation row g (lane 4 g +
// t).
LODE_DEVICE void AddSegment(const uint8_t* slot, const Word4* acts, const float* scales,
                            uint32_t n_acts, float (&sum)[2]) {
  using namespace canonical;
  const uint32_t lane = ThreadId() % 32, g = lane / 4, t = lane % 4;
  LODE_UNROLL
  for (uint32_t p = 0; p < kSegmentPairs; ++p) {
    const uint32_t* w =
        reinterpret_cast<const uint32_t*>(slot + g * kSegmentBytes + p * kPairBytes);
    const uint32_t last = w[5 + t];
    const uint32_t even[2] = {w[1 + t], t == 3 ? BytePermute(w[0], last, 0x5432u) : last};
    const uint32_t odd[2] = {w[9 + t], w[13 + t]};
    const Word4 y = acts[p * n_acts * 4];
    const float d0 = scales[p * n_acts * 2], d1 = scales[p * n_acts * 2 + 1];
    float isum[2], next[2];
    MultiplyBlocks(y.x, y.y, even[0], even[1], isum);
    MultiplyBlocks(y.z, y.w, odd[0], odd[1], next);
    LODE_UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
      const uint8_t* pair = slot + (2 * t + i) * kSegmentBytes + p * kPairBytes;
      const float of_even = HalfToFloat(*reinterpret_cast<const uint16_t*>(pair));
      const float of_odd = HalfToFloat(*reinterpret_cast<const uint16_t*>(pair + kBlockBytes));
      sum[i] = Add(sum[i], Mul(isum[i], Mul(of_even, d0)));
      sum[i] = Add(sum[i], Mul(next[i], Mul(of_odd, d1)));
    }
  }
}

template <class F, uint32_t kDepth>
LODE_KERNEL_FITTING(kTensorWarps * 32, 3)
TensorMatKernel(MatBatch batch, TensorCut cut) {
  static_assert(std::is_same_v<F, decode::Q8_0>);
  LODE_SHARED ListedRows listed;
  uint8_t* shared = DynamicShared();
  if (BlockX() < cut.float_blocks) {
    LetNextStart();
    FloatTile(batch, cut.floats, &listed, reinterpret_cast<float*>(shared));
    return;
  }
  const uint32_t warp = ThreadId() / 32, lane = ThreadId() % 32;
  const uint32_t columns = batch.source.columns, segments = columns / kSegmentColumns;
  const uint32_t step = (GridX() - cut.float_blocks) * cut.warps;
  constexpr uint32_t kSlot = kTensorRows * kSegmentBytes;
  uint8_t* ring = shared + cut.ring_at + warp * kDepth * kSlot;
  uint32_t tile = warp < cut.warps ? (BlockX() - cut.float_blocks) * cut.warps + warp : cut.tiles;
  TensorFeed feed = {tile, 0, nullptr, {}};
  FeedTile(batch, cut, &feed);
  LODE_NO_UNROLL
  for (uint32_t i = 0; i + 1 < kDepth; ++i)
    FeedSegment(batch, cut, segments, step, ring + i * kSlot, &feed);
  WaitAndList(batch, &listed);
  ArrangeActs(batch.source.form, listed, columns, shared);
  SyncBlock();
  const uint32_t n_acts = listed.n, g = lane / 4, t = lane % 4;
  if (n_acts == 0) tile = cut.tiles;
  // Lanes beyond the last activation row repeat it.
  const uint32_t act = g < n_acts ? g : (n_acts != 0 ? n_acts - 1 : 0);
  const Word4* acts = reinterpret_cast<const Word4*>(shared) + act * 4 + t;
  const float* scales =
      reinterpret_cast<const float*>(shared + ArrangedBytes(columns, n_acts)) + 2 * act;
  uint32_t slot = 0;
  for (; tile < cut.tiles; tile += step) {
    float sum[2] = {0, 0};
    LODE_NO_UNROLL
    for (uint32_t s = 0; s < segments; ++s) {
      WaitForCopiesBut<kDepth - 2>();
      SyncWarp();  // the segment is there, and all lanes have left the slot that is filled next
      FeedSegment(batch, cut, segments, step, ring + (slot == 0 ? kDepth - 1 : slot - 1) * kSlot,
                  &feed);
      AddSegment(ring + slot * kSlot, acts + s * kSegmentPairs * n_acts * 4,
                 scales + s * kSegmentPairs * n_acts * 2, n_acts, sum);
      slot = slot + 1 == kDepth ? 0 : slot + 1;
    }
    if (tile + step >= cut.tiles) LetNextStart();
    const MatTask& task = batch.tasks[TaskAt(batch, cut.float_blocks + tile)];
    const uint32_t row = (cut.float_blocks + tile - task.first_block) * kTensorRows + 2 * t;
    if (g >= n_acts) continue;
    float* y = task.y + static_cast<size_t>(listed.row[g]) * task.rows;
    if (row < task.rows) y[row] = sum[0];
    if (row + 1 < task.rows) y[row + 1] = sum[1];
  }
  WaitForCopies();
}

// False, and nothing is launched: not for this card or these columns, or too few rows.
template <class F>
bool LaunchTensorMat(CUstream_st* stream, const MatBatch& batch) {
  const uint32_t columns = batch.source.columns;
  if (!tensor_products || columns % kSegmentColumns != 0 || batch.swiglu) return false;
  MatBatch b = batch;
  TensorCut cut = {};
  const uint32_t n_floats = PlaceTasks(batch, kTensorRows, &b, &cut.floats, &cut.float_blocks);
  if (n_floats == b.n_tasks) return false;
  const MatTask& last = b.tasks[b.n_tasks - 1];
  cut.tiles = last.first_block + (last.rows + kTensorRows - 1) / kTensorRows - cut.float_blocks;
  // A warp goes through its rows alone: with few of them the other kernel's blocks, which share out
  // the columns of a row and have all of them in shared memory before the launch ahead ends, win.
  if (cut.tiles < kTensorTilesMin * multiprocessors) return false;
  // One tile per multiprocessor at a time until each has a block's fill.
  const uint32_t each = (cut.tiles + multiprocessors - 1) / multiprocessors;
  cut.warps = each < kTensorWarps ? each : kTensorWarps;
  cut.ring_at = TensorActBytes(columns, batch.n_rows);
  const bool deep = cut.warps <= kTensorWarps / 2;
  constexpr uint32_t kShallow = 3, kDeep = 6;
  const uint32_t slots = cut.warps * (deep ? kDeep : kShallow);
  size_t bytes = cut.ring_at + size_t{slots} * kTensorRows * kSegmentBytes;
  const size_t floats =
      n_floats == 0 ? 0 : sizeof(float) * (cut.floats.rows + cut.floats.acts) * cut.floats.stretch;
  if (bytes < floats) bytes = floats;
  if (bytes > shared_bytes_max) return false;
  const uint32_t together = multiprocessors * (shared_bytes_max / static_cast<uint32_t>(bytes));
  uint32_t blocks = (cut.tiles + cut.warps - 1) / cut.warps;
  if (blocks > together) blocks = together;
  LaunchAhead(stream, {cut.float_blocks + blocks}, kTensorWarps * 32, bytes,
              deep ? &TensorMatKernel<F, kDeep> : &TensorMatKernel<F, kShallow>, b, cut);
  return true;
}

}  // namespace lode::cuda
