// See cuda_drafter.h.
#include "gpu_worker/cuda_drafter.h"

#include <time.h>

#include <algorithm>
#include <atomic>

#include "gpu_worker/cuda_buffers.h"
#include "gpu_worker/cuda_lanes.h"
#include "kernels/cuda/runtime.h"
#include "shared/base/check.h"
#include "shared/base/log.h"
#include "shared/shm/wait_word.h"

namespace lode {
namespace {

constexpr uint64_t kSpinNs = 2'000'000;  // a pass ends long before; then the core is given back
constexpr long kNapNs = 10'000;
constexpr uint64_t kLookNs = 5'000'000;  // between two looks at the stream's error
constexpr uint64_t kPassNsMax = 60'000'000'000;

void OrFault(const Status& status) {
  if (!status.ok()) DeviceFault(status);
}

}  // namespace

StatusOr<std::unique_ptr<CudaDrafter>> CudaDrafter::Create(
    const ModelConfig& config, const DraftWeights& weights, const ModelWeights& trunk,
    CudaDevice& device, const AttentionState& cells, std::unique_ptr<CudaDraftLanes> lanes,
    const float* trunk_residual) {
  LODE_RETURN_IF_ERROR(device.EnableDrafts());
  std::unique_ptr<CudaDrafter> d(new CudaDrafter(device, std::move(lanes), trunk_residual));
  LODE_ASSIGN_OR_RETURN(d->drafter_,
                        Drafter::Create(config, weights, trunk, device, cells, *d->lanes_));
  LODE_RETURN_IF_ERROR(d->Allocate());
  LODE_RETURN_IF_ERROR(d->CaptureAll());
  return d;
}

CudaDrafter::~CudaDrafter() {
  for (void* memory :
       {static_cast<void*>(run_), static_cast<void*>(reports_), static_cast<void*>(host_logits_)}) {
    if (memory != nullptr) cuda::FreePinned(memory);
  }
}

Status CudaDrafter::Allocate() {
  const DeviceBuffers device{device_};
  const PinnedBuffers pinned;
  const size_t parts = size_t{kWindowRowsMax} * cuda::kGuessParts;
  LODE_RETURN_IF_ERROR(device("draft run", sizeof(cuda::DraftRunState), &state_));
  LODE_RETURN_IF_ERROR(
      device("draft picks", kWindowRowsMax * sizeof(cuda::GuessedToken), &picked_));
  LODE_RETURN_IF_ERROR(device("draft pick parts", parts * sizeof(uint64_t), &parts_));
  LODE_RETURN_IF_ERROR(device("draft exponentials",
                              size_t{kWindowRowsMax} * drafter_->logits_size() * sizeof(float),
                              &exps_));
  LODE_RETURN_IF_ERROR(device("draft end counter", sizeof(uint32_t), &arrived_));
  const std::span<const int32_t> ids = drafter_->vocabulary();
  if (!ids.empty()) {
    LODE_RETURN_IF_ERROR(device("draft vocabulary", ids.size_bytes(), &ids_));
    device_.Upload(ids_, ids.data(), ids.size_bytes());
  }
  LODE_RETURN_IF_ERROR(pinned("the draft run", sizeof(cuda::DraftRun), &run_));
  LODE_RETURN_IF_ERROR(
      pinned("draft reports", kDraftsMax * sizeof(cuda::DraftPassReport), &reports_));
  return pinned("draft logits", size_t{kWindowRowsMax} * drafter_->logits_size() * sizeof(float),
                &host_logits_);
}

Status CudaDrafter::CaptureAll() {
  CUstream_st* const stream = device_.stream();
  cuda::Synchronize(stream);
  for (uint32_t i = 0; i < 2; ++i) wide_[i] = drafter_->residual(i);
  for (uint32_t n_rows = 1; n_rows <= kWindowRowsMax; ++n_rows) {
    current_ = {};
    current_.n_rows = current_.n_seqs = n_rows;
    for (uint32_t source = 0; source < kSources; ++source) {
      LODE_ASSIGN_OR_RETURN(step_[source][n_rows], cuda::Graph::Capture(stream, [=, this] {
                              EnqueueStep(source, n_rows);
                            }));
      if (source == kTrunk) continue;
      LODE_ASSIGN_OR_RETURN(link_[source][n_rows], cuda::Graph::Capture(stream, [=, this] {
                              EnqueueLink(source, n_rows);
                            }));
    }
    LODE_ASSIGN_OR_RETURN(first_[n_rows],
                          cuda::Graph::Capture(stream, [=, this] { EnqueueFirst(n_rows); }));
  }
  return OkStatus();
}

// Rows without needs_logits keep what they had; nobody reads it.
void CudaDrafter::EnqueuePick(uint32_t n_rows) {
  cuda::LaunchGuess(device_.stream(),
                    {.logits = drafter_->logits(0),
                     .stride = drafter_->logits_size(),
                     .n = drafter_->logits_size(),
                     .ids = ids_,
                     .logits_only = device_.window_block(),
                     .parts = parts_,
                     .exps = exps_,
                     .picked = picked_},
                    n_rows);
  cuda::LaunchDraftLink(
      device_.stream(),
      {.window = device_.window_block(), .state = state_, .picked = picked_, .reports = reports_});
  cuda::CheckLaunches("draft pick");
}

void CudaDrafter::EnqueueStep(uint32_t source, uint32_t n_rows) {
  device_.BeginWindow(current_);
  cuda::LaunchDraftBegin(device_.stream(), state_, run_);
  drafter_->Record(n_rows, SourceOf(source));
  cuda::LaunchDraftEnd(device_.stream(),
                       {.window = device_.window_block(),
                        .logits = drafter_->logits(0),
                        .host_logits = host_logits_,
                        .n = drafter_->logits_size(),
                        .state = state_,
                        .report = reports_,
                        .arrived = arrived_},
                       n_rows);
  cuda::CheckLaunches("draft pass");
}

void CudaDrafter::EnqueueFirst(uint32_t n_rows) {
  device_.BeginWindow(current_);
  cuda::LaunchDraftBegin(device_.stream(), state_, run_);
  drafter_->Record(n_rows, trunk_residual_);
  EnqueuePick(n_rows);
}

void CudaDrafter::EnqueueLink(uint32_t source, uint32_t n_rows) {
  device_.ContinueWindow(n_rows);
  drafter_->Record(n_rows, wide_[source]);
  EnqueuePick(n_rows);
}

void CudaDrafter::Launch(cuda::Graph& graph) { OrFault(graph.Launch(device_.stream())); }

// Until the pass has left its report; what it has noticed of values that are not finite.
WindowOutcome CudaDrafter::Await(uint32_t pass) {
  std::atomic_ref<uint64_t> done(reports_[pass].done);
  const uint64_t begin = NowNs();
  uint64_t looked = begin;
  // Acquire: pairs with the release at the end of the pass.
  while (done.load(std::memory_order_acquire) != sequence_) {
    const uint64_t now = NowNs();
    if (now - looked > kLookNs) {
      OrFault(cuda::Look(device_.stream()));
      looked = now;
    }
    if (now - begin > kPassNsMax)
      DeviceFault(DeadlineExceeded("a draft pass did not end within {} s; the device hangs",
                                   kPassNsMax / 1'000'000'000));
    if (now - begin < kSpinNs) {
      SpinPause();
      continue;
    }
    const timespec nap = {0, kNapNs};
    nanosleep(&nap, nullptr);
  }
  return CudaDevice::FromWord(reports_[pass].not_finite);
}

WindowOutcome CudaDrafter::Step(const StepParams& params, const float* residual) {
  const uint32_t source = residual == trunk_residual_ ? kTrunk : (residual == wide_[0] ? 0u : 1u);
  LODE_CHECK(residual == SourceOf(source), "a draft pass starts from an unknown residual");
  current_ = params;
  run_->sequence = ++sequence_;
  run_->n_chains = 0;
  device_.StageWindow(params);
  Launch(*step_[source][params.n_rows]);
  last_ = source == 0 ? 1 : 0;
  return Await(0);
}

WindowOutcome CudaDrafter::RunChains(const StepParams& first, const float* residual,
                                     std::span<const DraftChain> chains,
                                     DraftGuess (*guesses)[kDraftsMax], uint32_t* n_guesses,
                                     uint32_t* n_passes) {
  LODE_CHECK(residual == trunk_residual_, "a chain starts from the trunk's residual");
  const uint32_t n = static_cast<uint32_t>(chains.size());
  current_ = first;
  run_->sequence = ++sequence_;
  run_->n_chains = n;
  uint32_t passes = 1;
  bool may_end = false;
  for (uint32_t i = 0; i < n; ++i) {
    LODE_CHECK(
        chains[i].wanted <= kDraftsMax && (i == 0 || chains[i].wanted <= chains[i - 1].wanted),
        "chains are not in order");
    run_->row[i] = chains[i].row;
    passes = std::max(passes, chains[i].wanted);
    may_end |= chains[i].min_p > 0;
    n_guesses[i] = 0;
  }
  device_.StageWindow(first);
  Launch(*first_[first.n_rows]);
  uint32_t launched = 1;
  bool alive[kWindowRowsMax];
  std::fill_n(alive, kWindowRowsMax, true);
  WindowOutcome outcome;
  for (uint32_t pass = 0; pass < launched; ++pass) {
    // One ahead, or all at once when nothing but a fault can end a chain.
    const bool any = std::any_of(alive, alive + n, [](bool b) { return b; });
    while (any && launched < passes && (!may_end || launched < pass + 2)) {
      const uint32_t rows = static_cast<uint32_t>(std::count_if(
          chains.begin(), chains.end(), [&](const DraftChain& c) { return c.wanted > launched; }));
      Launch(*link_[(launched - 1) % 2][rows]);
      ++launched;
    }
    const WindowOutcome of_pass = Await(pass);
    if (outcome.ok()) outcome = of_pass;
    last_ = pass % 2;
    if (!outcome.ok()) continue;  // what was launched must end
    *n_passes = pass + 1;
    for (uint32_t i = 0; i < n; ++i) {
      alive[i] &= chains[i].wanted > pass;
      if (!alive[i]) continue;
      const DraftGuess guess = {reports_[pass].token[i], reports_[pass].probability[i]};
      guesses[i][n_guesses[i]++] = guess;
      alive[i] = guess.p >= chains[i].min_p && chains[i].wanted > pass + 1;
    }
  }
  return outcome;
}

}  // namespace lode
