// See worker_loop.h. Every function here works on one window; the order of the calls in RunWindow
// is the protocol.
#include "gpu_worker/worker_loop.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "gpu_worker/row_results.h"
#include "shared/base/check.h"
#include "shared/base/fault.h"
#include "shared/base/log.h"

namespace lode {
namespace {

// A waiting loop looks at `stop` and moves the heartbeat this often.
constexpr uint64_t kLookNs = 50'000'000;
// A full result ring means that the daemon does not read; it is asked again this often until it
// does or the worker is stopped.
constexpr uint64_t kRingFullNs = 1'000'000;

WindowOutcome BadPlan(PlanError error, uint32_t where) {
  return {WindowStatus::kBadPlan,
          {.layer = 0, .row = where, .worker = 0, .detail = static_cast<uint32_t>(error)}};
}

// The table that an index of the tunables names; nullptr when this machine cannot run it.
const KernelTable* TableAt(uint32_t index) {
  const IsaChoice* choices = nullptr;
  const size_t n = IsaChoices(&choices);
  return index < n && choices[index].supported ? choices[index].table : nullptr;
}

}  // namespace

void ProposeAccepts(const WindowPlan& plan, WindowResult* result) {
  bool holds = false;  // the row before, of the same sequence
  for (uint32_t r = 0; r < plan.n_rows; ++r) {
    const RowPlan& row = plan.rows[r];
    if (row.kind == RowKind::kFlush) continue;
    holds = row.kind != RowKind::kDraft || (holds && result->rows[r - 1].token == row.token);
    if (holds) ++result->proposed_accepts[row.seq_index];
  }
}

GpuWorkerLoop::GpuWorkerLoop(const GpuLoopOptions& options, const GpuLoopParts& parts)
    : options_(options), parts_(parts), areas_(new PlanAreas) {
  changes_.reserve(kChangeBytesMax);
  for (uint32_t row = 0; row < kWindowRowsMax; ++row) scratch_.emplace_back(parts.config->vocab);
}

void GpuWorkerLoop::Run(const std::atomic<bool>& stop) {
  auto plan = std::make_unique<WindowPlan>();
  auto result = std::make_unique<WindowResult>();
  while (!stop.load(std::memory_order_relaxed)) {
    parts_.exchange->gpu_heartbeat.fetch_add(1, std::memory_order_relaxed);
    if (!parts_.window->plans.Pop(plan.get(), {options_.spin_ns, NowNs() + kLookNs})) continue;
    LODE_FAULT("gpu_worker.plan_taken");
    RunWindow(*plan, result.get());
    LODE_FAULT("gpu_worker.before_result");
    if (!Publish(*result, stop)) return;
    LODE_FAULT("gpu_worker.after_result");
  }
}

bool GpuWorkerLoop::Publish(const WindowResult& result, const std::atomic<bool>& stop) {
  while (!parts_.window->results.TryPush(result)) {
    if (stop.load(std::memory_order_relaxed)) return false;
    const uint64_t seen = parts_.window->results.tail.value.load(std::memory_order_acquire);
    WaitChange(parts_.window->results.tail, seen, {0, NowNs() + kRingFullNs});
  }
  return true;
}

void GpuWorkerLoop::RunWindow(const WindowPlan& plan, WindowResult* result) {
  const uint64_t begin = NowNs();
  std::memset(static_cast<void*>(result), 0, sizeof(*result));
  result->window = plan.window;
  result->generation = options_.limits.generation;
  result->device = options_.limits.device;
  result->n_rows = plan.n_rows;
  for (RowResult& row : result->rows) row.token = row.argmax = -1;

  // 1. Nothing of the plan is used before it is checked; what it refers to is copied.
  WindowOutcome outcome = Check(plan);
  // 2. Tunables, when their epoch is new. After this line isa, threads, share, budget and policy
  // are fixed for the window.
  if (outcome.ok()) outcome = ApplyTunables(plan.tunables);
  // 3. The plan becomes step parameters, if it fits what each slot has computed so far.
  StepParams params;
  uint32_t row_of[kWindowRowsMax] = {};
  if (outcome.ok()) {
    const uint32_t* blocks[kWindowRowsMax] = {};
    for (uint32_t s = 0; s < plan.n_seqs; ++s) blocks[s] = areas_->seqs[s].kv_blocks;
    const Status staged = parts_.state->Stage(plan, blocks, &params, row_of);
    if (!staged.ok()) {
      spdlog::error("window {}: {}", plan.window, Message(staged));
      outcome = BadPlan(PlanError::kHistory, 0);
    }
  }
  // 4. Forward pass and picks.
  if (outcome.ok()) outcome = RunRows(plan, params, row_of, result);

  result->status = outcome.status;
  result->error = outcome.error;
  result->resident_experts = parts_.tier->resident_experts();
  result->resident_bytes = parts_.tier->resident_bytes();
  result->window_ns = NowNs() - begin;
  resident_experts_.store(result->resident_experts, std::memory_order_relaxed);
  resident_bytes_.store(result->resident_bytes, std::memory_order_relaxed);
  windows_by_status_[static_cast<uint32_t>(outcome.status) % kStatuses].fetch_add(
      1, std::memory_order_relaxed);
}

WindowOutcome GpuWorkerLoop::Check(const WindowPlan& plan) {
  const PlanVerdict verdict =
      ValidatePlan(plan, options_.limits, parts_.window->sequences, areas_.get());
  if (verdict.ok()) return {};
  spdlog::error("window {} refused: {} (row or sequence {})", plan.window,
                PlanErrorText(verdict.error), verdict.where);
  return BadPlan(verdict.error, verdict.where);
}

WindowOutcome GpuWorkerLoop::ApplyTunables(const Tunables& tunables) {
  if (tunables_known_ && tunables.epoch == tunables_.epoch) return {};
  const KernelTable* table = TableAt(tunables.device_isa);
  bool ok = table != nullptr;
  for (const uint32_t isa : tunables.cpu_isa) ok &= TableAt(isa) != nullptr;
  if (!ok) {
    spdlog::error("tunables name an instruction set that this machine cannot run");
    return BadPlan(PlanError::kTunables, 0);
  }
  parts_.engine->ApplyTunables(tunables, table);
  lanes_window_.split = static_cast<SplitPolicy>(tunables.split_policy);
  lanes_window_.share_256 = static_cast<uint32_t>(std::lround(tunables.pull_share * kShareOne));
  std::memcpy(lanes_window_.cpu_isa, tunables.cpu_isa, sizeof(lanes_window_.cpu_isa));
  lanes_window_.cpu_threads = tunables.cpu_threads;
  tunables_ = tunables;
  tunables_known_ = true;
  return {};
}

WindowOutcome GpuWorkerLoop::RunRows(const WindowPlan& plan, const StepParams& params,
                                     const uint32_t* row_of, WindowResult* result) {
  uint64_t* stage_ns = plan.flags & kTimeStages ? result->stage_ns : nullptr;
  // A flush touches no expert: no border, no bell.
  if (params.n_rows == 0) return parts_.engine->Fold(params, stage_ns);

  // The tier's tables change here and nowhere else. After this line no slot is given to another
  // expert until the next window.
  const TierStep step = parts_.tier->Border(static_cast<TierPolicy>(tunables_.tier_policy),
                                            tunables_.vram_budget_bytes);
  result->tier_swaps = step.swaps;
  result->tier_upload_bytes = step.upload_bytes;

  lanes_window_.window = plan.window;
  lanes_window_.cpu_lane_down = (plan.flags & kCpuLaneDown) != 0;
  const uint32_t replaced = replaced_.exchange(0, std::memory_order_acquire);
  for (uint32_t w = 0; w < kCpuWorkersMax; ++w) {
    if (replaced >> w & 1) parts_.engine->WorkerReplaced(w);
  }
  RowWants wants[kWindowRowsMax];
  MakeWants(plan, {row_of, params.n_rows}, *areas_, parts_.config->vocab, wants, &changes_);
  parts_.engine->SetWants(wants, params.n_rows, changes_);
  const WindowOutcome outcome = parts_.engine->Run(params, lanes_window_, stage_ns);
  parts_.tier->WindowDone();

  FillCounts(params, row_of, result);
  if (outcome.ok()) {
    const uint64_t begin = NowNs();
    FillRows(plan, params, row_of, result);
    ProposeAccepts(plan, result);
    if (plan.flags & kTraceRouting) WriteTrace(plan, params, row_of);
    if (stage_ns != nullptr) stage_ns[static_cast<uint32_t>(Stage::kSample)] += NowNs() - begin;
    // The window is done; what follows guesses at the next one.
    if (parts_.drafts != nullptr)
      parts_.drafts->Run(plan, params, row_of, parts_.wide, *areas_, result);
    if (stage_ns != nullptr) stage_ns[static_cast<uint32_t>(Stage::kDraft)] += result->draft_ns;
  }
  return outcome;
}

void GpuWorkerLoop::FillRows(const WindowPlan& plan, const StepParams& params,
                             const uint32_t* row_of, WindowResult* result) {
  ParallelFor(parts_.engine->pool(), params.n_rows, [&](uint32_t step_row) {
    const uint32_t plan_row = row_of[step_row];
    if (plan.rows[plan_row].needs_logits) {
      FillRow(plan, plan_row, *areas_, *parts_.engine, step_row, parts_.config->vocab,
              &scratch_[step_row], &result->rows[plan_row]);
    }
  });
}

void GpuWorkerLoop::FillCounts(const StepParams& params, const uint32_t* row_of,
                               WindowResult* result) const {
  const LaneCounts& counts = parts_.engine->counts();
  result->device_ns = counts.device_ns;
  result->answer_ns = counts.answer_ns;
  std::memcpy(result->layer_lookups, counts.layer_lookups, sizeof(result->layer_lookups));
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    result->lookups[lane] = counts.lookups[lane];
    result->bytes[lane] = counts.bytes[lane];
    result->lane_ns[lane] = counts.lane_ns[lane];
    for (uint32_t r = 0; r < params.n_rows; ++r)
      result->rows[row_of[r]].lookups[lane] = counts.row_lookups[r][lane];
  }
}

void GpuWorkerLoop::WriteTrace(const WindowPlan& plan, const StepParams& params,
                               const uint32_t* row_of) {
  RoutingTrace& trace = parts_.window->traces[plan.window % kWindowRingSlots];
  const uint32_t used = parts_.config->experts_used;
  for (uint32_t r = 0; r < params.n_rows; ++r) {
    for (uint32_t layer = 0; layer < parts_.config->layers; ++layer) {
      std::memcpy(trace.ids[row_of[r]][layer], parts_.engine->routed(layer, r).ids,
                  used * sizeof(uint16_t));
    }
  }
}

void GpuWorkerLoop::WorkerReplaced(uint32_t worker) {
  if (worker < kCpuWorkersMax) replaced_.fetch_or(1u << worker, std::memory_order_release);
}

std::map<std::string, double> GpuWorkerLoop::Statistics() const {
  static constexpr const char* kNames[kStatuses] = {"windows_ok", "windows_aborted",
                                                    "windows_not_finite", "windows_bad_plan"};
  std::map<std::string, double> values;
  for (uint32_t i = 0; i < kStatuses; ++i)
    values[kNames[i]] = static_cast<double>(windows_by_status_[i].load());
  values["resident_experts"] = static_cast<double>(resident_experts_.load());
  values["resident_bytes"] = static_cast<double>(resident_bytes_.load());
  parts_.engine->AddStatistics(&values);
  return values;
}

}  // namespace lode
