// Lanes in phases: activations | plan | bell | pulls: gate+up, swiglu and requantise, down | hits:
// the same | wait. Rows of a matrix are cut into chunks for the pool; a pull reads each chunk from
// the node arenas that hold its rows.
#include "gpu_worker/cpu_lanes.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "kernels/canonical.h"
#include "shared/base/check.h"
#include "shared/base/fault.h"

namespace lode {
namespace {

// Matrix rows per unit of the pool: 64 rows of the flagship's gate are 37-120 KiB, about 10 us of
// one core.
constexpr uint32_t kChunkRows = 64;
// A sleeping wait looks at the abort word this often.
constexpr uint64_t kAbortCheckNs = 1'000'000;
constexpr uint32_t kNoRow = 0xffffffffu;
constexpr uint32_t kActBlocks[] = {32, 64, 256};  // by exchange form - 1

uint32_t Chunks(uint32_t rows) { return (rows + kChunkRows - 1) / kChunkRows; }

// Exchange form index: 0 f32, 1 q32, 2 q64, 3 q256.
uint32_t FormOf(Format format, bool float_reference) {
  const uint32_t block = float_reference ? 0 : Info(format).act_block_len;
  for (uint32_t i = 0; i < std::size(kActBlocks); ++i) {
    if (kActBlocks[i] == block) return i + 1;
  }
  LODE_CHECK(block == 0, "no activation form for blocks of {}", block);
  return 0;
}

bool AllFinite(const float* x, size_t n) {
  bool finite = true;
  for (size_t i = 0; i < n; ++i) finite &= canonical::IsFinite(x[i]);
  return finite;
}

void KeepLowest(std::atomic<uint32_t>* lowest, uint32_t row) {
  uint32_t seen = lowest->load(std::memory_order_relaxed);
  while (row < seen && !lowest->compare_exchange_weak(seen, row, std::memory_order_relaxed)) {
  }
}

MatFn Product(const KernelTable& table, Format format, bool float_reference) {
  const uint32_t f = static_cast<uint32_t>(format);
  return float_reference ? table.mat_float[f] : table.mat[f];
}

}  // namespace

struct CpuLanes::Vector {
  uint32_t expert;  // index into the plan
  uint32_t row;
  uint32_t index;  // (row, order)
};

struct CpuLanes::Scratch {
  std::vector<uint32_t> experts;       // plan indexes of the lane
  std::vector<uint32_t> first_vector;  // [experts + 1]
  std::vector<Vector> vectors;
  // [vector index][width]; gate becomes the hidden vector.
  std::vector<float> gate, up;
  size_t quantised_stride = 0;
  std::vector<uint8_t> quantised;  // [vector index] hidden vector in the form of the down matrix
  std::vector<float> results[2];   // [parity][vector index][hidden]
};

const char* LaneErrorText(LaneError error) {
  switch (error) {
    case LaneError::kAbortWord:
      return "the daemon declared the window void";
    case LaneError::kNoProgress:
      return "no progress";
    case LaneError::kTooLong:
      return "progress, but too slow";
    case LaneError::kPeerTimeout:
      return "it gave up waiting for another worker";
    case LaneError::kBadJob:
      return "it refused the job";
  }
  return "unknown";
}

CpuLanes::CpuLanes(const LanesOptions& options, const ArenaSet& arenas, ExpertTier* tier,
                   uint8_t* exchange, HostPool* pool)
    : options_(options),
      arenas_(arenas),
      tier_(tier),
      header_(reinterpret_cast<ExchangeHeader*>(exchange)),
      exchange_(exchange),
      layout_{{arenas.hidden(), arenas.width(), options.experts_used, arenas.nodes()}},
      pool_(pool),
      none_resident_(arenas.experts(), kNotResident),
      scratch_(new Scratch) {
  const size_t vectors = layout_.vectors();
  size_t stride = 0;
  for (const uint32_t block : kActBlocks) {
    if (arenas.width() % block == 0)
      stride = std::max(stride, ActLayout{arenas.width(), block}.bytes());
  }
  Scratch& s = *scratch_;
  s.experts.reserve(kJobExpertsMax);
  s.first_vector.reserve(kJobExpertsMax + 1);
  s.vectors.reserve(vectors);
  s.gate.resize(vectors * arenas.width());
  s.up.resize(vectors * arenas.width());
  s.quantised_stride = stride;
  s.quantised.resize(vectors * stride + 64);
  for (uint32_t parity = 0; parity < 2; ++parity) {
    s.results[parity].resize(vectors * arenas.hidden());
    results_[parity].assign(vectors, nullptr);
  }
}

CpuLanes::~CpuLanes() = default;

uint8_t* CpuLanes::ActSlot(uint32_t parity, uint32_t row) const {
  return exchange_ + layout_.acts_offset(parity) + row * layout_.act_row_bytes();
}
float* CpuLanes::WorkerResult(uint32_t parity, uint32_t index) const {
  return reinterpret_cast<float*>(exchange_ + layout_.result_offset(parity)) +
         static_cast<size_t>(index) * arenas_.hidden();
}

void CpuLanes::BeginWindow(const LanesWindow& window) {
  LODE_CHECK(window.kernels != nullptr, "window {} has no kernel table", window.window);
  window_ = window;
  counts_ = LaneCounts{};
  tags_[0] = tags_[1] = 0;
  for (uint32_t w = 0; w < arenas_.nodes(); ++w) {
    worker_busy_ns_[w] = header_->workers[w].busy_ns.load(std::memory_order_relaxed);
  }
  if (!window.cpu_lane_down) {
    const uint64_t epoch = header_->window_epoch.value.load(std::memory_order_relaxed);
    lode::Publish(header_->window_epoch, epoch | 1);  // odd: pools spin
  }
}

void CpuLanes::EndWindow() {
  const uint64_t epoch = header_->window_epoch.value.load(std::memory_order_relaxed);
  if (epoch & 1) lode::Publish(header_->window_epoch, epoch + 1);
  uint64_t longest = 0;  // workers run side by side: the lane was busy as long as its busiest one
  for (uint32_t w = 0; w < arenas_.nodes(); ++w) {
    const uint64_t busy = header_->workers[w].busy_ns.load(std::memory_order_relaxed);
    if (busy > worker_busy_ns_[w]) longest = std::max(longest, busy - worker_busy_ns_[w]);
  }
  counts_.lane_ns[static_cast<uint32_t>(Lane::kCpu)] = longest;
}

void CpuLanes::WorkerReplaced(uint32_t worker) {
  if (worker < arenas_.nodes())
    worker_busy_ns_[worker] = header_->workers[worker].busy_ns.load(std::memory_order_relaxed);
}

bool CpuLanes::Aborted() const {
  return header_->abort_window.load(std::memory_order_acquire) >= window_.window;
}

WindowOutcome CpuLanes::Failure(WindowStatus status, uint32_t layer, uint32_t row, uint32_t worker,
                                uint32_t detail) const {
  WindowOutcome outcome;
  outcome.status = status;
  outcome.error = {layer, row, worker, detail};
  return outcome;
}

// f32 always (workers exchange and requantise in float, float formats read it); each quantised form
// that gate or up needs.
WindowOutcome CpuLanes::FillActivations(uint32_t layer, const float* x, uint32_t n_rows) {
  const uint32_t hidden = arenas_.hidden(), parity = layer & 1;
  uint32_t forms = 0;
  for (const Matrix m : {Matrix::kGate, Matrix::kUp}) {
    forms |= 1u << FormOf(arenas_.shape(layer, m).format, options_.float_reference);
  }
  std::atomic<uint32_t> bad_row{kNoRow};
  ParallelFor(*pool_, n_rows, [&](uint32_t row) {
    const float* in = x + static_cast<size_t>(row) * hidden;
    uint8_t* slot = ActSlot(parity, row);
    std::memcpy(slot, in, hidden * sizeof(float));
    bool finite = AllFinite(in, hidden);
    for (uint32_t form = 1; form < ExchangeLayout::kForms; ++form) {
      if (!(forms >> form & 1)) continue;
      const ActLayout act{hidden, kActBlocks[form - 1]};
      uint8_t* base = slot + layout_.form_offset(form);
      finite &=
          window_.kernels->quantize(in, hidden, act.block_len, reinterpret_cast<int8_t*>(base),
                                    reinterpret_cast<float*>(base + act.d_offset()),
                                    reinterpret_cast<int16_t*>(base + act.sum16_offset()));
    }
    if (!finite) KeepLowest(&bad_row, row);
  });
  if (bad_row != kNoRow) return Failure(WindowStatus::kNotFinite, layer, bad_row, 0, 0);
  return {};
}

void CpuLanes::Publish(uint32_t layer, uint32_t n_rows) {
  const uint32_t parity = layer & 1;
  const ExpertPlan& plan = plans_[parity];
  ExpertJob& job = header_->jobs[parity];
  job.tag = tags_[parity] = JobTag(options_.generation, window_.window, layer);
  job.layer = layer;
  job.n_rows = n_rows;
  job.act_forms = kActF32;
  for (const Matrix m : {Matrix::kGate, Matrix::kUp}) {
    job.act_forms |= 1u << FormOf(arenas_.shape(layer, m).format, options_.float_reference);
  }
  job.float_reference = options_.float_reference;
  std::memcpy(job.isa, window_.cpu_isa, sizeof(job.isa));
  job.threads = window_.cpu_threads;
  job.n_experts = 0;
  for (uint32_t i = 0; i < plan.n_experts; ++i) {
    const PlannedExpert& e = plan.experts[i];
    if (e.lane != static_cast<uint32_t>(Lane::kCpu)) continue;
    JobExpert& out = job.experts[job.n_experts++];
    out.expert = e.expert;
    out.reserved = 0;
    out.rows = e.rows;
    std::memcpy(out.order, e.order, sizeof(out.order));
  }
  LODE_FAULT("gpu_worker.before_bell");
  lode::Publish(
      header_->bell,
      job.tag);  // release: pairs with the workers' acquire; the job and activations are complete
  LODE_FAULT("gpu_worker.after_bell");
}

void CpuLanes::CountPlan(uint32_t layer) {
  const ExpertPlan& plan = plans_[layer & 1];
  const uint64_t bytes = arenas_.weight_bytes(layer);
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    counts_.lookups[lane] += plan.n_by_lane[lane];
    counts_.layer_lookups[layer][lane] = static_cast<uint16_t>(plan.n_by_lane[lane]);
    counts_.bytes[lane] += plan.n_by_lane[lane] * bytes;
  }
  for (uint32_t i = 0; i < plan.n_experts; ++i) {
    for (uint32_t row = 0; row < kWindowRowsMax; ++row) {
      counts_.row_lookups[row][plan.experts[i].lane] += plan.experts[i].rows >> row & 1;
    }
  }
}

WindowOutcome CpuLanes::Start(uint32_t layer, const float* x, uint32_t n_rows,
                              const RoutedRow* routed) {
  const uint32_t parity = layer & 1;
  tags_[parity] = 0;
  header_->gpu_heartbeat.fetch_add(1, std::memory_order_relaxed);
  if (WindowOutcome outcome = FillActivations(layer, x, n_rows); !outcome.ok()) return outcome;

  ExpertPlan& plan = plans_[parity];
  PlanExperts(routed, n_rows, options_.experts_used,
              tier_ ? tier_->residency(layer) : none_resident_.data(), window_.share_256,
              window_.cpu_lane_down, &plan);
  if (tier_) tier_->Count(layer, routed, n_rows, options_.experts_used);
  CountPlan(layer);
  for (uint32_t i = 0; i < plan.n_experts; ++i) {
    const PlannedExpert& e = plan.experts[i];
    for (uint32_t row = 0; row < n_rows; ++row) {
      if (!(e.rows >> row & 1)) continue;
      const uint32_t index = VectorIndex(row, e.order[row]);
      results_[parity][index] =
          e.lane == static_cast<uint32_t>(Lane::kCpu)
              ? WorkerResult(parity, index)
              : &scratch_->results[parity][static_cast<size_t>(index) * arenas_.hidden()];
    }
  }
  if (plan.n_by_lane[static_cast<uint32_t>(Lane::kCpu)] > 0) Publish(layer, n_rows);
  for (const Lane lane : {Lane::kPull, Lane::kHit}) {
    if (plan.n_by_lane[static_cast<uint32_t>(lane)] == 0) continue;
    const uint64_t begin = NowNs();
    if (WindowOutcome outcome = RunLane(layer, lane); !outcome.ok()) return outcome;
    counts_.lane_ns[static_cast<uint32_t>(lane)] += NowNs() - begin;
  }
  return {};
}

void CpuLanes::CollectVectors(uint32_t layer, Lane lane) {
  const ExpertPlan& plan = plans_[layer & 1];
  Scratch& s = *scratch_;
  s.experts.clear();
  s.vectors.clear();
  s.first_vector.clear();
  for (uint32_t i = 0; i < plan.n_experts; ++i) {
    const PlannedExpert& e = plan.experts[i];
    if (e.lane != static_cast<uint32_t>(lane)) continue;
    s.first_vector.push_back(static_cast<uint32_t>(s.vectors.size()));
    for (uint32_t row = 0; row < kWindowRowsMax; ++row) {
      if (e.rows >> row & 1) s.vectors.push_back({i, row, VectorIndex(row, e.order[row])});
    }
    s.experts.push_back(i);
  }
  s.first_vector.push_back(static_cast<uint32_t>(s.vectors.size()));
}

// Rows [rows.begin, rows.end) of one matrix: one piece in a VRAM slot, or the parts of every node
// arena that holds some of them. out[a] points at row 0.
void CpuLanes::Multiply(uint32_t layer, const PlannedExpert& expert, Matrix matrix, RowRange rows,
                        const ActRow* acts, float* const* out) {
  const MatrixShape& shape = arenas_.shape(layer, matrix);
  const MatFn product = Product(*window_.kernels, shape.format, options_.float_reference);
  const uint32_t n_acts = static_cast<uint32_t>(__builtin_popcount(expert.rows));
  const bool hit = expert.lane == static_cast<uint32_t>(Lane::kHit);
  const uint32_t pieces = hit ? 1 : arenas_.nodes();
  for (uint32_t p = 0; p < pieces; ++p) {
    const RowRange held = hit ? RowRange{0, shape.rows} : arenas_.rows(p, matrix);
    const RowRange part = {std::max(rows.begin, held.begin), std::min(rows.end, held.end)};
    if (part.begin >= part.end) continue;
    const uint8_t* first = hit ? tier_->slot(layer, expert.slot) + shape.slot_offset
                               : arenas_.piece(p, layer, expert.expert, matrix);
    float* places[kWindowRowsMax];
    for (uint32_t a = 0; a < n_acts; ++a) places[a] = out[a] + part.begin;
    MatArgs args = {};
    args.w = first + uint64_t{part.begin - held.begin} * shape.row_bytes;
    args.row_bytes = shape.row_bytes;
    args.n_rows = part.size();
    args.n_cols = shape.columns;
    args.acts = acts;
    args.n_acts = n_acts;
    args.out = places;
    product(args);
  }
}

WindowOutcome CpuLanes::RunLane(uint32_t layer, Lane lane) {
  CollectVectors(layer, lane);
  Scratch& s = *scratch_;
  const ExpertPlan& plan = plans_[layer & 1];
  const uint32_t parity = layer & 1, width = arenas_.width(), hidden = arenas_.hidden();
  const uint32_t experts = static_cast<uint32_t>(s.experts.size());
  const auto run = [&](uint32_t entry, Matrix matrix, uint32_t chunk, auto act_of, auto out_of) {
    const uint32_t first = s.first_vector[entry], n = s.first_vector[entry + 1] - first;
    ActRow acts[kWindowRowsMax];
    float* out[kWindowRowsMax];
    for (uint32_t a = 0; a < n; ++a) {
      acts[a] = act_of(s.vectors[first + a]);
      out[a] = out_of(s.vectors[first + a]);
    }
    const uint32_t begin = chunk * kChunkRows,
                   end = std::min(begin + kChunkRows, arenas_.shape(layer, matrix).rows);
    Multiply(layer, plan.experts[s.experts[entry]], matrix, {begin, end}, acts, out);
  };

  // 1. gate and up, from the activations in the exchange (written by this thread; nobody else
  // writes them)
  const auto input_act = [&](Matrix matrix) {
    const uint32_t form = FormOf(arenas_.shape(layer, matrix).format, options_.float_reference);
    return [&, form](const Vector& v) {
      const uint8_t* slot = ActSlot(parity, v.row);
      ActRow act;
      if (form > 0)
        act = ActRowAt(slot + layout_.form_offset(form), ActLayout{hidden, kActBlocks[form - 1]});
      act.f = reinterpret_cast<const float*>(slot);
      return act;
    };
  };
  const uint32_t width_chunks = Chunks(width);
  ParallelFor(*pool_, experts * 2 * width_chunks, [&](uint32_t unit) {
    const uint32_t entry = unit / (2 * width_chunks), rest = unit % (2 * width_chunks);
    const bool is_gate = rest < width_chunks;
    const Matrix matrix = is_gate ? Matrix::kGate : Matrix::kUp;
    std::vector<float>& to = is_gate ? s.gate : s.up;
    run(entry, matrix, rest % width_chunks, input_act(matrix),
        [&](const Vector& v) { return &to[static_cast<size_t>(v.index) * width]; });
  });

  // 2. silu(gate) * up, then the form of the down matrix
  const uint32_t form =
      FormOf(arenas_.shape(layer, Matrix::kDown).format, options_.float_reference);
  const ActLayout act{width, form > 0 ? kActBlocks[form - 1] : 32};
  std::atomic<uint32_t> bad_row{kNoRow};
  ParallelFor(*pool_, static_cast<uint32_t>(s.vectors.size()), [&](uint32_t i) {
    const Vector& v = s.vectors[i];
    float* h = &s.gate[static_cast<size_t>(v.index) * width];
    window_.kernels->swiglu(h, &s.up[static_cast<size_t>(v.index) * width], width, h);
    uint8_t* q = &s.quantised[v.index * s.quantised_stride];
    const bool finite =
        form == 0 ? AllFinite(h, width)
                  : window_.kernels->quantize(h, width, act.block_len, reinterpret_cast<int8_t*>(q),
                                              reinterpret_cast<float*>(q + act.d_offset()),
                                              reinterpret_cast<int16_t*>(q + act.sum16_offset()));
    if (!finite) KeepLowest(&bad_row, v.row);
  });
  if (bad_row != kNoRow) return Failure(WindowStatus::kNotFinite, layer, bad_row, 0, 0);

  // 3. down
  const uint32_t hidden_chunks = Chunks(hidden);
  ParallelFor(*pool_, experts * hidden_chunks, [&](uint32_t unit) {
    run(
        unit / hidden_chunks, Matrix::kDown, unit % hidden_chunks,
        [&](const Vector& v) {
          ActRow row;
          if (form > 0) row = ActRowAt(&s.quantised[v.index * s.quantised_stride], act);
          row.f = &s.gate[static_cast<size_t>(v.index) * width];
          return row;
        },
        [&](const Vector& v) { return &s.results[parity][static_cast<size_t>(v.index) * hidden]; });
  });
  return {};
}

WindowOutcome CpuLanes::Finish(uint32_t layer) {
  if (tags_[layer & 1] == 0) return {};
  LODE_FAULT("gpu_worker.before_wait");
  for (uint32_t worker = 0; worker < arenas_.nodes(); ++worker) {
    if (WindowOutcome outcome = WaitForWorker(layer, worker); !outcome.ok()) return outcome;
  }
  return {};
}

WindowOutcome CpuLanes::WaitForWorker(uint32_t layer, uint32_t worker) {
  WorkerLine& line = header_->workers[worker];
  const uint64_t tag = tags_[layer & 1];
  const uint64_t begin = NowNs();
  uint64_t moved = begin;
  uint64_t progress = line.progress.load(std::memory_order_acquire);
  const auto failed = [&](LaneError error) {
    return Failure(WindowStatus::kAborted, layer, 0, worker, static_cast<uint32_t>(error));
  };
  for (;;) {
    if (Aborted()) return failed(LaneError::kAbortWord);
    // Acquire: pairs with the worker's release of the tag; its results and status are complete.
    const uint64_t ack = line.ack.value.load(std::memory_order_acquire);
    if (ack == tag) return WorkerOutcome(layer, worker);
    const uint64_t now = NowNs();
    if (const uint64_t seen = line.progress.load(std::memory_order_acquire); seen != progress) {
      progress = seen;
      moved = now;
    }
    if (now - begin >= options_.wait_max_ns) return failed(LaneError::kTooLong);
    if (now - moved >= options_.wait_ns) return failed(LaneError::kNoProgress);
    WaitChange(line.ack, ack, {std::min(options_.spin_ns, kAbortCheckNs), now + kAbortCheckNs});
  }
}

WindowOutcome CpuLanes::WorkerOutcome(uint32_t layer, uint32_t worker) const {
  const WorkerLine& line = header_->workers[worker];
  const uint32_t row = line.error_row.load(std::memory_order_relaxed);
  switch (static_cast<JobStatus>(line.status.load(std::memory_order_relaxed))) {
    case JobStatus::kOk:
      return {};
    case JobStatus::kNotFinite:
      return Failure(WindowStatus::kNotFinite, layer, std::min(row, kWindowRowsMax - 1), worker, 0);
    case JobStatus::kPeerTimeout:
      return Failure(WindowStatus::kAborted, layer, row, worker,
                     static_cast<uint32_t>(LaneError::kPeerTimeout));
    case JobStatus::kAborted:
      return Failure(WindowStatus::kAborted, layer, 0, worker,
                     static_cast<uint32_t>(LaneError::kAbortWord));
    case JobStatus::kBadJob:
      break;
  }
  return Failure(WindowStatus::kAborted, layer, row, worker,
                 static_cast<uint32_t>(LaneError::kBadJob));
}

const float* CpuLanes::Result(uint32_t layer, uint32_t row, uint32_t order) const {
  return results_[layer & 1][VectorIndex(row, order)];
}

}  // namespace lode
