// Router and combination of experts on the device: logits of a float matrix, with the forms of the
// layer's input that are still missing made beside them; softmax in the canonical order and the
// total order over (probability bits, lower id); weighted sums in routing order.
// Formulas: docs/design/arithmetic.md, "Operators". Called by gpu_worker/cuda_device.cc.
#include "kernels/cuda/decode.h"
#include "kernels/cuda/product.h"
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
constexpr uint32_t kRouteThreads = 512;
constexpr uint32_t kWarps = kRouteThreads / 32;
constexpr uint32_t kThreadExperts = kExpertsMax / kRouteThreads;
constexpr uint32_t kLowest = 0x007fffffu;  // OrderedBits of minus infinity

// Larger number, larger float; NaN counts as minus infinity.
LODE_DEVICE uint32_t OrderedBits(float x) {
  const uint32_t bits = canonical::BitsOf(x);
  if (x != x) return kLowest;
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
LODE_DEVICE float FromOrdered(uint32_t bits) {
  return canonical::FromBits((bits & 0x80000000u) != 0 ? bits & 0x7fffffffu : ~bits);
}
// Larger number, better expert: bits of a probability, NaN counts as zero; 0 is left for experts
// that do not exist.
LODE_DEVICE uint32_t RankOf(float p) {
  const uint32_t bits = canonical::BitsOf(p);
  return bits > 0x7f800000u ? 1 : bits + 1;
}

struct Candidate {
  uint32_t rank, id;
};
// What the threads of a row share.
struct RouteRow {
  float e[kExpertsMax];
  uint32_t warp_top[kWarps];   // ordered bits of logits
  uint32_t warp_best[kWarps];  // ranks of exponentials
  float total;
  uint32_t cut;  // rank of an exponential that `used` experts reach; 0: no such
  uint32_t n_candidates;
  Candidate candidates[kExpertsMax];
  float chosen[kExpertsUsedMax];
};

// The used-th best of the warps' best ranks: as many experts are at least as good. One warp.
LODE_DEVICE void FindCut(uint32_t used, RouteRow* row) {
  const uint32_t lane = ThreadId() % 32, own = lane < kWarps ? row->warp_best[lane] : 0;
  uint32_t better = 0;
  LODE_NO_UNROLL
  for (uint32_t w = 0; w < kWarps; ++w) {
    const uint32_t other = row->warp_best[w];
    better += other > own || (other == own && w < lane) ? 1 : 0;
  }
  if (used > kWarps ? lane == 0 : lane < kWarps && better + 1 == used)
    row->cut = used > kWarps ? 0 : own;
}

// Exponentials of a thread's experts from their logits, the sum of all of them and the cut; ends
// with a barrier.
LODE_DEVICE void Exponentials(uint32_t n, uint32_t used, RouteRow* row,
                              float (&e)[kThreadExperts]) {
  using namespace canonical;
  const uint32_t t = ThreadId(), lane = t % 32, warp = t / 32;
  uint32_t top = kLowest;
  LODE_UNROLL
  for (uint32_t j = 0; j < kThreadExperts; ++j) {
    if (j * kRouteThreads + t < n) top = Larger(top, OrderedBits(e[j]));
  }
  top = LargestOfWarp(top);
  if (lane == 0) row->warp_top[warp] = top;
  if (t == 0) row->n_candidates = 0;
  SyncBlock();
  const float largest = FromOrdered(LargestOfWarp(row->warp_top[lane % kWarps]));
  uint32_t best = 0;
  LODE_UNROLL
  for (uint32_t j = 0; j < kThreadExperts; ++j) {
    if (j * kRouteThreads + t >= n) continue;
    e[j] = Exp(Sub(e[j], largest));
    row->e[j * kRouteThreads + t] = e[j];
    best = Larger(best, RankOf(e[j]));
  }
  best = LargestOfWarp(best);
  if (lane == 0) row->warp_best[warp] = best;
  SyncBlock();
  if (warp == 1) FindCut(used, row);
  if (warp == 0) {
    constexpr uint32_t kAhead = 16;
    float p = 0;
    LODE_NO_UNROLL
    for (uint32_t base = lane; base < n; base += 32 * kAhead) {
      float v[kAhead];
      LODE_UNROLL
      for (uint32_t j = 0; j < kAhead; ++j) v[j] = base + 32 * j < n ? row->e[base + 32 * j] : 0.0f;
      LODE_UNROLL
      for (uint32_t j = 0; j < kAhead; ++j) {
        if (base + 32 * j < n) p = Add(p, v[j]);
      }
    }
    p = JoinLanes(p);
    if (lane == 0) row->total = p;
  }
  SyncBlock();
}

// Probabilities; experts that are at least as good as the cut, in any order; each of them counts
// who is better, which is its place. Division keeps the order of exponentials, so the cut is one
// for probabilities as well. Ends with a barrier.
LODE_DEVICE void ChooseBest(uint32_t n, uint32_t used, RouteRow* row,
                            const float (&e)[kThreadExperts], RoutedRow* out) {
  using namespace canonical;
  const uint32_t t = ThreadId(), lane = t % 32;
  const float total = row->total;
  const uint32_t cut = row->cut == 0 ? 1 : RankOf(Div(FromBits(row->cut - 1), total));
  LODE_UNROLL
  for (uint32_t j = 0; j < kThreadExperts; ++j) {
    const uint32_t id = j * kRouteThreads + t;
    if (id - lane >= n) continue;  // whole warps
    const float p = Div(e[j], total);
    const uint32_t rank = id < n ? RankOf(p) : 0, mask = Ballot(rank >= cut);
    if (mask == 0) continue;
    uint32_t base = 0;
    if (lane == 0) base = AtomicAdd(&row->n_candidates, PopCount(mask));
    base = ShuffleFrom(base, 0) + PopCount(mask & ((1u << lane) - 1));
    if (rank >= cut) {
      row->candidates[base] = {rank, id};
      row->e[id] = p;
    }
  }
  SyncBlock();
  const uint32_t candidates = row->n_candidates;
  LODE_NO_UNROLL
  for (uint32_t c = t; c < candidates; c += kRouteThreads) {
    const Candidate own = row->candidates[c];
    uint32_t better = 0;
    LODE_NO_UNROLL
    for (uint32_t i = 0; i < candidates; ++i) {
      const Candidate other = row->candidates[i];
      better += other.rank > own.rank || (other.rank == own.rank && other.id < own.id) ? 1 : 0;
    }
    if (better >= used) continue;
    row->chosen[better] = row->e[own.id];
    if (out != nullptr) out->ids[better] = static_cast<uint16_t>(own.id);
  }
  SyncBlock();
  const float sum = AddTerms(0.0f, row->chosen, used);
  if (out != nullptr && t < used) out->weights[t] = Div(row->chosen[t], sum);
  SyncBlock();
}

// A row per block. Everything is done twice: with numbers of its own while the launch ahead still
// runs, so that the code, which a launch of one block fetches line by line, is there when the
// logits are. Those numbers have one large one per warp, as most rows of logits do.
LODE_KERNEL(kRouteThreads) RouteKernel(RouteArgs a) {
  LetNextStart();
  LODE_SHARED RouteRow row;
  const uint32_t t = ThreadId();
  LODE_NO_UNROLL
  for (uint32_t round = 0; round < 2; ++round) {
    float e[kThreadExperts];
    LODE_UNROLL
    for (uint32_t j = 0; j < kThreadExperts; ++j) e[j] = -static_cast<float>(t % 32 * 2 + j);
    if (round == 1) {
      WaitForPrevious();
      const float* logits = a.logits + static_cast<size_t>(BlockX()) * a.experts;
      LODE_UNROLL
      for (uint32_t j = 0; j < kThreadExperts; ++j) {
        if (j * kRouteThreads + t < a.experts) e[j] = logits[j * kRouteThreads + t];
      }
    }
    Exponentials(a.experts, a.used, &row, e);
    ChooseBest(a.experts, a.used, &row, e, round == 1 ? a.routed + BlockX() : nullptr);
  }
}
static_assert(kExpertsMax % kRouteThreads == 0 && kWarps <= 32 && kRouteThreads >= kExpertsUsedMax);

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
  LaunchAhead(stream, {n_rows}, kRouteThreads, 0, &RouteKernel, args);
}
void LaunchCombine(CUstream_st* stream, const CombineArgs& args, uint32_t n_rows) {
  LaunchAhead(stream, {(args.hidden + kThreads - 1) / kThreads, n_rows}, kThreads, 0,
              &CombineKernel, args);
}

}  // namespace lode::cuda
