// The hashed n-gram layer on the device: gate of each stream, then the dilated causal convolution
// over the ring of normed gated values. Two kernels, because a row's convolution reads the ring
// entries of the rows before it in the same window. Formulas: docs/design/model.md. Called by
// gpu_worker/cuda_device_ple.cc.
#include "kernels/cuda/quantize.h"
#include "kernels/cuda/reduce.h"

namespace lode::cuda {
namespace {

constexpr uint32_t kThreads = 256;

LODE_DEVICE size_t RingAt(uint32_t slot, uint32_t position, size_t width) {
  return (static_cast<size_t>(slot) * kPleRing + position % kPleRing) * width;
}

// rms_norm of x[n] in shared memory, in place.
LODE_DEVICE void NormInPlace(float* x, const float* weight, uint32_t n, float eps, float* slot) {
  const float scale = BlockRmsScale(x, n, eps, slot);
  for (uint32_t i = ThreadId(); i < n; i += kThreads)
    x[i] = canonical::Mul(canonical::Mul(x[i], scale), weight[i]);
}

// One stream of one row per block.
LODE_KERNEL(kThreads) PleGateKernel(PleArgs a) {
  LetNextStart();
  WaitForPrevious();
  using namespace canonical;
  LODE_SHARED float slot;
  const uint32_t row = BlockY(), n = a.hidden, first = BlockX() * n;
  const size_t width = static_cast<size_t>(a.streams) * n, at = row * width + first;
  float* key = reinterpret_cast<float*>(DynamicShared());
  float* query = key + n;
  for (uint32_t i = ThreadId(); i < n; i += kThreads) {
    key[i] = a.key[at + i];
    query[i] = a.wide[at + i];
  }
  NormInPlace(key, a.norm_key + first, n, a.eps, &slot);
  NormInPlace(query, a.norm_query + first, n, a.eps, &slot);
  SyncBlock();
  if (ThreadId() < 32) {
    const float d =
        Mul(WarpDot(key, query, n), InvSqrt(static_cast<float>(static_cast<int32_t>(n))));
    const float root = Sqrt(Max(1e-6f, Abs(d)));
    const float signed_root = d > 0.0f ? root : (d < 0.0f ? -root : 0.0f);
    if (ThreadId() == 0) slot = Sigmoid(signed_root);
  }
  SyncBlock();
  const float gate = slot;
  for (uint32_t i = ThreadId(); i < n; i += kThreads) {
    key[i] = Mul(gate, a.value[static_cast<size_t>(row) * n + i]);
    a.gated[at + i] = key[i];
  }
  NormInPlace(key, a.norm_conv + first, n, a.eps, &slot);
  const StepRow& r = a.window->params.rows[row];
  float* ring = a.ring + RingAt(a.window->params.seqs[r.seq].slot, r.position, width) + first;
  for (uint32_t i = ThreadId(); i < n; i += kThreads) ring[i] = key[i];
}

LODE_KERNEL(kThreads) PleConvKernel(PleArgs a) {
  LetNextStart();
  WaitForPrevious();
  using namespace canonical;
  const uint32_t row = BlockY(), i = BlockX() * kThreads + ThreadId();
  const uint32_t width = a.streams * a.hidden;
  if (i >= width) return;
  const StepRow& r = a.window->params.rows[row];
  const uint32_t slot = a.window->params.seqs[r.seq].slot;
  float z = 0;
  for (uint32_t t = 0; t < a.taps; ++t) {
    const uint32_t back = (a.taps - 1 - t) * a.dilation;
    if (r.position < back) continue;
    z = Fma(a.conv_weight[static_cast<size_t>(t) * width + i],
            a.ring[RingAt(slot, r.position - back, width) + i], z);
  }
  const size_t at = static_cast<size_t>(row) * width + i;
  a.wide[at] = Add(Add(a.wide[at], a.gated[at]), Silu(z));
}

}  // namespace

void LaunchPle(CUstream_st* stream, const PleArgs& args, uint32_t n_rows) {
  const uint32_t width = args.streams * args.hidden;
  LaunchAhead(stream, {args.streams, n_rows}, kThreads, 2 * args.hidden * sizeof(float),
              &PleGateKernel, args);
  LaunchAhead(stream, {(width + kThreads - 1) / kThreads, n_rows}, kThreads, 0, &PleConvKernel,
              args);
}

}  // namespace lode::cuda
