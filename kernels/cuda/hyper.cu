// Hyper-connections on the device: norm of each residual stream, gated mix, write gates, write; and
// the rotary tables of a window. The matrices between them are format_kernels.h. Formulas:
// docs/design/model.md. Called by gpu_worker/cuda_device.cc. Bound: latency; 40 KiB per row.
#include "kernels/canonical_trig.h"
#include "kernels/cuda/quantize.h"
#include "kernels/cuda/reduce.h"

namespace lode::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kWarps = kThreads / 32;

LODE_KERNEL(kThreads) RopeTablesKernel(RopeTables rope, const WindowBlock* window) {
  const uint32_t row = BlockX();
  // Exact: positions stay below 2^24.
  const float p = static_cast<float>(static_cast<int32_t>(window->params.rows[row].position));
  for (uint32_t i = ThreadId(); i < rope.pairs; i += ThreadCount()) {
    const canonical::SinCosResult r = canonical::SinCos(canonical::Mul(p, rope.inv_freq[i]));
    rope.sin[row * rope.pairs + i] = r.sin;
    rope.cos[row * rope.pairs + i] = r.cos;
  }
}

// One stream of one row per block.
LODE_KERNEL(kThreads) HcNormKernel(HcNormArgs a) {
  using namespace canonical;
  LODE_SHARED float slot;
  float* x = reinterpret_cast<float*>(DynamicShared());
  const uint32_t row = BlockY(), first = BlockX() * a.hidden, lane = ThreadId() % 32;
  const size_t at = static_cast<size_t>(row) * a.streams * a.hidden + first;
  for (uint32_t i = ThreadId(); i < a.hidden; i += kThreads) x[i] = a.wide[at + i];
  const float scale = BlockRmsScale(x, a.hidden, a.eps, &slot);
  for (uint32_t base = ThreadId() / 32 * kWarpColumns; base < a.hidden;
       base += kWarps * kWarpColumns) {
    const uint32_t column = base + lane * kLaneColumns;
    float v[kLaneColumns];
    LODE_UNROLL
    for (uint32_t i = 0; i < kLaneColumns; ++i) {
      v[i] = 0.0f;
      if (column + i < a.hidden) {
        v[i] = Mul(Mul(x[column + i], scale), a.weight[first + column + i]);
        a.normed[at + column + i] = v[i];
      }
    }
    if (a.check.window != nullptr)
      FinishColumns(a.forms, a.check, {row, first + column, column < a.hidden}, row, v);
  }
}

// Block 0 of a row: u = silu(low / streams). Block t + 1: the write gate of stream t.
LODE_KERNEL(kThreads) HcGateKernel(HcGateArgs a) {
  using namespace canonical;
  LODE_SHARED float stage[2][kDotStage];
  const uint32_t row = BlockY();
  const float inverse = Div(1.0f, static_cast<float>(a.streams));
  if (BlockX() > 0) {
    const uint32_t t = BlockX() - 1, width = a.streams * a.hidden;
    const float dot =
        BlockDot(a.normed + static_cast<size_t>(row) * width,
                 a.inject_weight + static_cast<size_t>(t) * width, width, stage[0], stage[1]);
    if (ThreadId() == 0) a.inject[row * a.streams + t] = Mul(2.0f, Sigmoid(Mul(dot, inverse)));
    return;
  }
  float* low = a.low + static_cast<size_t>(row) * a.rank;
  for (uint32_t base = ThreadId() / 32 * kWarpColumns; base < a.rank;
       base += kWarps * kWarpColumns) {
    const uint32_t column = base + ThreadId() % 32 * kLaneColumns;
    float v[kLaneColumns];
    LODE_UNROLL
    for (uint32_t i = 0; i < kLaneColumns; ++i) {
      v[i] = 0.0f;
      if (column + i < a.rank) {
        v[i] = Silu(Mul(low[column + i], inverse));
        low[column + i] = v[i];
      }
    }
    FinishColumns(a.forms, a.check, {row, column, column < a.rank}, row, v);
  }
}

// A warp per 256 columns.
LODE_KERNEL(32) HcMixKernel(HcMixArgs a) {
  using namespace canonical;
  const uint32_t row = BlockY(), column = BlockX() * kWarpColumns + ThreadId() * kLaneColumns;
  const float inverse = Div(1.0f, static_cast<float>(a.streams));
  const size_t at = static_cast<size_t>(row) * a.streams * a.hidden;
  float v[kLaneColumns];
  LODE_UNROLL
  for (uint32_t i = 0; i < kLaneColumns; ++i) {
    const uint32_t c = column + i;
    v[i] = 0.0f;
    if (c >= a.hidden) continue;
    float x = Mul(Sigmoid(a.up[at + c]), a.normed[at + c]);
    for (uint32_t s = 1; s < a.streams; ++s) {
      const size_t of_stream = at + s * a.hidden + c;
      x = Add(x, Mul(Sigmoid(a.up[of_stream]), a.normed[of_stream]));
    }
    v[i] = Mul(x, inverse);
    a.x[static_cast<size_t>(row) * a.hidden + c] = v[i];
  }
  if (a.check.window != nullptr)
    FinishColumns(a.forms, a.check, {row, column, column < a.hidden}, row, v);
}

LODE_KERNEL(kThreads) HcWriteKernel(HcWriteArgs a) {
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
  Launch(stream, {n_rows}, 32, 0, &RopeTablesKernel, rope, window);
}
void LaunchHcNorm(CUstream_st* stream, const HcNormArgs& args, uint32_t n_rows) {
  Launch(stream, {args.streams, n_rows}, kThreads, args.hidden * sizeof(float), &HcNormKernel,
         args);
}
void LaunchHcGate(CUstream_st* stream, const HcGateArgs& args, uint32_t n_rows) {
  const uint32_t gates = args.inject_weight != nullptr ? args.streams : 0;
  Launch(stream, {1 + gates, n_rows}, kThreads, 0, &HcGateKernel, args);
}
void LaunchHcMix(CUstream_st* stream, const HcMixArgs& args, uint32_t n_rows) {
  Launch(stream, {CeilDiv(args.hidden, kWarpColumns), n_rows}, 32, 0, &HcMixKernel, args);
}
void LaunchHcWrite(CUstream_st* stream, const HcWriteArgs& args, uint32_t n_rows) {
  Launch(stream, {CeilDiv(args.hidden, kThreads), args.streams, n_rows}, kThreads, 0,
         &HcWriteKernel, args);
}

}  // namespace lode::cuda
