// See draft.h and draft_run.h. Bound: latency; nothing here moves more than some 100 KiB but the
// logits of passes that the host picks from.
#include "kernels/cuda/draft.h"
#include "kernels/cuda/draft_run.h"
#include "kernels/cuda/quantize.h"
#include "kernels/cuda/reduce.h"
#include "kernels/cuda/system.h"

namespace lode::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kWarp = 32;
static_assert(kThreads == kWarpColumns);  // a block's columns are whole blocks of every form
constexpr uint32_t kEndBlocksPerRow = 16;
constexpr uint32_t kStage = 2048;  // floats of a vector in shared memory at a time

// x . x for long vectors in device memory, valid in the first warp: all threads fetch, that warp
// adds in the canonical order. Ends with a barrier.
LODE_DEVICE float SquareSum(const float* x, uint32_t n, float* stage) {
  constexpr uint32_t kInFlight = kStage / kThreads;
  const uint32_t t = ThreadId();
  float p = 0;
  for (uint32_t base = 0; base < n; base += kStage) {
    float v[kInFlight];
    LODE_UNROLL
    for (uint32_t k = 0; k < kInFlight; ++k) {
      const uint32_t i = base + k * kThreads + t;
      v[k] = i < n ? x[i] : 0.0f;
    }
    LODE_UNROLL
    for (uint32_t k = 0; k < kInFlight; ++k) stage[k * kThreads + t] = v[k];
    SyncBlock();
    // Zeros beyond the end add nothing: partials are never -0.
    if (t < kWarp) {
      LODE_UNROLL
      for (uint32_t i = 0; i < kStage; i += kWarp)
        p = canonical::Fma(stage[i + t], stage[i + t], p);
    }
    SyncBlock();
  }
  return t < kWarp ? JoinLanes(p) : 0;
}

// out = rms_norm(x[n]) * weight, by a whole block; out may be x.
LODE_DEVICE void BlockNorm(const float* x, const float* weight, uint32_t n, float eps, float* stage,
                           float* slot, float* out) {
  using namespace canonical;
  const float sum = SquareSum(x, n, stage);
  if (ThreadId() == 0) *slot = InvSqrt(Add(Div(sum, static_cast<float>(n)), eps));
  SyncBlock();
  const float scale = *slot;
  for (uint32_t i = ThreadId(); i < n; i += kThreads) out[i] = Mul(Mul(x[i], scale), weight[i]);
}

// Block x 0: the embedding; block 1 + p: part p of the residual.
LODE_KERNEL(kThreads) DraftNormKernel(DraftNormArgs a) {
  LetNextStart();
  WaitForPrevious();
  LODE_SHARED float stage[kStage];
  LODE_SHARED float slot;
  const uint32_t row = BlockY();
  if (BlockX() == 0) {
    float* e = a.embed + static_cast<size_t>(row) * a.hidden;
    BlockNorm(e, a.embed_weight, a.hidden, a.eps, stage, &slot, e);
    return;
  }
  const uint32_t width = a.streams * a.hidden, part = width / a.parts, at = (BlockX() - 1) * part;
  const uint32_t source = a.window->params.rows[row].source;
  BlockNorm(a.residual + static_cast<size_t>(source) * width + at, a.residual_weight + at, part,
            a.eps, stage, &slot, a.normed + static_cast<size_t>(row) * width + at);
}

LODE_KERNEL(kThreads) DraftJoinKernel(DraftJoinArgs a) {
  LetNextStart();
  WaitForPrevious();
  LODE_SHARED float joined[kThreads];
  const uint32_t stream = BlockY(), row = BlockZ(), t = ThreadId(), first = BlockX() * kThreads;
  const uint32_t column = first + t, columns = 2 * a.hidden, vector = row * a.streams + stream;
  if (column < columns) {
    joined[t] = column < a.hidden
                    ? a.embed[static_cast<size_t>(row) * a.hidden + column]
                    : a.normed[static_cast<size_t>(vector) * a.hidden + column - a.hidden];
    a.joined[static_cast<size_t>(vector) * columns + column] = joined[t];
  }
  SyncBlock();
  const uint32_t left = columns - first;
  FinishShared(a.forms, a.check, vector, row, first, left < kThreads ? left : kThreads, joined);
}

// One thread for every (row, routed expert) pair; the first pair of an expert writes its entry.
LODE_KERNEL(kThreads) DraftListKernel(DraftListArgs a, uint32_t n_rows) {
  LetNextStart();
  WaitForPrevious();
  LODE_SHARED uint32_t id[kJobExpertsMax];
  LODE_SHARED uint32_t opens[kJobExpertsMax];  // 1: no pair before names this expert
  const uint32_t n = a.window->not_finite == kAllFinite ? n_rows * a.experts_used : 0,
                 t = ThreadId();
  if (t < n) id[t] = a.routed[t / a.experts_used].ids[t % a.experts_used];
  SyncBlock();
  if (t < n) {
    uint32_t before = 0;
    while (id[before] != id[t]) ++before;
    opens[t] = before == t ? 1 : 0;
  }
  SyncBlock();
  uint32_t place = 0, all = 0;
  for (uint32_t i = 0; i < n; ++i) {
    place += i < t ? opens[i] : 0;
    all += opens[i];
  }
  if (t == 0) {
    a.list->n_entries = all;
    a.list->n_slow = 0;
  }
  if (t >= n || opens[t] == 0) return;
  ExpertEntry entry = {};
  entry.gate = a.gate.data + id[t] * a.gate.stride;
  entry.up = a.up.data + id[t] * a.up.stride;
  entry.down = a.down.data + id[t] * a.down.stride;
  entry.width_end = a.width;
  entry.hidden_end = a.hidden;
  for (uint32_t i = t; i < n; ++i) {
    if (id[i] != id[t]) continue;
    entry.rows |= static_cast<RowMask>(1u << (i / a.experts_used));
    entry.order[i / a.experts_used] = static_cast<uint8_t>(i % a.experts_used);
  }
  a.list->entries[place] = entry;
}
static_assert(kJobExpertsMax <= kThreads);

LODE_KERNEL(kWarp) DraftBeginKernel(DraftRunState* state, const DraftRun* pinned) {
  LetNextStart();
  WaitForPrevious();
  const uint32_t* from = reinterpret_cast<const uint32_t*>(pinned);
  uint32_t* to = reinterpret_cast<uint32_t*>(&state->run);
  for (uint32_t i = ThreadId(); i < sizeof(DraftRun) / sizeof(uint32_t); i += kWarp)
    to[i] = from[i];
  if (ThreadId() == 0) state->pass = 0;
}

LODE_KERNEL(kWarp) DraftLinkKernel(DraftLinkArgs a) {
  LetNextStart();
  WaitForPrevious();
  const uint32_t chain = ThreadId(), pass = a.state->pass, chains = a.state->run.n_chains;
  DraftPassReport& report = a.reports[pass];
  StepParams& params = a.window->params;
  const bool mine = chain < chains;
  const uint32_t row = mine ? (pass == 0 ? a.state->run.row[chain] : chain) : 0;
  const StepRow from = params.rows[row];
  const uint32_t slot = params.seqs[from.seq].slot;
  SyncWarp();  // everything of this pass has been read
  if (mine) {
    const GuessedToken& guess = a.picked[row];
    report.token[chain] = guess.token;
    report.probability[chain] = guess.probability;
    const uint32_t position = from.position + 1;
    params.rows[chain] = StepRow{chain, position, guess.token, 1, row};
    params.seqs[chain] = StepSequence{slot, position, chain, 1};
  }
  SyncWarp();
  if (chain != 0) return;
  params.n_rows = params.n_seqs = chains;
  a.state->pass = pass + 1;
  report.not_finite = a.window->not_finite;
  FenceSystem();
  StoreReleaseSystem(&report.done, a.state->run.sequence);
}

// Blocks (x, y): part x of row y's logits. The last block to arrive says that the pass is there.
LODE_KERNEL(kThreads) DraftEndKernel(DraftEndArgs a) {
  LetNextStart();
  WaitForPrevious();
  const uint32_t row = BlockY();
  if (a.window->params.rows[row].needs_logits != 0) {
    const float* from = a.logits + static_cast<uint64_t>(row) * a.n;
    float* to = a.host_logits + static_cast<uint64_t>(row) * a.n;
    for (uint32_t i = BlockX() * kThreads + ThreadId(); i < a.n; i += GridX() * kThreads)
      to[i] = from[i];
  }
  FenceSystem();
  SyncBlock();
  if (ThreadId() != 0 || AtomicAdd(a.arrived, 1) + 1 != GridX() * GridY()) return;
  *a.arrived = 0;
  a.report->not_finite = a.window->not_finite;
  FenceSystem();
  StoreReleaseSystem(&a.report->done, a.state->run.sequence);
}

}  // namespace

void LaunchDraftNorm(CUstream_st* stream, const DraftNormArgs& args, uint32_t n_rows) {
  LaunchAhead(stream, {1 + args.parts, n_rows}, kThreads, 0, &DraftNormKernel, args);
}
void LaunchDraftJoin(CUstream_st* stream, const DraftJoinArgs& args, uint32_t n_rows) {
  LaunchAhead(stream, {(2 * args.hidden + kThreads - 1) / kThreads, args.streams, n_rows}, kThreads,
              0, &DraftJoinKernel, args);
}
void LaunchDraftList(CUstream_st* stream, const DraftListArgs& args, uint32_t n_rows) {
  LaunchAhead(stream, {1}, kThreads, 0, &DraftListKernel, args, n_rows);
}
void LaunchDraftBegin(CUstream_st* stream, DraftRunState* state, const DraftRun* pinned) {
  LaunchAhead(stream, {1}, kWarp, 0, &DraftBeginKernel, state, pinned);
}
void LaunchDraftLink(CUstream_st* stream, const DraftLinkArgs& args) {
  LaunchAhead(stream, {1}, kWarp, 0, &DraftLinkKernel, args);
}
void LaunchDraftEnd(CUstream_st* stream, const DraftEndArgs& args, uint32_t n_rows) {
  LaunchAhead(stream, {kEndBlocksPerRow, n_rows}, kThreads, 0, &DraftEndKernel, args);
}

}  // namespace lode::cuda
