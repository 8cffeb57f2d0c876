// See gpu_worker.h: the assembly of a GPU worker, one function per step.
#include "gpu_worker/gpu_worker.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "gpu_worker/cpu_engine.h"
#include "gpu_worker/draft_vocabulary.h"
#include "gpu_worker/drafter.h"
#include "shared/base/fault.h"
#include "shared/base/log.h"
#include "shared/wire/segment_headers.h"

namespace lode {
namespace {

constexpr uint64_t kNsPerMs = 1'000'000, kNsPerUs = 1'000;
constexpr auto kArenaPoll = std::chrono::milliseconds(50);
constexpr uint64_t kProfileWindowsMin = 256;  // as many as lode_hit_rate looks back
constexpr uint64_t kProfileBytesMax = 64ull
                                      << 20;  // 256 layers x 1024 experts x 40 bytes is 10 MiB

StatusOr<KvType> ParseKvType(const std::string& name) {
  if (name == "q8") return KvType::kQ8;
  if (name == "f16") return KvType::kF16;
  if (name == "f32") return KvType::kF32;
  return InvalidArgument("KV type '{}' is unknown; q8, f16 and f32 are known", name);
}

StatusOr<std::vector<RankedExpert>> ReadProfile(const std::string& path, uint32_t layers,
                                                uint32_t experts, bool may_be_missing) {
  std::error_code ignored;
  if (path.empty() || (may_be_missing && !std::filesystem::exists(path, ignored)))
    return std::vector<RankedExpert>();
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  if (!in) return NotFound("expert profile {} cannot be read", path);
  if (static_cast<uint64_t>(in.tellg()) > kProfileBytesMax)
    return InvalidArgument("expert profile {} is larger than 64 MiB", path);
  in.seekg(0);
  std::stringstream text;
  text << in.rdbuf();
  StatusOr<std::vector<RankedExpert>> ranking = ParseRanking(text.str(), layers, experts);
  if (!ranking.ok()) return InvalidArgument("{}: {}", path, Message(ranking.status()));
  return ranking;
}

Status Stopped() { return Status(StatusCode::kCancelled, "stopped while loading"); }

}  // namespace

GpuWorker::~GpuWorker() = default;

StatusOr<ReadyReport> GpuWorker::Load(const LoadPlan& plan, GpuSegments segments,
                                      const ProgressFn& progress, const std::atomic<bool>& stop) {
  stop_ = &stop;
  if (plan.device != "cpu" && plan.device != "cuda") {
    return InvalidArgument("device '{}' is unknown; cpu and cuda are known", plan.device);
  }
  if (!FloatEnvironmentIsCanonical()) {
    return FailedPrecondition(
        "the floating-point environment was changed (flush to zero or rounding mode)");
  }
  LODE_RETURN_IF_ERROR(OpenModel(plan));
  LODE_RETURN_IF_ERROR(MakeDevice(plan));
  LODE_RETURN_IF_ERROR(AttachSegments(plan, std::move(segments)));
  LODE_RETURN_IF_ERROR(BuildDevice(plan, progress));
  LODE_RETURN_IF_ERROR(WaitForArenas(progress));
  LODE_RETURN_IF_ERROR(BuildEngine(plan));
  LODE_RETURN_IF_ERROR(FillTier(plan, progress));
  BuildLoop(plan);
  return Report(plan);
}

Status GpuWorker::OpenModel(const LoadPlan& plan) {
  LODE_ASSIGN_OR_RETURN(source_, ModelSource::Open(plan.model));
  if (source_->identity() != plan.identity) {
    return FailedPrecondition(
        "model {} has identity {} here and {} in the daemon; the file changed while Lode was "
        "starting",
        plan.model, source_->identity(), plan.identity);
  }
  if (plan.draft_head && !plan.mtp.empty()) {
    LODE_ASSIGN_OR_RETURN(head_, ModelSource::OpenDraftHead(plan.mtp, source_->config()));
  }
  drafts_ = plan.draft_head && (head_ != nullptr || source_->config().nextn_layers > 0);
  return CheckComputable(*source_);
}

// Every segment is checked against what this process computes from the model itself. The arenas'
// headers are checked when they are complete: a CPU worker may still be writing them.
Status GpuWorker::AttachSegments(const LoadPlan& plan, GpuSegments segments) {
  const ModelConfig& config = source_->config();
  LODE_ASSIGN_OR_RETURN(window_,
                        Segment::Attach(std::move(segments.window), "window", sizeof(WindowSegment),
                                        Segment::Access::kReadWrite));
  LODE_RETURN_IF_ERROR(CheckWindowSegment(*window_, generation_, index_, config.vocab));
  pulse_ = std::make_unique<Pulse>(&window_->As<WindowSegment>()->pulse);
  const ExchangeShape shape = {config.hidden, config.expert_width, config.experts_used,
                               plan.n_nodes};
  LODE_ASSIGN_OR_RETURN(
      exchange_, Segment::Attach(std::move(segments.exchange), "exchange",
                                 ExchangeLayout{shape}.bytes(), Segment::Access::kReadWrite));
  LODE_RETURN_IF_ERROR(CheckExchange(*exchange_, shape));
  if (segments.arenas.size() != plan.n_nodes) {
    return InvalidArgument("{} arenas for {} CPU workers", segments.arenas.size(), plan.n_nodes);
  }
  // Nobody here writes an arena; some drivers register only what could be written.
  const Segment::Access arena_access = cuda_ != nullptr && !cuda_->registers_read_only()
                                           ? Segment::Access::kReadWrite
                                           : Segment::Access::kReadOnly;
  std::vector<const uint8_t*> data;
  for (uint32_t node = 0; node < plan.n_nodes; ++node) {
    LODE_ASSIGN_OR_RETURN(ArenaLayout layout, ComputeArenaLayout(*source_, node, plan.n_nodes));
    LODE_ASSIGN_OR_RETURN(
        std::unique_ptr<Segment> arena,
        Segment::Attach(std::move(segments.arenas[node]), "arena", layout.bytes, arena_access));
    data.push_back(arena->data());
    arena_segments_.push_back(std::move(arena));
    layouts_.push_back(std::move(layout));
  }
  arenas_ = std::make_unique<ArenaSet>(layouts_, std::move(data));
  return OkStatus();
}

// First of all, so that a machine without the device refuses before it reads anything.
Status GpuWorker::MakeDevice(const LoadPlan& plan) {
  const ModelConfig& config = source_->config();
  if (plan.device == "cuda") {
    LODE_ASSIGN_OR_RETURN(cuda_, MakeCudaStack(*source_, plan, generation_));
    device_ = &cuda_->device();
    return OkStatus();
  }
  CpuDeviceOptions device;
  device.threads = std::max(1u, plan.threads);
  if (plan.cpus.size() == device.threads) device.cpus = plan.cpus;
  device.lock_memory = plan.lock_memory;
  device.spin_ns = static_cast<uint32_t>(std::min<uint64_t>(plan.spin_us * kNsPerUs, UINT32_MAX));
  device.isa = plan.isa;
  device.float_reference = plan.float_reference;
  device.context = plan.context;
  device.drafts = drafts_;
  LODE_ASSIGN_OR_RETURN(cpu_device_, CpuDevice::Create(config, device));
  device_ = cpu_device_.get();
  return OkStatus();
}

Status GpuWorker::BuildDevice(const LoadPlan& plan, const ProgressFn& progress) {
  const ModelConfig& config = source_->config();
  const auto dense = [&](uint64_t done, uint64_t total) {
    if (progress) progress("read dense weights", done, total);
  };
  LODE_ASSIGN_OR_RETURN(weights_, ModelWeights::Load(*source_, *device_, dense));
  if (stop_->load()) return Stopped();

  StateOptions state;
  state.slots = plan.sequence_slots;
  state.kv_blocks = plan.kv_blocks;
  state.context = plan.context;
  state.drafts = drafts_;
  LODE_ASSIGN_OR_RETURN(state.kv_type, ParseKvType(plan.kv_type));
  LODE_ASSIGN_OR_RETURN(state_, SequenceState::Create(config, *device_, state));
  if (!config.ple.empty()) {
    LODE_ASSIGN_OR_RETURN(ple_, PleReader::Create(*source_));
  }
  LODE_ASSIGN_OR_RETURN(forward_, Forward::Create(config, weights_, *device_, *state_, ple_.get()));
  return drafts_ ? BuildDrafter(plan) : OkStatus();
}

Status GpuWorker::BuildDrafter(const LoadPlan& plan) {
  const ModelConfig& config = source_->config();
  const ModelSource& head = head_ != nullptr ? *head_ : *source_;
  LODE_ASSIGN_OR_RETURN(std::vector<int32_t> vocabulary,
                        ReadDraftVocabulary(plan.draft_vocab, plan.draft_vocab_top, config.vocab));
  LODE_ASSIGN_OR_RETURN(draft_weights_, DraftWeights::Load(head, *source_, weights_, *device_,
                                                           std::move(vocabulary)));
  draft_weights_.full_width_norm = plan.mtp_full_width_norm;
  if (cuda_ != nullptr) {
    LODE_ASSIGN_OR_RETURN(
        drafter_, cuda_->MakeDrafter(head, draft_weights_, weights_, state_->draft_attention(),
                                     *forward_, &draft_expert_bytes_));
    return OkStatus();
  }
  LODE_ASSIGN_OR_RETURN(draft_lanes_, LocalExpertLanes::LoadDraft(head, *cpu_device_));
  draft_expert_bytes_ = draft_lanes_->bytes();
  LODE_ASSIGN_OR_RETURN(drafter_, Drafter::Create(config, draft_weights_, weights_, *device_,
                                                  state_->draft_attention(), *draft_lanes_));
  return OkStatus();
}

// Pulls and the tier read the arenas, so serving starts when every expert of every node is
// complete. Loading may take long; only a standstill ends it.
Status GpuWorker::WaitForArenas(const ProgressFn& progress) {
  const uint64_t all = arenas_->complete_all();
  uint64_t seen = arenas_->complete(), moved = NowNs();
  for (uint64_t now; (now = arenas_->complete()) != all;) {
    if (stop_->load()) return Stopped();
    if (now != seen) {
      seen = now;
      moved = NowNs();
      if (progress) progress("wait for experts", seen, all);
    } else if (NowNs() - moved > kArenaIdleNsMax) {
      return DeadlineExceeded(
          "the CPU workers' arenas stand at {} of {} experts for {} s; see their logs", seen, all,
          kArenaIdleNsMax / 1'000'000'000);
    }
    exchange_->As<ExchangeHeader>()->gpu_heartbeat.fetch_add(1, std::memory_order_relaxed);
    std::this_thread::sleep_for(kArenaPoll);
  }
  for (size_t node = 0; node < arena_segments_.size(); ++node) {
    LODE_RETURN_IF_ERROR(CheckArena(*arena_segments_[node], layouts_[node], source_->identity()));
  }
  return OkStatus();
}

Status GpuWorker::FillTier(const LoadPlan& plan, const ProgressFn& progress) {
  LODE_ASSIGN_OR_RETURN(const std::vector<RankedExpert> ranking,
                        ReadProfile(plan.profile, arenas_->layers(), arenas_->experts(),
                                    plan.profile == plan.save_profile));
  save_profile_ = plan.save_profile;
  if (!ranking.empty())
    spdlog::info("expert ranking of {} pairs from {}", ranking.size(), plan.profile);
  const auto fill = [&](uint64_t done, uint64_t total) {
    if (progress) progress("fill slots", done, total);
  };
  std::unique_ptr<SlotMemory> memory;  // null: the host's
  if (cuda_ != nullptr) {
    LODE_ASSIGN_OR_RETURN(memory, cuda_->MakeSlots(*arenas_, plan.vram_budget_bytes));
  }
  LODE_ASSIGN_OR_RETURN(tier_, ExpertTier::Create(*arenas_, plan.vram_budget_bytes, ranking, fill,
                                                  std::move(memory)));
  if (cuda_ != nullptr) {
    LODE_RETURN_IF_ERROR(cuda_->Attach(tier_.get()));
    return stop_->load() ? Stopped() : OkStatus();
  }
  // The cpu device's lanes take the tier as it is.
  LanesOptions lanes;
  lanes.experts_used = source_->config().experts_used;
  lanes.generation = generation_;
  lanes.float_reference = plan.float_reference;
  lanes.spin_ns = plan.spin_us * kNsPerUs;
  if (plan.wait_ms > 0) lanes.wait_ns = plan.wait_ms * kNsPerMs;
  if (plan.wait_max_ms > 0) lanes.wait_max_ns = plan.wait_max_ms * kNsPerMs;
  lanes_ = std::make_unique<CpuLanes>(lanes, *arenas_, tier_.get(), exchange_->data(),
                                      &cpu_device_->pool());
  engine_ = std::make_unique<CpuEngine>(*cpu_device_, *forward_, *lanes_);
  return stop_->load() ? Stopped() : OkStatus();
}

// The cuda device's engine comes before the tier: after it, what VRAM is left is known.
Status GpuWorker::BuildEngine(const LoadPlan&) {
  if (cuda_ == nullptr) return OkStatus();
  std::vector<Segment*> arenas;
  for (const auto& segment : arena_segments_) arenas.push_back(segment.get());
  LODE_ASSIGN_OR_RETURN(engine_, cuda_->MakeEngine(*forward_, *arenas_, *exchange_, arenas));
  return stop_->load() ? Stopped() : OkStatus();
}

void GpuWorker::BuildLoop(const LoadPlan& plan) {
  const ModelConfig& config = source_->config();
  GpuLoopOptions loop;
  loop.limits = {generation_,  index_,         config.vocab,
                 plan.context, plan.kv_blocks, plan.sequence_slots};
  loop.spin_ns = plan.spin_us * kNsPerUs;
  if (drafter_ != nullptr) {
    draft_loop_ = std::make_unique<DraftLoop>(config.vocab, plan.sequence_slots, plan.context,
                                              *drafter_, engine_->pool());
  }
  GpuLoopParts parts = {&config,
                        engine_.get(),
                        state_.get(),
                        tier_.get(),
                        draft_loop_.get(),
                        forward_->wide(),
                        exchange_->As<ExchangeHeader>(),
                        window_->As<WindowSegment>()};
  std::lock_guard<std::mutex> lock(mutex_);
  loop_ = std::make_unique<GpuWorkerLoop>(loop, parts);
}

ReadyReport GpuWorker::Report(const LoadPlan& plan) const {
  ReadyReport report;
  uint64_t device_bytes = 0;
  for (const DeviceAllocation& a : device_->allocations()) device_bytes += a.bytes;
  // On the card the draft head's experts and the slots are among the allocations.
  if (cuda_ == nullptr) device_bytes += draft_expert_bytes_;
  report.memory_bytes = device_bytes + (cuda_ == nullptr ? tier_->slot_bytes_total() : 0);
  if (drafter_ != nullptr) {
    report.facts["draft_head"] = head_ != nullptr ? plan.mtp : plan.model;
    report.facts["draft_bytes"] = std::to_string(draft_weights_.bytes + draft_expert_bytes_);
    report.facts["draft_vocabulary"] = std::to_string(draft_weights_.output.rows);
  }
  report.facts["device"] = plan.device;
  // On cuda the host computes nothing of the model; the table only has to exist here.
  const char* isa =
      cpu_device_ ? cpu_device_->kernels().name : FindKernelTable(plan.isa.c_str(), nullptr)->name;
  const uint32_t threads = cpu_device_ ? cpu_device_->pool().threads() : cuda_->host_threads();
  report.facts["isa"] = isa;
  report.facts["threads"] = std::to_string(threads);
  const bool pinned = cpu_device_ && plan.cpus.size() == threads;
  report.facts["pinned"] = pinned ? "yes" : "no";
  report.facts["locked"] = cpu_device_ && cpu_device_->memory_locked() ? "yes" : "no";
  report.facts["dense_bytes"] = std::to_string(weights_.bytes);
  report.facts["device_bytes"] = std::to_string(device_bytes);
  report.facts["slot_bytes"] = std::to_string(tier_->slot_bytes_total());
  report.facts["resident_experts"] = std::to_string(tier_->resident_experts());
  report.facts["kv_type"] = plan.kv_type;
  report.summary = fmt::format(
      "device {}: {} MiB in all ({} MiB dense weights, {} MiB expert slots with {} of {} experts); "
      "isa {}, {} threads, kv {}",
      plan.device, report.memory_bytes >> 20, weights_.bytes >> 20, tier_->slot_bytes_total() >> 20,
      tier_->resident_experts(), arenas_->complete_all(), isa, threads, plan.kv_type);
  if (cuda_ != nullptr) cuda_->AddFacts(&report.facts);
  return report;
}

void GpuWorker::Run() {
  loop_->Run(*stop_);
  SaveProfile();
}

// What a few windows taught is worse than what the file may hold from a longer life.
void GpuWorker::SaveProfile() const {
  if (save_profile_.empty() || loop_->windows_ok() < kProfileWindowsMin) return;
  if (const Status written = tier_->WriteProfile(save_profile_); !written.ok())
    spdlog::warn("the learned expert ranking is lost: {}", Message(written));
  else
    spdlog::info("learned expert ranking written to {}", save_profile_);
}

std::map<std::string, double> GpuWorker::Statistics() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return loop_ != nullptr ? loop_->Statistics() : std::map<std::string, double>();
}

void GpuWorker::CpuWorkerReplaced(uint32_t worker) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (loop_ != nullptr) loop_->WorkerReplaced(worker);
}

}  // namespace lode
