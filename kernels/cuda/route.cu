// Router and combination of experts on the device: logits of a float matrix, with the forms of the
// layer's input that are still missing made beside them; softmax in the canonical order and the
// total order over (probability bits, lower id); weighted sums in routing order.
// Formulas: docs/design/arithmetic.md, "Operators". Called by gpu_worker/cuda_device.cc.
#include "kernels/cuda/decode.h"
#include "kernels/cuda/quantize.h"
#include "kernels/cuda/reduce.h"

namespace lode::cuda {
namespace {

constexpr uint32_t kThreads = 256;

// ---- logits: a warp has one expert's weights in registers, lane l those of partial l
constexpr uint32_t kRouterWarps = kThreads / 32;
constexpr uint32_t kRouterRows = 4;  // experts of a block; its two halves share out the rows
constexpr uint32_t kRouterActs = 4;  // rows of the window in shared memory at a time
constexpr uint32_t kRouterHalf = kRouterActs / (kRouterWarps / kRouterRows);  // of one warp
constexpr uint32_t kLaneWeights = kRouterColumnsMax / 32;
static_assert(kRouterWarps == 2 * kRouterRows && kRouterHalf == 2);

template <class F>
LODE_DEVICE void LoadWeights(const uint8_t* row, uint32_t n, float (&w)[kLaneWeights]) {
  LODE_UNROLL
  for (uint32_t j = 0; j < kLaneWeights; ++j)
    w[j] = j < n ? F::Weight(row + (32 * j + ThreadId() % 32) * F::kBytes, 0) : 0.0f;
}

// Logits of kRouterRows experts; behind the last of these blocks, one per row that makes forms.
LODE_KERNEL(kThreads) RouterKernel(RouterArgs a, uint32_t n_rows) {
  LetNextStart();
  using namespace canonical;
  const uint32_t logit_blocks = (a.experts + kRouterRows - 1) / kRouterRows;
  const uint32_t warp = ThreadId() / 32, lane = ThreadId() % 32;
  if (BlockX() >= logit_blocks) {
    WaitForPrevious();
    const uint32_t row = BlockX() - logit_blocks;
    const float* x = a.x + static_cast<size_t>(row) * a.columns;
    for (uint32_t base = warp * kWarpColumns; base < a.columns; base += kThreads * kLaneColumns) {
      const uint32_t at = base + lane * kLaneColumns;
      float v[kLaneColumns];
      LODE_UNROLL
      for (uint32_t i = 0; i < kLaneColumns; ++i) v[i] = at + i < a.columns ? x[at + i] : 0.0f;
      FinishColumns(a.forms, a.check, {row, at, at < a.columns}, row, v);
    }
    return;
  }
  float* x = reinterpret_cast<float*>(DynamicShared());
  const uint32_t expert = BlockX() * kRouterRows + warp % kRouterRows, n = a.columns / 32;
  const uint8_t* row = a.w + (expert < a.experts ? expert : a.experts - 1) * a.row_bytes;
  float w[kLaneWeights];
  if (a.format == Format::kF32) {
    LoadWeights<decode::F32>(row, n, w);
  } else if (a.format == Format::kF16) {
    LoadWeights<decode::F16>(row, n, w);
  } else {
    LoadWeights<decode::BF16>(row, n, w);
  }
  WaitForPrevious();
  for (uint32_t first = 0; first < n_rows; first += kRouterActs) {
    const uint32_t acts = n_rows - first < kRouterActs ? n_rows - first : kRouterActs;
    if (first != 0) SyncBlock();
    for (uint32_t i = 4 * ThreadId(); i < acts * a.columns; i += 4 * kThreads)
      CopyAhead16(x + i, a.x + static_cast<size_t>(first) * a.columns + i);
    WaitForCopies();
    SyncBlock();
    const uint32_t mine = warp / kRouterRows * kRouterHalf;
    if (mine >= acts) continue;  // whole warps
    // A second row that is not there repeats the first.
    const float* x0 = x + mine * a.columns + lane;
    const float* x1 = mine + 1 < acts ? x0 + a.columns : x0;
    float p0 = 0, p1 = 0;
    LODE_UNROLL
    for (uint32_t j = 0; j < kLaneWeights; ++j) {
      if (j < n) {
        p0 = Fma(w[j], x0[32 * j], p0);
        p1 = Fma(w[j], x1[32 * j], p1);
      }
    }
    p0 = JoinLanes(p0);
    p1 = JoinLanes(p1);
    if (lane != 0 || expert >= a.experts) continue;
    float* out = a.logits + static_cast<size_t>(first + mine) * a.experts + expert;
    out[0] = p0;
    if (mine + 1 < acts) out[a.experts] = p1;
  }
}

// ---- the best k
constexpr uint32_t kLaneExperts = kExpertsMax / 32;

// Larger number, better expert: probability bits, NaN counts as zero; 0 is left for those taken.
LODE_DEVICE uint32_t RankOf(uint32_t bits) { return bits > 0x7f800000u ? 1 : bits + 1; }

// A lane's best expert that is left: of equal ones the first.
struct LaneBest {
  uint32_t rank, at;
};
LODE_DEVICE LaneBest BestOfLane(const uint32_t (&rank)[kLaneExperts]) {
  LaneBest best = {rank[0], 0};
  LODE_UNROLL
  for (uint32_t j = 1; j < kLaneExperts; ++j) {
    if (rank[j] > best.rank) best = {rank[j], j};
  }
  return best;
}

// A row per block: all threads make the probabilities, the first warp adds and chooses. Little
// code, because a launch of one block waits for every line of it.
LODE_KERNEL(kThreads) RouteKernel(RouteArgs a) {
  LetNextStart();
  WaitForPrevious();
  using namespace canonical;
  LODE_SHARED float e[kExpertsMax];
  LODE_SHARED float warp_top[kThreads / 32];
  LODE_SHARED float total;
  LODE_SHARED float chosen[kExpertsUsedMax];
  const uint32_t row = BlockX(), t = ThreadId(), lane = t % 32;
  const float* logits = a.logits + static_cast<size_t>(row) * a.experts;
  float top = FromBits(0xff800000u);
  for (uint32_t i = t; i < a.experts; i += kThreads) {
    e[i] = logits[i];
    top = Max(top, e[i]);
  }
  top = WarpMax(top);
  if (lane == 0) warp_top[t / 32] = top;
  SyncBlock();
  for (uint32_t w = 0; w < kThreads / 32; ++w) top = Max(top, warp_top[w]);
  LODE_NO_UNROLL
  for (uint32_t i = t; i < a.experts; i += kThreads) e[i] = Exp(Sub(e[i], top));
  SyncBlock();
  if (t < 32) {
    float p = 0;
    for (uint32_t i = lane; i < a.experts; i += 32) p = Add(p, e[i]);
    p = JoinLanes(p);
    if (lane == 0) total = p;
  }
  SyncBlock();
  LODE_NO_UNROLL
  for (uint32_t i = t; i < a.experts; i += kThreads) e[i] = Div(e[i], total);
  SyncBlock();
  if (t >= 32) return;
  uint32_t rank[kLaneExperts];
  LODE_UNROLL
  for (uint32_t j = 0; j < kLaneExperts; ++j)
    rank[j] = 32 * j + lane < a.experts ? RankOf(BitsOf(e[32 * j + lane])) : 0;
  RoutedRow* out = a.routed + row;
  LaneBest best = BestOfLane(rank);
  LODE_NO_UNROLL
  for (uint32_t r = 0; r < a.used; ++r) {
    const uint32_t top_rank = LargestOfWarp(best.rank);
    const uint32_t id = SmallestOfWarp(best.rank == top_rank ? 32 * best.at + lane : ~uint32_t{0});
    if (id % 32 == lane) {
      LODE_UNROLL
      for (uint32_t j = 0; j < kLaneExperts; ++j) {
        if (j == id / 32) rank[j] = 0;
      }
      chosen[r] = e[id];
      out->ids[r] = static_cast<uint16_t>(id);
      best = BestOfLane(rank);
    }
  }
  SyncWarp();
  float sum = 0;
  for (uint32_t r = 0; r < a.used; ++r) sum = Add(sum, chosen[r]);
  for (uint32_t r = lane; r < a.used; r += 32) out->weights[r] = Div(chosen[r], sum);
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

bool LaunchRouter(CUstream_st* stream, const RouterArgs& args, uint32_t n_rows) {
  const bool floats =
      args.format == Format::kF32 || args.format == Format::kF16 || args.format == Format::kBF16;
  if (!floats || args.columns > kRouterColumnsMax || args.columns % 32 != 0) return false;
  bool missing = false;
  for (const ActForm& form : args.forms.form) missing |= form.base != nullptr;
  const uint32_t acts = n_rows < kRouterActs ? n_rows : kRouterActs;
  LaunchAhead(stream, {(args.experts + kRouterRows - 1) / kRouterRows + (missing ? n_rows : 0)},
              kThreads, sizeof(float) * acts * args.columns, &RouterKernel, args, n_rows);
  return true;
}
void LaunchRoute(CUstream_st* stream, const RouteArgs& args, uint32_t n_rows) {
  LaunchAhead(stream, {n_rows}, kThreads, 0, &RouteKernel, args);
}
void LaunchCombine(CUstream_st* stream, const CombineArgs& args, uint32_t n_rows) {
  LaunchAhead(stream, {(args.hidden + kThreads - 1) / kThreads, n_rows}, kThreads, 0,
              &CombineKernel, args);
}

}  // namespace lode::cuda
