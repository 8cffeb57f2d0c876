// Router and combination of experts on the device: softmax in the canonical order and the total
// order over (probability bits, lower id), one warp per row; weighted sums in routing order.
// Formulas: docs/design/arithmetic.md, "Operators". Called by gpu_worker/cuda_device.cc.
#include "kernels/cuda/quantize.h"
#include "kernels/cuda/reduce.h"

namespace lode::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kTaken = 0xffffffffu;

// Larger number, better expert: probability bits (NaN counts as zero), a taken one below all; then
// the lower id.
LODE_DEVICE uint64_t RankOf(uint32_t bits, uint32_t id) {
  const uint32_t key = bits == kTaken ? 0 : (bits > 0x7f800000u ? 1 : bits + 1);
  return static_cast<uint64_t>(key) << 32 | (~id & 0xffffffffu);
}

LODE_KERNEL(32) RouteKernel(RouteArgs a) {
  LetNextStart();
  WaitForPrevious();
  using namespace canonical;
  LODE_SHARED uint32_t probability[kExpertsMax];  // bits
  const uint32_t row = BlockX(), lane = ThreadId();
  const float* logits = a.logits + static_cast<size_t>(row) * a.experts;
  float top = FromBits(0xff800000u);
  for (uint32_t i = lane; i < a.experts; i += 32) top = Max(top, logits[i]);
  top = WarpMax(top);
  float p = 0;
  for (uint32_t i = lane; i < a.experts; i += 32) {
    const float e = Exp(Sub(logits[i], top));
    probability[i] = BitsOf(e);
    p = Add(p, e);
  }
  const float total = JoinLanes(p);
  for (uint32_t i = lane; i < a.experts; i += 32)
    probability[i] = BitsOf(Div(FromBits(probability[i]), total));
  RoutedRow* out = a.routed + row;
  float sum = 0;
  for (uint32_t r = 0; r < a.used; ++r) {
    uint64_t best = 0;
    for (uint32_t i = lane; i < a.experts; i += 32) {
      const uint64_t rank = RankOf(probability[i], i);
      best = rank > best ? rank : best;
    }
    LODE_UNROLL
    for (uint32_t w = 16; w >= 1; w /= 2) {
      const uint64_t other = ShuffleXor(best, w);
      best = other > best ? other : best;
    }
    const uint32_t id = ~static_cast<uint32_t>(best);
    SyncWarp();
    const float weight = FromBits(probability[id]);
    SyncWarp();
    if (lane == 0) {
      probability[id] = kTaken;
      out->ids[r] = static_cast<uint16_t>(id);
      out->weights[r] = weight;
    }
    sum = Add(sum, weight);
    SyncWarp();
  }
  for (uint32_t r = lane; r < a.used; r += 32) out->weights[r] = Div(out->weights[r], sum);
}

LODE_KERNEL(kThreads) CombineKernel(CombineArgs a) {
  LetNextStart();
  WaitForPrevious();
  using namespace canonical;
  const uint32_t row = BlockY(), i = BlockX() * kThreads + ThreadId();
  if (i >= a.hidden) return;
  const RoutedRow& routed = a.routed[row];
  float y = 0;
  for (uint32_t r = 0; r < a.used; ++r) {
    const uint32_t pair = row * a.used + r;
    const float* expert = a.table != nullptr ? a.table[pair] : a.direct[pair];
    y = Fma(routed.weights[r], expert[i], y);
  }
  const size_t at = static_cast<size_t>(row) * a.hidden + i;
  a.y[at] = Fma(a.shared_gate[row], a.shared[at], y);
}

}  // namespace

void LaunchRoute(CUstream_st* stream, const RouteArgs& args, uint32_t n_rows) {
  Launch(stream, {n_rows}, 32, 0, &RouteKernel, args);
}
void LaunchCombine(CUstream_st* stream, const CombineArgs& args, uint32_t n_rows) {
  Launch(stream, {(args.hidden + kThreads - 1) / kThreads, n_rows}, kThreads, 0, &CombineKernel,
         args);
}

}  // namespace lode::cuda
