// Sparse attention on the device, second half: a row attends to its list of cells. It is cut at the
// canonical chunks of 64 cells, whose results are independent of each other: scores with chunk
// maxima, then weighted sums per chunk under the row's maximum, then chunks added in ascending
// order, one division, output gate. Formulas and orders: docs/design/arithmetic.md. Called by
// gpu_worker/cuda_device_mixers.cc. Bound: instructions per (cell, head) of the scores; a chunk's
// cells are read once for all query heads that share them.
#include "kernels/cuda/cells.h"
#include "kernels/cuda/quantize.h"
#include "kernels/cuda/reduce.h"

namespace lode::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kWarps = kThreads / 32;
// Blocks per multiprocessor that share out the parts of a row's cells. One for every part that
// there could be would fill the card in a short context too, where most have no work: the next
// launch would find no room before they have ended.
constexpr uint32_t kAttendBlocks = 4;

// The cells of one chunk for one KV head: where they lie.
struct ChunkCells {
  size_t at[kAttendChunk];  // of the cell inside the pool, less the part's offset
  float scale[kAttendChunk];
};
LODE_DEVICE void LocateCells(const AttendLaunch& a, uint32_t row, uint32_t kv_head, uint32_t first,
                             uint32_t n, size_t scales, ChunkCells* out) {
  const WindowBlock* window = a.check.window;
  const uint32_t slot = window->params.seqs[window->params.rows[row].seq].slot;
  for (uint32_t i = ThreadId(); i < n; i += ThreadCount()) {
    const uint32_t position = a.cells[static_cast<size_t>(row) * a.cells_max + first + i];
    const uint8_t* block = CellBlock(a.cache, slot, position);
    const size_t cell = static_cast<size_t>(kv_head) * kKvBlockCells + position % kKvBlockCells;
    out->at[i] = static_cast<size_t>(block - a.cache.pool) + cell * a.cache.cell_bytes;
    out->scale[i] = reinterpret_cast<const float*>(block + scales)[cell];
  }
}
// The type is a constant of the kernel: with a choice at run time every load would wait for the
// last.
template <KvType kType>
LODE_DEVICE float CellValue(const uint8_t* cell, float scale, uint32_t i) {
  if constexpr (kType == KvType::kQ8) {
    // The code added to the bits of 1.5 * 2^23 is that float plus the code: exact, and no
    // conversion of an integer, which a quarter of the lanes can do at a time.
    const int32_t code = static_cast<int8_t>(cell[i]);
    const float biased = canonical::FromBits(0x4b400000u + static_cast<uint32_t>(code));
    return canonical::Mul(canonical::Sub(biased, 12582912.0f), scale);
  } else if constexpr (kType == KvType::kF16) {
    return canonical::FromF16(reinterpret_cast<const uint16_t*>(cell)[i]);
  } else {
    return reinterpret_cast<const float*>(cell)[i];
  }
}

LODE_DEVICE uint32_t ChunksOf(const AttendLaunch& a) {
  return (a.cells_max + kAttendChunk - 1) / kAttendChunk;
}
// Index of (row, head, chunk) in the per-chunk buffers.
LODE_DEVICE size_t ChunkAt(const AttendLaunch& a, uint32_t row, uint32_t head, uint32_t chunk) {
  return (static_cast<size_t>(row) * a.shape.heads + head) * ChunksOf(a) + chunk;
}

constexpr uint32_t kScoreCells = 16;  // cells of one block: a quarter of a chunk
constexpr uint32_t kChunkParts = kAttendChunk / kScoreCells;
constexpr uint32_t kScoreHeads = 4;  // query heads whose dot products a warp keeps going at once
constexpr uint32_t kWarpCells = kScoreCells / kWarps;
constexpr uint32_t kShortDims = 256 / 32;  // values of a head per lane, heads of up to 256
constexpr uint32_t kLongDims = kAttendHeadDimMax / 32;
constexpr uint32_t kQueryBytes = 40 * 1024;  // of shared memory
static_assert(kAttendChunk % kScoreCells == 0 && kWarpCells == 2);

// Query heads that a block has in shared memory at a time.
LODE_FN uint32_t QueryHeads(const AttentionShape& s) {
  const uint32_t group = s.heads / s.kv_heads;
  const uint32_t fit = kQueryBytes / (s.dim * static_cast<uint32_t>(sizeof(float)));
  return group < fit ? group : fit;
}

// q . k of kScoreHeads heads with a warp's two cells; heads beyond `heads` repeat the last. Four
// lanes get the score of a head with a cell, one of them writes it.
template <uint32_t kLaneDims>
LODE_DEVICE void CellScores(const float* q, uint32_t heads, uint32_t dim, uint32_t cells,
                            const float (&k)[kWarpCells][kLaneDims], float scale, float* out,
                            uint32_t out_stride) {
  using namespace canonical;
  const uint32_t lane = ThreadId() % 32;
  static_assert(kScoreHeads * kWarpCells == 8);
  float p[8];  // [head][cell]
  LODE_UNROLL
  for (uint32_t i = 0; i < 8; ++i) p[i] = 0.0f;
  LODE_UNROLL
  for (uint32_t j = 0; j < kLaneDims; ++j) {
    if (32 * j + lane >= dim) continue;
    LODE_UNROLL
    for (uint32_t h = 0; h < kScoreHeads; ++h) {
      const float value = q[(h < heads ? h : heads - 1) * dim + 32 * j + lane];
      LODE_UNROLL
      for (uint32_t c = 0; c < kWarpCells; ++c)
        p[h * kWarpCells + c] = Fma(value, k[c][j], p[h * kWarpCells + c]);
    }
  }
  const float sum = JoinEight(p);
  const uint32_t h = lane / 4 / kWarpCells, c = lane / 4 % kWarpCells;
  if (lane % 4 == 0 && h < heads && c < cells) out[h * out_stride + c] = Mul(sum, scale);
}

// Scores of a quarter of a chunk under all query heads of one KV head: a warp has two cells in
// registers, the block its query heads in shared memory.
template <KvType kType, uint32_t kLaneDims>
LODE_KERNEL(kThreads)
AttendScoresKernel(AttendLaunch a) {
  LetNextStart();
  WaitForPrevious();
  using namespace canonical;
  LODE_SHARED ChunkCells cells;
  float* q = reinterpret_cast<float*>(DynamicShared());
  const AttentionShape& s = a.shape;
  const uint32_t kv_head = BlockY(), row = BlockZ(), begin = BlockX() * kScoreCells;
  const uint32_t all = a.n_cells[row], lane = ThreadId() % 32;
  const uint32_t group = s.heads / s.kv_heads, fit = QueryHeads(s);
  const float scale = InvSqrt(static_cast<float>(static_cast<int32_t>(s.dim)));
  const size_t head_of_group = static_cast<size_t>(row) * s.heads + kv_head * group;
  const uint32_t mine = ThreadId() / 32 * kWarpCells;
  // Mostly all heads fit: then the queries are fetched once for all parts of the block.
  LODE_NO_UNROLL
  for (uint32_t first = begin; first < all; first += GridX() * kScoreCells) {
    const uint32_t n = all - first < kScoreCells ? all - first : kScoreCells;
    const uint32_t warp_cells = mine < n ? (n - mine < kWarpCells ? n - mine : kWarpCells) : 0;
    float k[kWarpCells][kLaneDims];
    LODE_NO_UNROLL
    for (uint32_t base = 0; base < group; base += fit) {
      const uint32_t heads = group - base < fit ? group - base : fit;
      if (base != 0 || first != begin) SyncBlock();
      if (first == begin || group > fit) {
        for (uint32_t h = ThreadId() / 32; h < heads; h += kWarps) {
          const float* from = a.q + (head_of_group + base + h) * 2 * s.dim;
          for (uint32_t i = 4 * lane; i < s.dim; i += 4 * 32)
            CopyAhead16(q + h * s.dim + i, from + i);
        }
      }
      if (base == 0) LocateCells(a, row, kv_head, first, n, a.cache.k_scales, &cells);
      WaitForCopies();
      SyncBlock();
      if (warp_cells == 0) continue;
      if (base == 0) {
        LODE_UNROLL
        for (uint32_t c = 0; c < kWarpCells; ++c) {
          const uint32_t i = c < warp_cells ? mine + c : mine;
          LODE_UNROLL
          for (uint32_t j = 0; j < kLaneDims; ++j)
            k[c][j] = 32 * j + lane < s.dim ? CellValue<kType>(a.cache.pool + cells.at[i],
                                                               cells.scale[i], 32 * j + lane)
                                            : 0.0f;
        }
      }
      for (uint32_t g = 0; g < heads; g += kScoreHeads)
        CellScores<kLaneDims>(
            q + g * s.dim, heads - g < kScoreHeads ? heads - g : kScoreHeads, s.dim, warp_cells, k,
            scale, a.scores + (head_of_group + base + g) * a.cells_max + first + mine, a.cells_max);
    }
  }
}

// The largest of n scores, by one warp; the same in every lane.
LODE_DEVICE float TopScore(const float* scores, uint32_t n) {
  constexpr uint32_t kAhead = 16;  // loads in flight
  float top = canonical::FromBits(0xff800000u);
  for (uint32_t base = ThreadId() % 32; base < n; base += 32 * kAhead) {
    float v[kAhead];
    LODE_UNROLL
    for (uint32_t j = 0; j < kAhead; ++j) v[j] = scores[base + 32 * j < n ? base + 32 * j : base];
    LODE_UNROLL
    for (uint32_t j = 0; j < kAhead; ++j) top = canonical::Max(top, v[j]);
  }
  return WarpMax(top);
}

constexpr uint32_t kSumHeads =
    4;  // query heads of one block: their sums share a pass over the cells

// What the threads of a chunk's sums share.
struct ChunkShared {
  ChunkCells cells;
  Word4 weights[kAttendChunk];  // of kSumHeads heads with a cell, side by side
  float tops[kSumHeads];        // largest score of each head
};
static_assert(kSumHeads * sizeof(float) == sizeof(Word4));

// Weights of n cells from `first` on for the heads from `head` on, and their totals.
// first_of_block: the largest scores are still to be found.
LODE_DEVICE void ChunkWeights(const AttendLaunch& a, size_t head, uint32_t heads, uint32_t first,
                              uint32_t n, uint32_t all, bool first_of_block, ChunkShared* shared) {
  using namespace canonical;
  float* const e = reinterpret_cast<float*>(shared->weights);
  const uint32_t lane = ThreadId() % 32;
  for (uint32_t g = ThreadId() / 32; g < heads; g += ThreadCount() / 32) {
    const float* scores = a.scores + (head + g) * a.cells_max;
    const float top = first_of_block ? TopScore(scores, all) : shared->tops[g];
    if (lane == 0) shared->tops[g] = top;
    float p = 0;
    for (uint32_t i = lane; i < n; i += 32) {
      const float weight = Exp(Sub(scores[first + i], top));
      e[i * kSumHeads + g] = weight;
      p = Add(p, weight);
    }
    const float total = JoinLanes(p);
    if (lane == 0) a.chunk_total[(head + g) * ChunksOf(a) + first / kAttendChunk] = total;
  }
}

// Weighted values and weights of some chunks, for kSumHeads query heads of one KV head.
template <KvType kType>
LODE_KERNEL(kAttendHeadDimMax)
AttendSumsKernel(AttendLaunch a) {
  LetNextStart();
  WaitForPrevious();
  using namespace canonical;
  LODE_SHARED ChunkShared shared;
  const AttentionShape& s = a.shape;
  const uint32_t group = s.heads / s.kv_heads, sets = (group + kSumHeads - 1) / kSumHeads;
  const uint32_t kv_head = BlockY() / sets, g0 = BlockY() % sets * kSumHeads;
  const uint32_t row = BlockZ(), all = a.n_cells[row], d = ThreadId();
  const uint32_t heads = group - g0 < kSumHeads ? group - g0 : kSumHeads;
  const size_t head = static_cast<size_t>(row) * s.heads + kv_head * group + g0;
  LODE_NO_UNROLL
  for (uint32_t chunk = BlockX(); chunk * kAttendChunk < all; chunk += GridX()) {
    const uint32_t first = chunk * kAttendChunk;
    const uint32_t n = all - first < kAttendChunk ? all - first : kAttendChunk;
    if (chunk != BlockX()) SyncBlock();  // the last chunk's weights have been read
    LocateCells(a, row, kv_head, first, n, a.cache.v_scales, &shared.cells);
    ChunkWeights(a, head, heads, first, n, all, chunk == BlockX(), &shared);
    SyncBlock();
    if (d >= s.dim) continue;
    float sum[kSumHeads];
    LODE_UNROLL
    for (uint32_t g = 0; g < kSumHeads; ++g) sum[g] = 0.0f;
    constexpr uint32_t kAhead = 16;  // values in flight
    for (uint32_t base = 0; base < n; base += kAhead) {
      float v[kAhead];
      LODE_UNROLL
      for (uint32_t i = 0; i < kAhead; ++i) {
        const uint32_t c = base + i < n ? base + i : n - 1;
        v[i] = CellValue<kType>(a.cache.pool + a.cache.v + shared.cells.at[c],
                                shared.cells.scale[c], d);
      }
      LODE_UNROLL
      for (uint32_t i = 0; i < kAhead; ++i) {
        if (base + i >= n) continue;
        // Heads that do not exist have whatever is there; nobody asks for their sums.
        const Word4 w = shared.weights[base + i];
        const uint32_t of[kSumHeads] = {w.x, w.y, w.z, w.w};
        LODE_UNROLL
        for (uint32_t g = 0; g < kSumHeads; ++g) sum[g] = Fma(FromBits(of[g]), v[i], sum[g]);
      }
    }
    LODE_UNROLL
    for (uint32_t g = 0; g < kSumHeads; ++g) {
      if (g < heads) a.chunk_sum[((head + g) * ChunksOf(a) + chunk) * s.dim + d] = sum[g];
    }
  }
}

// Chunks added in ascending order, one division, output gate; a block per 256 columns of a row.
LODE_KERNEL(kThreads) AttendJoinKernel(AttendLaunch a) {
  LetNextStart();
  WaitForPrevious();
  using namespace canonical;
  LODE_SHARED float joined[kThreads];
  const AttentionShape& s = a.shape;
  const uint32_t row = BlockY(), width = s.heads * s.dim, t = ThreadId();
  const uint32_t first = BlockX() * kThreads, column = first + t;
  const uint32_t chunks = (a.n_cells[row] + kAttendChunk - 1) / kAttendChunk;
  if (column < width) {
    const uint32_t head = column / s.dim, d = column % s.dim;
    const size_t at = ChunkAt(a, row, head, 0);
    const float gate = a.q[(static_cast<size_t>(row) * s.heads + head) * 2 * s.dim + s.dim + d];
    constexpr uint32_t kAhead = 8;  // chunks whose loads are in flight
    float total = 0, sum = 0;
    for (uint32_t base = 0; base < chunks; base += kAhead) {
      float totals[kAhead], sums[kAhead];
      LODE_UNROLL
      for (uint32_t i = 0; i < kAhead; ++i) {
        const size_t c = at + (base + i < chunks ? base + i : base);
        totals[i] = a.chunk_total[c];
        sums[i] = a.chunk_sum[c * s.dim + d];
      }
      LODE_UNROLL
      for (uint32_t i = 0; i < kAhead; ++i) {
        if (base + i >= chunks) continue;
        total = Add(total, totals[i]);
        sum = Add(sum, sums[i]);
      }
    }
    joined[t] = Mul(Div(sum, total), Sigmoid(gate));
    a.out[static_cast<size_t>(row) * width + column] = joined[t];
  }
  SyncBlock();
  const uint32_t left = width - first;
  FinishShared(a.forms, a.check, row, row, first, left < kThreads ? left : kThreads, joined);
}

}  // namespace

namespace {

template <KvType kType>
void LaunchScoresAndSums(CUstream_st* stream, const AttendLaunch& args, uint32_t n_rows) {
  const AttentionShape& s = args.shape;
  const uint32_t chunks = (args.cells_max + kAttendChunk - 1) / kAttendChunk;
  // Blocks for `want` parts of each of `times` (row, head group)s.
  const auto blocks = [](uint32_t want, uint32_t times) {
    const uint32_t fit = (kAttendBlocks * multiprocessors + times - 1) / times;
    return want < fit ? want : fit;
  };
  LaunchAhead(stream, {blocks(chunks * kChunkParts, s.kv_heads * n_rows), s.kv_heads, n_rows},
              kThreads, sizeof(float) * QueryHeads(s) * s.dim,
              s.dim <= 32 * kShortDims ? &AttendScoresKernel<kType, kShortDims>
                                       : &AttendScoresKernel<kType, kLongDims>,
              args);
  const uint32_t sets = (s.heads / s.kv_heads + kSumHeads - 1) / kSumHeads;
  LaunchAhead(stream, {blocks(chunks, s.kv_heads * sets * n_rows), s.kv_heads * sets, n_rows},
              (s.dim + 31) / 32 * 32, 0, &AttendSumsKernel<kType>, args);
}

}  // namespace

void LaunchAttend(CUstream_st* stream, const AttendLaunch& args, uint32_t n_rows) {
  const AttentionShape& s = args.shape;
  switch (args.cache.type) {
    case KvType::kQ8:
      LaunchScoresAndSums<KvType::kQ8>(stream, args, n_rows);
      break;
    case KvType::kF16:
      LaunchScoresAndSums<KvType::kF16>(stream, args, n_rows);
      break;
    case KvType::kF32:
      LaunchScoresAndSums<KvType::kF32>(stream, args, n_rows);
      break;
  }
  LaunchAhead(stream, {(s.heads * s.dim + kThreads - 1) / kThreads, n_rows}, kThreads, 0,
              &AttendJoinKernel, args);
}

}  // namespace lode::cuda
