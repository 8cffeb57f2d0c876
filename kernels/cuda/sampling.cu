// See sampling.h. Four kernels, a row per grid line: best token by parts, of the logits and of the
// changed logits; exponentials, and the histogram of a draw's first cut; the exponentials' sum (one
// chain of additions per canonical partial) beside the cuts of top-k and top-p; draw by parts.
// Everything is exact integers or canonical floats, so no order of threads shows.
// Bound: the sum's chain, vocab / 32 additions of 4 clocks (18 us at 248,320 tokens).
#include "gpu_worker/sampler_math.h"
#include "kernels/cuda/draw_cut.h"
#include "kernels/cuda/logit_changes.h"
#include "kernels/cuda/platform.h"
#include "kernels/cuda/row_sum.h"
#include "kernels/cuda/sampling.h"

namespace lode::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kPartTokens = 16 * kThreads;
constexpr uint32_t kWideThreads = kRowSumThreads;  // of a block that walks a whole row
constexpr uint32_t kWideShared = kHistogramBytes > kRowSumBytes ? kHistogramBytes : kRowSumBytes;

// Device scratch of one row.
struct RowScratch {
  uint64_t tops[kPickPartsMax];
  uint64_t changed_tops[kPickPartsMax];  // of the changed logits; 0: nothing allowed in the part
  uint64_t buckets[kBuckets];            // of a draw's first cut
  uint64_t cut;                          // candidates have at least this key
  RowWants wants;  // fetched once: every read of pinned memory is a round trip
};
constexpr size_t kHeadBytes = (sizeof(RowScratch) + 255) / 256 * 256;
LODE_FN size_t FloatBytes(uint32_t vocab) {
  return (size_t{vocab} * sizeof(float) + 255) / 256 * 256;
}
LODE_FN size_t ScratchBytes(uint32_t vocab) {
  return kHeadBytes + 2 * FloatBytes(vocab) + size_t{vocab} * sizeof(uint64_t);
}

struct Row {
  const float* logits;
  RowScratch* head;
  float* exps;
  float* changed;
  uint64_t* keys;  // candidates down to the bucket where a cut crosses
};
// How often penalties count a token; done with before there are keys.
LODE_DEVICE uint32_t* CountsOf(const Row& row) { return reinterpret_cast<uint32_t*>(row.keys); }
LODE_DEVICE Row RowOf(const PickArgs& a, uint32_t row) {
  uint8_t* scratch = a.scratch + row * ScratchBytes(a.vocab);
  return {a.logits + static_cast<size_t>(row) * a.vocab, reinterpret_cast<RowScratch*>(scratch),
          reinterpret_cast<float*>(scratch + kHeadBytes),
          reinterpret_cast<float*>(scratch + kHeadBytes + FloatBytes(a.vocab)),
          reinterpret_cast<uint64_t*>(scratch + kHeadBytes + 2 * FloatBytes(a.vocab))};
}
LODE_DEVICE bool Wanted(const PickArgs& a, uint32_t row) {
  return a.window->params.rows[row].needs_logits != 0;
}

LODE_DEVICE uint64_t WarpLargest(uint64_t key) {
  LODE_UNROLL
  for (uint32_t w = 16; w >= 1; w /= 2) {
    const uint64_t other = ShuffleXor(key, w);
    key = other > key ? other : key;
  }
  return key;
}
// Largest key of the block, for all its threads; `shared`: a key per warp.
LODE_DEVICE uint64_t BlockLargest(uint64_t key, uint64_t* shared) {
  key = WarpLargest(key);
  if (ThreadId() % 32 == 0) shared[ThreadId() / 32] = key;
  SyncBlock();
  key = shared[ThreadId() % 32 < ThreadCount() / 32 ? ThreadId() % 32 : 0];
  SyncBlock();
  return WarpLargest(key);
}
// From the parts' keys; every warp for itself.
LODE_DEVICE uint64_t BestOf(const uint64_t* tops, uint32_t parts) {
  uint64_t best = 0;
  for (uint32_t p = ThreadId() % 32; p < parts; p += 32) best = tops[p] > best ? tops[p] : best;
  return WarpLargest(best);
}
LODE_DEVICE uint64_t PickBestOf(const RowScratch& head, uint32_t parts) {
  return BestOf(head.wants.changed != 0 ? head.changed_tops : head.tops, parts);
}
LODE_DEVICE float MaxOf(const float* logits, uint64_t best) {
  return best != 0 ? CleanLogit(logits[IdOfKey(best)]) : canonical::FromBits(0xff800000u);
}

LODE_KERNEL(kThreads) PickTopKernel(PickArgs a) {
  LetNextStart();
  // Written before the window was launched, so it can be fetched while the head still runs.
  const RowWants wants = a.wants[BlockY()];
  WaitForPrevious();
  LODE_SHARED uint64_t warps[kThreads / 32];
  if (!Wanted(a, BlockY())) return;
  const Row row = RowOf(a, BlockY());
  uint64_t best = 0;
  for (uint32_t i = BlockX() * kThreads + ThreadId(); i < a.vocab; i += GridX() * kThreads) {
    const uint64_t key = KeyOf(CleanLogit(row.logits[i]), i);
    best = key > best ? key : best;
  }
  best = BlockLargest(best, warps);
  if (wants.draw != 0) {
    for (uint32_t b = BlockX() * kThreads + ThreadId(); b < kBuckets; b += GridX() * kThreads)
      row.head->buckets[b] = 0;
  }
  uint64_t changed_best = 0;
  if (wants.changed != 0) {
    const LogitChange change = {row.logits, row.changed, CountsOf(row), a.changes, a.vocab};
    changed_best = BlockLargest(ChangeLogits(change, wants), warps);
  }
  if (ThreadId() != 0) return;
  row.head->tops[BlockX()] = best;
  row.head->changed_tops[BlockX()] = changed_best;
  if (BlockX() == 0) row.head->wants = wants;
}

LODE_DEVICE CutInput CutsOf(const Row& row, uint32_t parts) {
  const RowWants& w = row.head->wants;
  const float* logits = w.changed != 0 ? row.changed : row.logits;
  const float max = MaxOf(logits, PickBestOf(*row.head, parts));
  return {logits, max, w.temperature, w.top_k, w.top_p, w.draw != 0};
}

LODE_KERNEL(kThreads) PickExpKernel(PickArgs a) {
  LetNextStart();
  WaitForPrevious();
  if (!Wanted(a, BlockY())) return;
  const Row row = RowOf(a, BlockY());
  const float max = MaxOf(row.logits, BestOf(row.head->tops, GridX()));
  const uint32_t first = BlockX() * kThreads + ThreadId(), step = GridX() * kThreads;
  for (uint32_t i = first; i < a.vocab; i += step)
    row.exps[i] = canonical::Exp(canonical::Sub(CleanLogit(row.logits[i]), max));
  const CutInput in = CutsOf(row, GridX());
  if (!Cuts(in)) return;
  const Histogram h = SharedHistogram();
  AddToHistogram(in, FirstCut(in), a.vocab, first, step, h);
  for (uint32_t b = ThreadId(); b < kBuckets; b += kThreads) {
    const uint64_t sum = SumIn(h, b);
    if (sum != 0) AtomicAdd(&row.head->buckets[b], sum);
  }
}

// Block 0 of a row: the sum. Block 1: the cuts, when a draw has some.
LODE_KERNEL(kWideThreads) PickSumKernel(PickArgs a, uint32_t parts) {
  LetNextStart();
  WaitForPrevious();
  if (!Wanted(a, BlockY())) return;
  const Row row = RowOf(a, BlockY());
  const RowWants& wants = row.head->wants;
  const uint64_t pick_best = PickBestOf(*row.head, parts);
  if (BlockX() == 0) {
    const uint64_t best = BestOf(row.head->tops, parts);
    const float sum = RowSum(row.exps, a.vocab, reinterpret_cast<float*>(DynamicShared()));
    if (ThreadId() != 0) return;
    PickReport& report = a.reports[BlockY()];
    report.best = best;
    report.pick_best = pick_best;
    report.max = MaxOf(row.logits, best);
    report.sum = sum;
    report.pick_logit = row.logits[pick_best != 0 ? IdOfKey(pick_best) : 0];
    if (wants.target >= 0) report.target_logit = row.logits[wants.target];
  } else if (wants.draw != 0) {
    const uint64_t cut = CutAll(CutsOf(row, parts), row.head->buckets, a.vocab, row.keys);
    if (ThreadId() == 0) row.head->cut = cut;
  }
}

LODE_KERNEL(kThreads) PickDrawKernel(PickArgs a) {
  LetNextStart();
  WaitForPrevious();
  LODE_SHARED uint64_t warps[kThreads / 32];
  if (!Wanted(a, BlockY())) return;
  const Row row = RowOf(a, BlockY());
  const RowWants wants = row.head->wants;
  if (wants.draw == 0) return;
  const uint64_t floor = MinPFloor(wants.min_p);
  const CutInput in = CutsOf(row, GridX());
  uint64_t best = 0;
  for (uint32_t i = BlockX() * kThreads + ThreadId(); i < a.vocab; i += GridX() * kThreads) {
    float x;
    uint64_t key;
    if (!Candidate(in, in.logits[i], i, &x, &key) || key < row.head->cut) continue;
    if (floor > 0 && WeightOf(x) < floor) continue;
    const float value =
        canonical::Add(x, canonical::Gumbel(wants.seed, wants.position, i, wants.stream));
    key = KeyOf(value, i);
    best = key > best ? key : best;
  }
  best = BlockLargest(best, warps);
  if (ThreadId() != 0) return;
  DrawPart& part = a.reports[BlockY()].draws[BlockX()];
  part.key = best;
  part.logit = best != 0 ? row.logits[IdOfKey(best)] : 0.0f;
}

}  // namespace

size_t PickScratchBytes(uint32_t vocab) { return ScratchBytes(vocab); }
uint32_t PickParts(uint32_t vocab) {
  const uint32_t parts = (vocab + kPartTokens - 1) / kPartTokens;
  return parts < kPickPartsMax ? parts : kPickPartsMax;
}

void LaunchPick(CUstream_st* stream, const PickArgs& args, uint32_t n_rows) {
  const uint32_t parts = PickParts(args.vocab);
  LaunchAhead(stream, {parts, n_rows}, kThreads, 0, &PickTopKernel, args);
  LaunchAhead(stream, {parts, n_rows}, kThreads, kHistogramBytes, &PickExpKernel, args);
  LaunchAhead(stream, {2, n_rows}, kWideThreads, kWideShared, &PickSumKernel, args, parts);
  LaunchAhead(stream, {parts, n_rows}, kThreads, 0, &PickDrawKernel, args);
}

}  // namespace lode::cuda
