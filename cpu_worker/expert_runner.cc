// See expert_runner.h. Each phase is one function; a chunk is a range of rows of one expert.
#include "cpu_worker/expert_runner.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <bit>
#include <thread>

#include "cpu_worker/job_check.h"
#include "kernels/canonical.h"
#include "kernels/kernel_table.h"
#include "shared/base/check.h"
#include "shared/base/fault.h"

namespace lode {
namespace {

// A chunk that ends inside a kernel's group of rows pays for all of it.
constexpr uint32_t Units(uint32_t rows) { return (rows + kRowGranule - 1) / kRowGranule; }

// Chunks per expert so that the phase has about kChunksPerThread per active thread.
uint32_t ChunksPerExpert(const NodePool& pool, uint32_t n_experts, uint32_t rows) {
  const uint32_t wanted = (NodePool::kChunksPerThread * pool.active() + n_experts - 1) / n_experts;
  const uint32_t most = std::max(1u, Units(rows));
  // kChunksMax bounds the phase: n_experts is at most kJobExpertsMax.
  return std::clamp(wanted, 1u, std::min(most, NodePool::kChunksMax / kJobExpertsMax));
}

// Chunk `chunk` of `rows` rows: whole units, but for the last one. REQUIRES n_chunks <= Units(rows).
RowRange ChunkRows(uint32_t rows, uint32_t chunk, uint32_t n_chunks) {
  const RowRange units = NodeRows(Units(rows), chunk, n_chunks);
  return {units.begin * kRowGranule, std::min(rows, units.end * kRowGranule)};
}

bool AllFinite(const float* x, uint32_t n) {
  bool finite = true;
  for (uint32_t i = 0; i < n; ++i) finite &= canonical::IsFinite(x[i]);
  return finite;
}

}  // namespace

ExpertRunner::ExpertRunner(const ArenaLayout& layout, const uint8_t* arena, uint8_t* exchange,
                           NodePool* pool, const ExpertRunnerOptions& options)
    : layout_(layout),
      arena_(arena),
      header_(reinterpret_cast<ExchangeHeader*>(exchange)),
      exchange_(exchange),
      exchange_layout_{options.shape},
      pool_(pool),
      options_(options) {
  const size_t n_vectors = exchange_layout_.vectors();
  vectors_.reserve(n_vectors);
  first_vector_.reserve(kJobExpertsMax + 1);
  quantised_stride_ = 0;
  for (uint32_t block : {32u, 64u, 256u}) {
    if (layout.width % block == 0)
      quantised_stride_ = std::max(quantised_stride_, ActLayout{layout.width, block}.bytes());
  }
  constexpr size_t kAlign = 64;  // ActLayout's own; its sizes are multiples of it
  quantised_.reset(static_cast<uint8_t*>(
      std::aligned_alloc(kAlign, n_vectors * std::max(quantised_stride_, kAlign))));
  LODE_CHECK(quantised_ != nullptr, "no memory for {} quantised vectors", n_vectors);
  gate_up_left_ = std::make_unique<std::atomic<uint32_t>[]>(kJobExpertsMax);
  experts_ = std::make_unique<ExpertState[]>(kJobExpertsMax);
  thread_states_.resize(pool->threads());
  chunks_.reserve(size_t{kJobExpertsMax} * 2 * kMatrixChunksMax);
  if (const char* e = std::getenv("LODE_LANE")) {  // EXPERIMENT: flow:shares:quarters:min_kib
    uint32_t f = 1, min = 12;
    std::sscanf(e, "%u:%u:%u:%u", &f, &options_.chunks.shares, &options_.chunks.most_per_expert_4, &min);
    options_.flow = f != 0;
    options_.chunks.bytes_min = min << 10;
  }
  for (uint32_t t = 0; t < pool->threads(); ++t) {
    gate_scratch_.push_back(std::make_unique<float[]>(size_t{kWindowRowsMax} *
                                                      std::max(1u, layout.width_rows().size())));
  }
}

ExpertRunner::Outcome ExpertRunner::Run(const ExpertJob& job, const KernelTable& given) {
  const KernelTable& table = options_.table != nullptr ? *options_.table : given;
  failure_.store(0, std::memory_order_relaxed);  // phases start with a release
  pool_->SetActive(job.threads);
  if (options_.trace != nullptr) options_.trace->run_ns = NowNs();
  CollectVectors(job);
  if (options_.flow) {
    Flow(job, table);
  } else {
    if (options_.trace != nullptr) options_.trace->open_ns = NowNs();
    GateUp(job, table);
    LODE_FAULT("cpu_worker.after_gate_up");
    Requantise(job, table);
    LODE_FAULT("cpu_worker.before_down");
    const uint64_t before_down =
        failure_.load(std::memory_order_relaxed);  // a phase ended: all its writes are visible
    if (before_down == 0) Down(job, table);
  }
  if (options_.trace != nullptr) options_.trace->end_ns = NowNs();
  const uint64_t failure = failure_.load(std::memory_order_relaxed);
  const LayerExperts& layer = layout_.layers[job.layer];
  Outcome outcome;
  outcome.status = static_cast<JobStatus>(failure >> 32);
  outcome.error_row = static_cast<uint32_t>(failure);
  outcome.bytes = uint64_t{job.n_experts} * layout_.width_rows().size() *
                  (layer.gate_row_bytes + layer.up_row_bytes);
  if (failure == 0)
    outcome.bytes += uint64_t{job.n_experts} * layout_.hidden_rows().size() * layer.down_row_bytes;
  return outcome;
}

// ---- one list of chunks

void ExpertRunner::Flow(const ExpertJob& job, const KernelTable& table) {
  const LayerExperts& layer = layout_.layers[job.layer];
  down_act_ = {layout_.width, std::max(1u, Info(layer.down).act_block_len)};
  const uint32_t width_rows = layout_.width_rows().size();
  CutJob({job.n_experts, width_rows, layout_.hidden_rows().size(),
          layer.gate_row_bytes + layer.up_row_bytes, layer.down_row_bytes, pool_->active()},
         options_.chunks, &chunks_);
  for (uint32_t j = 0; j < job.n_experts; ++j)  // relaxed: the phase starts with a release
    experts_[j].hidden.store(kMissing, std::memory_order_relaxed);
  uint32_t pieces = 0;
  for (size_t i = 0; i < chunks_.size() && !chunks_[i].down; ++i) {
    ++pieces;
    if (i + 1 < chunks_.size() && chunks_[i + 1].entry == chunks_[i].entry && !chunks_[i + 1].down) continue;
    experts_[chunks_[i].entry].gate_up_left.store(pieces, std::memory_order_relaxed);
    pieces = 0;
  }
  flagged_.store(0, std::memory_order_relaxed);
  quantised_count_.store(0, std::memory_order_relaxed);
  if (options_.trace != nullptr) options_.trace->open_ns = NowNs();
  pool_->RunPhase(static_cast<uint32_t>(chunks_.size()),
                  [&](uint32_t chunk, uint32_t thread, NodePool::Next& next) {
                    FlowChunk(job, table, chunk, thread, next);
                  });
}

const uint8_t* ExpertRunner::FirstRow(const ExpertJob& job, const JobChunk& chunk) const {
  const LayerExperts& layer = layout_.layers[job.layer];
  const uint8_t* expert = arena_ + layout_.offset(job.layer, job.experts[chunk.entry].expert);
  return chunk.down ? expert + layer.down_offset + size_t{chunk.rows.begin} * layer.down_row_bytes
                    : expert + size_t{chunk.rows.begin} * layer.gate_row_bytes;
}

void ExpertRunner::PrefetchStart(const ExpertJob& job, const JobChunk& chunk, uint32_t thread) {
  if (thread_states_[thread].tag == job.tag) return;
  thread_states_[thread].tag = job.tag;
  if (!options_.prefetch_first) return;
  const LayerExperts& layer = layout_.layers[job.layer];
  const uint32_t row_bytes = chunk.down ? layer.down_row_bytes : layer.gate_row_bytes;
  const size_t bytes = size_t{std::min(kRowGranule, chunk.rows.size())} * row_bytes;
  const uint8_t* w = FirstRow(job, chunk);
  constexpr size_t kLine = 64;
  for (size_t i = 0; i < bytes; i += kLine) __builtin_prefetch(w + i, 0, 2);
}

void ExpertRunner::FlowChunk(const ExpertJob& job, const KernelTable& table, uint32_t chunk,
                             uint32_t thread, NodePool::Next& next) {
  const JobChunk& c = chunks_[chunk];
  PrefetchStart(job, c, thread);
  if (!HasEnded() && Aborted(job)) Fail(JobStatus::kAborted, 0);
  if (HasEnded()) return;
  const auto next_row = [&]() -> const uint8_t* {
    const uint32_t ahead = next.Claim();
    return ahead == NodePool::Next::kNone ? nullptr : FirstRow(job, chunks_[ahead]);
  };
  if (!c.down) {
    {
      LaneSpan span(options_.trace, thread, LaneStep::kGateUp);
      if (c.rows.size() > 0) GateUpChunk(job, table, c.entry, c.rows, thread, next_row);
    }
    if (experts_[c.entry].gate_up_left.fetch_sub(1, std::memory_order_acq_rel) == 1)
      EndGateUp(job, table, c.entry, thread);
  } else {
    if (!EnsureQuantised(job, table, c.entry, thread)) return;
    // A vector that is not finite: the others are still looked at, since the lowest row is told.
    if (failure_.load(std::memory_order_relaxed) != 0) return;
    LaneSpan span(options_.trace, thread, LaneStep::kDown);
    if (c.rows.size() > 0) DownChunk(job, table, c.entry, c.rows, next_row);
  }
  if (chunk % options_.progress_every == 0) AddProgress();
}

void ExpertRunner::EndGateUp(const ExpertJob& job, const KernelTable& table, uint32_t entry,
                             uint32_t thread) {
  SetHiddenReady(job, entry);
  if (flagged_.fetch_add(1, std::memory_order_relaxed) + 1 == job.n_experts)
    LODE_FAULT("cpu_worker.after_gate_up");
  if (PeersAreThere(job, entry)) EnsureQuantised(job, table, entry, thread);
}

bool ExpertRunner::PeersAreThere(const ExpertJob& job, uint32_t entry) const {
  for (uint32_t peer = 0; peer < exchange_layout_.shape.n_workers; ++peer) {
    if (header_->hidden_ready[job.layer & 1][peer][entry].load(std::memory_order_relaxed) !=
        job.tag)
      return false;
  }
  return true;
}

template <class Done>
bool ExpertRunner::WaitForOwn(const Done& done) {
  constexpr uint32_t kPollsPerClock = 64;
  constexpr uint64_t kYieldAfterNs = 20'000;         // longer than a chunk of hidden vectors takes
  constexpr uint64_t kLostAfterNs = 60'000'000'000;  // a thread of this process has gone: our bug
  const uint64_t start = NowNs();
  uint64_t last = start, waited = 0;
  for (;;) {
    for (uint32_t i = 0; i < kPollsPerClock; ++i) {
      if (done()) return true;
      SpinPause();
    }
    if (HasEnded()) return false;
    const uint64_t now = NowNs();
    waited += std::min(now - last, kWaitSliceNs);  // a process that was stopped has not waited
    last = now;
    LODE_CHECK(waited < kLostAfterNs, "hidden vectors of this worker's own threads did not come");
    if (pool_->spin_ns() == 0 || now - start > kYieldAfterNs) std::this_thread::yield();
  }
}

bool ExpertRunner::EnsureQuantised(const ExpertJob& job, const KernelTable& table, uint32_t entry,
                                   uint32_t thread) {
  std::atomic<uint32_t>& hidden = experts_[entry].hidden;
  if (hidden.load(std::memory_order_acquire) == kQuantised) return true;
  uint32_t missing = kMissing;
  if (!hidden.compare_exchange_strong(missing, kTaken, std::memory_order_relaxed)) {
    LaneSpan span(options_.trace, thread, LaneStep::kWaited);
    return WaitForOwn([&] { return hidden.load(std::memory_order_acquire) == kQuantised; });
  }
  {
    LaneSpan span(options_.trace, thread, LaneStep::kWaited);
    if (!WaitForOwn([&] {
          return header_->hidden_ready[job.layer & 1][options_.me][entry].load(
                     std::memory_order_acquire) == job.tag;
        }))
      return false;
    for (uint32_t peer = 0; peer < exchange_layout_.shape.n_workers; ++peer) {
      if (peer != options_.me && !WaitForPeer(job, entry, peer)) return false;
    }
  }
  LaneSpan span(options_.trace, thread, LaneStep::kQuantise);
  for (uint32_t v = first_vector_[entry]; v < first_vector_[entry + 1]; ++v)
    RequantiseVector(job, table, v);
  hidden.store(kQuantised, std::memory_order_release);
  if (quantised_count_.fetch_add(1, std::memory_order_relaxed) + 1 == job.n_experts)
    LODE_FAULT("cpu_worker.before_down");
  return true;
}

bool ExpertRunner::HasEnded() const {
  return failure_.load(std::memory_order_relaxed) >> 32 >
         static_cast<uint64_t>(JobStatus::kNotFinite);
}

void ExpertRunner::CollectVectors(const ExpertJob& job) {
  vectors_.clear();
  first_vector_.clear();
  for (uint32_t j = 0; j < job.n_experts; ++j) {
    first_vector_.push_back(static_cast<uint32_t>(vectors_.size()));
    for (uint32_t row = 0; row < job.n_rows; ++row) {
      if ((job.experts[j].rows >> row & 1) == 0) continue;
      const uint32_t index = row * exchange_layout_.shape.experts_used + job.experts[j].order[row];
      vectors_.push_back(
          {static_cast<uint16_t>(j), static_cast<uint16_t>(row), static_cast<uint16_t>(index)});
    }
  }
  first_vector_.push_back(static_cast<uint32_t>(vectors_.size()));
}

// ---- phase 1
// ---------------------------------------------------------------------------------------------------------------------

void ExpertRunner::GateUp(const ExpertJob& job, const KernelTable& table) {
  const uint32_t rows = layout_.width_rows().size();
  if (rows == 0) {  // more workers than rows: nothing to add, but the others wait for our flags
    for (uint32_t j = 0; j < job.n_experts; ++j) SetHiddenReady(job, j);
    return;
  }
  const uint32_t per_expert = ChunksPerExpert(*pool_, job.n_experts, rows);
  for (uint32_t j = 0; j < job.n_experts; ++j)
    gate_up_left_[j].store(per_expert, std::memory_order_relaxed);  // phases start with a release
  const LayerExperts& layer = layout_.layers[job.layer];
  const auto first_row = [&](uint32_t chunk) {
    return arena_ + layout_.offset(job.layer, job.experts[chunk / per_expert].expert) +
           size_t{ChunkRows(rows, chunk % per_expert, per_expert).begin} * layer.gate_row_bytes;
  };
  pool_->RunPhase(job.n_experts * per_expert, [&](uint32_t chunk, uint32_t thread,
                                                  NodePool::Next& next) {
    const uint32_t entry = chunk / per_expert;
    if (failure_.load(std::memory_order_relaxed) == 0 && Aborted(job)) Fail(JobStatus::kAborted, 0);
    if (failure_.load(std::memory_order_relaxed) != 0)
      return;  // a hint; the flags below stay unset, peers end by the abort word too
    const auto next_row = [&]() -> const uint8_t* {
      const uint32_t ahead = next.Claim();
      return ahead == NodePool::Next::kNone ? nullptr : first_row(ahead);
    };
    {
      LaneSpan span(options_.trace, thread, LaneStep::kGateUp);
      GateUpChunk(job, table, entry, ChunkRows(rows, chunk % per_expert, per_expert), thread,
                  next_row);
    }
    // acq_rel: the thread that ends the expert has seen every other chunk's writes, and its release
    // of the flag passes them on.
    if (gate_up_left_[entry].fetch_sub(1, std::memory_order_acq_rel) == 1)
      SetHiddenReady(job, entry);
    AddProgress();
  });
}

void ExpertRunner::GateUpChunk(const ExpertJob& job, const KernelTable& table, uint32_t entry,
                               RowRange rows, uint32_t thread, const NextRowFn& next_row) {
  const LayerExperts& layer = layout_.layers[job.layer];
  const uint8_t* expert = arena_ + layout_.offset(job.layer, job.experts[entry].expert);
  const uint32_t first = first_vector_[entry], n = first_vector_[entry + 1] - first;
  ActRow gate_acts[kWindowRowsMax], up_acts[kWindowRowsMax];
  float *gate_out[kWindowRowsMax], *up_out[kWindowRowsMax];
  for (uint32_t i = 0; i < n; ++i) {
    const Vector& v = vectors_[first + i];
    gate_acts[i] = ActRowOf(job, v.row, layer.gate);
    up_acts[i] = ActRowOf(job, v.row, layer.up);
    gate_out[i] = gate_scratch_[thread].get() + size_t{i} * rows.size();
    up_out[i] = Hidden(job, v.index) + layout_.width_rows().begin + rows.begin;
  }
  const MatFn* mat = job.float_reference ? table.mat_float : table.mat;
  MatArgs args = {expert + size_t{rows.begin} * layer.gate_row_bytes,
                  layer.gate_row_bytes,
                  rows.size(),
                  layout_.hidden,
                  gate_acts,
                  n,
                  gate_out};
  const uint8_t* up = expert + layer.up_offset + size_t{rows.begin} * layer.up_row_bytes;
  const auto up_row = [up] { return up; };
  SetNext(&up_row, &args);
  mat[static_cast<uint32_t>(layer.gate)](args);
  SetNext(&next_row, &args);
  args.w = up;
  args.row_bytes = layer.up_row_bytes;
  args.acts = up_acts;
  args.out = up_out;
  mat[static_cast<uint32_t>(layer.up)](args);
  for (uint32_t i = 0; i < n; ++i) table.swiglu(gate_out[i], up_out[i], rows.size(), up_out[i]);
}

void ExpertRunner::SetHiddenReady(const ExpertJob& job, uint32_t entry) {
  // Release: pairs with the peers' acquire in WaitForPeer; our part of the expert's hidden vectors
  // is complete.
  header_->hidden_ready[job.layer & 1][options_.me][entry].store(job.tag,
                                                                 std::memory_order_release);
}

// ---- phase 2
// ---------------------------------------------------------------------------------------------------------------------

void ExpertRunner::Requantise(const ExpertJob& job, const KernelTable& table) {
  down_act_ = {layout_.width, std::max(1u, Info(layout_.layers[job.layer].down).act_block_len)};
  pool_->RunPhase(static_cast<uint32_t>(vectors_.size()), [&](uint32_t v, uint32_t thread) {
    LaneSpan span(options_.trace, thread, LaneStep::kQuantise);
    if (failure_.load(std::memory_order_relaxed) >> 32 >
        static_cast<uint64_t>(JobStatus::kNotFinite))
      return;
    RequantiseVector(job, table, v);
    AddProgress();
  });
}

void ExpertRunner::RequantiseVector(const ExpertJob& job, const KernelTable& table, uint32_t v) {
  const Vector& vector = vectors_[v];
  for (uint32_t peer = 0; !options_.flow && peer < exchange_layout_.shape.n_workers; ++peer) {
    if (peer != options_.me && !WaitForPeer(job, vector.entry, peer)) return;
  }
  const float* hidden = Hidden(job, vector.index);
  bool finite;
  if (job.float_reference || Info(layout_.layers[job.layer].down).act_block_len == 0) {
    finite = AllFinite(hidden, layout_.width);
  } else {
    uint8_t* q = quantised_.get() + v * quantised_stride_;
    finite =
        table.quantize(hidden, layout_.width, down_act_.block_len, reinterpret_cast<int8_t*>(q),
                       reinterpret_cast<float*>(q + down_act_.d_offset()),
                       reinterpret_cast<int16_t*>(q + down_act_.sum16_offset()));
  }
  if (!finite) Fail(JobStatus::kNotFinite, vector.row);
}

bool ExpertRunner::WaitForPeer(const ExpertJob& job, uint32_t entry, uint32_t peer) {
  constexpr uint32_t kPollsPerClock = 64;
  constexpr uint64_t kYieldAfterNs = 20'000;  // longer than a peer of equal speed lags behind
  const std::atomic<uint64_t>& flag = header_->hidden_ready[job.layer & 1][peer][entry];
  const std::atomic<uint64_t>& progress = header_->workers[peer].progress;
  const uint64_t start = NowNs();
  uint64_t last_change = start,
           last_progress = progress.load(std::memory_order_relaxed);  // a sign of life, no data
  for (;;) {
    for (uint32_t i = 0; i < kPollsPerClock; ++i) {
      // Acquire: pairs with the peer's SetHiddenReady.
      if (flag.load(std::memory_order_acquire) == job.tag) return true;
      SpinPause();
    }
    if (failure_.load(std::memory_order_relaxed) >> 32 >
        static_cast<uint64_t>(JobStatus::kNotFinite))
      return false;
    if (Aborted(job)) {
      Fail(JobStatus::kAborted, 0);
      return false;
    }
    const uint64_t now = NowNs(), seen = progress.load(std::memory_order_relaxed);
    if (seen != last_progress) {
      last_progress = seen;
      last_change = now;
    }
    if (now - last_change > options_.wait_ns || now - start > options_.wait_max_ns) {
      Fail(JobStatus::kPeerTimeout, peer);
      return false;
    }
    // With more threads than cores the peer may be waiting for this very core.
    if (pool_->spin_ns() == 0 || now - start > kYieldAfterNs) std::this_thread::yield();
  }
}

// ---- phase 3
// ---------------------------------------------------------------------------------------------------------------------

void ExpertRunner::Down(const ExpertJob& job, const KernelTable& table) {
  const uint32_t rows = layout_.hidden_rows().size();
  if (rows == 0) return;
  const uint32_t per_expert = ChunksPerExpert(*pool_, job.n_experts, rows);
  const LayerExperts& layer = layout_.layers[job.layer];
  const auto first_row = [&](uint32_t chunk) {
    return arena_ + layout_.offset(job.layer, job.experts[chunk / per_expert].expert) +
           layer.down_offset +
           size_t{ChunkRows(rows, chunk % per_expert, per_expert).begin} * layer.down_row_bytes;
  };
  pool_->RunPhase(job.n_experts * per_expert, [&](uint32_t chunk, uint32_t thread, NodePool::Next& next) {
    if (failure_.load(std::memory_order_relaxed) == 0 && Aborted(job)) Fail(JobStatus::kAborted, 0);
    if (failure_.load(std::memory_order_relaxed) != 0) return;
    LaneSpan span(options_.trace, thread, LaneStep::kDown);
    const auto next_row = [&]() -> const uint8_t* {
      const uint32_t ahead = next.Claim();
      return ahead == NodePool::Next::kNone ? nullptr : first_row(ahead);
    };
    DownChunk(job, table, chunk / per_expert, ChunkRows(rows, chunk % per_expert, per_expert),
              next_row);
    AddProgress();
  });
}

void ExpertRunner::DownChunk(const ExpertJob& job, const KernelTable& table, uint32_t entry,
                             RowRange rows, const NextRowFn& next_row) {
  const LayerExperts& layer = layout_.layers[job.layer];
  const bool floats = job.float_reference || Info(layer.down).act_block_len == 0;
  const uint32_t first = first_vector_[entry], n = first_vector_[entry + 1] - first;
  ActRow acts[kWindowRowsMax];
  float* out[kWindowRowsMax];
  for (uint32_t i = 0; i < n; ++i) {
    const Vector& v = vectors_[first + i];
    if (floats) {
      acts[i].f = Hidden(job, v.index);
    } else {
      acts[i] = ActRowAt(quantised_.get() + (first + i) * quantised_stride_, down_act_);
    }
    out[i] = Result(job, v.index) + layout_.hidden_rows().begin + rows.begin;
  }
  const uint8_t* w =
      arena_ + layout_.offset(job.layer, job.experts[entry].expert) + layer.down_offset;
  const MatFn* mat = job.float_reference ? table.mat_float : table.mat;
  MatArgs args = {w + size_t{rows.begin} * layer.down_row_bytes,
                  layer.down_row_bytes,
                  rows.size(),
                  layout_.width,
                  acts,
                  n,
                  out};
  SetNext(&next_row, &args);
  mat[static_cast<uint32_t>(layer.down)](args);
}

// ---- shared by the phases
// --------------------------------------------------------------------------------------------------------

bool ExpertRunner::Aborted(const ExpertJob& job) const {
  if (options_.stop != nullptr && options_.stop->load(std::memory_order_relaxed)) return true;
  // Relaxed: only says that the window is void. 0 = nothing aborted yet; windows count from 1.
  const uint64_t aborted = header_->abort_window.load(std::memory_order_relaxed);
  // Tags carry 32 bits of the window: compare by distance.
  return aborted != 0 && static_cast<int32_t>(static_cast<uint32_t>(aborted) -
                                              static_cast<uint32_t>(TagWindow(job.tag))) >= 0;
}

void ExpertRunner::Fail(JobStatus status, uint32_t detail) {
  const uint64_t mine = (static_cast<uint64_t>(status) << 32) | detail;
  uint64_t seen = failure_.load(std::memory_order_relaxed);
  do {
    // First failure wins. Two non-finite rows: the lowest one is reported, whatever the timing, and
    // alike by every worker.
    const bool lower_row =
        seen != 0 && seen >> 32 == mine >> 32 && status == JobStatus::kNotFinite && mine < seen;
    if (seen != 0 && !lower_row) return;
  } while (!failure_.compare_exchange_weak(
      seen, mine, std::memory_order_relaxed));  // read after the phase's end, which orders
}

void ExpertRunner::AddProgress() {
  header_->workers[options_.me].progress.fetch_add(
      1, std::memory_order_relaxed);  // a sign of life, no data
}

const uint8_t* ExpertRunner::ActOf(const ExpertJob& job, uint32_t row) const {
  return exchange_ + exchange_layout_.acts_offset(job.layer & 1) +
         row * exchange_layout_.act_row_bytes();
}
float* ExpertRunner::Hidden(const ExpertJob& job, uint32_t index) const {
  return reinterpret_cast<float*>(exchange_ + exchange_layout_.hidden_offset(job.layer & 1)) +
         size_t{index} * layout_.width;
}
float* ExpertRunner::Result(const ExpertJob& job, uint32_t index) const {
  return reinterpret_cast<float*>(exchange_ + exchange_layout_.result_offset(job.layer & 1)) +
         size_t{index} * layout_.hidden;
}

ActRow ExpertRunner::ActRowOf(const ExpertJob& job, uint32_t row, Format format) const {
  const uint8_t* base = ActOf(job, row);
  const uint32_t form_bit = ActFormOf(format, job.float_reference != 0);
  const uint32_t form = static_cast<uint32_t>(
      std::countr_zero(form_bit));  // bit i of ActForms is form i of ExchangeLayout
  if (form_bit == kActF32) {
    ActRow row_f;
    row_f.f = reinterpret_cast<const float*>(base + exchange_layout_.form_offset(0));
    return row_f;
  }
  return ActRowAt(base + exchange_layout_.form_offset(form),
                  ActLayout{layout_.hidden, Info(format).act_block_len});
}

}  // namespace lode
