// See sampling.h. Four kernels, a row per grid line: best token by parts, of the logits and of the
// changed logits; exponentials; their sum (one chain of additions per canonical partial) beside the
// cuts of top-k and top-p; draw by parts.
// Everything is exact integers or canonical floats, so no order of threads shows.
// Bound: the sum's chain, vocab / 32 additions of 4 clocks (18 us at 248,320 tokens).
#include "gpu_worker/sampler_math.h"
#include "kernels/cuda/logit_changes.h"
#include "kernels/cuda/platform.h"
#include "kernels/cuda/reduce.h"
#include "kernels/cuda/sampling.h"

namespace lode::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kPartTokens = 16 * kThreads;
constexpr uint32_t kWideThreads = 1024;  // of a block that walks a whole row
constexpr uint32_t kTile = 4096;         // exponentials in shared memory at a time, twice
// Buckets of a cut's first step: steps of 1/128 below the best logit, the last one for all the
// rest.
constexpr uint32_t kBuckets = 4096;
constexpr float kBucketsPerUnit = 128.0f;
constexpr uint32_t kWideShared = 2 * kTile * sizeof(float);
static_assert(kWideShared >= 2 * kBuckets * sizeof(uint32_t));

// Device scratch of one row.
struct RowScratch {
  uint64_t tops[kPickPartsMax];
  uint64_t changed_tops[kPickPartsMax];  // of the changed logits; 0: nothing allowed in the part
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
  uint64_t* keys;  // of candidates in the bucket of a cut
};
// How often penalties count a token; done with before there are keys.
LODE_DEVICE uint32_t* CountsOf(const Row& row) { return reinterpret_cast<uint32_t*>(row.keys); }
// What the row picks from.
LODE_DEVICE const float* PickedFrom(const Row& row) {
  return row.head->wants.changed != 0 ? row.changed : row.logits;
}
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

LODE_KERNEL(kThreads) PickExpKernel(PickArgs a) {
  LetNextStart();
  WaitForPrevious();
  if (!Wanted(a, BlockY())) return;
  const Row row = RowOf(a, BlockY());
  const float max = MaxOf(row.logits, BestOf(row.head->tops, GridX()));
  for (uint32_t i = BlockX() * kThreads + ThreadId(); i < a.vocab; i += GridX() * kThreads)
    row.exps[i] = canonical::Exp(canonical::Sub(CleanLogit(row.logits[i]), max));
}

// The canonical sum of the row's exponentials: all threads fetch, the first warp adds. Zeros beyond
// the end add nothing: partials are never -0. Valid in the first warp.
LODE_DEVICE float SumOfExps(const Row& row, uint32_t vocab) {
  float* tiles = reinterpret_cast<float*>(DynamicShared());
  const uint32_t t = ThreadId();
  float p = 0;
  for (uint32_t first = 0; first < vocab; first += kTile) {
    float* tile = tiles + (first / kTile) % 2 * kTile;
    for (uint32_t i = t; i < kTile; i += kWideThreads)
      tile[i] = first + i < vocab ? row.exps[first + i] : 0.0f;
    // The buffer was last read two barriers ago, by the warp that comes here behind its reading.
    SyncBlock();
    if (t >= 32) continue;
    constexpr uint32_t kAhead = 16;
    LODE_NO_UNROLL
    for (uint32_t j = 0; j < kTile / 32; j += kAhead) {
      float v[kAhead];
      LODE_UNROLL
      for (uint32_t k = 0; k < kAhead; ++k) v[k] = tile[(j + k) * 32 + t];
      LODE_UNROLL
      for (uint32_t k = 0; k < kAhead; ++k) p = canonical::Add(p, v[k]);
    }
  }
  return t < 32 ? JoinLanes(p) : 0;
}

// 64-bit sums in two words each, so that 32-bit atomics do.
struct Histogram {
  uint32_t *low, *high;  // [kBuckets], shared memory
};
LODE_DEVICE void Clear(const Histogram& h, uint32_t n) {
  SyncBlock();
  for (uint32_t i = ThreadId(); i < n; i += kWideThreads) h.low[i] = h.high[i] = 0;
  SyncBlock();
}
LODE_DEVICE void AddTo(const Histogram& h, uint32_t bucket, uint64_t weight) {
  const uint32_t low = static_cast<uint32_t>(weight);
  uint32_t high = static_cast<uint32_t>(weight >> 32);
  if (low != 0) high += AtomicAdd(&h.low[bucket], low) > ~low;  // the carry
  if (high != 0) AtomicAdd(&h.high[bucket], high);
}
LODE_DEVICE uint64_t SumIn(const Histogram& h, uint32_t bucket) {
  return static_cast<uint64_t>(h.high[bucket]) << 32 | h.low[bucket];
}

// Where the buckets' sums, from bucket 0 on, first reach the target.
struct Crossing {
  uint32_t bucket;
  uint64_t left;   // of the target, inside that bucket
  uint64_t total;  // of all buckets
};
enum class Target : uint32_t { kGiven, kTopP };
// n: a multiple of 32. `shared`: 33 words of the block. For every thread.
LODE_DEVICE Crossing Cross(const Histogram& h, uint32_t n, uint64_t target, Target kind,
                           float top_p, uint64_t* shared, Crossing* crossing) {
  SyncBlock();  // sums are complete
  const uint32_t group = n / 32, t = ThreadId();
  if (t < 32) {
    uint64_t sum = 0;
    // Lanes start at different buckets: different banks.
    for (uint32_t j = 0; j < group; ++j) sum += SumIn(h, t * group + (j + t) % group);
    shared[t] = sum;
    SyncWarp();
    if (t == 0) {
      uint64_t total = 0;
      for (uint32_t g = 0; g < 32; ++g) total += shared[g];
      if (kind == Target::kTopP) target = TopPTarget(top_p, total);
      crossing->total = total;
      if (target <= total) {  // else there is nothing to cut
        uint32_t b = 0;
        while (shared[b / group] < target) {
          target -= shared[b / group];
          b += group;
        }
        while (SumIn(h, b) < target) target -= SumIn(h, b++);
        crossing->bucket = b;
        crossing->left = target;
      }
    }
  }
  SyncBlock();
  return *crossing;
}

LODE_DEVICE uint32_t BucketOf(float x) {
  const float b = canonical::Mul(x, -kBucketsPerUnit);
  return b < kBuckets - 1 ? static_cast<uint32_t>(b) : kBuckets - 1;
}

// A cut over the row's candidates (keys from `least` on): the key at which counts (top-k) or
// weights (top-p), added from the best candidate down, first reach the target. First by value in
// equal steps, then, among the candidates of that step, 8 bits of the key at a time.
struct CutInput {
  const float* logits;
  float max, temperature;
  uint64_t least;
  Target kind;
  uint32_t top_k;
  float top_p;
};
LODE_DEVICE bool Candidate(const CutInput& in, uint32_t id, float* x, uint64_t* key) {
  *x = ScaledLogit(CleanLogit(in.logits[id]), in.max, in.temperature);
  *key = KeyOf(*x, id);
  return *x > canonical::FromBits(0xff800000u) && *key >= in.least;
}
LODE_DEVICE uint64_t UnitsOf(const CutInput& in, float x) {
  return in.kind == Target::kTopP ? WeightOf(x) : 1;
}

LODE_DEVICE uint64_t Cut(const Row& row, uint32_t vocab, const CutInput& in) {
  LODE_SHARED uint64_t groups[32];
  LODE_SHARED Crossing crossing;
  LODE_SHARED uint32_t n_keys;
  uint32_t* words = reinterpret_cast<uint32_t*>(DynamicShared());
  const Histogram h = {words, words + kBuckets};
  const uint32_t t = ThreadId();
  float x;
  uint64_t key;
  if (t == 0) n_keys = 0;
  Clear(h, kBuckets);
  for (uint32_t i = t; i < vocab; i += kWideThreads) {
    if (Candidate(in, i, &x, &key)) AddTo(h, BucketOf(x), UnitsOf(in, x));
  }
  const Crossing at = Cross(h, kBuckets, in.top_k, in.kind, in.top_p, groups, &crossing);
  if (in.kind == Target::kGiven && in.top_k >= at.total) return in.least;
  for (uint32_t i = t; i < vocab; i += kWideThreads) {
    if (Candidate(in, i, &x, &key) && BucketOf(x) == at.bucket)
      row.keys[AtomicAdd(&n_keys, 1)] = key;
  }
  uint64_t prefix = 0, mask = 0, left = at.left;
  for (int shift = 56; shift >= 0; shift -= 8) {
    Clear(h, 256);  // and the keys are complete
    for (uint32_t i = t; i < n_keys; i += kWideThreads) {
      const uint64_t k = row.keys[i];
      if ((k & mask) == prefix) {
        AddTo(h, 255 - (static_cast<uint32_t>(k >> shift) & 255), UnitsOf(in, ValueOfKey(k)));
      }
    }
    const Crossing inside = Cross(h, 256, left, Target::kGiven, 1.0f, groups, &crossing);
    left = inside.left;
    prefix |= static_cast<uint64_t>(255 - inside.bucket) << shift;
    mask |= uint64_t{255} << shift;
  }
  return prefix;
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
    const float sum = SumOfExps(row, a.vocab);
    if (ThreadId() != 0) return;
    PickReport& report = a.reports[BlockY()];
    report.best = best;
    report.pick_best = pick_best;
    report.max = MaxOf(row.logits, best);
    report.sum = sum;
    report.pick_logit = row.logits[pick_best != 0 ? IdOfKey(pick_best) : 0];
    if (wants.target >= 0) report.target_logit = row.logits[wants.target];
  } else if (wants.draw != 0) {
    const float* logits = PickedFrom(row);
    CutInput in = {logits,     MaxOf(logits, pick_best), wants.temperature,
                   0,          Target::kGiven,           wants.top_k,
                   wants.top_p};
    if (in.top_k > 0) in.least = Cut(row, a.vocab, in);
    if (in.top_p < 1.0f) {
      in.kind = Target::kTopP;
      in.least = Cut(row, a.vocab, in);
    }
    if (ThreadId() == 0) row.head->cut = in.least;
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
  const float* logits = PickedFrom(row);
  CutInput in = {logits,
                 MaxOf(logits, PickBestOf(*row.head, GridX())),
                 wants.temperature,
                 row.head->cut,
                 Target::kGiven,
                 0,
                 1.0f};
  uint64_t best = 0;
  for (uint32_t i = BlockX() * kThreads + ThreadId(); i < a.vocab; i += GridX() * kThreads) {
    float x;
    uint64_t key;
    if (!Candidate(in, i, &x, &key)) continue;
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
  LaunchAhead(stream, {parts, n_rows}, kThreads, 0, &PickExpKernel, args);
  LaunchAhead(stream, {2, n_rows}, kWideThreads, kWideShared, &PickSumKernel, args, parts);
  LaunchAhead(stream, {parts, n_rows}, kThreads, 0, &PickDrawKernel, args);
}

}  // namespace lode::cuda
