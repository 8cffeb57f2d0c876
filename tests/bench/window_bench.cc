// Windows of the real engine (supervisor, CPU workers, GPU worker as processes) on any model and
// device, without scheduler or clients: how long a window of n rows takes, what each lane did, where
// the time goes. Meant for full-shape synthetic models, whose router is random: LODE_BENCH_ROUTING=1
// in the environment draws routing with a trained model's figures (gpu_worker/bench_routing.h).
//
//   window_bench MODEL [key=value...]     device=cuda rows=1,4 windows=40 vram=BYTES workers=1
//       threads=0 share=-1 split=fixed|balanced tier=static|decayed_lfu hbm_gbs=4290 name=LABEL
//
// Prints one table row per row count and one line of JSON. Figures count only on a quiet machine.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>

#include "daemon/setup.h"
#include "daemon/window_runner.h"
#include "kernels/kernel_table.h"
#include "shared/base/log.h"
#include "shared/shm/wait_word.h"
#include "tests/support/places.h"

namespace lode {
namespace {

constexpr uint32_t kKvTokens = 4096;
constexpr uint32_t kWarmWindows = 8, kTimedWindows = 6;
constexpr double kCommittedPer4Rows = 3.29;  // published: tokens that a window of 4 rows commits
constexpr double kLaunchNs = 600;            // per graph node, measured: docs/measurements/h200-term-order.md
constexpr const char* kStageNames[kStages] = {"embed", "hyper", "deltanet", "attention", "ple",
                                              "router", "experts", "pull", "shared", "cpu wait",
                                              "combine", "head", "sample", "draft"};

using Settings = std::map<std::string, std::string>;
double Number(const Settings& s, const char* key) { return std::strtod(s.at(key).c_str(), nullptr); }

class Bench {
 public:
  Bench(std::string model, Settings settings) : model_(std::move(model)), s_(std::move(settings)) {}
  ~Bench() {
    if (supervisor_) supervisor_->Stop();
    supervisor_.reset();
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }

  Status Start() {
    folder_ = (std::filesystem::temp_directory_path() / "lode-bench-XXXXXX").string();
    if (mkdtemp(folder_.data()) == nullptr) return Internal("no temporary folder");
    Options o;
    o.model = model_;
    o.device = s_.at("device");
    o.cpu_workers = static_cast<uint32_t>(Number(s_, "workers"));
    o.cpu_threads = static_cast<uint32_t>(Number(s_, "threads"));
    o.vram_budget = static_cast<uint64_t>(Number(s_, "vram"));
    o.pull_share = Number(s_, "share");
    o.split_policy = s_.at("split");
    o.tier_policy = s_.at("tier");
    o.kv_tokens = kKvTokens;
    o.sequences = 1;
    o.lock_memory = false;
    o.log_level = "info";
    o.wait_ms = 2000;
    o.wait_max_ms = 5000;
    LODE_ASSIGN_OR_RETURN(source_, ModelSource::Open(model_));
    LODE_ASSIGN_OR_RETURN(const Topology topology,
                          ReadTopology(TopologyOptions::FromEnvironment()));
    LODE_ASSIGN_OR_RETURN(EngineSetup setup, MakeSetup(o, *source_, topology, folder_ + "/w.sock",
                                                       TestBinaries()));
    std::printf("%s\n", setup.summary.c_str());
    tunables_ = setup.scheduler.tunables;
    tunables_.epoch = 1;
    LODE_ASSIGN_OR_RETURN(supervisor_, Supervisor::Create(std::move(setup.supervisor)));
    const uint64_t begin = NowNs();
    supervisor_->Start();
    LODE_RETURN_IF_ERROR(supervisor_->WaitReady([&] { return NowNs() - begin < 300'000'000'000; }));
    const auto facts = supervisor_->Facts(WorkerRole::kGpu, 0);
    for (const auto& [name, value] : facts) std::printf("  %s = %s\n", name.c_str(), value.c_str());
    std::printf("ready after %.1f s\n", static_cast<double>(NowNs() - begin) / 1e9);
    facts_ = facts;
    const auto isa = [&](WorkerRole role, uint32_t i) {
      return IsaIndex(supervisor_->Facts(role, i)["isa"]);
    };
    tunables_.device_isa = isa(WorkerRole::kGpu, 0);
    for (uint32_t i = 0; i < kCpuWorkersMax; ++i)
      tunables_.cpu_isa[i] = isa(WorkerRole::kCpu, std::min(i, WorkerCount() - 1));
    link_ = supervisor_->gpu();
    for (uint32_t b = 0; b < kKvTokens / kKvBlockCells; ++b)
      link_->window->sequences[0].kv_blocks[b] = b;
    return OkStatus();
  }

  Status Run(uint32_t n_rows) {
    ++epoch_;
    position_ = 0;
    const auto windows = static_cast<uint32_t>(Number(s_, "windows"));
    WindowResult r;
    for (uint32_t i = 0; i < kWarmWindows; ++i) LODE_RETURN_IF_ERROR(One(n_rows, 0, &r));
    std::vector<double> ms;
    uint64_t lookups[kLanes] = {}, bytes[kLanes] = {}, lane_ns[kLanes] = {}, swaps = 0, uploaded = 0;
    for (uint32_t i = 0; i < windows; ++i) {
      LODE_RETURN_IF_ERROR(One(n_rows, 0, &r));
      ms.push_back(static_cast<double>(r.window_ns) / 1e6);
      for (uint32_t l = 0; l < kLanes; ++l) {
        lookups[l] += r.lookups[l];
        bytes[l] += r.bytes[l];
        lane_ns[l] += r.lane_ns[l];
      }
      swaps += r.tier_swaps;
      uploaded += r.tier_upload_bytes;
    }
    uint64_t stage_ns[kStages] = {};
    for (uint32_t i = 0; i < kTimedWindows; ++i) {
      LODE_RETURN_IF_ERROR(One(n_rows, kTimeStages, &r));
      for (uint32_t k = 0; k < kStages; ++k) stage_ns[k] += r.stage_ns[k];
    }
    std::sort(ms.begin(), ms.end());
    Print(n_rows, ms, windows, lookups, bytes, lane_ns, stage_ns, swaps, uploaded);
    return OkStatus();
  }

 private:
  uint32_t WorkerCount() const { return static_cast<uint32_t>(supervisor_->Workers().size()) - 1; }

  Status One(uint32_t n_rows, uint32_t flags, WindowResult* result) {
    auto plan = std::make_unique<WindowPlan>();
    plan->flags = flags;
    plan->tunables = tunables_;
    plan->n_seqs = 1;
    SequencePlan& seq = plan->seqs[0];
    seq.epoch = epoch_;
    seq.committed = position_;
    seq.block_count = kKvTokens / kKvBlockCells;
    seq.sampling.top_p = 1;
    seq.sampling.repetition_penalty = 1;
    for (uint32_t i = 0; i < n_rows; ++i) {
      RowPlan& row = plan->rows[plan->n_rows++];
      row.position = position_ + i;
      row.token = static_cast<int32_t>((row.position * 7919u + 13u) % source_->config().vocab);
      row.target = -1;
      row.mask_offset = kNoMask;
      row.needs_logits = row.pick = 1;
      row.kind = RowKind::kPrompt;
    }
    position_ += n_rows;
    plan->window = ++window_;
    plan->generation = link_->generation;
    supervisor_->NoteWindow(plan->window);
    if (!link_->window->plans.TryPush(*plan)) return Internal("the plan ring is full");
    if (!link_->window->results.Pop(result, {0, NowNs() + 60'000'000'000}))
      return Internal("window {} got no result", window_);
    if (result->status != WindowStatus::kOk) {
      return Internal("window {} ended with status {}, layer {}, worker {}, detail {}", window_,
                      static_cast<uint32_t>(result->status), result->error.layer,
                      result->error.worker, result->error.detail);
    }
    return OkStatus();
  }

  void Print(uint32_t n_rows, const std::vector<double>& ms, uint32_t windows,
             const uint64_t* lookups, const uint64_t* bytes, const uint64_t* lane_ns,
             const uint64_t* stage_ns, uint64_t swaps, uint64_t uploaded) const {
    const double median = ms[ms.size() / 2], n = windows;
    const double tokens = n_rows == 4 ? kCommittedPer4Rows : n_rows == 1 ? 1 : n_rows;
    const double all = static_cast<double>(lookups[0] + lookups[1] + lookups[2]);
    const auto mib = [&](uint32_t l) { return static_cast<double>(bytes[l]) / n / 1e6; };
    const auto lane_ms = [&](uint32_t l) { return static_cast<double>(lane_ns[l]) / n / 1e6; };
    const auto rate = [&](uint32_t l) { return lane_ms(l) > 0 ? mib(l) / lane_ms(l) : 0; };  // GB/s
    const double hbm = Number(s_, "hbm_gbs");
    double dense_mb = 0;
    if (const auto it = facts_.find("dense_bytes"); it != facts_.end())
      dense_mb = std::strtod(it->second.c_str(), nullptr) / 1e6;
    const double lanes_ms = std::max({mib(0) / hbm, rate(1) > 0 ? mib(1) / rate(1) : 0,
                                      rate(2) > 0 ? mib(2) / rate(2) : 0});
    const double ceiling_ms = dense_mb / hbm + lanes_ms;
    const auto nodes = facts_.find(n_rows == 1 ? "graph nodes, 1 row" : "graph nodes, 4 rows");
    const double floor_ms =
        nodes == facts_.end() ? 0 : std::strtod(nodes->second.c_str(), nullptr) * kLaunchNs / 1e6;
    std::printf(
        "[%s] %u rows: %.3f ms median (%.3f min, %.3f max), %.1f tok/s | hit %.3f pull %.3f cpu %.3f "
        "| MB/window hit %.0f pull %.0f cpu %.0f | lane ms %.2f %.2f %.2f (pull %.1f, cpu %.1f GB/s) "
        "| ceiling %.2f ms, launch floor %.2f ms, ratio %.2f and %.2f | swaps %.1f, %.1f MB up\n",
        s_.at("name").c_str(), n_rows, median, ms.front(), ms.back(), 1e3 * tokens / median,
        static_cast<double>(lookups[0]) / all, static_cast<double>(lookups[1]) / all,
        static_cast<double>(lookups[2]) / all, mib(0), mib(1), mib(2), lane_ms(0), lane_ms(1),
        lane_ms(2), rate(1), rate(2), ceiling_ms, floor_ms, ceiling_ms / median,
        (ceiling_ms + floor_ms) / median, static_cast<double>(swaps) / n,
        static_cast<double>(uploaded) / n / 1e6);
    std::printf("    stages, ms (with a stamp behind each):");
    for (uint32_t k = 0; k < kStages; ++k) {
      if (stage_ns[k] > 0)
        std::printf(" %s %.2f", kStageNames[k], static_cast<double>(stage_ns[k]) / kTimedWindows / 1e6);
    }
    std::printf("\n");
    std::fflush(stdout);
  }

  const std::string model_;
  const Settings s_;
  std::string folder_;
  std::unique_ptr<ModelSource> source_;
  std::unique_ptr<Supervisor> supervisor_;
  std::shared_ptr<const GpuLink> link_;
  std::map<std::string, std::string> facts_;
  Tunables tunables_ = {};
  uint64_t window_ = 0, epoch_ = 0;
  uint32_t position_ = 0;
};

Status Main(int argc, char** argv) {
  Settings settings = {{"device", "cuda"}, {"rows", "1,4"},  {"windows", "40"},
                       {"vram", "0"},      {"workers", "1"}, {"threads", "0"},
                       {"share", "-1"},    {"split", "fixed"}, {"tier", "decayed_lfu"},
                       {"hbm_gbs", "4290"}, {"name", "bench"}};
  for (int i = 2; i < argc; ++i) {
    const std::string arg = argv[i];
    const size_t equals = arg.find('=');
    if (equals == std::string::npos || !settings.count(arg.substr(0, equals)))
      return InvalidArgument("'{}' is no key=value of this program", arg);
    settings[arg.substr(0, equals)] = arg.substr(equals + 1);
  }
  Bench bench(argv[1], settings);
  LODE_RETURN_IF_ERROR(bench.Start());
  std::string rows = settings["rows"];
  for (char* p = rows.data(); *p != '\0';) {
    LODE_RETURN_IF_ERROR(bench.Run(static_cast<uint32_t>(std::strtoul(p, &p, 10))));
    if (*p == ',') ++p;
  }
  return OkStatus();
}

}  // namespace
}  // namespace lode

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: window_bench MODEL [key=value...]\n");
    return 2;
  }
  signal(SIGPIPE, SIG_IGN);
  const lode::Status status = lode::Main(argc, argv);
  if (!status.ok()) std::printf("failed: %s\n", lode::Message(status).c_str());
  return status.ok() ? 0 : 1;
}
