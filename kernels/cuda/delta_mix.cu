// Everything between the two products of a Gated DeltaNet layer in one launch: causal convolution,
// norms and gates of the window's rows, the recurrence, the gated norm behind it and the forms for
// the output product. A block has one head of one sequence, four lanes for each of its value
// columns; nothing of a row leaves the block in between, so three launches and their trips through
// the L2 become barriers. Heads that share a key head make its queries and keys each for
// themselves: a few thousand operations. What earlier windows left (state, rows to fold, taps) is
// read and worked off before the launch ahead has ended. Same operations in the same order as
// delta.cu, which other shapes take. Formulas and the replay rule: docs/design/model.md. Bound: the
// dependent chain of a step, about half a microsecond a row.
#include "kernels/cuda/delta_mix.h"
#include "kernels/cuda/delta_steps.h"
#include "kernels/cuda/quantize.h"

namespace lode::cuda {
namespace {

constexpr uint32_t kTapsMax = 4;
enum Part : uint32_t { kQuery, kKey, kValue, kParts };

// Queries and keys that are normed: every lane of a column finds its own side by side, and the four
// of them meet different banks.
template <uint32_t kDim>
inline constexpr uint32_t kNormedStride = kDim / kLanesPerColumn + 4;
template <uint32_t kDim>
LODE_DEVICE uint32_t NormedAt(uint32_t i) {
  return i % kLanesPerColumn * kNormedStride<kDim> + i / kLanesPerColumn;
}
template <uint32_t kDim, uint32_t kJ>
LODE_DEVICE void NormedKeys(const float* normed, uint32_t l, float (&own)[kJ]) {
  const Word4* from = reinterpret_cast<const Word4*>(normed + l * kNormedStride<kDim>);
  LODE_UNROLL
  for (uint32_t j = 0; j < kJ / 4; ++j) {
    const Word4 w = from[j];
    own[4 * j] = canonical::FromBits(w.x), own[4 * j + 1] = canonical::FromBits(w.y);
    own[4 * j + 2] = canonical::FromBits(w.z), own[4 * j + 3] = canonical::FromBits(w.w);
  }
}

// One head's vectors of some rows.
template <uint32_t kDim>
struct HeadRows {
  alignas(16) float normed[kWindowRowsMax][2][kLanesPerColumn * kNormedStride<kDim>];
  float v[kWindowRowsMax][kParts * kDim];
  float beta[kWindowRowsMax], decay[kWindowRowsMax];
};

// Where a block's head lies.
struct HeadPlace {
  uint32_t head, key_head;
  size_t key_width, value_width;
};

// Accepted rows from the rings into the state, as many at a time as a window may have.
template <uint32_t kDim, uint32_t kJ>
LODE_DEVICE void FoldRows(const DeltaStepArgs& a, const StepSequence& seq, const HeadPlace& at,
                          uint32_t folded, HeadRows<kDim>* rows, float (&s)[kJ]) {
  const uint32_t i = ThreadId(), l = i % kLanesPerColumn, column = i / kLanesPerColumn;
  for (uint32_t first = folded; first < seq.committed; first += kWindowRowsMax) {
    const uint32_t left = seq.committed - first, n = left < kWindowRowsMax ? left : kWindowRowsMax;
    if (first != folded) SyncBlock();
    for (uint32_t r = i / kDim; r < n; r += kLanesPerColumn) {
      const uint32_t within = i % kDim, position = first + r;
      rows->normed[r][kKey][NormedAt<kDim>(within)] =
          a.key[RingAt(seq.slot, position, at.key_width) + at.key_head * kDim + within];
      rows->v[r][kValue * kDim + within] =
          a.value[RingAt(seq.slot, position, at.value_width) + at.head * kDim + within];
      if (within != 0) continue;
      const size_t gate = RingAt(seq.slot, position, a.shape.value_heads) + at.head;
      rows->beta[r] = a.beta[gate];
      rows->decay[r] = a.decay[gate];
    }
    SyncBlock();
    for (uint32_t r = 0; r < n; ++r) {
      float key[kJ];
      NormedKeys<kDim, kJ>(rows->normed[r][kKey], l, key);
      StepState<kJ>(key, rows->v[r][kValue * kDim + column], rows->beta[r], rows->decay[r], s);
    }
  }
}

// What a thread's channel needs that was there before this window.
struct Taps {
  float weight[kTapsMax], x[kTapsMax];  // by distance: 0 is the row itself
};
LODE_DEVICE Taps LoadTaps(const DeltaConvArgs& a, const StepSequence& seq, uint32_t channel,
                          size_t width) {
  Taps taps;
  LODE_UNROLL
  for (uint32_t back = 0; back < kTapsMax; ++back) {
    const bool there = back < a.shape.taps;
    taps.weight[back] = there ? a.conv_weight[(a.shape.taps - 1 - back) * width + channel] : 0.0f;
    taps.x[back] = there && back != 0 && seq.committed >= back
                       ? a.conv[RingAt(seq.slot, seq.committed - back, width) + channel]
                       : 0.0f;
  }
  return taps;
}

// Convolution and silu of one channel for all rows of the sequence.
LODE_DEVICE void Convolve(const DeltaConvArgs& a, const StepSequence& seq, uint32_t channel,
                          size_t width, bool keeps, const Taps& before, float* out,
                          uint32_t stride) {
  using namespace canonical;
  float x[kWindowRowsMax];
  LODE_UNROLL
  for (uint32_t r = 0; r < kWindowRowsMax; ++r)
    x[r] = r < seq.n_rows ? a.qkv[(seq.first_row + r) * width + channel] : 0.0f;
  LODE_UNROLL
  for (uint32_t r = 0; r < kWindowRowsMax; ++r) {
    if (r >= seq.n_rows) break;
    float sum = 0;
    LODE_UNROLL
    for (uint32_t t = 0; t < kTapsMax; ++t) {
      const uint32_t back = kTapsMax - 1 - t;
      // Taps before the sequence are left out.
      if (back >= a.shape.taps || seq.committed + r < back) continue;
      sum = Fma(before.weight[back], back <= r ? x[r - back] : before.x[back - r], sum);
    }
    out[r * stride] = Silu(sum);
    if (keeps) a.conv[RingAt(seq.slot, seq.committed + r, width) + channel] = x[r];
  }
}

// The L2 norm of every row's query and key, a warp for each; keys enter the ring. Values and gates
// do as well.
template <uint32_t kDim>
LODE_DEVICE void NormAndKeep(const DeltaConvArgs& a, const StepSequence& seq, const HeadPlace& at,
                             HeadRows<kDim>* rows) {
  using namespace canonical;
  const uint32_t warp = ThreadId() / 32, warps = ThreadCount() / 32, lane = ThreadId() % 32;
  for (uint32_t item = warp; item < 2 * seq.n_rows; item += warps) {
    const uint32_t r = item / 2, part = item % 2;
    const float* v = rows->v[r] + part * kDim;
    const float length = Sqrt(Add(WarpDot(v, v, kDim), kL2Eps));
    const float scale = part == kQuery ? InvSqrt(static_cast<float>(kDim)) : 1.0f;
    float* ring = a.key + RingAt(seq.slot, seq.committed + r, at.key_width) + at.key_head * kDim;
    for (uint32_t i = lane; i < kDim; i += 32) {
      const float normed = Mul(Div(v[i], length), scale);
      rows->normed[r][part][NormedAt<kDim>(i)] = normed;
      if (part == kKey && at.head == at.key_head) ring[i] = normed;
    }
  }
  for (uint32_t i = ThreadId(); i < seq.n_rows * kDim; i += ThreadCount()) {
    const uint32_t r = i / kDim, within = i % kDim;
    a.value[RingAt(seq.slot, seq.committed + r, at.value_width) + at.head * kDim + within] =
        rows->v[r][kValue * kDim + within];
  }
}

template <uint32_t kDim>
LODE_DEVICE void MakeGates(const DeltaConvArgs& a, const StepSequence& seq, uint32_t head,
                           HeadRows<kDim>* rows) {
  using namespace canonical;
  // The last threads: the first ones have channels.
  const uint32_t r = ThreadCount() - 1 - ThreadId();
  if (r >= seq.n_rows) return;
  const size_t in = static_cast<size_t>(seq.first_row + r) * a.shape.value_heads + head;
  const size_t gate = RingAt(seq.slot, seq.committed + r, a.shape.value_heads) + head;
  const float beta = Sigmoid(a.beta_in[in]);
  const float decay = Exp(Mul(a.a[head], Softplus(Add(a.alpha_in[in], a.dt[head]))));
  a.beta[gate] = rows->beta[r] = beta;
  a.decay[gate] = rows->decay[r] = decay;
}

// A warp's row: the head's values normed and gated, then quantised by as many lanes as it fills.
// Gates and norm are asked for before the recurrence.
template <uint32_t kDim>
struct RowGate {
  float z[kDim / 32], norm[kDim / 32];
};
template <uint32_t kDim>
LODE_DEVICE RowGate<kDim> LoadGate(const DeltaGateArgs& a, uint32_t row, uint32_t head) {
  RowGate<kDim> gate;
  const uint32_t lane = ThreadId() % 32;
  const float* z = a.z + (static_cast<size_t>(row) * a.heads + head) * kDim + lane;
  LODE_UNROLL
  for (uint32_t j = 0; j < kDim / 32; ++j)
    gate.z[j] = z[32 * j], gate.norm[j] = a.norm[32 * j + lane];
  return gate;
}
template <uint32_t kDim>
LODE_DEVICE void GateRow(const DeltaGateArgs& a, const RowGate<kDim>& gate, uint32_t row,
                         uint32_t head, float* v) {
  using namespace canonical;
  constexpr uint32_t kOwn = kDim / 32;
  const uint32_t lane = ThreadId() % 32;
  const size_t at = (static_cast<size_t>(row) * a.heads + head) * kDim;
  float own[kOwn], p = 0;
  LODE_UNROLL
  for (uint32_t j = 0; j < kOwn; ++j) own[j] = v[32 * j + lane];
  LODE_UNROLL
  for (uint32_t j = 0; j < kOwn; ++j) p = Fma(own[j], own[j], p);
  const float scale = InvSqrt(Add(Div(JoinLanes(p), static_cast<float>(kDim)), a.eps));
  LODE_UNROLL
  for (uint32_t j = 0; j < kOwn; ++j) {
    const uint32_t i = 32 * j + lane;
    const float y = Mul(Mul(Mul(own[j], scale), gate.norm[j]), Sigmoid(gate.z[j]));
    v[i] = y;
    a.o[at + i] = y;
  }
  SyncWarp();
  const uint32_t column = lane * kLaneColumns;
  const bool inside = column < kDim;
  float eight[kLaneColumns];
  LODE_UNROLL
  for (uint32_t i = 0; i < kLaneColumns; ++i) eight[i] = inside ? v[column + i] : 0.0f;
  FinishColumns(a.forms, a.check, {row, head * kDim + column, inside}, row, eight);
}

template <uint32_t kDim>
LODE_KERNEL(kDim* kLanesPerColumn)
DeltaMixKernel(DeltaMixArgs a) {
  LetNextStart();
  constexpr uint32_t kJ = kDim / kLanesPerColumn;
  LODE_SHARED HeadRows<kDim> rows;
  const DeltaShape& d = a.step.shape;
  const uint32_t i = ThreadId(), column = i / kLanesPerColumn, l = i % kLanesPerColumn;
  const HeadPlace at = {BlockX(), BlockX() % d.key_heads, static_cast<size_t>(d.key_heads) * kDim,
                        static_cast<size_t>(d.value_heads) * kDim};
  const size_t width = 2 * at.key_width + at.value_width;
  const StepSequence seq = a.step.window->params.seqs[BlockY()];
  if (BlockY() >= a.step.window->params.n_seqs) {
    WaitForPrevious();
    return;
  }
  const uint32_t folded = a.step.folded[seq.slot];
  float* state = a.step.s + (static_cast<size_t>(seq.slot) * d.value_heads + at.head) * kDim * kDim;
  float s[kJ];
  LODE_UNROLL
  for (uint32_t j = 0; j < kJ; ++j)
    s[j] = state[static_cast<size_t>(kLanesPerColumn * j + l) * kDim + column];
  // Channel of this thread: of the key head's query and key, or of the head's value.
  const uint32_t part = i / kDim, within = i % kDim;
  const size_t channel = part == kValue
                             ? 2 * at.key_width + at.head * kDim + within
                             : (part == kKey ? at.key_width : 0) + at.key_head * kDim + within;
  Taps taps = {};
  if (part < kParts) taps = LoadTaps(a.conv, seq, static_cast<uint32_t>(channel), width);
  if (folded < seq.committed) {
    FoldRows<kDim, kJ>(a.step, seq, at, folded, &rows, s);
    LODE_UNROLL
    for (uint32_t j = 0; j < kJ; ++j)
      state[static_cast<size_t>(kLanesPerColumn * j + l) * kDim + column] = s[j];
    SyncBlock();  // the rows have been read
  }
  WaitForPrevious();
  MakeGates<kDim>(a.conv, seq, at.head, &rows);
  if (part < kParts)
    Convolve(a.conv, seq, static_cast<uint32_t>(channel), width,
             part == kValue || at.head == at.key_head, taps, &rows.v[0][i], kParts * kDim);
  SyncBlock();
  // Now, because at the end everybody would wait for the counter. The last warp has least to do.
  if (i == ThreadCount() - 32) ArriveFolded(a.step.window, a.step.folded, a.step.finished);
  NormAndKeep<kDim>(a.conv, seq, at, &rows);
  RowGate<kDim> gate = {};
  const uint32_t own_row = seq.first_row + i / 32;
  if (i / 32 < seq.n_rows) gate = LoadGate<kDim>(a.gate, own_row, at.head);
  SyncBlock();
  for (uint32_t r = 0; r < seq.n_rows; ++r) {
    float* v = rows.v[r];
    float keys[kJ];
    NormedKeys<kDim, kJ>(rows.normed[r][kKey], l, keys);
    StepState<kJ>(keys, v[kValue * kDim + column], rows.beta[r], rows.decay[r], s);
    NormedKeys<kDim, kJ>(rows.normed[r][kQuery], l, keys);
    const float o = ColumnSum<kJ>(keys, s);
    SyncWarp();  // the column's lanes have read its value
    if (l == 0) v[kValue * kDim + column] = o;
  }
  SyncBlock();
  if (i / 32 < seq.n_rows)
    GateRow<kDim>(a.gate, gate, own_row, at.head, rows.v[i / 32] + kValue * kDim);
}

// The first part of it alone.
template <uint32_t kDim>
LODE_KERNEL(kDim* kLanesPerColumn)
DeltaFoldKernel(DeltaStepArgs a) {
  LetNextStart();
  constexpr uint32_t kJ = kDim / kLanesPerColumn;
  LODE_SHARED HeadRows<kDim> rows;
  const DeltaShape& d = a.shape;
  const uint32_t column = ThreadId() / kLanesPerColumn, l = ThreadId() % kLanesPerColumn;
  const HeadPlace at = {BlockX(), BlockX() % d.key_heads, static_cast<size_t>(d.key_heads) * kDim,
                        static_cast<size_t>(d.value_heads) * kDim};
  const StepSequence& seq = a.window->params.seqs[BlockY()];
  WaitForPrevious();
  if (BlockY() >= a.window->params.n_seqs) return;
  const uint32_t folded = a.folded[seq.slot];
  if (folded < seq.committed) {
    float* state = a.s + (static_cast<size_t>(seq.slot) * d.value_heads + at.head) * kDim * kDim;
    float s[kJ];
    LODE_UNROLL
    for (uint32_t j = 0; j < kJ; ++j)
      s[j] = state[static_cast<size_t>(kLanesPerColumn * j + l) * kDim + column];
    FoldRows<kDim, kJ>(a, seq, at, folded, &rows, s);
    LODE_UNROLL
    for (uint32_t j = 0; j < kJ; ++j)
      state[static_cast<size_t>(kLanesPerColumn * j + l) * kDim + column] = s[j];
  }
  FinishFolding(a.window, a.folded, a.finished);
}

template <uint32_t kDim>
bool LaunchFoldOf(CUstream_st* stream, const DeltaStepArgs& args, uint32_t n_seqs) {
  if (args.shape.dim != kDim) return false;
  LaunchAhead(stream, {args.shape.value_heads, n_seqs}, kDim * kLanesPerColumn, 0,
              &DeltaFoldKernel<kDim>, args);
  return true;
}

template <uint32_t kDim>
bool LaunchMixOf(CUstream_st* stream, const DeltaMixArgs& args, uint32_t n_seqs) {
  static_assert(kDim * kLanesPerColumn / 32 >= kWindowRowsMax && kDim % 64 == 0);
  if (args.step.shape.dim != kDim) return false;
  LaunchAhead(stream, {args.step.shape.value_heads, n_seqs}, kDim * kLanesPerColumn, 0,
              &DeltaMixKernel<kDim>, args);
  return true;
}

}  // namespace

bool LaunchDeltaMix(CUstream_st* stream, const DeltaMixArgs& args, uint32_t n_seqs) {
  // Forms of up to 64 columns: a head is whole blocks of them.
  if (args.step.shape.taps > kTapsMax || args.gate.forms.form[2].base != nullptr) return false;
  return LaunchMixOf<64>(stream, args, n_seqs) || LaunchMixOf<128>(stream, args, n_seqs);
}

bool LaunchDeltaFold(CUstream_st* stream, const DeltaStepArgs& args, uint32_t n_seqs) {
  return LaunchFoldOf<64>(stream, args, n_seqs) || LaunchFoldOf<128>(stream, args, n_seqs);
}

}  // namespace lode::cuda
