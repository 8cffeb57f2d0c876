// See expert_runner.h. The job's chunks are one phase of the pool; what a chunk may rely on is said
// where it waits for it.
#include "cpu_worker/expert_runner.h"

#include <algorithm>
#include <bit>
#include <thread>

#include "cpu_worker/job_check.h"
#include "kernels/canonical.h"
#include "kernels/kernel_table.h"
#include "shared/base/check.h"
#include "shared/base/fault.h"

namespace lode {
namespace {

constexpr uint32_t kPollsPerClock = 64;     // of a spinning wait
constexpr uint64_t kYieldAfterNs = 20'000;  // longer than a peer of equal speed lags behind
// Signs of life go to a line that all threads and a GPU look at: one per so many chunks.
constexpr uint32_t kChunksPerSign = 8;
constexpr size_t kCacheLineBytes = 64;

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
  experts_ = std::make_unique<ExpertState[]>(kJobExpertsMax);
  threads_ = std::make_unique<ThreadState[]>(pool->threads());
  for (uint32_t t = 0; t < pool->threads(); ++t) {
    gate_scratch_.push_back(std::make_unique<float[]>(size_t{kWindowRowsMax} *
                                                      std::max(1u, layout.width_rows().size())));
  }
}

ExpertRunner::Outcome ExpertRunner::Run(const ExpertJob& job, const KernelTable& table) {
  LaneTrace* const trace = options_.trace;
  if (trace != nullptr) trace->run_ns = NowNs();
  pool_->SetActive(job.threads);
  Prepare(job);
  if (trace != nullptr) trace->open_ns = NowNs();
  pool_->RunPhase(chunks_.size(), [&](uint32_t chunk, uint32_t thread, NodePool::Next& next) {
    DoChunk(job, table, chunk, thread, &next);
  });
  if (trace != nullptr) trace->end_ns = NowNs();
  // The phase has ended: all its writes are visible.
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

// ---- before the threads start: they all wait for this

void ExpertRunner::Prepare(const ExpertJob& job) {
  ++serial_;
  // Relaxed: the phase starts with a release.
  if (failure_.exchange(0, std::memory_order_relaxed) != 0) {  // that job left counts behind
    for (uint32_t j = 0; j < kJobExpertsMax; ++j)
      experts_[j].gate_up_done.store(0, std::memory_order_relaxed);
    flagged_.store(0, std::memory_order_relaxed);
    quantised_experts_.store(0, std::memory_order_relaxed);
  }
  CollectVectors(job);
  const LayerExperts& layer = layout_.layers[job.layer];
  down_act_ = {layout_.width, std::max(1u, Info(layer.down).act_block_len)};
  chunks_.Cut({job.n_experts, layout_.width_rows().size(), layout_.hidden_rows().size(),
               layer.gate_row_bytes + layer.up_row_bytes, layer.down_row_bytes, pool_->active()},
              options_.chunks);
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

// ---- one chunk

void ExpertRunner::DoChunk(const ExpertJob& job, const KernelTable& table, uint32_t chunk,
                           uint32_t thread, NodePool::Next* next) {
  const JobChunk c = chunks_[chunk];
  if (threads_[thread].tag != job.tag) {
    threads_[thread].tag = job.tag;
    PrefetchStart(job, c);
  }
  if (!HasEnded() && Aborted(job)) Fail(JobStatus::kAborted, 0);
  // The flags stay unset: peers end by the abort word too.
  if (HasEnded()) return;
  const auto next_row = [&]() -> const uint8_t* {
    const uint32_t ahead = next->Claim();
    return ahead == NodePool::Next::kNone ? nullptr : FirstRow(job, chunks_[ahead]);
  };
  if (c.down) {
    if (!EnsureQuantised(job, table, c.entry, thread)) return;
    // Some vector is not finite: the others are still looked at, since the lowest row is told.
    if (failure_.load(std::memory_order_relaxed) != 0) return;
    const LaneSpan span(options_.trace, thread, LaneStep::kDown);
    if (c.rows.size() > 0) DownChunk(job, table, c.entry, c.rows, next_row);
  } else {
    {
      const LaneSpan span(options_.trace, thread, LaneStep::kGateUp);
      if (c.rows.size() > 0) GateUpChunk(job, table, c.entry, c.rows, thread, next_row);
    }
    // acq_rel: the thread that ends the expert has seen every other chunk's writes, and its release
    // of the flag passes them on.
    std::atomic<uint32_t>& done = experts_[c.entry].gate_up_done;
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == chunks_.GateUpPieces(c.entry)) {
      done.store(0, std::memory_order_relaxed);  // the phase's end orders it before the next job
      EndGateUp(job, table, c.entry, thread);
    }
  }
  if (chunk % kChunksPerSign == 0) AddProgress();
}

const uint8_t* ExpertRunner::FirstRow(const ExpertJob& job, const JobChunk& chunk) const {
  const LayerExperts& layer = layout_.layers[job.layer];
  const uint8_t* expert = arena_ + layout_.offset(job.layer, job.experts[chunk.entry].expert);
  return chunk.down ? expert + layer.down_offset + size_t{chunk.rows.begin} * layer.down_row_bytes
                    : expert + size_t{chunk.rows.begin} * layer.gate_row_bytes;
}

// Nobody has announced a thread's first chunk: its first rows come while the activations, which are
// in another core's cache or just off the link, are prepared.
void ExpertRunner::PrefetchStart(const ExpertJob& job, const JobChunk& chunk) const {
  const LayerExperts& layer = layout_.layers[job.layer];
  const uint32_t row_bytes = chunk.down ? layer.down_row_bytes : layer.gate_row_bytes;
  const size_t bytes = size_t{std::min(kRowGranule, chunk.rows.size())} * row_bytes;
  const uint8_t* const w = FirstRow(job, chunk);
  for (size_t i = 0; i < bytes; i += kCacheLineBytes) __builtin_prefetch(w + i, 0, 2);
}

// ---- gate and up

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

// ---- hidden vectors

// Every own row of the expert's hidden vectors is written. Without peers, or when all of them were
// faster, the vectors are quantised here and now, long before their down rows are claimed.
void ExpertRunner::EndGateUp(const ExpertJob& job, const KernelTable& table, uint32_t entry,
                             uint32_t thread) {
  SetHiddenReady(job, entry);
  if (flagged_.fetch_add(1, std::memory_order_relaxed) + 1 == job.n_experts) {
    flagged_.store(0, std::memory_order_relaxed);
    LODE_FAULT("cpu_worker.after_gate_up");
  }
  for (uint32_t worker = 0; worker < exchange_layout_.shape.n_workers; ++worker) {
    if (!IsHiddenReady(job, entry, worker)) return;
  }
  EnsureQuantised(job, table, entry, thread);
}

// Chunks are claimed in the order of the list, so whatever this waits for is being worked on by a
// thread that waits for nothing, or by a peer.
bool ExpertRunner::EnsureQuantised(const ExpertJob& job, const KernelTable& table, uint32_t entry,
                                   uint32_t thread) {
  std::atomic<uint64_t>& hidden = experts_[entry].hidden;
  const uint64_t taken = 2 * serial_, quantised = taken + 1;
  // Acquire: pairs with the release below.
  uint64_t seen = hidden.load(std::memory_order_acquire);
  if (seen == quantised) return true;
  if (seen == taken || !hidden.compare_exchange_strong(seen, taken, std::memory_order_relaxed)) {
    const LaneSpan span(options_.trace, thread, LaneStep::kWaited);
    return WaitForThreads([&] { return hidden.load(std::memory_order_acquire) == quantised; });
  }
  {
    const LaneSpan span(options_.trace, thread, LaneStep::kWaited);
    if (!WaitForThreads([&] { return IsHiddenReady(job, entry, options_.me); })) return false;
    for (uint32_t peer = 0; peer < exchange_layout_.shape.n_workers; ++peer) {
      if (peer != options_.me && !WaitForPeer(job, entry, peer)) return false;
    }
  }
  const LaneSpan span(options_.trace, thread, LaneStep::kQuantise);
  for (uint32_t v = first_vector_[entry]; v < first_vector_[entry + 1]; ++v)
    RequantiseVector(job, table, v);
  hidden.store(quantised, std::memory_order_release);
  if (quantised_experts_.fetch_add(1, std::memory_order_relaxed) + 1 == job.n_experts) {
    quantised_experts_.store(0, std::memory_order_relaxed);
    LODE_FAULT("cpu_worker.before_down");
  }
  return true;
}

void ExpertRunner::SetHiddenReady(const ExpertJob& job, uint32_t entry) {
  // Release: pairs with the peers' acquire in WaitForPeer; our part of the expert's hidden vectors
  // is complete.
  header_->hidden_ready[job.layer & 1][options_.me][entry].store(job.tag,
                                                                 std::memory_order_release);
}

bool ExpertRunner::IsHiddenReady(const ExpertJob& job, uint32_t entry, uint32_t worker) const {
  // Acquire: pairs with that worker's SetHiddenReady.
  return header_->hidden_ready[job.layer & 1][worker][entry].load(std::memory_order_acquire) ==
         job.tag;
}

void ExpertRunner::RequantiseVector(const ExpertJob& job, const KernelTable& table, uint32_t v) {
  const Vector& vector = vectors_[v];
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
    if (HasEnded()) return false;
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

template <class Done>
bool ExpertRunner::WaitForThreads(const Done& done) {
  // As long as the pool itself waits for the end of a phase: a thread has gone, our own bug.
  constexpr uint64_t kLostAfterNs = 60'000'000'000;
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
    LODE_CHECK(waited < kLostAfterNs, "hidden vectors of this worker's own threads do not come");
    // With more threads than cores that thread may be waiting for this very core.
    if (pool_->spin_ns() == 0 || now - start > kYieldAfterNs) std::this_thread::yield();
  }
}

// ---- down

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

// ---- shared

// A value that is not finite ends nothing: the job is looked at to its end for the lowest such row.
bool ExpertRunner::HasEnded() const {
  return failure_.load(std::memory_order_relaxed) >> 32 >
         static_cast<uint64_t>(JobStatus::kNotFinite);
}

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
    // First failure wins, but: of two non-finite rows the lowest is reported, whatever the timing,
    // alike by every worker; and what ends the job, so that threads stop waiting for each other, takes
    // the place of a value that does not.
    const bool was_value = seen >> 32 == static_cast<uint64_t>(JobStatus::kNotFinite);
    const bool lower_row = was_value && status == JobStatus::kNotFinite && mine < seen;
    const bool ends = was_value && status != JobStatus::kNotFinite;
    if (seen != 0 && !lower_row && !ends) return;
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
