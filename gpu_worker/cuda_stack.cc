// See cuda_stack.h: the assembly of the cuda device's parts, and the one place that decides who gets
// how much device memory.
#include "gpu_worker/cuda_stack.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "gpu_worker/cuda_api.h"
#include "gpu_worker/cuda_drafter.h"
#include "gpu_worker/cuda_engine.h"
#include "gpu_worker/cuda_slots.h"
#include "gpu_worker/link_probe.h"
#include "kernels/cuda/runtime.h"
#include "shared/base/log.h"

namespace lode {
namespace {

// Left free on the card: the driver's own growth (local memory, printf, a display) and neighbours.
constexpr uint64_t kReserveBytes = uint64_t{256} << 20;
// The least compute capability with every instruction that the kernels use.
constexpr uint32_t kCapabilityMin = 75;
constexpr uint64_t kNsPerMs = 1'000'000;
// The probe reads with a thread per CPU but these, about as many as the CPU workers have.
constexpr uint32_t kCoresKept = 2;
// The sampler's rows, one thread each; more than rows would idle.
constexpr uint32_t kHostThreadsMax = 4;

double Mib(uint64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

// A line of the memory table: what an allocation is for, by its name. The draft head is layer
// `layers`, behind the trunk's.
const char* Purpose(const std::string& what, uint32_t layers) {
  const auto has = [&](const char* part) { return what.find(part) != std::string::npos; };
  if (what.starts_with("draft experts")) return "draft experts";
  if (what.starts_with(fmt::format("layer {} ", layers))) return "draft cells";
  if (what.starts_with("draft ") || what.starts_with(fmt::format("blk.{}.", layers)))
    return "draft head";
  if (has("KV block") || has("index keys")) return "KV cache";
  if (what.starts_with("layer ")) return "sequence state";
  if (what.starts_with("lanes ")) return "lanes";
  if (what == "pull staging") return "pull staging";
  if (has("expert slots")) return "expert slots";
  if (has(".weight") || has("ssm_a") || has(".bias") || has("blk.")) return "dense weights";
  return "window and scratch";
}

class Stack final : public CudaStack {
 public:
  Stack(const ModelConfig& config, const LoadPlan& plan, uint32_t generation)
      : config_(config), plan_(plan), generation_(generation) {}
  ~Stack() override {
    for (const auto& [memory, bytes] : registered_) cuda::UnregisterHost(memory, bytes);
  }

  Status Open() {
    if (plan_.float_reference) {
      return InvalidArgument("float_reference is for the cpu device; set device = \"cpu\"");
    }
    const int ordinal = static_cast<int>(plan_.device_index);
    LODE_ASSIGN_OR_RETURN(card_, CudaDevice::Describe(ordinal));
    if (card_.capability < kCapabilityMin) {
      return FailedPrecondition(
          "{} has compute capability {}; the cuda device needs {} or more (10 * major + minor)",
          card_.name, card_.capability, kCapabilityMin);
    }
    LODE_ASSIGN_OR_RETURN(device_,
                          CudaDevice::Create(config_, {.ordinal = ordinal, .context = plan_.context}));
    LODE_ASSIGN_OR_RETURN(const cuda::MemoryInfo memory, cuda::DeviceMemory());
    uint64_t scratch = 0;
    for (const DeviceAllocation& a : device_->allocations()) scratch += a.bytes;
    free_at_start_ = memory.free_bytes + scratch;
    registers_read_only_ = cuda::RegistersReadOnly(ordinal);
    return OkStatus();
  }

  Device& device() override { return *device_; }
  bool registers_read_only() const override { return registers_read_only_; }

  StatusOr<std::unique_ptr<DraftEngine>> MakeDrafter(const ModelSource& head,
                                                     const DraftWeights& weights,
                                                     const ModelWeights& trunk,
                                                     const AttentionState& cells,
                                                     const Forward& forward,
                                                     uint64_t* draft_bytes) override {
    LODE_ASSIGN_OR_RETURN(auto lanes, CudaDraftLanes::Load(head, *device_));
    *draft_bytes = lanes->bytes();
    LODE_ASSIGN_OR_RETURN(auto drafter,
                          CudaDrafter::Create(config_, weights, trunk, *device_, cells,
                                              std::move(lanes), forward.wide()));
    facts_["graph nodes, one more draft"] = std::to_string(drafter->nodes());
    return std::unique_ptr<DraftEngine>(std::move(drafter));
  }

  StatusOr<std::unique_ptr<WindowEngine>> MakeEngine(Forward& forward, const ArenaSet& arenas,
                                                     Segment& exchange,
                                                     const std::vector<Segment*>& mapped) override {
    LODE_RETURN_IF_ERROR(Register(exchange, false, "the exchange"));
    for (Segment* segment : mapped)
      LODE_RETURN_IF_ERROR(Register(*segment, registers_read_only_, "an arena"));
    PullOptions pull;
    pull.staging_bytes = plan_.pull_staging_bytes;
#if defined(LODE_TEST_HOOKS)
    // MiB[,blocks,threads,loads], to try shapes of the copies.
    if (const char* text = std::getenv("LODE_BENCH_PULL"); text != nullptr) {
      unsigned long long mib = 0;
      std::sscanf(text, "%llu,%u,%u,%u", &mib, &pull.copy.blocks, &pull.copy.threads,
                  &pull.copy.loads);
      pull.staging_bytes = mib << 20;
    }
#endif
    LODE_ASSIGN_OR_RETURN(auto lanes, CudaLanes::Create(*device_, arenas, config_.experts_used,
                                                        exchange.data(), pull));
    CudaEngineOptions options;
#if defined(LODE_TEST_HOOKS)
    if (std::getenv("LODE_BENCH_ROUTING") != nullptr) {
      spdlog::warn("LODE_BENCH_ROUTING is set: experts are drawn, the router does not decide");
      LODE_RETURN_IF_ERROR(lanes->ForceRouting());
    }
#endif
    options.generation = generation_;
    options.host_threads = host_threads();
    LODE_ASSIGN_OR_RETURN(options.link_bytes_per_second, Probe(arenas));
    if (plan_.wait_ms > 0) options.wait_ns = plan_.wait_ms * kNsPerMs;
    if (plan_.wait_max_ms > 0) options.wait_max_ns = plan_.wait_max_ms * kNsPerMs;
    LODE_ASSIGN_OR_RETURN(auto engine, CudaEngine::Create(options, config_, *device_, arenas, forward,
                                                          std::move(lanes)));
    engine_ = engine.get();
#if defined(LODE_TEST_HOOKS)
    if (std::getenv("LODE_BENCH_ROUTING") != nullptr) {
      for (const uint32_t n_rows : {1u, 4u}) {
        LODE_ASSIGN_OR_RETURN(const double ms, engine->EmptyGraphMs(n_rows));
        facts_[fmt::format("empty graph ms, {} rows", n_rows)] = std::to_string(ms);
      }
    }
#endif
    return std::unique_ptr<WindowEngine>(std::move(engine));
  }

  // The pull lane's rate beside a busy host.
  StatusOr<double> Probe(const ArenaSet& arenas) {
    const uint32_t cores = std::thread::hardware_concurrency();
    const uint32_t readers = cores > kCoresKept ? cores - kCoresKept : 1;
    LODE_ASSIGN_OR_RETURN(const std::vector<LinkRates> nodes,
                          ProbeLinks(*device_, arenas, readers));
    for (uint32_t n = 0; n < nodes.size(); ++n) {
      spdlog::info(
          "pull lane, arena {}: {:.1f} GB/s; beside {} threads that read {:.1f} GB/s: {:.1f} GB/s", n,
          nodes[n].idle / 1e9, readers, nodes[n].host / 1e9, nodes[n].busy / 1e9);
    }
    const LinkRates all = OverAllNodes(nodes);
    facts_["link_bytes_per_second"] = std::to_string(all.idle);
    facts_["link_bytes_per_second_busy"] = std::to_string(all.busy);
    facts_["host_read_bytes_per_second"] = std::to_string(all.host);
    return all.busy;
  }

  StatusOr<std::unique_ptr<SlotMemory>> MakeSlots(const ArenaSet& arenas,
                                                  uint64_t budget_bytes) override {
    LODE_ASSIGN_OR_RETURN(const cuda::MemoryInfo memory, cuda::DeviceMemory());
    const uint64_t used =
        free_at_start_ > memory.free_bytes ? free_at_start_ - memory.free_bytes : 0;
    if (budget_bytes < used + kReserveBytes) {
      return ResourceExhausted(
          "vram_budget is {:.0f} MiB, but dense weights, state, KV and graphs take {:.0f} MiB and "
          "{:.0f} MiB stay in reserve: {:.0f} MiB are missing",
          Mib(budget_bytes), Mib(used), Mib(kReserveBytes),
          Mib(used + kReserveBytes - budget_bytes));
    }
    uint64_t all = 0;
    for (const uint64_t bytes : arenas.all_slot_bytes()) all += bytes * arenas.experts();
    const uint64_t free_bytes =
        memory.free_bytes > kReserveBytes ? memory.free_bytes - kReserveBytes : 0;
    const uint64_t wanted = std::min(all, budget_bytes - used - kReserveBytes);
    const uint64_t capacity = std::min(wanted, free_bytes);
    if (capacity < wanted) {
      spdlog::warn(
          "only {:.0f} MiB of the card are free (other processes use it): expert slots get {:.0f} "
          "MiB instead of {:.0f}",
          Mib(memory.free_bytes), Mib(capacity), Mib(wanted));
    }
    LODE_ASSIGN_OR_RETURN(void* slots, device_->Allocate("expert slots", capacity));
    cuda::Synchronize(device_->stream());  // it clears; copies run on a stream of their own
    LODE_ASSIGN_OR_RETURN(
        auto memory_of_slots,
        CudaSlots::Create(arenas, static_cast<uint8_t*>(slots), capacity));
    return std::unique_ptr<SlotMemory>(std::move(memory_of_slots));
  }

  Status Attach(ExpertTier* tier) override {
    engine_->SetTier(tier);
    LODE_ASSIGN_OR_RETURN(const cuda::MemoryInfo memory, cuda::DeviceMemory());
    std::map<std::string, uint64_t> table;
    for (const DeviceAllocation& a : device_->allocations()) table[Purpose(a.what, config_.layers)] += a.bytes;
    spdlog::info("device memory of {} ({:.0f} MiB):", card_.name, Mib(card_.total_bytes));
    uint64_t named = 0;
    for (const auto& [purpose, bytes] : table) {
      spdlog::info("  {:<20} {:>10.1f} MiB", purpose, Mib(bytes));
      named += bytes;
      facts_[fmt::format("vram {}", purpose)] = std::to_string(bytes);
    }
    const uint64_t used =
        free_at_start_ > memory.free_bytes ? free_at_start_ - memory.free_bytes : named;
    spdlog::info("  {:<20} {:>10.1f} MiB", "graphs, registration",
                 Mib(used > named ? used - named : 0));
    spdlog::info("  {:<20} {:>10.1f} MiB ({:.0f} MiB of it in reserve)", "free",
                 Mib(memory.free_bytes), Mib(kReserveBytes));
    facts_["graph nodes, 1 row"] = std::to_string(engine_->nodes(1));
    facts_["graph nodes, 4 rows"] = std::to_string(engine_->nodes(4));
    facts_["graph nodes, beside the trunk"] = std::to_string(engine_->branch_nodes());
    return OkStatus();
  }

  uint32_t host_threads() const override {
    return std::clamp(std::thread::hardware_concurrency() / 2, 1u, kHostThreadsMax);
  }
  void AddFacts(std::map<std::string, std::string>* facts) const override {
    facts->insert(facts_.begin(), facts_.end());
    (*facts)["card"] = card_.name;
    (*facts)["capability"] = std::to_string(card_.capability);
  }

 private:
  Status Register(Segment& segment, bool read_only, const char* what) {
    if (segment.size() == 0) return OkStatus();
    LODE_RETURN_IF_ERROR(cuda::RegisterHost(segment.data(), segment.size(), read_only, what));
    registered_.emplace_back(segment.data(), segment.size());
    return OkStatus();
  }

  const ModelConfig config_;
  const LoadPlan plan_;
  const uint32_t generation_;
  CudaCard card_;
  std::unique_ptr<CudaDevice> device_;
  std::vector<std::pair<void*, size_t>> registered_;
  CudaEngine* engine_ = nullptr;  // owned by the worker
  bool registers_read_only_ = false;
  uint64_t free_at_start_ = 0;    // of the card, with this process's context and nothing in it
  std::map<std::string, std::string> facts_;
};

}  // namespace

StatusOr<std::unique_ptr<CudaStack>> MakeCudaStack(const ModelSource& source, const LoadPlan& plan,
                                                   uint32_t generation) {
  auto stack = std::make_unique<Stack>(source.config(), plan, generation);
  LODE_RETURN_IF_ERROR(stack->Open());
  return std::unique_ptr<CudaStack>(std::move(stack));
}

StatusOr<std::string> ProbeCuda(uint32_t device_index) {
  LODE_ASSIGN_OR_RETURN(const CudaCard card,
                        CudaDevice::Describe(static_cast<int>(device_index)));
  if (card.capability < kCapabilityMin) {
    return FailedPrecondition("{} has compute capability {}; {} or more is needed", card.name,
                              card.capability, kCapabilityMin);
  }
  return fmt::format("{}, compute capability {}, {:.0f} MiB", card.name, card.capability,
                     Mib(card.total_bytes));
}

}  // namespace lode
