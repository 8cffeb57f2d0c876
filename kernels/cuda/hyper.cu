// Hyper-connections on the device: norm of each residual stream, gated mix, write gates, write; and
// the rotary tables of a window. The matrices between them are format_kernels.h. Formulas:
// docs/design/model.md. Called by gpu_worker/cuda_device.cc. Bound: latency; 40 KiB per row.
#include "kernels/canonical_trig.h"
#include "kernels/cuda/quantize.h"
#include "kernels/cuda/reduce.h"

namespace lode::cuda {
namespace {

constexpr uint32_t kThreads = 256;
static_assert(kThreads == kWarpColumns);  // a block's columns are whole blocks of every form

LODE_KERNEL(kThreads) RopeTablesKernel(RopeTables rope, const WindowBlock* window) {
  LetNextStart();
  WaitForPrevious();
  const uint32_t row = BlockX();
  // Exact: positions stay below 2^24.
  const float p = static_cast<float>(static_cast<int32_t>(window->params.rows[row].position));
  for (uint32_t i = ThreadId(); i < rope.pairs; i += ThreadCount()) {
    const canonical::SinCosResult r = canonical::SinCos(canonical::Mul(p, rope.inv_freq[i]));
    rope.sin[row * rope.pairs + i] = r.sin;
    rope.cos[row * rope.pairs + i] = r.cos;
  }
}

constexpr uint32_t kNormThreads = 320;

// One stream of one row per block, eight columns per thread. A write that is still due is done on
// the way.
LODE_KERNEL(kNormThreads) HcNormKernel(HcNormArgs a) {
  LetNextStart();
  using namespace canonical;
  LODE_SHARED float slot;
  float* x = reinterpret_cast<float*>(DynamicShared());
  const uint32_t row = BlockY(), first = BlockX() * a.hidden, own = ThreadId() * kLaneColumns;
  const bool whole = a.hidden % kLaneColumns == 0;
  const size_t at = static_cast<size_t>(row) * a.streams * a.hidden + first;
  // The norm's weights are constant: here before the launch ahead has ended.
  Eight weight = LoadEight(a.weight + first + own, own < a.hidden ? a.hidden - own : 0, whole);
  WaitForPrevious();
  const float inject = a.y != nullptr ? a.inject[row * a.streams + BlockX()] : 0.0f;
  const float* y = a.y != nullptr ? a.y + static_cast<size_t>(row) * a.hidden : nullptr;
  for (uint32_t i = own; i < a.hidden; i += kNormThreads * kLaneColumns) {
    Eight r = LoadEight(a.wide + at + i, a.hidden - i, whole);
    if (y != nullptr) {
      const Eight added = LoadEight(y + i, a.hidden - i, whole);
      LODE_UNROLL
      for (uint32_t k = 0; k < kLaneColumns; ++k) r.v[k] = Fma(inject, added.v[k], r.v[k]);
      StoreEight(a.wide + at + i, r, a.hidden - i, whole);
    }
    StoreEight(x + i, r, a.hidden - i, true);
  }
  const float scale = BlockRmsScale(x, a.hidden, a.eps, &slot);
  // Whole warps go on, so that the exchanges of the forms have all lanes.
  for (uint32_t base = own / kWarpColumns * kWarpColumns; base < a.hidden;
       base += kNormThreads * kLaneColumns) {
    const uint32_t i = base + own % kWarpColumns, left = i < a.hidden ? a.hidden - i : 0;
    if (i != own) weight = LoadEight(a.weight + first + i, left, whole);
    Eight r = LoadEight(x + i, left, true);
    LODE_UNROLL
    for (uint32_t k = 0; k < kLaneColumns; ++k) r.v[k] = Mul(Mul(r.v[k], scale), weight.v[k]);
    StoreEight(a.normed + at + i, r, left, whole);
    if (a.check.window != nullptr)
      FinishColumns(a.forms, a.check, {row, first + i, left != 0}, row, r.v);
  }
}

// u = silu(low / streams) in place.
LODE_KERNEL(kThreads) HcGateKernel(HcGateArgs a) {
  LetNextStart();
  WaitForPrevious();
  using namespace canonical;
  LODE_SHARED float u[kThreads];
  const uint32_t row = BlockY(), t = ThreadId(), column = BlockX() * kThreads + t;
  const float inverse = Div(1.0f, static_cast<float>(a.streams));
  if (column < a.rank) {
    float* low = a.low + static_cast<size_t>(row) * a.rank + column;
    *low = u[t] = Silu(Mul(*low, inverse));
  }
  SyncBlock();
  const uint32_t first = BlockX() * kThreads, left = a.rank - first;
  FinishShared(a.forms, a.check, row, row, first, left < kThreads ? left : kThreads, u);
}

LODE_KERNEL(kThreads) HcMixKernel(HcMixArgs a) {
  LetNextStart();
  WaitForPrevious();
  using namespace canonical;
  LODE_SHARED float mixed[kThreads];
  const uint32_t row = BlockY(), t = ThreadId(), column = BlockX() * kThreads + t;
  const float inverse = Div(1.0f, static_cast<float>(a.streams));
  const size_t at = static_cast<size_t>(row) * a.streams * a.hidden + column;
  if (column < a.hidden) {
    float x = Mul(Sigmoid(a.up[at]), a.normed[at]);
    for (uint32_t s = 1; s < a.streams; ++s) {
      const size_t of_stream = at + s * a.hidden;
      x = Add(x, Mul(Sigmoid(a.up[of_stream]), a.normed[of_stream]));
    }
    mixed[t] = Mul(x, inverse);
    a.x[static_cast<size_t>(row) * a.hidden + column] = mixed[t];
  }
  if (a.check.window == nullptr) return;
  SyncBlock();
  const uint32_t first = BlockX() * kThreads, left = a.hidden - first;
  FinishShared(a.forms, a.check, row, row, first, left < kThreads ? left : kThreads, mixed);
}

LODE_KERNEL(kThreads) HcWriteKernel(HcWriteArgs a) {
  LetNextStart();
  WaitForPrevious();
  const uint32_t i = BlockX() * kThreads + ThreadId(), stream = BlockY(), row = BlockZ();
  if (i >= a.hidden) return;
  float* r = a.wide + (static_cast<size_t>(row) * a.streams + stream) * a.hidden + i;
  *r = canonical::Fma(a.inject[row * a.streams + stream],
                      a.y[static_cast<size_t>(row) * a.hidden + i], *r);
}

uint32_t CeilDiv(uint32_t n, uint32_t d) { return (n + d - 1) / d; }

}  // namespace

void LaunchRopeTables(CUstream_st* stream, const RopeTables& rope, const WindowBlock* window,
                      uint32_t n_rows) {
  LaunchAhead(stream, {n_rows}, 32, 0, &RopeTablesKernel, rope, window);
}
void LaunchHcNorm(CUstream_st* stream, const HcNormArgs& args, uint32_t n_rows) {
  LaunchAhead(stream, {args.streams, n_rows}, kNormThreads, args.hidden * sizeof(float),
              &HcNormKernel, args);
}
void LaunchHcGate(CUstream_st* stream, const HcGateArgs& args, uint32_t n_rows) {
  LaunchAhead(stream, {CeilDiv(args.rank, kThreads), n_rows}, kThreads, 0, &HcGateKernel, args);
}
void LaunchHcMix(CUstream_st* stream, const HcMixArgs& args, uint32_t n_rows) {
  LaunchAhead(stream, {CeilDiv(args.hidden, kThreads), n_rows}, kThreads, 0, &HcMixKernel, args);
}
void LaunchHcWrite(CUstream_st* stream, const HcWriteArgs& args, uint32_t n_rows) {
  LaunchAhead(stream, {CeilDiv(args.hidden, kThreads), args.streams, n_rows}, kThreads, 0,
              &HcWriteKernel, args);
}

}  // namespace lode::cuda
