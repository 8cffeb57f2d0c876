// Sparse attention on the device, first half: store (norm, rotation, cells, index keys) and select
// (block scores, radix selection, cell list); attend.cu does the rest. All cells of a window are
// stored before any row attends; rows of this window are read back from the cache. Formulas and
// orders: docs/design/arithmetic.md. Called by gpu_worker/cuda_device_mixers.cc. Bound: latency;
// index keys' bytes in a long context.
#include "kernels/canonical_trig.h"
#include "kernels/cuda/cells.h"
#include "kernels/cuda/quantize.h"
#include "kernels/cuda/reduce.h"

namespace lode::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: the addition rounds to the nearest integer

LODE_DEVICE size_t RingAt(uint32_t slot, uint32_t position, size_t width) {
  return (static_cast<size_t>(slot) * kConvRing + position % kConvRing) * width;
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
constexpr uint32_t kSelectThreads = 512;
constexpr uint32_t kSelectWarps = kSelectThreads / 32;

// This block's share of the scores of a row's n complete blocks; a warp per block.
LODE_DEVICE void IndexScores(const AttentionSelectArgs& a, uint32_t row, uint32_t n) {
  using namespace canonical;
  const AttentionShape& s = a.shape;
  const uint32_t dim = s.index_dim;
  const uint32_t slot = a.window->params.seqs[a.window->params.rows[row].seq].slot;
  const float scale = InvSqrt(static_cast<float>(static_cast<int32_t>(dim)));
  const float* q = a.index_q + static_cast<size_t>(row) * s.index_heads * dim;
  const uint32_t first = BlockX() * kSelectWarps + ThreadId() / 32;
  for (uint32_t j = first; j < n; j += GridX() * kSelectWarps) {
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

// Cells of a row with more blocks than it may select, from their scores: those of the best blocks
// and the tail behind the last complete one.
LODE_DEVICE void SelectCells(const AttentionSelectArgs& a, uint32_t row, uint32_t end,
                             uint32_t* cells) {
  LODE_SHARED uint32_t histogram[256];
  LODE_SHARED uint32_t found[2];
  LODE_SHARED uint32_t warp_counts[kSelectWarps];
  const uint32_t t = ThreadId(), lane = t % 32, size = a.shape.index_block;
  const uint32_t best = a.shape.blocks_best, n = end / size;
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

// Cells of every row, ascending: everything when the budget holds it; else the row's blocks score,
// and the last of them to arrive selects.
LODE_KERNEL(kSelectThreads) SelectKernel(AttentionSelectArgs a) {
  LetNextStart();
  WaitForPrevious();
  const uint32_t row = BlockY(), t = ThreadId(), size = a.shape.index_block;
  const uint32_t end = a.window->params.rows[row].position + 1, n = end / size;
  uint32_t* cells = a.cells + static_cast<size_t>(row) * a.cells_max;
  if (n <= a.shape.blocks_best) {
    if (BlockX() != 0) return;
    for (uint32_t i = t; i < end; i += kSelectThreads) cells[i] = i;
    if (t == 0) a.n_cells[row] = end;
    return;
  }
  IndexScores(a, row, n);
  LODE_SHARED uint32_t before;
  FenceDevice();
  SyncBlock();
  if (t == 0) before = AtomicAdd(&a.arrived[row], 1);
  SyncBlock();
  if (before + 1 != GridX()) return;
  if (t == 0) a.arrived[row] = 0;
  FenceDevice();
  SelectCells(a, row, end, cells);
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
  const uint32_t most = (args.blocks_max + kSelectWarps - 1) / kSelectWarps;
  const uint32_t fit = most < multiprocessors ? most : multiprocessors;
  const uint32_t blocks = args.blocks_max > args.shape.blocks_best ? fit : 1;
  LaunchAhead(stream, {blocks, n_rows}, kSelectThreads, 0, &SelectKernel, args);
}

}  // namespace lode::cuda
