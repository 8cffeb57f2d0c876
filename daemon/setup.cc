// See daemon/setup.h.
#include "daemon/setup.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "daemon/child_process.h"
#include "daemon/tuning.h"
#include "kernels/isa_list.h"
#include "shared/base/limits.h"
#include "shared/base/log.h"

namespace lode {
namespace {

// Published starting points of policy `fixed`: the smallest pack leaves the CPU lane more to do per
// byte it reads.
constexpr double kShareQ2 = 0.2, kShareOthers = 0.55;
// Busy polling when every thread has a core: longer than a layer, shorter than anybody would notice
// in a power meter.
constexpr uint32_t kSpinUs = 200;

// Opening a card loads the driver and all kernels: seconds on a cold machine.
constexpr int kProbeMs = 30'000;

// A GPU that this build can use. The daemon never opens a card: the GPU worker's binary does, and
// says "+card" or "-why not" through the pipe. A build without the cuda device answers as well.
bool UsableGpu(const std::string& worker_dir) {
  if (access("/dev/nvidiactl", R_OK | W_OK) != 0) {
    spdlog::info("no GPU is used: /dev/nvidiactl {}", errno == ENOENT
                                                          ? "is missing (no NVIDIA driver)"
                                                          : "may not be opened by this user");
    return false;
  }
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return false;
  Fd in(ends[0]), out(ends[1]);
  auto child = ChildProcess::Spawn({worker_dir + "/lode-gpu-worker", "--probe"}, out);
  out.Reset();
  if (!child.ok()) {
    spdlog::warn("no GPU is used: {}", Message(child.status()));
    return false;
  }
  std::string answer;
  char text[512];
  pollfd entry = {in.get(), POLLIN, 0};
  for (ssize_t n = 1; n > 0 && poll(&entry, 1, kProbeMs) > 0;) {
    n = read(in.get(), text, sizeof(text));
    if (n > 0) answer.append(text, static_cast<size_t>(n));
  }
  child->Signal(SIGKILL);
  while (!child->Reap()) poll(nullptr, 0, 1);
  const bool usable = answer.starts_with("+");
  spdlog::info("{}: {}", usable ? "GPU" : "no GPU is used",
               answer.size() > 1 ? answer.substr(1) : "the GPU worker did not answer in time");
  return usable;
}

StatusOr<double> PullShare(const Options& options, const ModelSource& source) {
  if (options.pull_share >= 0) return options.pull_share;
  LODE_ASSIGN_OR_RETURN(const ExpertTensors experts, FindExperts(source, 0));
  return experts.gate->type == TensorType::kQ2_0 ? kShareQ2 : kShareOthers;
}

uint32_t HugePages(const std::string& word) {
  return word == "none" ? 0 : word == "transparent" ? 1 : 2;
}

struct Threads {
  ThreadChoice cpu;
  uint32_t device = 1;
  std::vector<uint32_t> device_cpus;  // to pin them to; empty: not pinned
  bool oversubscribed = false;
};
// The cpu device's threads and the CPU workers' threads take turns: while the workers compute, the
// device waits for them. So both may have every core, but nobody may spin then.
Threads ChooseAll(const Options& options, const Topology& topology, uint32_t n_workers, bool cuda) {
  Threads threads;
  threads.cpu = ChooseThreads(topology, n_workers, options.cpu_threads);
  // On cuda one core stays for the thread that launches windows while every pool spins.
  if (cuda && options.cpu_threads == 0 && threads.cpu.workers[0].threads > 1) {
    WorkerThreads& first = threads.cpu.workers[0];
    --first.threads;
    if (first.cpus.size() > first.threads) first.cpus.resize(first.threads);
  }
  uint32_t total = 0;
  for (const WorkerThreads& worker : threads.cpu.workers) total += worker.threads;
  if (!cuda) {
    threads.device = options.device_threads ? options.device_threads : CoreBudget(topology);
    total += threads.device;
  }
  threads.oversubscribed = threads.cpu.oversubscribed || total + 1 > CoreBudget(topology);
  // Threads of the device are pinned when there are cores that no CPU worker has; else they share
  // and must be free to move.
  const std::vector<uint32_t>& spare = threads.cpu.spare_cpus;
  if (spare.size() >= threads.device)
    threads.device_cpus.assign(spare.begin(), spare.begin() + threads.device);
  return threads;
}

LoadPlan CommonPlan(const Options& options, const ModelSource& source, uint32_t n_workers,
                    uint32_t context, uint32_t spin_us) {
  LoadPlan plan;
  plan.model = source.description();
  plan.identity = source.identity();
  plan.n_nodes = n_workers;
  plan.isa = options.isa;
  plan.kv_type = options.kv_type;
  plan.kv_blocks = options.kv_tokens / kKvBlockCells;
  plan.sequence_slots = options.sequences;
  plan.context = context;
  plan.profile = options.profile;
  plan.draft_head = options.draft_source == "head" || options.draft_source == "both";
  plan.mtp = options.mtp;
  plan.mtp_full_width_norm = options.mtp_norm == "full";
  plan.draft_vocab = options.draft_vocab;
  plan.draft_vocab_top = options.draft_vocab_top;
  plan.save_profile = options.save_profile;
  plan.spin_us = spin_us;
  plan.wait_ms = options.wait_ms;
  plan.wait_max_ms = options.wait_max_ms;
  plan.float_reference = options.float_reference;
  plan.lock_memory = options.lock_memory;
  plan.huge_pages = HugePages(options.huge_pages);
  return plan;
}

// N of these hold at most N experts, exactly N where all layers have slots of one size.
StatusOr<uint64_t> SmallestSlotBytes(const ModelSource& source) {
  LODE_ASSIGN_OR_RETURN(const ArenaLayout layout, ComputeArenaLayout(source, 0, 1));
  uint64_t least = ~uint64_t{0};
  for (const LayerExperts& layer : layout.layers)
    least = std::min(least, ExpertSlotBytes(layer, layout.hidden, layout.width));
  return least;
}

}  // namespace

uint32_t IsaIndex(const std::string& name) {
  for (uint32_t i = 0; i < kIsaCount; ++i) {
    if (name == kIsaNames[i]) return i;
  }
  return 0;
}

StatusOr<uint64_t> ExpertSlotBytesTotal(const ModelSource& source) {
  LODE_ASSIGN_OR_RETURN(const ArenaLayout layout, ComputeArenaLayout(source, 0, 1));
  uint64_t bytes = 0;
  for (const LayerExperts& layer : layout.layers)
    bytes += layout.experts * ExpertSlotBytes(layer, layout.hidden, layout.width);
  return bytes;
}

StatusOr<EngineSetup> MakeSetup(const Options& options, const ModelSource& source,
                                const Topology& topology, const std::string& control_socket,
                                const std::string& worker_dir) {
  const ModelConfig& model = source.config();
  LODE_RETURN_IF_ERROR(CheckComputable(source));
  const bool cuda = options.device == "cuda" || (options.device == "auto" && UsableGpu(worker_dir));
  const uint32_t n_workers =
      std::min(kCpuWorkersMax, options.cpu_workers ? options.cpu_workers : ChooseWorkers(topology));
  const uint32_t context =
      std::min({options.context ? options.context : model.context, options.kv_tokens, kContextMax});
  if (context < kWarmUpTokens) {
    return InvalidArgument(
        "a context of {} tokens is too short; at least {} are needed (option context)", context,
        kWarmUpTokens);
  }
  const Threads threads = ChooseAll(options, topology, n_workers, cuda);
  const uint32_t spin_us = options.spin_us >= 0     ? static_cast<uint32_t>(options.spin_us)
                           : threads.oversubscribed ? 0
                                                    : kSpinUs;
  uint64_t vram = options.vram_budget;
  if (vram == 0 && !cuda) {
    LODE_ASSIGN_OR_RETURN(vram, ExpertSlotBytesTotal(source));
    vram /= 2;
  } else if (vram == 0) {
    vram = ~uint64_t{0};  // cuda: all that is left after everything else was allocated
  }

  if (options.expert_slots > 0) {
    LODE_ASSIGN_OR_RETURN(const uint64_t slot, SmallestSlotBytes(source));
    vram = std::min(vram, options.expert_slots * slot);
  }

  EngineSetup setup;
  SupervisorConfig& s = setup.supervisor;
  s.cpu_binary = worker_dir + "/lode-cpu-worker";
  s.gpu_binary = worker_dir + "/lode-gpu-worker";
  s.socket_path = control_socket;
  s.log_level = options.log_level;
  s.shape = {model.hidden, model.expert_width, model.experts_used, n_workers};
  s.identity = source.identity();
  s.huge_arenas = options.huge_pages == "hugetlb";
  s.vocab = model.vocab;
  s.load_seconds = options.load_seconds;
  const LoadPlan common = CommonPlan(options, source, n_workers, context, spin_us);
  for (uint32_t i = 0; i < n_workers; ++i) {
    LODE_ASSIGN_OR_RETURN(ArenaLayout layout, ComputeArenaLayout(source, i, n_workers));
    s.arenas.push_back(std::move(layout));
    LoadPlan plan = common;
    plan.threads = threads.cpu.workers[i].threads;
    plan.cpus = threads.cpu.workers[i].cpus;
    s.cpu_plans.push_back(std::move(plan));
  }
  s.gpu_plan = common;
  s.gpu_plan.threads = threads.device;
  s.gpu_plan.cpus = threads.device_cpus;
  // Both sides must know: a CPU worker polls a bell that a GPU rings.
  s.gpu_plan.device = cuda ? "cuda" : "cpu";
  for (LoadPlan& plan : s.cpu_plans) plan.device = s.gpu_plan.device;
  s.gpu_plan.vram_budget_bytes = vram;
  s.gpu_plan.pull_staging_bytes = options.pull_staging;

  SchedulerConfig& c = setup.scheduler;
  c.vocab = model.vocab;
  c.context = context;
  c.sequences = options.sequences;
  c.kv_blocks = options.kv_tokens / kKvBlockCells;
  c.queue = options.queue;
  c.prompt_rows = options.prompt_rows;
  c.slow_client_seconds = options.slow_client_seconds;
  c.request_seconds = options.request_seconds;
  c.watchdog_seconds = options.watchdog_seconds;
  c.spin_ns = uint64_t{spin_us} * 1000;
  LODE_ASSIGN_OR_RETURN(const double share, PullShare(options, source));
  c.tunables.vram_budget_bytes = vram;
  c.tunables.pull_share = static_cast<float>(share);
  c.tunables.split_policy = static_cast<uint32_t>(ChosenSplit(options, cuda));
  c.tunables.tier_policy = static_cast<uint32_t>(
      options.tier_policy == "static" ? TierPolicy::kStatic : TierPolicy::kDecayedLfu);
  c.drafts.head = s.gpu_plan.draft_head && (!options.mtp.empty() || model.nextn_layers > 0);
  c.facts = {{"device", s.gpu_plan.device},
             {"kv_type", options.kv_type},
             {"cpu_workers", std::to_string(n_workers)},
             {"draft_head", !c.drafts.head        ? "none"
                            : options.mtp.empty() ? "of the model's file"
                                                  : options.mtp}};
  setup.summary = fmt::format(
      "{}: device {}, {} CPU workers, {} device threads, context {}, {} sequences, {} KV blocks, "
      "pull "
      "share {}, spin {} us",
      source.description(), s.gpu_plan.device, n_workers, threads.device, context, c.sequences,
      c.kv_blocks, share, spin_us);
  if (threads.cpu.wish_cut)
    setup.summary +=
        fmt::format("; cpu_threads cut to the CPU quota of {:.1f} cores", topology.quota_cores);
  return setup;
}

}  // namespace lode
