// Sparse attention on the device: store (norm, rotation, cells, index keys), select (block scores,
// radix selection, cell list), attend. All cells of a window are stored before any row attends;
// rows of this window are read back from the cache. Attention of a row is cut at the canonical
// chunks of 64 cells, whose results are independent of each other: scores with chunk maxima, then
// weighted sums per chunk under the row's maximum, then chunks added in ascending order. Formulas
// and orders: docs/design/arithmetic.md. Called by gpu_worker/cuda_device_attention.cc. Bound: cell
// bytes; a chunk's cells are read once for all query heads that share them.
#include "kernels/canonical_trig.h"
#include "kernels/cuda/quantize.h"
#include "kernels/cuda/reduce.h"

namespace lode::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kWarps = kThreads / 32;
constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: the addition rounds to the nearest integer

LODE_DEVICE size_t RingAt(uint32_t slot, uint32_t position, size_t width) {
  return (static_cast<size_t>(slot) * kConvRing + position % kConvRing) * width;
}
// First byte of the KV block that holds `position` of the slot's sequence.
LODE_DEVICE uint8_t* CellBlock(const KvCache& cache, uint32_t slot, uint32_t position) {
  const uint32_t block = cache.block_tables[static_cast<size_t>(slot) * cache.blocks_per_sequence +
                                            position / kKvBlockCells];
  return cache.pool + cache.block_bytes * block;
}

// ---- store
// Norm of x[n] in shared memory, in place; ends with a barrier.
LODE_DEVICE void NormHead(float* x, const float* weight, uint32_t n, float eps, float* slot) {
  const float scale = BlockRmsScale(x, n, eps, slot);
  for (uint32_t i = ThreadId(); i < n; i += ThreadCount())
    x[i] = canonical::Mul(canonical::Mul(x[i], scale), weight[i]);
  SyncBlock();
}
// Rotates pairs (i, i + pairs); ends with a barrier.
LODE_DEVICE void RotateHead(float* x, uint32_t pairs, const float* sin, const float* cos) {
  using namespace canonical;
  for (uint32_t i = ThreadId(); i < pairs; i += ThreadCount()) {
    const float a = x[i], b = x[i + pairs];
    x[i] = Sub(Mul(a, cos[i]), Mul(b, sin[i]));
    x[i + pairs] = Add(Mul(b, cos[i]), Mul(a, sin[i]));
  }
  SyncBlock();
}

// x[n] in shared memory becomes a cell. `top` is one shared word.
LODE_DEVICE void StoreCell(const AttentionStoreArgs& a, const float* x, uint32_t n, uint8_t* cell,
                           float* scale, uint32_t* top, uint32_t row) {
  using namespace canonical;
  if (ThreadId() == 0) *top = 0;
  SyncBlock();
  uint32_t mine = 0;
  for (uint32_t i = ThreadId(); i < n; i += ThreadCount())
    mine = Larger(mine, BitsOf(x[i]) & 0x7fffffffu);
  AtomicMax(top, mine);
  SyncBlock();
  if (ThreadId() == 0 && *top >= kInfinityBits) ReportNotFinite(a.check, row);
  const float d = Div(FromBits(*top), 127.0f);
  const bool tiny = d < kTiniestScale;
  const float inverse = tiny ? 0.0f : Div(1.0f, d);
  for (uint32_t i = ThreadId(); i < n; i += ThreadCount()) {
    if (a.cache.type == KvType::kQ8) {
      cell[i] = static_cast<uint8_t>(BitsOf(Add(Mul(x[i], inverse), kMagic)) - BitsOf(kMagic));
    } else if (a.cache.type == KvType::kF16) {
      reinterpret_cast<uint16_t*>(cell)[i] = ToF16(x[i]);
    } else {
      reinterpret_cast<float*>(cell)[i] = x[i];
    }
  }
  if (ThreadId() == 0) *scale = a.cache.type != KvType::kQ8 ? 1.0f : (tiny ? 0.0f : d);
}

LODE_DEVICE void Fetch(float* to, const float* from, uint32_t n) {
  for (uint32_t i = ThreadId(); i < n; i += ThreadCount()) to[i] = from[i];
}
LODE_DEVICE void PutBack(float* to, const float* from, uint32_t n) {
  for (uint32_t i = ThreadId(); i < n; i += ThreadCount()) to[i] = from[i];
}

// The raw index key of the row enters its ring; a row that completes an index block pools it: mean
// of the raw keys, norm, rotation at the block's first position. Raw keys of this window are read
// where the product left them.
LODE_DEVICE void StoreIndexKey(const AttentionStoreArgs& a, uint32_t row, float* x, float* slot) {
  using namespace canonical;
  const AttentionShape& s = a.shape;
  const uint32_t dim = s.index_dim;
  const StepRow& r = a.check.window->params.rows[row];
  const StepSequence& seq = a.check.window->params.seqs[r.seq];
  const float* own = a.index_k + static_cast<size_t>(row) * dim;
  Fetch(a.cache.raw_index + RingAt(seq.slot, r.position, dim), own, dim);
  if ((r.position + 1) % s.index_block != 0) return;
  const uint32_t first = r.position + 1 - s.index_block;
  const float scale = Div(1.0f, static_cast<float>(static_cast<int32_t>(s.index_block)));
  for (uint32_t i = ThreadId(); i < dim; i += ThreadCount()) {
    float sum = 0;
    for (uint32_t t = 0; t < s.index_block; ++t) {
      const uint32_t back = s.index_block - 1 - t;
      const float raw = back <= row - seq.first_row
                            ? a.index_k[static_cast<size_t>(row - back) * dim + i]
                            : a.cache.raw_index[RingAt(seq.slot, first + t, dim) + i];
      sum = t == 0 ? raw : Add(sum, raw);
    }
    x[i] = Mul(sum, scale);
  }
  NormHead(x, a.index_k_norm, dim, s.eps, slot);
  const float position = static_cast<float>(static_cast<int32_t>(first));
  for (uint32_t i = ThreadId(); i < s.pairs; i += ThreadCount()) {
    const SinCosResult angle = SinCos(Mul(position, a.rope.inv_freq[i]));
    const float u = x[i], v = x[i + s.pairs];
    x[i] = Sub(Mul(u, angle.cos), Mul(v, angle.sin));
    x[i + s.pairs] = Add(Mul(v, angle.cos), Mul(u, angle.sin));
  }
  SyncBlock();
  uint8_t* block = CellBlock(a.cache, seq.slot, first);
  const size_t in_block = first % kKvBlockCells / s.index_block;
  PutBack(reinterpret_cast<float*>(block + a.cache.index) + in_block * dim, x, dim);
}

// One head of one row per block: query heads, index query heads, KV heads (key and value), index
// key.
LODE_KERNEL(kThreads) AttentionStoreKernel(AttentionStoreArgs a) {
  LetNextStart();
  WaitForPrevious();
  LODE_SHARED float x[kAttendHeadDimMax];
  LODE_SHARED float slot;
  LODE_SHARED uint32_t top;
  const AttentionShape& s = a.shape;
  const uint32_t row = BlockY();
  const float* sin = a.rope.sin + static_cast<size_t>(row) * s.pairs;
  const float* cos = a.rope.cos + static_cast<size_t>(row) * s.pairs;
  uint32_t unit = BlockX();
  if (unit < s.heads + s.index_heads) {
    const bool index = unit >= s.heads;
    const uint32_t dim = index ? s.index_dim : s.dim;
    float* head =
        index ? a.index_q + (static_cast<size_t>(row) * s.index_heads + unit - s.heads) * dim
              : a.q + (static_cast<size_t>(row) * s.heads + unit) * 2 * dim;
    Fetch(x, head, dim);
    NormHead(x, index ? a.index_q_norm : a.q_norm, dim, s.eps, &slot);
    RotateHead(x, s.pairs, sin, cos);
    PutBack(head, x, dim);
    return;
  }
  unit -= s.heads + s.index_heads;
  if (unit == s.kv_heads) {
    StoreIndexKey(a, row, x, &slot);
    return;
  }
  const StepRow& r = a.check.window->params.rows[row];
  const uint32_t slot_of = a.check.window->params.seqs[r.seq].slot;
  uint8_t* block = CellBlock(a.cache, slot_of, r.position);
  const size_t cell = static_cast<size_t>(unit) * kKvBlockCells + r.position % kKvBlockCells;
  const size_t at = (static_cast<size_t>(row) * s.kv_heads + unit) * s.dim;
  Fetch(x, a.k + at, s.dim);
  NormHead(x, a.k_norm, s.dim, s.eps, &slot);
  RotateHead(x, s.pairs, sin, cos);
  StoreCell(a, x, s.dim, block + cell * a.cache.cell_bytes,
            reinterpret_cast<float*>(block + a.cache.k_scales) + cell, &top, row);
  SyncBlock();
  Fetch(x, a.v + at, s.dim);
  SyncBlock();
  StoreCell(a, x, s.dim, block + a.cache.v + cell * a.cache.cell_bytes,
            reinterpret_cast<float*>(block + a.cache.v_scales) + cell, &top, row);
}

// ---- select
// Scores of complete blocks, where there are more than a row may select; a warp per block.
LODE_KERNEL(kThreads) IndexScoresKernel(AttentionSelectArgs a) {
  LetNextStart();
  WaitForPrevious();
  using namespace canonical;
  const AttentionShape& s = a.shape;
  const uint32_t row = BlockY(), dim = s.index_dim;
  const StepRow& r = a.window->params.rows[row];
  const uint32_t n = (r.position + 1) / s.index_block;
  if (n <= s.blocks_best) return;
  const uint32_t slot = a.window->params.seqs[r.seq].slot;
  const float scale = InvSqrt(static_cast<float>(static_cast<int32_t>(dim)));
  const float* q = a.index_q + static_cast<size_t>(row) * s.index_heads * dim;
  for (uint32_t j = BlockX() * kWarps + ThreadId() / 32; j < n; j += GridX() * kWarps) {
    const uint32_t position = j * s.index_block;
    const float* key =
        reinterpret_cast<const float*>(CellBlock(a.cache, slot, position) + a.cache.index) +
        static_cast<size_t>(position % kKvBlockCells / s.index_block) * dim;
    float sum = 0;
    for (uint32_t h = 0; h < s.index_heads; ++h)
      sum = Add(sum, Max(0.0f, WarpDot(q + h * dim, key, dim)));
    if (ThreadId() % 32 == 0)
      a.scores[static_cast<size_t>(row) * a.blocks_max + j] = Mul(sum, scale);
  }
}

// Larger score, larger number; NaN below everything; -0 counts as +0.
LODE_DEVICE uint32_t OrderedBits(float score) {
  const uint32_t bits = canonical::BitsOf(canonical::Add(score, 0.0f));
  if (score != score) return 0;
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

constexpr uint32_t kSelectThreads = 512;
constexpr uint32_t kSelectWarps = kSelectThreads / 32;

// Finds, from the top of a 256-bin histogram, the bin that holds rank `left` (1-based): one warp.
LODE_DEVICE void FindBin(const uint32_t* histogram, uint32_t left, uint32_t* bin, uint32_t* rest) {
  const uint32_t lane = ThreadId() % 32;
  uint32_t mine = 0;
  for (uint32_t i = 0; i < 8; ++i) mine += histogram[255 - 8 * lane - i];
  uint32_t through = mine;
  for (uint32_t by = 1; by < 32; by *= 2) {
    const uint32_t below = ShuffleUp(through, by);
    if (lane >= by) through += below;
  }
  uint32_t before = through - mine;
  if (before < left && left <= through) {  // exactly one lane
    uint32_t digit = 255 - 8 * lane;
    while (before + histogram[digit] < left) before += histogram[digit--];
    *bin = digit;
    *rest = left - before;
  }
}

struct Selection {
  uint32_t threshold, equal_left;
};
// The k-th best score and how many blocks with exactly that score are taken; n > k.
LODE_DEVICE Selection FindThreshold(const float* scores, uint32_t n, uint32_t k,
                                    uint32_t* histogram, uint32_t* found) {
  uint32_t threshold = 0, left = k;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (uint32_t i = ThreadId(); i < 256; i += kSelectThreads) histogram[i] = 0;
    SyncBlock();
    const uint32_t fixed = shift == 24 ? 0 : ~uint32_t{0} << (shift + 8);
    for (uint32_t j = ThreadId(); j < n; j += kSelectThreads) {
      const uint32_t bits = OrderedBits(scores[j]);
      if (((bits ^ threshold) & fixed) == 0) AtomicAdd(&histogram[(bits >> shift) & 255u], 1);
    }
    SyncBlock();
    if (ThreadId() < 32) FindBin(histogram, left, &found[0], &found[1]);
    SyncBlock();
    threshold |= found[0] << shift;
    left = found[1];
  }
  return {threshold, left};
}

// Cells of one row, ascending: everything when the budget holds it, else those of the best blocks
// and the tail behind the last complete block.
LODE_KERNEL(kSelectThreads) SelectKernel(AttentionSelectArgs a) {
  LetNextStart();
  WaitForPrevious();
  LODE_SHARED uint32_t histogram[256];
  LODE_SHARED uint32_t found[2];
  LODE_SHARED uint32_t warp_counts[kSelectWarps];
  const uint32_t row = BlockX(), t = ThreadId(), lane = t % 32, size = a.shape.index_block;
  const uint32_t best = a.shape.blocks_best, end = a.window->params.rows[row].position + 1;
  const uint32_t n = end / size;
  uint32_t* cells = a.cells + static_cast<size_t>(row) * a.cells_max;
  if (n <= best) {
    for (uint32_t i = t; i < end; i += kSelectThreads) cells[i] = i;
    if (t == 0) a.n_cells[row] = end;
    return;
  }
  const float* scores = a.scores + static_cast<size_t>(row) * a.blocks_max;
  const Selection chosen = FindThreshold(scores, n, best, histogram, found);
  // Counts of better (high half) and equal (low half) blocks before this one.
  uint32_t better_before = 0, equal_before = 0;
  for (uint32_t base = 0; base < n; base += kSelectThreads) {
    const uint32_t j = base + t;
    const uint32_t bits = j < n ? OrderedBits(scores[j]) : 0;
    const bool better = j < n && bits > chosen.threshold;
    const bool equal = j < n && bits == chosen.threshold;
    const uint32_t better_votes = Ballot(better), equal_votes = Ballot(equal);
    if (lane == 0) warp_counts[t / 32] = PopCount(better_votes) << 16 | PopCount(equal_votes);
    SyncBlock();
    uint32_t before = 0, all = 0;
    for (uint32_t w = 0; w < kSelectWarps; ++w) {
      if (w < t / 32) before += warp_counts[w];
      all += warp_counts[w];
    }
    const uint32_t lower = (1u << lane) - 1;
    const uint32_t b = better_before + (before >> 16) + PopCount(better_votes & lower);
    const uint32_t e = equal_before + (before & 0xffffu) + PopCount(equal_votes & lower);
    if (better || (equal && e < chosen.equal_left)) {
      const uint32_t place = b + (e < chosen.equal_left ? e : chosen.equal_left);
      for (uint32_t i = 0; i < size; ++i) cells[place * size + i] = j * size + i;
    }
    better_before += all >> 16;
    equal_before += all & 0xffffu;
    SyncBlock();
  }
  const uint32_t tail = end - n * size;
  for (uint32_t i = t; i < tail; i += kSelectThreads) cells[best * size + i] = n * size + i;
  if (t == 0) a.n_cells[row] = best * size + tail;
}

// ---- attend
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
    return canonical::Mul(static_cast<float>(static_cast<int8_t>(cell[i])), scale);
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
constexpr uint32_t kLaneDims = kAttendHeadDimMax / 32;
constexpr uint32_t kQueryBytes = 40 * 1024;  // of shared memory
static_assert(kAttendChunk % kScoreCells == 0 && kWarpCells == 2);

// Query heads that a block has in shared memory at a time.
LODE_FN uint32_t QueryHeads(const AttentionShape& s) {
  const uint32_t group = s.heads / s.kv_heads;
  const uint32_t fit = kQueryBytes / (s.dim * static_cast<uint32_t>(sizeof(float)));
  return group < fit ? group : fit;
}

// q . k of kScoreHeads heads with a warp's two cells; heads beyond `heads` repeat the last. Lane h
// + kScoreHeads * c writes the score of head h with cell c < cells.
LODE_DEVICE void CellScores(const float* q, uint32_t heads, uint32_t dim, uint32_t cells,
                            const float (&k)[kWarpCells][kLaneDims], float scale, float* out,
                            uint32_t out_stride) {
  using namespace canonical;
  const uint32_t lane = ThreadId() % 32;
  float p[kScoreHeads][kWarpCells];
  LODE_UNROLL
  for (uint32_t h = 0; h < kScoreHeads; ++h) p[h][0] = p[h][1] = 0.0f;
  LODE_UNROLL
  for (uint32_t j = 0; j < kLaneDims; ++j) {
    if (32 * j + lane >= dim) continue;
    LODE_UNROLL
    for (uint32_t h = 0; h < kScoreHeads; ++h) {
      const float value = q[(h < heads ? h : heads - 1) * dim + 32 * j + lane];
      LODE_UNROLL
      for (uint32_t c = 0; c < kWarpCells; ++c) p[h][c] = Fma(value, k[c][j], p[h][c]);
    }
  }
  LODE_UNROLL
  for (uint32_t h = 0; h < kScoreHeads; ++h) {
    LODE_UNROLL
    for (uint32_t c = 0; c < kWarpCells; ++c) {
      const float sum = JoinLanes(p[h][c]);
      if (lane == h + kScoreHeads * c && h < heads && c < cells)
        out[h * out_stride + c] = Mul(sum, scale);
    }
  }
}

// Scores of a quarter of a chunk under all query heads of one KV head: a warp has two cells in
// registers, the block its query heads in shared memory.
template <KvType kType>
LODE_KERNEL(kThreads)
AttendScoresKernel(AttendLaunch a) {
  LetNextStart();
  WaitForPrevious();
  using namespace canonical;
  LODE_SHARED ChunkCells cells;
  float* q = reinterpret_cast<float*>(DynamicShared());
  const AttentionShape& s = a.shape;
  const uint32_t kv_head = BlockY(), row = BlockZ(), first = BlockX() * kScoreCells;
  const uint32_t all = a.n_cells[row], lane = ThreadId() % 32;
  if (first >= all) return;
  const uint32_t n = all - first < kScoreCells ? all - first : kScoreCells;
  const uint32_t group = s.heads / s.kv_heads, fit = QueryHeads(s);
  const float scale = InvSqrt(static_cast<float>(static_cast<int32_t>(s.dim)));
  const size_t head_of_group = static_cast<size_t>(row) * s.heads + kv_head * group;
  const uint32_t mine = ThreadId() / 32 * kWarpCells;
  const uint32_t warp_cells = mine < n ? (n - mine < kWarpCells ? n - mine : kWarpCells) : 0;
  float k[kWarpCells][kLaneDims];
  for (uint32_t base = 0; base < group; base += fit) {
    const uint32_t heads = group - base < fit ? group - base : fit;
    if (base != 0) SyncBlock();
    for (uint32_t h = ThreadId() / 32; h < heads; h += kWarps) {
      const float* from = a.q + (head_of_group + base + h) * 2 * s.dim;
      for (uint32_t i = 4 * lane; i < s.dim; i += 4 * 32) CopyAhead16(q + h * s.dim + i, from + i);
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
      CellScores(q + g * s.dim, heads - g < kScoreHeads ? heads - g : kScoreHeads, s.dim,
                 warp_cells, k, scale,
                 a.scores + (head_of_group + base + g) * a.cells_max + first + mine, a.cells_max);
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

// Weighted values and weights of one chunk, for kSumHeads query heads of one KV head.
template <KvType kType>
LODE_KERNEL(kAttendHeadDimMax)
AttendSumsKernel(AttendLaunch a) {
  LetNextStart();
  WaitForPrevious();
  using namespace canonical;
  LODE_SHARED ChunkCells cells;
  LODE_SHARED float e[kSumHeads][kAttendChunk];
  const AttentionShape& s = a.shape;
  const uint32_t group = s.heads / s.kv_heads, sets = (group + kSumHeads - 1) / kSumHeads;
  const uint32_t chunk = BlockX(), kv_head = BlockY() / sets, g0 = BlockY() % sets * kSumHeads;
  const uint32_t row = BlockZ(), lane = ThreadId() % 32;
  const uint32_t first = chunk * kAttendChunk, all = a.n_cells[row];
  if (first >= all) return;
  const uint32_t n = all - first < kAttendChunk ? all - first : kAttendChunk;
  const uint32_t heads = group - g0 < kSumHeads ? group - g0 : kSumHeads;
  LocateCells(a, row, kv_head, first, n, a.cache.v_scales, &cells);
  for (uint32_t g = ThreadId() / 32; g < heads; g += ThreadCount() / 32) {
    const size_t head = static_cast<size_t>(row) * s.heads + kv_head * group + g0 + g;
    const float* scores = a.scores + head * a.cells_max;
    const float top = TopScore(scores, all);
    float p = 0;
    for (uint32_t i = lane; i < n; i += 32) {
      e[g][i] = Exp(Sub(scores[first + i], top));
      p = Add(p, e[g][i]);
    }
    const float total = JoinLanes(p);
    if (lane == 0) a.chunk_total[head * ChunksOf(a) + chunk] = total;
  }
  SyncBlock();
  const uint32_t d = ThreadId();
  if (d >= s.dim) return;
  float sum[kSumHeads];
  LODE_UNROLL
  for (uint32_t g = 0; g < kSumHeads; ++g) sum[g] = 0.0f;
  constexpr uint32_t kAhead = 16;  // values in flight
  for (uint32_t base = 0; base < n; base += kAhead) {
    float v[kAhead];
    LODE_UNROLL
    for (uint32_t i = 0; i < kAhead; ++i) {
      const uint32_t c = base + i < n ? base + i : n - 1;
      v[i] = CellValue<kType>(a.cache.pool + a.cache.v + cells.at[c], cells.scale[c], d);
    }
    LODE_UNROLL
    for (uint32_t i = 0; i < kAhead; ++i) {
      if (base + i >= n) continue;
      LODE_UNROLL
      for (uint32_t g = 0; g < kSumHeads; ++g) {
        if (g < heads) sum[g] = Fma(e[g][base + i], v[i], sum[g]);
      }
    }
  }
  LODE_UNROLL
  for (uint32_t g = 0; g < kSumHeads; ++g) {
    if (g < heads)
      a.chunk_sum[ChunkAt(a, row, kv_head * group + g0 + g, chunk) * s.dim + d] = sum[g];
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

void LaunchAttentionStore(CUstream_st* stream, const AttentionStoreArgs& args, uint32_t n_rows) {
  const AttentionShape& s = args.shape;
  LaunchAhead(stream, {s.heads + s.index_heads + s.kv_heads + 1, n_rows}, kThreads, 0,
              &AttentionStoreKernel, args);
}

void LaunchAttentionSelect(CUstream_st* stream, const AttentionSelectArgs& args, uint32_t n_rows,
                           uint32_t multiprocessors) {
  // More blocks than a short context needs: those without work leave at once.
  const uint32_t most = (args.blocks_max + kWarps - 1) / kWarps;
  const uint32_t blocks = most < 2 * multiprocessors ? most : 2 * multiprocessors;
  if (args.blocks_max > args.shape.blocks_best)
    LaunchAhead(stream, {blocks, n_rows}, kThreads, 0, &IndexScoresKernel, args);
  LaunchAhead(stream, {n_rows}, kSelectThreads, 0, &SelectKernel, args);
}

namespace {

template <KvType kType>
void LaunchScoresAndSums(CUstream_st* stream, const AttendLaunch& args, uint32_t n_rows) {
  const AttentionShape& s = args.shape;
  const uint32_t chunks = (args.cells_max + kAttendChunk - 1) / kAttendChunk;
  LaunchAhead(stream, {chunks * kChunkParts, s.kv_heads, n_rows}, kThreads,
              sizeof(float) * QueryHeads(s) * s.dim, &AttendScoresKernel<kType>, args);
  const uint32_t sets = (s.heads / s.kv_heads + kSumHeads - 1) / kSumHeads;
  LaunchAhead(stream, {chunks, s.kv_heads * sets, n_rows}, (s.dim + 31) / 32 * 32, 0,
              &AttendSumsKernel<kType>, args);
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
