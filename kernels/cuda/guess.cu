// See guess.h. Bound: the sum, a chain of additions in one block (row_sum.h); the exponentials are
// made by the whole card before, because one multiprocessor takes three times as long for them as
// for the sum.
#include "kernels/cuda/guess.h"

#include "gpu_worker/sampler_math.h"
#include "kernels/cuda/row_sum.h"

namespace lode::cuda {
namespace {

// Of a block that looks for the maximum of a part: it reads a part of the flagship's vocabulary in
// 8 rounds, each of which is a trip to memory.
constexpr uint32_t kMaxThreads = 1024;
constexpr uint32_t kExpThreads = 256;
constexpr uint32_t kExpBlocks = 128;  // of a row: a block for every multiprocessor
constexpr uint32_t kWarp = 32;
static_assert(kGuessParts == kWarp);          // a lane for each part
static_assert(kMaxThreads / kWarp <= kWarp);  // a lane for each warp of a part

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
    const uint64_t key = KeyOf(CleanLogit(logits[i]), i);
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
  return IdOfKey(WarpLargest(a.parts[row * kGuessParts + ThreadId() % kWarp]));
}

LODE_KERNEL(kExpThreads) GuessExpKernel(GuessArgs a) {
  LetNextStart();
  WaitForPrevious();
  const uint32_t row = BlockY();
  if (!Wanted(a, row)) return;
  const float* logits = a.logits + static_cast<size_t>(row) * a.stride;
  float* exps = a.exps + static_cast<size_t>(row) * a.n;
  const float max = CleanLogit(logits[BestIndex(a, row)]);
  for (uint32_t i = BlockX() * kExpThreads + ThreadId(); i < a.n; i += GridX() * kExpThreads)
    exps[i] = canonical::Exp(canonical::Sub(CleanLogit(logits[i]), max));
}

LODE_KERNEL(kRowSumThreads) GuessSumKernel(GuessArgs a) {
  LetNextStart();
  WaitForPrevious();
  using namespace canonical;
  LODE_SHARED float staged[kRowSumBytes / sizeof(float)];
  const uint32_t row = BlockX();
  if (!Wanted(a, row)) return;
  const float sum = RowSum(a.exps + static_cast<size_t>(row) * a.n, a.n, staged);
  if (ThreadId() >= kWarp) return;
  const uint32_t index = BestIndex(a, row);
  if (ThreadId() != 0) return;
  const float max = CleanLogit(a.logits[static_cast<size_t>(row) * a.stride + index]);
  const float log_sum = Log(sum);
  a.picked[row] = {.token = a.ids != nullptr ? a.ids[index] : static_cast<int32_t>(index),
                   .max = max,
                   .log_sum = log_sum,
                   .probability = Exp(Sub(Sub(max, max), log_sum))};
}

}  // namespace

void LaunchGuess(CUstream_st* stream, const GuessArgs& args, uint32_t n_rows) {
  LaunchAhead(stream, {kGuessParts, n_rows}, kMaxThreads, 0, &GuessLargestKernel, args);
  LaunchAhead(stream, {kExpBlocks, n_rows}, kExpThreads, 0, &GuessExpKernel, args);
  LaunchAhead(stream, {n_rows}, kRowSumThreads, 0, &GuessSumKernel, args);
}

}  // namespace lode::cuda
