// See pick.h. Bound: the sum. Its 32 partials are chains of n / 32 dependent additions (7,760 at a
// vocabulary of 248,320), so one warp adds from shared memory while the block's other warps compute the
// next stage's exponentials.
#include "kernels/cuda/pick.h"

#include "kernels/cuda/reduce.h"

namespace lode::cuda {
namespace {

constexpr uint32_t kMaxThreads = 256;
constexpr uint32_t kSumThreads = 512;
constexpr uint32_t kWarp = 32;
constexpr uint32_t kStage = 4096;  // exponentials of a stage; two stages are 32 KiB
static_assert(kPickParts == kWarp);  // a lane for each part
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

LODE_DEVICE bool Wanted(const PickArgs& a, uint32_t row) {
  return a.logits_only == nullptr || a.logits_only->params.rows[row].needs_logits != 0;
}

LODE_KERNEL(kMaxThreads) PickLargestKernel(PickArgs a) {
  LetNextStart();
  WaitForPrevious();
  LODE_SHARED uint64_t of_warp[kMaxThreads / kWarp];
  const uint32_t row = BlockY(), t = ThreadId();
  if (!Wanted(a, row)) return;
  const float* logits = a.logits + static_cast<size_t>(row) * a.stride;
  uint64_t best = 0;  // below every key
  for (uint32_t i = BlockX() * kMaxThreads + t; i < a.n; i += kPickParts * kMaxThreads) {
    const uint64_t key = KeyOf(logits[i], i);
    best = key > best ? key : best;
  }
  best = WarpLargest(best);
  if (t % kWarp == 0) of_warp[t / kWarp] = best;
  SyncBlock();
  if (t >= kWarp) return;
  best = WarpLargest(t < kMaxThreads / kWarp ? of_warp[t] : 0);
  if (t == 0) a.parts[row * kPickParts + BlockX()] = best;
}

// Stage s into `to`: exp(logit - max) of kStage logits, by all warps but the first (all warps for the
// first stage, which nobody adds meanwhile).
LODE_DEVICE void Exponentials(const PickArgs& a, const float* logits, uint32_t stage, float max,
                              uint32_t first_thread, float* to) {
  const uint32_t base = stage * kStage;
  const uint32_t m = a.n - base < kStage ? a.n - base : kStage;
  for (uint32_t i = ThreadId() - first_thread; i < m; i += kSumThreads - first_thread)
    to[i] = canonical::Exp(canonical::Sub(Clean(logits[base + i]), max));
}

LODE_KERNEL(kSumThreads) PickSumKernel(PickArgs a) {
  LetNextStart();
  WaitForPrevious();
  using namespace canonical;
  LODE_SHARED float staged[2][kStage];
  LODE_SHARED uint32_t winner;
  const uint32_t row = BlockX(), t = ThreadId();
  if (!Wanted(a, row)) return;
  const float* logits = a.logits + static_cast<size_t>(row) * a.stride;
  if (t < kWarp) {
    const uint64_t best = WarpLargest(a.parts[row * kPickParts + t]);
    if (t == 0) winner = 0xffffffffu - static_cast<uint32_t>(best);
  }
  SyncBlock();
  const uint32_t index = winner;
  const float max = Clean(logits[index]);
  const uint32_t stages = (a.n + kStage - 1) / kStage;
  float p = 0;
  Exponentials(a, logits, 0, max, 0, staged[0]);
  SyncBlock();
  for (uint32_t s = 0; s < stages; ++s) {
    if (t < kWarp) {
      const uint32_t m = a.n - s * kStage < kStage ? a.n - s * kStage : kStage;
      const float* e = staged[s % 2];
      for (uint32_t i = t; i < m; i += kWarp) p = Add(p, e[i]);
    } else if (s + 1 < stages) {
      Exponentials(a, logits, s + 1, max, kWarp, staged[(s + 1) % 2]);
    }
    SyncBlock();
  }
  if (t >= kWarp) return;
  const float log_sum = Log(JoinLanes(p));
  if (t != 0) return;
  a.picked[row] = {.token = a.ids != nullptr ? a.ids[index] : static_cast<int32_t>(index),
                   .max = max,
                   .log_sum = log_sum,
                   .probability = Exp(Sub(Sub(max, max), log_sum))};
}

}  // namespace

void LaunchPick(CUstream_st* stream, const PickArgs& args, uint32_t n_rows) {
  Launch(stream, {kPickParts, n_rows}, kMaxThreads, 0, &PickLargestKernel, args);
  Launch(stream, {n_rows}, kSumThreads, 0, &PickSumKernel, args);
}

}  // namespace lode::cuda
