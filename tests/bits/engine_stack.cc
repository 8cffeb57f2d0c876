// See engine_stack.h.
#include "tests/bits/engine_stack.h"

#include <cstdlib>
#include <filesystem>
#include <thread>

#include "kernels/kernel_table.h"
#include "shared/shm/wait_word.h"
#include "tests/support/places.h"

namespace lode {
namespace {

// A busy build machine may be slow; a hang still ends.
constexpr double kPatienceSeconds = 600;
constexpr uint32_t kWaitMs = 30'000, kWaitMaxMs = 60'000;
constexpr uint32_t kKvTokens = 4096;

uint64_t Deadline() { return NowNs() + static_cast<uint64_t>(kPatienceSeconds * 1e9); }

}  // namespace

uint32_t MeasuredThreads() {
  const uint32_t cores = std::thread::hardware_concurrency();
  return TestDevice() == "cuda" && cores > 4 ? cores - 2 : 2;
}

StatusOr<std::unique_ptr<EngineStack>> EngineStack::Start(const ModelSource& source,
                                                          const Tokenizer& tokenizer,
                                                          const EngineStackOptions& options) {
  std::unique_ptr<EngineStack> stack(new EngineStack);
  std::string folder = (std::filesystem::temp_directory_path() / "lode-bits-XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr)
    return Internal("no temporary folder could be made as {}", folder);
  stack->folder_ = folder;
  Options o;
  o.model = source.description();
  o.device = TestDevice();
  o.cpu_workers = options.cpu_workers;
  o.split_policy = "fixed";  // every lane has work, whatever the lanes cost here
  o.cpu_threads = options.threads;
  o.device_threads = options.threads;
  o.spin_us = 0;
  o.lock_memory = false;
  o.log_level = "error";
  o.kv_tokens = kKvTokens;
  o.wait_ms = kWaitMs;
  o.wait_max_ms = kWaitMaxMs;
  LODE_ASSIGN_OR_RETURN(const Topology topology, ReadTopology(TopologyOptions::FromEnvironment()));
  LODE_ASSIGN_OR_RETURN(EngineSetup setup, MakeSetup(o, source, topology, folder + "/workers.sock",
                                                     TestBinaries()));
  LODE_ASSIGN_OR_RETURN(stack->supervisor_, Supervisor::Create(std::move(setup.supervisor)));
  stack->scheduler_ =
      std::make_unique<Scheduler>(std::move(setup.scheduler), stack->supervisor_.get(), &tokenizer);
  stack->supervisor_->Start();
  const uint64_t deadline = Deadline();
  LODE_RETURN_IF_ERROR(stack->supervisor_->WaitReady([&] { return NowNs() < deadline; }));
  LODE_RETURN_IF_ERROR(stack->scheduler_->WarmUp(deadline));
  stack->scheduler_->SetAccepting(true);
  return stack;
}

EngineStack::~EngineStack() {
  if (scheduler_) scheduler_->Stop();
  if (supervisor_) supervisor_->Stop();
  scheduler_.reset();
  supervisor_.reset();
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

Status EngineStack::UseBestIsa(uint32_t cpu_workers) {
  const IsaChoice* choices = nullptr;
  uint32_t best = 0;
  const auto n = static_cast<uint32_t>(IsaChoices(&choices));
  for (uint32_t i = 0; i < n; ++i) best = choices[i].supported ? i : best;
  TunablesChange change;
  change.device_isa = best;
  for (uint32_t worker = 0; worker < cpu_workers; ++worker)
    change.cpu_isa.emplace_back(worker, best);
  return scheduler_->SetTunables(change);
}

StatusOr<BitsAnswer> EngineStack::Answer(const std::vector<Request>& requests,
                                         const std::vector<Request>& neighbours,
                                         uint64_t* lookups) {
  std::vector<std::shared_ptr<RequestStream>> company;
  struct CancelAll {
    std::vector<std::shared_ptr<RequestStream>>* streams;
    ~CancelAll() {
      for (const auto& stream : *streams) stream->Cancel();
    }
  } cancel_all{&company};
  const uint64_t deadline = Deadline();
  StreamEvent event;
  for (const Request& request : neighbours) {
    LODE_ASSIGN_OR_RETURN(company.emplace_back(), scheduler_->Submit(request));
    if (!company.back()->Pop(&event, deadline) || event.finish)
      return Internal("neighbour {} did not run", request.id);
  }
  BitsAnswer answer;
  for (const Request& request : requests) {
    LODE_ASSIGN_OR_RETURN(const std::shared_ptr<RequestStream> stream, scheduler_->Submit(request));
    answer.tokens.emplace_back();
    do {
      event = {};
      if (!stream->Pop(&event, deadline)) return Internal("request {} got no answer", request.id);
      for (const TokenOut& token : event.tokens) answer.tokens.back().push_back(token.id);
    } while (!event.finish);
    if (event.finish->reason != FinishReason::kLength) {
      return Internal("request {} ended early: {}", request.id, Message(event.finish->error));
    }
    answer.logits_hash.push_back(event.finish->logits_hash);
    for (uint32_t lane = 0; lane < kLanes; ++lane)
      lookups[lane] += event.finish->usage.lookups[lane];
  }
  for (const auto& stream : company) {
    while (stream->TryPop(&event)) {
      if (event.finish) return Internal("a neighbour ended before the answer did");
    }
  }
  return answer;
}

}  // namespace lode
