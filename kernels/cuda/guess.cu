// See guess.h. Bound: the sum. Its 32 partials are chains of n / 32 dependent additions (7,760 at a
// vocabulary of 248,320, some 17 us), so one warp of one block adds from shared memory while the
// block's other warps fetch; the exponentials are made by the whole card before, because one
// multiprocessor takes three times as long for them as for the sum.
#include "kernels/cuda/guess.h"
#include "kernels/cuda/reduce.h"

namespace lode::cuda {
namespace {

constexpr uint32_t kMaxThreads = 256;
constexpr uint32_t kExpBlocks = 128;  // of a row: a block for every multiprocessor
constexpr uint32_t kSumThreads = 1024;
constexpr uint32_t kWarp = 32;
constexpr uint32_t kProducers = kSumThreads - kWarp;  // threads that fetch
constexpr uint32_t kEach = 4;                         // of a fetching thread and stage
constexpr uint32_t kStage = kEach * kProducers;       // two stages are 31 KiB
static_assert(kGuessParts == kWarp);                  // a lane for each part
static_assert(kStage % canonical::kPartials == 0);

LODE_DEVICE float Clean(float logit) {
  return logit != logit ? canonical::FromBits(0xff800000u) : logit;
}

// Larger key = larger logit, then lower index; -0 and +0 share a value.
LODE_DEVICE uint64_t KeyOf(float logit, uint32_t index) {
  const uint32_t bits = canonical::BitsOf(canonical::Add(Clean(logit), 0.0f));
  const uint32_t ordered = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(ordered) << 32 | (0xffffffffu - index);
}
LODE_DEVICE uint64_t WarpLargest(uint64_t key) {
  LODE_UNROLL
  for (uint32_t w = kWarp / 2; w >= 1; w /= 2) {
    const uint64_t other = ShuffleXor(key, w);
    key = other > key ? other : key;
  }
  return key;
}

LODE_DEVICE bool Wanted(const GuessArgs& a, uint32_t row) {
  return a.logits_only == nullptr || a.logits_only->params.rows[row].needs_logits != 0;
}

LODE_KERNEL(kMaxThreads) GuessLargestKernel(GuessArgs a) {
  LetNextStart();
  WaitForPrevious();
  LODE_SHARED uint64_t of_warp[kMaxThreads / kWarp];
  const uint32_t row = BlockY(), t = ThreadId();
  if (!Wanted(a, row)) return;
  const float* logits = a.logits + static_cast<size_t>(row) * a.stride;
  uint64_t best = 0;  // below every key
  for (uint32_t i = BlockX() * kMaxThreads + t; i < a.n; i += kGuessParts * kMaxThreads) {
    const uint64_t key = KeyOf(logits[i], i);
    best = key > best ? key : best;
  }
  best = WarpLargest(best);
  if (t % kWarp == 0) of_warp[t / kWarp] = best;
  SyncBlock();
  if (t >= kWarp) return;
  best = WarpLargest(t < kMaxThreads / kWarp ? of_warp[t] : 0);
  if (t == 0) a.parts[row * kGuessParts + BlockX()] = best;
}

// The best of a row's parts, for every lane of the calling warp.
LODE_DEVICE uint32_t BestIndex(const GuessArgs& a, uint32_t row) {
  return 0xffffffffu -
         static_cast<uint32_t>(WarpLargest(a.parts[row * kGuessParts + ThreadId() % kWarp]));
}

LODE_KERNEL(kMaxThreads) GuessExpKernel(GuessArgs a) {
  LetNextStart();
  WaitForPrevious();
  const uint32_t row = BlockY();
  if (!Wanted(a, row)) return;
  const float* logits = a.logits + static_cast<size_t>(row) * a.stride;
  float* exps = a.exps + static_cast<size_t>(row) * a.n;
  const float max = Clean(logits[BestIndex(a, row)]);
  for (uint32_t i = BlockX() * kMaxThreads + ThreadId(); i < a.n; i += GridX() * kMaxThreads)
    exps[i] = canonical::Exp(canonical::Sub(Clean(logits[i]), max));
}

// What a fetching thread brings of a stage.
struct Fetched {
  float v[kEach];
};
LODE_DEVICE Fetched Fetch(const float* exps, uint32_t n, uint32_t stage) {
  Fetched f;
  LODE_UNROLL
  for (uint32_t k = 0; k < kEach; ++k) {
    const uint32_t i = stage * kStage + k * kProducers + ThreadId() - kWarp;
    f.v[k] = i < n ? exps[i] : 0.0f;
  }
  return f;
}

// The canonical sum of exps[n], valid in the first warp. Round r: the other warps store stage r
// (and have asked for stage r + 1), the first warp adds stage r - 1. Zeros beyond the end add
// nothing: partials are never -0.
LODE_DEVICE float SumOf(const float* exps, uint32_t n, float (*staged)[kStage]) {
  const uint32_t t = ThreadId(), stages = (n + kStage - 1) / kStage;
  float p = 0;
  Fetched now = {};
  if (t >= kWarp) now = Fetch(exps, n, 0);
  for (uint32_t r = 0; r <= stages; ++r) {
    if (t >= kWarp) {
      const Fetched next = Fetch(exps, n, r + 1);
      LODE_UNROLL
      for (uint32_t k = 0; k < kEach; ++k) staged[r % 2][k * kProducers + t - kWarp] = now.v[k];
      now = next;
    } else if (r > 0) {
      const float* e = staged[(r - 1) % 2];
      LODE_UNROLL
      for (uint32_t j = 0; j < kStage / kWarp; ++j) p = canonical::Add(p, e[j * kWarp + t]);
    }
    SyncBlock();
  }
  return t < kWarp ? JoinLanes(p) : 0;
}

LODE_KERNEL(kSumThreads) GuessSumKernel(GuessArgs a) {
  LetNextStart();
  WaitForPrevious();
  using namespace canonical;
  LODE_SHARED float staged[2][kStage];
  const uint32_t row = BlockX();
  if (!Wanted(a, row)) return;
  const float sum = SumOf(a.exps + static_cast<size_t>(row) * a.n, a.n, staged);
  if (ThreadId() >= kWarp) return;
  const uint32_t index = BestIndex(a, row);
  if (ThreadId() != 0) return;
  const float max = Clean(a.logits[static_cast<size_t>(row) * a.stride + index]);
  const float log_sum = Log(sum);
  a.picked[row] = {.token = a.ids != nullptr ? a.ids[index] : static_cast<int32_t>(index),
                   .max = max,
                   .log_sum = log_sum,
                   .probability = Exp(Sub(Sub(max, max), log_sum))};
}

}  // namespace

void LaunchGuess(CUstream_st* stream, const GuessArgs& args, uint32_t n_rows) {
  Launch(stream, {kGuessParts, n_rows}, kMaxThreads, 0, &GuessLargestKernel, args);
  Launch(stream, {kExpBlocks, n_rows}, kMaxThreads, 0, &GuessExpKernel, args);
  Launch(stream, {n_rows}, kSumThreads, 0, &GuessSumKernel, args);
}

}  // namespace lode::cuda
