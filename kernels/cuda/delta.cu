// Gated DeltaNet on the device: causal convolution with norms and gates, the recurrence with replay
// of accepted rows, and the gated norm behind it. In the recurrence four lanes share a value column
// and hold its keys of one residue mod 4 in registers; columns are independent. Lane l's keys
// belong to partials l, l + 4, ..: levels 16, 8, 4 of the canonical tree are additions inside the
// lane, 2 and 1 are exchanges. Formulas and the replay rule: docs/design/model.md. Called by
// gpu_worker/cuda_device_delta.cc. Bound: the dependent chain of a step (decay, sum, exchange,
// update), about a microsecond a row; state bytes at one row.
#include "kernels/cuda/delta_steps.h"
#include "kernels/cuda/quantize.h"
#include "kernels/cuda/reduce.h"

namespace lode::cuda {
namespace {

constexpr uint32_t kHeadThreads = 256;  // of a block that treats one head of one row
constexpr uint32_t kStepThreads = 64;   // of the recurrence: 16 value columns
constexpr uint32_t kStepColumns = kStepThreads / kLanesPerColumn;
constexpr uint32_t kLaneDims = kHeadThreads / 32;  // values of a head per lane of a warp
constexpr uint32_t kTapsAhead = 4;                 // of the convolution, loads in flight
static_assert(kStepColumns == kDeltaColumns);

// Convolution, silu and, for queries and keys, the L2 norm of one head of one row; head 0 also
// makes the row's gates. Rows of this window are read where the product left them: their ring
// entries are written by other blocks of this launch.
LODE_KERNEL(kHeadThreads) DeltaConvKernel(DeltaConvArgs a) {
  LetNextStart();
  using namespace canonical;
  LODE_SHARED float c[kHeadThreads];
  LODE_SHARED float length;
  const uint32_t head = BlockX(), row = BlockY(), i = ThreadId();
  const DeltaShape& d = a.shape;
  const uint32_t width = (2 * d.key_heads + d.value_heads) * d.dim, channel = head * d.dim + i;
  // The first taps' weights are constant: here before the launch ahead has ended.
  float weight[kTapsAhead];
  LODE_UNROLL
  for (uint32_t t = 0; t < kTapsAhead; ++t)
    weight[t] =
        i < d.dim && t < d.taps ? a.conv_weight[static_cast<size_t>(t) * width + channel] : 0.0f;
  WaitForPrevious();
  const StepRow& r = a.window->params.rows[row];
  const StepSequence& seq = a.window->params.seqs[r.seq];
  if (i < d.dim) {
    float sum = 0;
    for (uint32_t base = 0; base < d.taps; base += kTapsAhead) {
      float x[kTapsAhead];
      LODE_UNROLL
      for (uint32_t t = 0; t < kTapsAhead; ++t) {
        const uint32_t back = d.taps - 1 - (base + t);
        // A choice of addresses, not of loads: all are on their way together. A tap that is left
        // out reads the row itself.
        const bool real = base + t < d.taps && r.position >= back;
        const float* from = a.qkv + static_cast<size_t>(row) * width + channel;
        if (real && back <= row - seq.first_row) from -= static_cast<size_t>(back) * width;
        if (real && back > row - seq.first_row)
          from = a.conv + RingAt(seq.slot, r.position - back, width) + channel;
        x[t] = *from;
        if (base != 0) weight[t] = a.conv_weight[static_cast<size_t>(base + t) * width + channel];
      }
      LODE_UNROLL
      for (uint32_t t = 0; t < kTapsAhead; ++t) {
        // Taps before the sequence are left out.
        if (base + t >= d.taps || r.position < d.taps - 1 - (base + t)) continue;
        sum = Fma(weight[t], x[t], sum);
      }
    }
    c[i] = Silu(sum);
    a.conv[RingAt(seq.slot, r.position, width) + channel] =
        a.qkv[static_cast<size_t>(row) * width + channel];
  }
  SyncBlock();
  const uint32_t key_width = d.key_heads * d.dim, value_width = d.value_heads * d.dim;
  if (head < 2 * d.key_heads) {
    if (i < 32) {
      const float dot = WarpDot(c, c, d.dim);
      if (i == 0) length = Sqrt(Add(dot, kL2Eps));
    }
    SyncBlock();
    const float scale = head < d.key_heads ? InvSqrt(static_cast<float>(d.dim)) : 1.0f;
    float* out = head < d.key_heads
                     ? a.query + static_cast<size_t>(row) * key_width + channel
                     : a.key + RingAt(seq.slot, r.position, key_width) + channel - key_width;
    if (i < d.dim) *out = Mul(Div(c[i], length), scale);
  } else if (i < d.dim) {
    a.value[RingAt(seq.slot, r.position, value_width) + channel - 2 * key_width] = c[i];
  }
  if (head != 0) return;
  const size_t gates = RingAt(seq.slot, r.position, d.value_heads);
  for (uint32_t h = i; h < d.value_heads; h += ThreadCount()) {
    const size_t in = static_cast<size_t>(row) * d.value_heads + h;
    a.beta[gates + h] = Sigmoid(a.beta_in[in]);
    a.decay[gates + h] = Exp(Mul(a.a[h], Softplus(Add(a.alpha_in[in], a.dt[h]))));
  }
}

// What a step needs beside the state, as this thread fetches it; the next step's is on its way
// while one is computed.
template <uint32_t kDim>
struct StepInput {
  static constexpr uint32_t kOwn = (kDim + kStepThreads - 1) / kStepThreads;
  float key[kOwn], query[kOwn];
  float beta, decay, v;
};
// Where a block's columns are.
struct StepPlace {
  uint32_t head, column;
  size_t key_width, key_at;
};
template <uint32_t kDim>
LODE_DEVICE StepInput<kDim> LoadStep(const DeltaStepArgs& a, const StepSequence& seq,
                                     const StepPlace& at, uint32_t position) {
  StepInput<kDim> in;
  const uint32_t heads = a.shape.value_heads;
  const bool fresh = position >= seq.committed;
  const uint32_t row = fresh ? seq.first_row + (position - seq.committed) : 0;
  LODE_UNROLL
  for (uint32_t o = 0; o < StepInput<kDim>::kOwn; ++o) {
    const uint32_t k = ThreadId() + o * kStepThreads;
    if (k >= kDim) continue;
    in.key[o] = a.key[RingAt(seq.slot, position, at.key_width) + at.key_at + k];
    if (fresh) in.query[o] = a.query[row * at.key_width + at.key_at + k];
  }
  const size_t gate = RingAt(seq.slot, position, heads) + at.head;
  in.beta = a.beta[gate];
  in.decay = a.decay[gate];
  in.v = a.value[RingAt(seq.slot, position, static_cast<size_t>(heads) * kDim) +
                 static_cast<size_t>(at.head) * kDim + at.column];
  return in;
}

// 16 value columns of one head of one sequence. kJ = dim / 4 keys per lane. The state and the count
// of folded rows were last written before the layer ahead was answered (by a strict launch), so they
// are read while the launch ahead still runs.
template <uint32_t kJ>
LODE_KERNEL(kStepThreads)
DeltaStepKernel(DeltaStepArgs a) {
  LetNextStart();
  constexpr uint32_t kDim = kJ * kLanesPerColumn;
  LODE_SHARED float key[kDim];
  LODE_SHARED float query[kDim];
  const uint32_t blocks = kDim / kStepColumns, head = BlockX() / blocks;
  const uint32_t column = BlockX() % blocks * kStepColumns + ThreadId() / kLanesPerColumn;
  const uint32_t l = ThreadId() % kLanesPerColumn, heads = a.shape.value_heads;
  const StepParams& params = a.window->params;
  if (BlockY() >= params.n_seqs) {
    WaitForPrevious();
    return;
  }
  const StepSequence& seq = params.seqs[BlockY()];
  const uint32_t folded = a.folded[seq.slot], end = seq.committed + seq.n_rows;
  const StepPlace at = {head, column, static_cast<size_t>(a.shape.key_heads) * kDim,
                        static_cast<size_t>(head % a.shape.key_heads) * kDim};
  float* state = a.s + (static_cast<size_t>(seq.slot) * heads + head) * kDim * kDim + column;
  float s[kJ];
  if (folded < end) {
    LODE_UNROLL
    for (uint32_t j = 0; j < kJ; ++j)
      s[j] = state[static_cast<size_t>(kLanesPerColumn * j + l) * kDim];
  }
  WaitForPrevious();
  StepInput<kDim> in;
  if (folded < end) in = LoadStep<kDim>(a, seq, at, folded);
  for (uint32_t position = folded; position < end; ++position) {
    const bool fresh = position >= seq.committed;  // else an accepted row, being folded
    SyncBlock();                                   // the last step's vectors have been read
    LODE_UNROLL
    for (uint32_t o = 0; o < StepInput<kDim>::kOwn; ++o) {
      const uint32_t k = ThreadId() + o * kStepThreads;
      if (k >= kDim) continue;
      key[k] = in.key[o];
      if (fresh) query[k] = in.query[o];
    }
    const float beta = in.beta, decay = in.decay, v = in.v;
    SyncBlock();
    if (position + 1 < end) in = LoadStep<kDim>(a, seq, at, position + 1);
    float own[kJ];
    LaneKeys<kJ>(key, l, own);
    StepState<kJ>(own, v, beta, decay, s);
    if (fresh) {
      LaneKeys<kJ>(query, l, own);
      const float o = ColumnSum<kJ>(own, s);
      const uint32_t row = seq.first_row + (position - seq.committed);
      if (l == 0) a.out[(static_cast<size_t>(row) * heads + head) * kDim + column] = o;
    } else if (position + 1 == seq.committed) {
      LODE_UNROLL
      for (uint32_t j = 0; j < kJ; ++j)
        state[static_cast<size_t>(kLanesPerColumn * j + l) * kDim] = s[j];
    }
  }
  FinishFolding(a.window, a.folded, a.finished);
}

// 256 columns of a row: whole heads, normed and gated, then quantised by the first warp.
LODE_KERNEL(kHeadThreads) DeltaGateKernel(DeltaGateArgs a) {
  LetNextStart();
  WaitForPrevious();
  using namespace canonical;
  LODE_SHARED float out[kWarpColumns];
  const uint32_t row = BlockY(), width = a.heads * a.dim, first = BlockX() * kWarpColumns;
  const uint32_t lane = ThreadId() % 32;
  const size_t at = static_cast<size_t>(row) * width + first;
  for (uint32_t h = ThreadId() / 32; h < kWarpColumns / a.dim && first + h * a.dim < width;
       h += kHeadThreads / 32) {
    float* o = a.o + at + h * a.dim;
    const float* z = a.z + at + h * a.dim;
    float own[kLaneDims], gate[kLaneDims];
    LODE_UNROLL
    for (uint32_t j = 0; j < kLaneDims; ++j) {
      const uint32_t i = 32 * j + lane < a.dim ? 32 * j + lane : lane % a.dim;
      own[j] = o[i], gate[j] = z[i];
    }
    float p = 0;
    LODE_UNROLL
    for (uint32_t j = 0; j < kLaneDims; ++j) {
      if (32 * j + lane < a.dim) p = Fma(own[j], own[j], p);
    }
    const float mean = Div(JoinLanes(p), static_cast<float>(a.dim));
    const float scale = InvSqrt(Add(mean, a.eps));
    LODE_UNROLL
    for (uint32_t j = 0; j < kLaneDims; ++j) {
      const uint32_t i = 32 * j + lane;
      if (i >= a.dim) continue;
      const float y = Mul(Mul(Mul(own[j], scale), a.norm[i]), Sigmoid(gate[j]));
      out[h * a.dim + i] = y;
      o[i] = y;
    }
  }
  SyncBlock();
  if (ThreadId() >= 32) return;
  const uint32_t column = lane * kLaneColumns;
  const bool inside = first + column < width;
  float v[kLaneColumns];
  LODE_UNROLL
  for (uint32_t i = 0; i < kLaneColumns; ++i) v[i] = inside ? out[column + i] : 0.0f;
  FinishColumns(a.forms, a.check, {row, first + column, inside}, row, v);
}

template <uint32_t kDim>
bool LaunchStepsOf(CUstream_st* stream, const DeltaStepArgs& args, uint32_t n_seqs) {
  if (args.shape.dim != kDim) return false;
  LaunchAhead(stream, {args.shape.value_heads * (kDim / kStepColumns), n_seqs}, kStepThreads, 0,
              &DeltaStepKernel<kDim / kLanesPerColumn>, args);
  return true;
}

}  // namespace

bool DeltaShapeIsKnown(const DeltaShape& shape) {
  return shape.dim == 16 || shape.dim == 32 || shape.dim == 64 || shape.dim == 128 ||
         shape.dim == 256;
}

void LaunchDeltaConv(CUstream_st* stream, const DeltaConvArgs& args, uint32_t n_rows) {
  const uint32_t threads = (args.shape.dim + 31) / 32 * 32;
  LaunchAhead(stream, {2 * args.shape.key_heads + args.shape.value_heads, n_rows}, threads, 0,
              &DeltaConvKernel, args);
}

void LaunchDeltaSteps(CUstream_st* stream, const DeltaStepArgs& args, uint32_t n_seqs) {
  LaunchStepsOf<16>(stream, args, n_seqs) || LaunchStepsOf<32>(stream, args, n_seqs) ||
      LaunchStepsOf<64>(stream, args, n_seqs) || LaunchStepsOf<128>(stream, args, n_seqs) ||
      LaunchStepsOf<256>(stream, args, n_seqs);
}

void LaunchDeltaGate(CUstream_st* stream, const DeltaGateArgs& args, uint32_t n_rows) {
  const uint32_t width = args.heads * args.dim;
  LaunchAhead(stream, {(width + kWarpColumns - 1) / kWarpColumns, n_rows}, kHeadThreads, 0,
              &DeltaGateKernel, args);
}

}  // namespace lode::cuda
