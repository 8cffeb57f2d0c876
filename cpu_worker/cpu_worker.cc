// See cpu_worker.h.
#include "cpu_worker/cpu_worker.h"

#include <algorithm>
#include <utility>

#include "cpu_worker/page_placement.h"
#include "shared/base/limits.h"
#include "shared/wire/segment_headers.h"

namespace lode {
namespace {

constexpr uint64_t kNsPerMs = 1'000'000, kNsPerUs = 1'000;

WorkerLoopOptions LoopOptions(const LoadPlan& plan, const ExchangeShape& shape, uint32_t index,
                              uint32_t generation) {
  WorkerLoopOptions options;
  options.me = index;
  options.generation = generation;
  options.spin_ns = plan.spin_us * kNsPerUs;
  options.bell_never_wakes = plan.device == "cuda";
  options.runner.shape = shape;
  // Three quarters of the GPU worker's patience with us: when one worker is stuck, the others say
  // so before they are blamed.
  if (plan.wait_ms > 0) options.runner.wait_ns = plan.wait_ms * kNsPerMs * 3 / 4;
  if (plan.wait_max_ms > 0) options.runner.wait_max_ns = plan.wait_max_ms * kNsPerMs * 3 / 4;
  return options;
}

StatusOr<std::unique_ptr<ModelSource>> OpenModel(const LoadPlan& plan) {
  LODE_ASSIGN_OR_RETURN(std::unique_ptr<ModelSource> source, ModelSource::Open(plan.model));
  if (source->identity() != plan.identity) {
    return FailedPrecondition(
        "model {} has identity {} here and {} in the daemon; the file changed while Lode was "
        "starting",
        plan.model, source->identity(), plan.identity);
  }
  return source;
}

}  // namespace

StatusOr<ReadyReport> CpuWorker::Load(const LoadPlan& plan, Fd exchange, Fd arena,
                                      const WeightStore::ProgressFn& progress,
                                      const std::atomic<bool>& stop) {
  if (index_ >= plan.n_nodes)
    return InvalidArgument("worker index {} with {} workers", index_, plan.n_nodes);
  const char* why_not = nullptr;
  const KernelTable* table = FindKernelTable(plan.isa.c_str(), &why_not);
  if (table == nullptr)
    return InvalidArgument("instruction set '{}': {}", plan.isa,
                           why_not != nullptr ? why_not : "unknown");
  LODE_ASSIGN_OR_RETURN(source_, OpenModel(plan));
  const ModelConfig& config = source_->config();
  const ExchangeShape shape = {config.hidden, config.expert_width, config.experts_used,
                               plan.n_nodes};
  LODE_ASSIGN_OR_RETURN(
      exchange_, Segment::Attach(std::move(exchange), "exchange", ExchangeLayout{shape}.bytes(),
                                 Segment::Access::kReadWrite));
  LODE_RETURN_IF_ERROR(CheckExchange(*exchange_, shape));

  WeightStoreOptions store_options;
  store_options.node = index_;
  store_options.n_nodes = plan.n_nodes;
  store_options.numa_nodes = NumaNodesOfCpus(plan.cpus);
  store_options.huge_pages = plan.huge_pages;
  store_options.lock_memory = plan.lock_memory;
  store_options.reader_threads =
      std::max(2u, plan.threads);  // two at least: one reads while the other hashes
  LODE_ASSIGN_OR_RETURN(store_, WeightStore::Open(*source_, std::move(arena), store_options));
  LODE_RETURN_IF_ERROR(store_->Load(progress, stop));

  NodePoolOptions pool_options;
  pool_options.threads = std::max(1u, plan.threads);
  if (plan.cpus.size() == pool_options.threads) pool_options.cpus = plan.cpus;
  pool_options.spin_ns = plan.spin_us * kNsPerUs;
  LODE_ASSIGN_OR_RETURN(pool_, NodePool::Start(pool_options));
  auto loop =
      std::make_unique<WorkerLoop>(store_->layout(), store_->data(), exchange_->data(), pool_.get(),
                                   LoopOptions(plan, shape, index_, generation_), stop);
  loop->Announce();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    loop_ = std::move(loop);
  }

  ReadyReport report;
  report.memory_bytes = store_->bytes() + exchange_->size();
  report.facts = store_->facts();
  report.facts["isa"] = table->name;
  report.facts["threads"] = std::to_string(pool_options.threads);
  report.facts["pinned"] = pool_options.cpus.empty() ? "no" : "yes";
  report.summary = fmt::format(
      "experts of worker {} of {}: {} MiB, pages {}, {}, {} adopted; {} threads, isa {}", index_,
      plan.n_nodes, store_->bytes() >> 20, report.facts["pages"], report.facts["numa_verified"],
      store_->adopted_experts(), pool_options.threads, table->name);
  return report;
}

void CpuWorker::Run() { loop_->Run(); }

std::map<std::string, double> CpuWorker::Statistics() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return loop_ != nullptr ? loop_->Statistics() : std::map<std::string, double>();
}

}  // namespace lode
