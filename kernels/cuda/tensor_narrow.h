// A Q8_0 product with few columns whose input every block quantises for itself (NarrowProduct), on
// the integer tensor cores: see tensor_mat.h for the instruction and the words of a pair of blocks.
// A block of threads has 32 rows of every stream; a warp eight of them, whose sums stay in its
// lanes, so that each lane gates two values of its own and only the mix over the streams passes
// through shared memory. Bound: latency; hyper-connections run it 97 times a window. Device code
// and its launch.
#pragma once

#include <type_traits>

#include "kernels/cuda/dense.h"
#include "kernels/cuda/tensor_mat.h"

namespace lode::cuda {

inline constexpr uint32_t kNarrowTiles = kNarrowRows / kTensorRows;  // of one stream

struct TensorNarrowLayout {
  uint32_t parts, form, form_stride, d_offset, sum_offset, u, gated, mixed, bytes;
};
LODE_FN TensorNarrowLayout LayOutTensorNarrow(const NarrowProduct& p) {
  constexpr uint32_t kFloat = sizeof(float);
  TensorNarrowLayout l;
  l.parts = p.streams != 0 ? p.streams : 1;
  l.form = l.parts * PartStageBytes(kNarrowRows, p.row_bytes);
  l.d_offset = p.columns;
  l.sum_offset = l.d_offset + p.columns / 32 * kFloat;
  l.form_stride = (l.sum_offset + p.columns / 16 * 2 + kCopyBytes - 1) / kCopyBytes * kCopyBytes;
  l.u = l.form + p.n_rows * l.form_stride;
  l.gated = l.u + (p.streams != 0 ? p.n_rows * p.columns * kFloat : 0);
  l.mixed = l.gated + p.streams * p.n_rows * kNarrowRows * kFloat;
  l.bytes = l.mixed + (p.streams != 0 ? p.n_rows * kNarrowRows * kFloat : 0);
  return l;
}

// Two blocks' words of one activation row for lane t, as ArrangeActs has them.
LODE_DEVICE Word4 ActWords(const uint32_t* y, uint32_t t) {
  const uint32_t high =
      t == 3 ? BytePermute(y[0], y[7], 0x7610u) : FunnelRight(y[4 + t], y[5 + t], 16);
  return Word4{FunnelRight(y[t], y[t + 1], 16), high, y[8 + t], y[12 + t]};
}

// Sums of rows 2 t and 2 t + 1 of the eight that begin at `rows`, with activation row act.
LODE_DEVICE void NarrowSums(const uint8_t* rows, uint32_t row_bytes, const ActForm& form,
                            uint32_t act, uint32_t pairs, float (&sum)[2]) {
  using namespace canonical;
  const uint32_t lane = ThreadId() % 32, g = lane / 4, t = lane % 4;
  const uint8_t* codes = form.base + act * form.stride;
  const float* scales = reinterpret_cast<const float*>(codes + form.d_offset);
  sum[0] = sum[1] = 0.0f;
  for (uint32_t p = 0; p < pairs; ++p) {
    const uint32_t* w = reinterpret_cast<const uint32_t*>(rows + g * row_bytes + p * kPairBytes);
    const uint32_t last = w[5 + t];
    const uint32_t high = t == 3 ? BytePermute(w[0], last, 0x5432u) : last;
    const Word4 y = ActWords(reinterpret_cast<const uint32_t*>(codes) + 16 * p, t);
    float even[2], odd[2];
    MultiplyBlocks(y.x, y.y, w[1 + t], high, even);
    MultiplyBlocks(y.z, y.w, w[9 + t], w[13 + t], odd);
    LODE_UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
      const uint8_t* pair = rows + (2 * t + i) * row_bytes + p * kPairBytes;
      const float of_even = HalfToFloat(*reinterpret_cast<const uint16_t*>(pair));
      const float of_odd = HalfToFloat(*reinterpret_cast<const uint16_t*>(pair + kBlockBytes));
      sum[i] = Add(sum[i], Mul(even[i], Mul(of_even, scales[2 * p])));
      sum[i] = Add(sum[i], Mul(odd[i], Mul(of_odd, scales[2 * p + 1])));
    }
  }
}

// Where a lane's two values of a tile are: tiles of a stream follow each other.
struct NarrowPlace {
  uint32_t stream, column;  // of the block's 32
};
LODE_DEVICE NarrowPlace PlaceOf(uint32_t tile) {
  return {tile / kNarrowTiles, tile % kNarrowTiles * kTensorRows + ThreadId() % 4 * 2};
}
// Normed values of a lane's two columns.
LODE_DEVICE Word2 NormedPair(const NarrowProduct& p, uint32_t first, uint32_t act,
                             const NarrowPlace& at) {
  return *reinterpret_cast<const Word2*>(
      p.normed + (static_cast<size_t>(act) * p.streams + at.stream) * p.rows + first + at.column);
}

// The streams' gated values become the mix and its form.
LODE_DEVICE void MixGated(const NarrowProduct& p, const float* gated, uint32_t first, float inverse,
                          float* mixed) {
  using namespace canonical;
  const uint32_t n = p.n_rows * kNarrowRows;
  for (uint32_t i = ThreadId(); i < n; i += ThreadCount()) {
    float x = gated[i];
    for (uint32_t s = 1; s < p.streams; ++s) x = Add(x, gated[s * n + i]);
    mixed[i] = Mul(x, inverse);
    p.y[static_cast<size_t>(i / kNarrowRows) * p.rows + first + i % kNarrowRows] = mixed[i];
  }
  SyncBlock();
  FinishMix(p, mixed, first);
}

template <class F>
LODE_KERNEL(kProductThreadsMax)
TensorNarrowKernel(NarrowProduct p) {
  static_assert(std::is_same_v<F, decode::Q8_0>);
  using namespace canonical;
  LetNextStart();
  const TensorNarrowLayout l = LayOutTensorNarrow(p);
  uint8_t* shared = DynamicShared();
  const NarrowBlock b = BeginNarrow(p, l, shared);
  const uint32_t first = b.first;
  float* u = reinterpret_cast<float*>(shared + l.u);
  float* gated = reinterpret_cast<float*>(shared + l.gated);
  const float inverse = p.streams != 0 ? Div(1.0f, static_cast<float>(p.streams)) : 1.0f;
  const uint32_t warp = ThreadId() / 32, g = ThreadId() % 32 / 4;
  const uint32_t act = g < p.n_rows ? g : p.n_rows - 1;  // lanes beyond the last row repeat it
  WaitForPrevious();
  NarrowGates(p);
  const uint32_t tiles = l.parts * kNarrowTiles;
  Word2 normed = {0, 0};
  if (p.streams != 0 && warp < tiles) normed = NormedPair(p, first, act, PlaceOf(warp));
  if (p.streams != 0) {
    for (uint32_t i = ThreadId(); i < p.n_rows * p.columns; i += ThreadCount())
      u[i] = Silu(Mul(p.x[i], inverse));
    SyncBlock();
  }
  QuantizeNarrow(p, p.streams != 0 ? u : p.x, b.form, inverse);
  WaitForCopies();
  SyncBlock();
  const uint32_t row_bytes = static_cast<uint32_t>(p.row_bytes);
  for (uint32_t t = warp; t < tiles; t += ThreadCount() / 32) {
    const NarrowPlace at = PlaceOf(t);
    float sum[2];
    NarrowSums(shared + at.stream * PartStageBytes(kNarrowRows, p.row_bytes) +
                   t % kNarrowTiles * kTensorRows * row_bytes,
               row_bytes, b.form, act, p.columns / 64, sum);
    if (p.streams != 0) {
      if (t != warp) normed = NormedPair(p, first, act, at);
      float* to = gated + (at.stream * p.n_rows + act) * kNarrowRows + at.column;
      const float one = Mul(Sigmoid(sum[0]), FromBits(normed.x));
      const float two = Mul(Sigmoid(sum[1]), FromBits(normed.y));
      if (g < p.n_rows) to[0] = one, to[1] = two;
    } else if (g < p.n_rows) {
      float* y = p.y + static_cast<size_t>(act) * p.rows + first;
      if (at.column < b.tile.valid) y[at.column] = sum[0];
      if (at.column + 1 < b.tile.valid) y[at.column + 1] = sum[1];
    }
  }
  if (p.streams == 0) return;
  SyncBlock();
  MixGated(p, gated, first, inverse, reinterpret_cast<float*>(shared + l.mixed));
}

template <class F>
bool LaunchTensorNarrow([[maybe_unused]] CUstream_st* stream,
                        [[maybe_unused]] const NarrowProduct& p) {
  if constexpr (std::is_same_v<F, decode::Q8_0>) {
    if (!tensor_products || p.columns == 0 || p.columns % 64 != 0) return false;
    if (reinterpret_cast<uintptr_t>(p.w) % kCopyBytes != 0) return false;
    if (p.streams != 0 && p.rows % kNarrowRows != 0) return false;
    const uint32_t bytes = LayOutTensorNarrow(p).bytes;
    if (bytes > shared_bytes_max) return false;
    const uint32_t tiles = (p.streams != 0 ? p.streams : 1) * kNarrowTiles;
    const uint32_t lanes = p.n_rows * p.columns / kLaneColumns;
    uint32_t threads = (lanes + 31) / 32 * 32;
    if (threads < tiles * 32) threads = tiles * 32;
    if (threads > kProductThreadsMax) threads = kProductThreadsMax;
    const uint32_t blocks = (p.rows + kNarrowRows - 1) / kNarrowRows;
    LaunchAhead(stream, {blocks}, threads, bytes, &TensorNarrowKernel<F>, p);
    return true;
  }
  return false;
}

}  // namespace lode::cuda
