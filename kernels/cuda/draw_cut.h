// The cuts of a draw, top-k and top-p: the key from which on candidates stay. Device code of
// sampling.cu. Counts (top-k) and weights (top-p) are exact integers, so no order of threads shows:
// the whole card sorts a row's candidates into buckets of equal steps of value, then one block
// finds the bucket where the sum crosses, gathers the candidates down to it and cuts inside that
// list, 8 bits of the key at a time.
#pragma once

#include "gpu_worker/sampler_math.h"
#include "kernels/cuda/platform.h"

namespace lode::cuda {

// Steps of 1/128 below the best logit, the last one for all the rest.
inline constexpr uint32_t kBuckets = 4096;
inline constexpr float kBucketsPerUnit = 128.0f;

// 64-bit sums in two words each, so that 32-bit atomics do; shared memory of the block.
struct Histogram {
  uint32_t *low, *high;  // [kBuckets]
};
inline constexpr uint32_t kHistogramBytes = 2 * kBuckets * sizeof(uint32_t);
LODE_DEVICE Histogram SharedHistogram() {
  uint32_t* words = reinterpret_cast<uint32_t*>(DynamicShared());
  return {words, words + kBuckets};
}
LODE_DEVICE void Clear(const Histogram& h, uint32_t n) {
  SyncBlock();
  for (uint32_t i = ThreadId(); i < n; i += ThreadCount()) h.low[i] = h.high[i] = 0;
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
  uint64_t target;  // in all
  uint64_t left;    // of the target, inside that bucket
  uint64_t total;   // of all buckets; less than the target: nothing is cut, the rest is undefined
};
enum class Target : uint32_t { kGiven, kTopP };
// n: a multiple of 32. For every thread.
LODE_DEVICE Crossing Cross(const Histogram& h, uint32_t n, uint64_t target, Target kind,
                           float top_p) {
  LODE_SHARED uint64_t groups[32];
  LODE_SHARED Crossing crossing;
  SyncBlock();  // sums are complete
  const uint32_t group = n / 32, t = ThreadId();
  if (t < 32) {
    uint64_t sum = 0;
    // Lanes start at different buckets: different banks.
    for (uint32_t j = 0; j < group; ++j) sum += SumIn(h, t * group + (j + t) % group);
    groups[t] = sum;
    SyncWarp();
    if (t == 0) {
      uint64_t total = 0;
      for (uint32_t g = 0; g < 32; ++g) total += groups[g];
      if (kind == Target::kTopP) target = TopPTarget(top_p, total);
      crossing.total = total;
      crossing.target = target;
      if (target <= total) {
        uint32_t b = 0;
        while (groups[b / group] < target) {
          target -= groups[b / group];
          b += group;
        }
        while (SumIn(h, b) < target) target -= SumIn(h, b++);
        crossing.bucket = b;
        crossing.left = target;
      }
    }
  }
  SyncBlock();
  return crossing;
}

LODE_DEVICE uint32_t BucketOf(float x) {
  const float b = canonical::Mul(x, -kBucketsPerUnit);
  return b < kBuckets - 1 ? static_cast<uint32_t>(b) : kBuckets - 1;
}

struct CutInput {
  const float* logits;  // [vocab]
  float max, temperature;
  uint32_t top_k;  // 0: off
  float top_p;     // 1: off
  bool draws;
};
LODE_DEVICE bool Cuts(const CutInput& in) { return in.draws && (in.top_k > 0 || in.top_p < 1.0f); }
LODE_DEVICE Target FirstCut(const CutInput& in) {
  return in.top_k > 0 ? Target::kGiven : Target::kTopP;
}
LODE_DEVICE bool Candidate(const CutInput& in, float logit, uint32_t id, float* x, uint64_t* key) {
  *x = ScaledLogit(CleanLogit(logit), in.max, in.temperature);
  *key = KeyOf(*x, id);
  return *x > canonical::FromBits(0xff800000u);
}
LODE_DEVICE uint64_t UnitsOf(Target kind, float x) {
  return kind == Target::kTopP ? WeightOf(x) : 1;
}

// Tokens first, first + step, ... into the block's histogram, which is complete for all its
// threads.
LODE_DEVICE void AddToHistogram(const CutInput& in, Target kind, uint32_t vocab, uint32_t first,
                                uint32_t step, const Histogram& h) {
  Clear(h, kBuckets);
  for (uint32_t i = first; i < vocab; i += step) {
    float x;
    uint64_t key;
    if (Candidate(in, in.logits[i], i, &x, &key)) AddTo(h, BucketOf(x), UnitsOf(kind, x));
  }
  SyncBlock();
}

// No logit below it is in the bucket or in one before: two steps further down than the bucket
// begins, and what rounding takes off a large maximum. Spares the division for nearly all tokens.
LODE_DEVICE float LowestLogit(const CutInput& in, uint32_t bucket) {
  constexpr float kRounding = 1.0f / (1 << 22);
  if (bucket + 1 >= kBuckets) return canonical::FromBits(0xff800000u);
  const float steps = static_cast<float>(bucket + 2) / kBucketsPerUnit;
  const float reach = canonical::Mul(in.temperature, steps);
  const float slack = canonical::Mul(in.max < 0 ? -in.max : in.max, kRounding);
  return canonical::Sub(canonical::Sub(in.max, reach), slack);
}

// Candidates of the bucket and of those before it, in any order; how many, for every thread.
LODE_DEVICE uint32_t Gather(const CutInput& in, uint32_t bucket, uint32_t vocab, uint64_t* keys) {
  LODE_SHARED uint32_t n_keys;
  constexpr uint32_t kAhead = 8;  // loads in flight per thread
  if (ThreadId() == 0) n_keys = 0;
  SyncBlock();
  const float lowest = LowestLogit(in, bucket);
  for (uint32_t first = ThreadId(); first < vocab; first += kAhead * ThreadCount()) {
    float logits[kAhead];
    LODE_UNROLL
    for (uint32_t k = 0; k < kAhead; ++k) {
      const uint32_t i = first + k * ThreadCount();
      logits[k] = i < vocab ? in.logits[i] : canonical::FromBits(0xff800000u);
    }
    LODE_UNROLL
    for (uint32_t k = 0; k < kAhead; ++k) {
      const uint32_t i = first + k * ThreadCount();
      if (i >= vocab || logits[k] < lowest) continue;
      float x;
      uint64_t key;
      if (Candidate(in, logits[k], i, &x, &key) && BucketOf(x) <= bucket)
        keys[AtomicAdd(&n_keys, 1)] = key;
    }
  }
  SyncBlock();
  return n_keys;
}

// A cut over listed candidates from key `least` on.
LODE_DEVICE uint64_t CutList(const uint64_t* keys, uint32_t n, uint64_t least, Target units,
                             uint64_t target, Target kind, float top_p, const Histogram& h) {
  uint64_t prefix = 0, mask = 0;
  for (int shift = 56; shift >= 0; shift -= 8) {
    Clear(h, 256);
    for (uint32_t i = ThreadId(); i < n; i += ThreadCount()) {
      const uint64_t k = keys[i];
      if (k < least || (k & mask) != prefix) continue;
      const uint32_t byte = static_cast<uint32_t>(k >> shift) & 255;
      AddTo(h, 255 - byte, UnitsOf(units, ValueOfKey(k)));
    }
    const Crossing inside = Cross(h, 256, target, kind, top_p);
    target = inside.left;
    kind = Target::kGiven;
    prefix |= static_cast<uint64_t>(255 - inside.bucket) << shift;
    mask |= uint64_t{255} << shift;
  }
  return prefix;
}

// All cuts of a row, by one block. `buckets`: the histogram of the first one; `keys`: scratch,
// [vocab]. 0 when nothing is cut.
LODE_DEVICE uint64_t CutAll(const CutInput& in, const uint64_t* buckets, uint32_t vocab,
                            uint64_t* keys) {
  if (!Cuts(in)) return 0;
  const Histogram h = SharedHistogram();
  for (uint32_t b = ThreadId(); b < kBuckets; b += ThreadCount()) {
    h.low[b] = static_cast<uint32_t>(buckets[b]);
    h.high[b] = static_cast<uint32_t>(buckets[b] >> 32);
  }
  uint64_t least = 0;
  Crossing at = Cross(h, kBuckets, in.top_k, FirstCut(in), in.top_p);
  if (in.top_k > 0 && in.top_k < at.total) {
    const uint32_t n = Gather(in, at.bucket, vocab, keys);
    least = CutList(keys, n, 0, Target::kGiven, at.target, Target::kGiven, 1.0f, h);
    if (in.top_p >= 1.0f) return least;
    return CutList(keys, n, least, Target::kTopP, 0, Target::kTopP, in.top_p, h);
  }
  if (in.top_p >= 1.0f) return least;
  if (in.top_k > 0) {  // of more tokens than there are: the histogram counted the wrong thing
    AddToHistogram(in, Target::kTopP, vocab, ThreadId(), ThreadCount(), h);
    at = Cross(h, kBuckets, 0, Target::kTopP, in.top_p);
  }
  const uint32_t n = Gather(in, at.bucket, vocab, keys);
  return CutList(keys, n, least, Target::kTopP, at.target, Target::kGiven, 1.0f, h);
}

}  // namespace lode::cuda
