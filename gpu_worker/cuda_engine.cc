// See cuda_engine.h.
#include "gpu_worker/cuda_engine.h"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>

#include "gpu_worker/cuda_buffers.h"
#include "gpu_worker/row_results.h"
#include "gpu_worker/sampler_math.h"
#include "kernels/cuda/runtime.h"
#include "shared/base/check.h"
#include "shared/base/fault.h"
#include "shared/base/log.h"

namespace lode {
namespace {

enum Word : uint32_t { kWordDone = 0, kWordNotFinite = 8, kWords = 16 };  // a cache line each
// Looks at the done word without sleeping for this long: a window of a resident model ends in it.
constexpr uint64_t kSpinNs = 200'000;
// Afterwards the core belongs to the CPU workers, but for this part of the window's usual time
// before and behind its usual end: a nap takes 60 to 100 us, however short it was meant to be.
constexpr uint64_t kNearEnd = 8;
constexpr uint64_t kUsualWeight = 8;  // a window moves what is usual by 1/8
constexpr long kNapNs = 10'000;
constexpr uint64_t kLookNs = 5'000'000;  // between two looks at the stream's error
// Every wait inside a window ends by itself long before (the lanes' deadlines end all later ones).
constexpr uint64_t kWindowNsMax = 600'000'000'000;
constexpr uint32_t kStampsPerLayer = 12;
constexpr double kNsPerSecond = 1e9;

void OrFault(const Status& status) {
  if (!status.ok()) DeviceFault(status);
}

}  // namespace

// Puts a stamp kernel behind every stage and remembers which stage it ends.
class CudaEngine::StampSink final : public StageSink {
 public:
  StampSink(CUstream_st* stream, uint64_t* stamps, std::vector<Stage>* stages)
      : stream_(stream), stamps_(stamps), stages_(stages) {
    stages_->clear();
    cuda::LaunchStamp(stream_, stamps_, 0);
  }
  void Lap(Stage stage) override {
    stages_->push_back(stage);
    cuda::LaunchStamp(stream_, stamps_, static_cast<uint32_t>(stages_->size()));
  }

 private:
  CUstream_st* const stream_;
  uint64_t* const stamps_;
  std::vector<Stage>* const stages_;
};

StatusOr<std::unique_ptr<CudaEngine>> CudaEngine::Create(const CudaEngineOptions& options,
                                                         const ModelConfig& config,
                                                         CudaDevice& device, const ArenaSet& arenas,
                                                         Forward& forward,
                                                         std::unique_ptr<CudaLanes> lanes) {
  std::unique_ptr<CudaEngine> engine(
      new CudaEngine(options, config, device, arenas, forward, std::move(lanes)));
  LODE_RETURN_IF_ERROR(engine->Allocate());
  LODE_RETURN_IF_ERROR(engine->CaptureAll());
  return engine;
}

CudaEngine::CudaEngine(const CudaEngineOptions& options, const ModelConfig& config,
                       CudaDevice& device, const ArenaSet& arenas, Forward& forward,
                       std::unique_ptr<CudaLanes> lanes)
    : options_(options),
      config_(config),
      device_(device),
      arenas_(arenas),
      forward_(forward),
      lanes_(std::move(lanes)),
      pool_(std::max(1u, options.host_threads)) {
  if (options.link_bytes_per_second > 0) {
    costs_.StartPull(static_cast<double>(lanes_->expert_bytes()) / options.link_bytes_per_second *
                     kNsPerSecond);
  }
}

CudaEngine::~CudaEngine() {
  for (void* memory :
       {static_cast<void*>(wants_), static_cast<void*>(host_changes_), static_cast<void*>(picks_),
        static_cast<void*>(host_logits_), static_cast<void*>(host_routed_), static_cast<void*>(report_),
        static_cast<void*>(host_stamps_), static_cast<void*>(words_)}) {
    if (memory != nullptr) cuda::FreePinned(memory);
  }
}

Status CudaEngine::Allocate() {
  const size_t n_stamps = size_t{config_.layers} * kStampsPerLayer + kStampsPerLayer;
  const size_t n_routed = size_t{config_.layers} * kWindowRowsMax;
  const DeviceBuffers device = {device_};
  LODE_RETURN_IF_ERROR(device("lanes stamps", n_stamps * sizeof(uint64_t), &stamps_));
  LODE_RETURN_IF_ERROR(device("lanes end counter", sizeof(uint32_t), &arrived_));
  const size_t pick_bytes = kWindowRowsMax * cuda::PickScratchBytes(config_.vocab);
  LODE_RETURN_IF_ERROR(device("sampling", pick_bytes, &pick_scratch_));
  LODE_RETURN_IF_ERROR(device("changes of logits", kChangeBytesMax, &changes_));
  const PinnedBuffers pinned;
  LODE_RETURN_IF_ERROR(pinned("rows' wants", kWindowRowsMax * sizeof(RowWants), &wants_));
  LODE_RETURN_IF_ERROR(pinned("changes of logits", kChangeBytesMax, &host_changes_));
  LODE_RETURN_IF_ERROR(pinned("rows' picks", kWindowRowsMax * sizeof(cuda::PickReport), &picks_));
  LODE_RETURN_IF_ERROR(
      pinned("logits", size_t{kWindowRowsMax} * config_.vocab * sizeof(float), &host_logits_));
  LODE_RETURN_IF_ERROR(pinned("routing", n_routed * sizeof(RoutedRow), &host_routed_));
  LODE_RETURN_IF_ERROR(pinned("the lanes' report", sizeof(cuda::LaneReport), &report_));
  LODE_RETURN_IF_ERROR(pinned("stage stamps", n_stamps * sizeof(uint64_t), &host_stamps_));
  return pinned("window words", kWords * sizeof(uint64_t), &words_);
}

Status CudaEngine::CaptureAll() {
  CUstream_st* const stream = device_.stream();
  for (uint32_t n_rows = 0; n_rows <= kWindowRowsMax; ++n_rows) {
    for (const bool timed : {false, true}) {
      // Kernels look at the parameters for how many sequences there are; this is the most.
      current_ = {};
      current_.n_rows = n_rows;
      current_.n_seqs = kWindowRowsMax;
      LODE_ASSIGN_OR_RETURN(graphs_[timed][n_rows], cuda::Graph::Capture(stream, [=, this] {
                              EnqueueWindow(n_rows, timed);
                            }));
    }
  }
  return OkStatus();
}

#if defined(LODE_TEST_HOOKS)
StatusOr<double> CudaEngine::EmptyGraphMs(uint32_t n_rows) {
  CUstream_st* const stream = device_.stream();
  cuda::launches_empty = true;
  auto graph = cuda::Graph::Capture(stream, [=, this] { EnqueueWindow(n_rows, false); });
  cuda::launches_empty = false;
  LODE_RETURN_IF_ERROR(graph.status());
  cuda::Timer* const timer = cuda::NewTimer();
  constexpr uint32_t kRuns = 21;
  std::vector<double> ms;
  for (uint32_t i = 0; i < kRuns; ++i) {
    cuda::Synchronize(stream);
    cuda::StartTimer(timer, stream);
    OrFault((*graph)->Launch(stream));
    ms.push_back(cuda::StopTimer(timer, stream));
  }
  cuda::DeleteTimer(timer);
  std::sort(ms.begin(), ms.end());
  return ms[kRuns / 2];
}
#endif

void CudaEngine::EnqueueWindow(uint32_t n_rows, bool timed) {
  CUstream_st* const stream = device_.stream();
  device_.BeginWindow(current_);
  lanes_->EnqueueBegin();
  std::optional<StampSink> sink;
  if (timed) sink.emplace(stream, stamps_, &stages_[n_rows]);
  forward_.Record(n_rows, *lanes_, timed ? &*sink : nullptr);
  if (n_rows > 0) {
    cuda::LaunchPick(stream,
                     {.window = device_.window_block(),
                      .wants = wants_,
                      .changes = changes_,
                      .logits = forward_.logits(0),
                      .vocab = config_.vocab,
                      .reports = picks_,
                      .scratch = pick_scratch_},
                     n_rows);
  }
  if (timed && n_rows > 0) sink->Lap(Stage::kSample);
  LODE_CHECK(stages_[n_rows].size() < size_t{config_.layers + 1} * kStampsPerLayer,
             "{} stages in a window", stages_[n_rows].size());
  cuda::EndCopies end = {};
  end.block = device_.window_block();
  end.logits = forward_.logits(0);
  end.host_logits = host_logits_;
  end.wants = wants_;
  end.vocab = config_.vocab;
  end.report = lanes_->constants().report;
  end.host_report = report_;
  end.routed = forward_.routed_all();
  end.host_routed = host_routed_;
  end.n_routed = n_rows > 0 ? config_.layers * kWindowRowsMax : 0;
  end.stamps = timed ? stamps_ : nullptr;
  end.host_stamps = host_stamps_;
  end.n_stamps = timed ? static_cast<uint32_t>(stages_[n_rows].size()) + 1 : 0;
  end.window = lanes_->constants().window;
  end.arrived = arrived_;
  end.host_not_finite = words_ + kWordNotFinite;
  end.done = words_ + kWordDone;
  cuda::LaunchEnd(stream, end, n_rows);
}

void CudaEngine::ApplyTunables(const Tunables&, const KernelTable*) {}

void CudaEngine::SetWants(const RowWants* wants, uint32_t n_rows,
                          std::span<const uint8_t> changes) {
  LODE_CHECK(changes.size() <= kChangeBytesMax, "{} bytes of changes", changes.size());
  std::copy_n(wants, n_rows, wants_);
  if (changes.empty()) return;
  // The window before has ended: nothing reads either copy any more.
  std::memcpy(host_changes_, changes.data(), changes.size());
  cuda::CopyAsync(changes_, host_changes_, changes.size(), device_.stream());
}

bool CudaEngine::pick(uint32_t row, RowPick* out) const {
  const cuda::PickReport& report = picks_[row];
  const auto token_of = [](uint64_t key) {
    return key != 0 ? static_cast<int32_t>(IdOfKey(key)) : 0;
  };
  out->argmax = token_of(report.best);
  out->max = report.max;
  out->sum = report.sum;
  out->target_logit = report.target_logit;
  out->token = token_of(report.pick_best);
  out->token_logit = report.pick_logit;
  // Without a finite logit there is nothing to draw from.
  if (wants_[row].draw == 0 || report.pick_best == 0 ||
      ValueOfKey(report.pick_best) == canonical::FromBits(0xff800000u))
    return true;
  const cuda::DrawPart* best = &report.draws[0];
  for (uint32_t p = 1; p < cuda::PickParts(config_.vocab); ++p) {
    if (report.draws[p].key > best->key) best = &report.draws[p];
  }
  out->token = static_cast<int32_t>(IdOfKey(best->key));
  out->token_logit = best->logit;
  return true;
}

bool CudaEngine::VoidAlready(uint64_t window) const {
  return lanes_->header()->abort_window.load(std::memory_order_acquire) >= window;
}

// The CPU workers' pools spin while the epoch is odd: a kernel cannot wake them.
void CudaEngine::SetEpoch(bool odd) {
  WaitWord& word = lanes_->header()->window_epoch;
  const uint64_t epoch = word.value.load(std::memory_order_relaxed);
  if (((epoch & 1) != 0) != odd) lode::Publish(word, epoch + 1);
}

WindowOutcome CudaEngine::Run(const StepParams& params, const LanesWindow& window,
                              uint64_t* stage_ns) {
  const cuda::Range range("window");
  counts_ = LaneCounts{};
  const auto aborted = [](LaneError error) {
    return WindowOutcome{
        WindowStatus::kAborted,
        {.layer = 0, .row = 0, .worker = 0, .detail = static_cast<uint32_t>(error)}};
  };
  if (VoidAlready(window.window)) return aborted(LaneError::kAbortWord);
  // Disk reads belong to the host: the n-gram rows are there before the graph starts.
  const Status ngrams = forward_.LoadNgrams(params);
  if (!ngrams.ok()) {
    spdlog::error("window {} aborted: {}", window.window, Message(ngrams));
    WindowOutcome outcome = aborted(LaneError::kAbortWord);
    outcome.error.detail = static_cast<uint32_t>(ngrams.code());
    return outcome;
  }
  if (tier_ != nullptr) lanes_->UploadTables(*tier_);
  cuda::LaneWindow& w = *lanes_->window();
  w.window = window.window;
  w.wait_ns = options_.wait_ns;
  w.wait_max_ns = options_.wait_max_ns;
  w.generation = options_.generation;
  w.cpu_threads = window.cpu_threads;
  std::copy(std::begin(window.cpu_isa), std::end(window.cpu_isa), w.cpu_isa);
  w.split = {.cpu_lane_down = window.cpu_lane_down ? 1u : 0u,
             .balanced = window.split == SplitPolicy::kBalanced ? 1u : 0u,
             .share_256 = window.share_256,
             .pull_ns = costs_.pull_ns(params.n_rows),
             .cpu_ns = costs_.cpu_ns(params.n_rows),
             .cpu_fixed_ns = LaneCosts::kFixedNs};
  uint64_t busy[kCpuWorkersMax];
  ReadBusy(busy);
  lanes_->SendForced();
  if (!window.cpu_lane_down) SetEpoch(true);
  Launch(params, stage_ns != nullptr);
  LODE_FAULT("gpu_worker.window_launched");
  // The host has nothing else to do now, and behind the window somebody waits for it.
  if (tier_ != nullptr) tier_->PlanAhead();
  lanes_->DrawForced();
  AwaitEnd();
  SetEpoch(false);
  Collect(params, busy);
  if (stage_ns != nullptr) AddStages(params.n_rows, stage_ns);
  const WindowOutcome outcome = OutcomeOf();
  // After this line the next plan may accept the window's rows.
  if (outcome.ok()) forward_.WindowDone(params);
  return outcome;
}

WindowOutcome CudaEngine::Fold(const StepParams& params, uint64_t* stage_ns) {
  counts_ = LaneCounts{};
  Launch(params, stage_ns != nullptr);
  AwaitEnd();
  if (stage_ns != nullptr) AddStages(0, stage_ns);
  const WindowOutcome outcome = OutcomeOf();
  if (outcome.ok()) forward_.WindowDone(params);
  return outcome;
}

void CudaEngine::Launch(const StepParams& params, bool timed) {
  current_ = params;
  lanes_->window()->sequence = ++sequence_;
  lanes_->header()->gpu_heartbeat.fetch_add(1, std::memory_order_relaxed);
  device_.StageWindow(params);
  launched_ns_ = NowNs();
  OrFault(graphs_[timed][params.n_rows]->Launch(device_.stream()));
}

void CudaEngine::AwaitEnd() {
  std::atomic_ref<uint64_t> done(words_[kWordDone]);
  uint64_t& usual = usual_ns_[current_.n_rows];
  const uint64_t begin = launched_ns_, near = usual / kNearEnd;
  uint64_t looked = begin;
  // Acquire: pairs with the release at the end of EndKernel; what the window left in pinned memory
  // is complete.
  while (done.load(std::memory_order_acquire) != sequence_) {
    const uint64_t now = NowNs();
    const uint64_t waited = now - begin;
    if (waited < kSpinNs || (waited + near > usual && waited < usual + near)) {
      SpinPause();
      continue;
    }
    if (now - looked > kLookNs) {
      OrFault(cuda::Look(device_.stream()));
      looked = now;
    }
    if (waited > kWindowNsMax) {
      DeviceFault(DeadlineExceeded("a window did not end within {} s; the device hangs",
                                   kWindowNsMax / 1'000'000'000));
    }
    const timespec nap = {0, kNapNs};
    nanosleep(&nap, nullptr);
  }
  const uint64_t took = NowNs() - begin;
  usual = usual == 0 ? took : usual - usual / kUsualWeight + took / kUsualWeight;
}

// The first failure by layer; inside a layer the device's own values come before the workers' word.
WindowOutcome CudaEngine::OutcomeOf() const {
  const WindowOutcome not_finite = CudaDevice::FromWord(words_[kWordNotFinite]);
  const cuda::LaneFault& fault = report_->fault;
  if (fault.status == 0) return not_finite;
  const WindowOutcome lanes = {static_cast<WindowStatus>(fault.status), fault.error};
  if (!not_finite.ok() && not_finite.error.layer <= lanes.error.layer) return not_finite;
  return lanes;
}

void CudaEngine::ReadBusy(uint64_t* busy) const {
  for (uint32_t w = 0; w < arenas_.nodes(); ++w)
    busy[w] = lanes_->header()->workers[w].busy_ns.load(std::memory_order_relaxed);
}

void CudaEngine::Collect(const StepParams& params, const uint64_t* busy_before) {
  const auto lane = [](Lane l) { return static_cast<uint32_t>(l); };
  counts_.device_ns = report_->ended_ns - report_->began_ns;
  lanes_->PutForced(host_routed_, params.n_rows);
  uint32_t jobs = 0;
  for (uint32_t layer = 0; layer < config_.layers; ++layer) {
    const uint32_t* by_lane = report_->by_layer[layer];
    for (uint32_t l = 0; l < kLanes; ++l) {
      counts_.lookups[l] += by_lane[l];
      counts_.layer_lookups[layer][l] = static_cast<uint16_t>(by_lane[l]);
      counts_.bytes[l] += by_lane[l] * arenas_.weight_bytes(layer);
    }
    const uint64_t* marks = report_->marks[layer];
    const auto mark = [&](cuda::LayerMark m) { return marks[static_cast<uint32_t>(m)]; };
    const uint64_t planned = mark(cuda::LayerMark::kPlanned), wait = mark(cuda::LayerMark::kWait);
    const uint64_t bell = mark(cuda::LayerMark::kBell), answer = mark(cuda::LayerMark::kAnswered);
    if (bell > 0 && answer > bell) counts_.answer_ns += answer - bell;
    if (planned == 0 || wait < planned) continue;
    const uint32_t pulls = by_lane[lane(Lane::kPull)], cpu = by_lane[lane(Lane::kCpu)];
    // Staged pulls have a clock of their own: plan to last byte. When some were read straight by the
    // kernels that compute, hits ran beside them, and the layer counts for the slower lane.
    const uint64_t pulled = mark(cuda::LayerMark::kPulled);
    const uint64_t device_ns =
        pulls <= lanes_->staged_max() && pulled > planned ? pulled - planned : wait - planned;
    counts_.lane_ns[lane(pulls > 0 ? Lane::kPull : Lane::kHit)] += device_ns;
    costs_.LearnPull(params.n_rows, pulls, device_ns);
    jobs += cpu > 0 ? 1 : 0;
  }
  uint64_t busy[kCpuWorkersMax], longest = 0;
  ReadBusy(busy);
  for (uint32_t w = 0; w < arenas_.nodes(); ++w)
    longest = std::max(longest, busy[w] > busy_before[w] ? busy[w] - busy_before[w] : 0);
  counts_.lane_ns[lane(Lane::kCpu)] = longest;
  costs_.LearnCpu(params.n_rows, jobs, counts_.lookups[lane(Lane::kCpu)], longest);
  for (uint32_t row = 0; row < params.n_rows; ++row) {
    for (uint32_t l = 0; l < kLanes; ++l)
      counts_.row_lookups[row][l] = report_->row_lookups[row][l];
  }
  for (uint32_t n = 0; n < kWindowRowsMax; ++n) {
    shown_pull_ns_[n].store(costs_.pull_ns(n + 1), std::memory_order_relaxed);
    shown_cpu_ns_[n].store(costs_.cpu_ns(n + 1), std::memory_order_relaxed);
  }
  // A void window's later layers routed noise.
  if (tier_ == nullptr || !OutcomeOf().ok()) return;
  for (uint32_t layer = 0; layer < config_.layers; ++layer)
    tier_->Count(layer, &routed(layer, 0), params.n_rows, config_.experts_used);
}

void CudaEngine::AddStages(uint32_t n_rows, uint64_t* stage_ns) const {
  const std::vector<Stage>& stages = stages_[n_rows];
  for (size_t i = 0; i < stages.size(); ++i) {
    if (host_stamps_[i + 1] >= host_stamps_[i])
      stage_ns[static_cast<uint32_t>(stages[i])] += host_stamps_[i + 1] - host_stamps_[i];
  }
}

void CudaEngine::AddStatistics(std::map<std::string, double>* values) const {
  for (const uint32_t n_rows : {1u, 4u, 8u}) {
    (*values)[fmt::format("pull_ns_per_expert_{}_rows", n_rows)] =
        shown_pull_ns_[n_rows - 1].load(std::memory_order_relaxed);
    (*values)[fmt::format("cpu_ns_per_expert_{}_rows", n_rows)] =
        shown_cpu_ns_[n_rows - 1].load(std::memory_order_relaxed);
  }
}

}  // namespace lode
