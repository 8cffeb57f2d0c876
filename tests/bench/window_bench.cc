// Windows of the real engine (supervisor, CPU workers, GPU worker as processes) on any model and
// device, without scheduler or clients: how long a window of n rows takes, what each lane did, where
// the time goes. Meant for full-shape synthetic models, whose router is random: LODE_BENCH_ROUTING=1
// in the environment draws routing with a trained model's figures (gpu_worker/bench_routing.h).
//
//   window_bench MODEL [key=value...]     device=cuda rows=1,4 windows=40 vram=12GiB[,8GiB...]
//       workers=1 threads=0 share=-1 split=fixed[,balanced] tier=static|decayed_lfu staging=BYTES
//       use=0[,N...] hbm_gbs=4290 name=LABEL
//
// vram: the first is the worker's budget; smaller ones follow without a restart, as if the card were
// that small (a big model takes a minute to make). use: how many of the CPU workers' threads work; 0:
// all.
// Prints per row count: the window (4 rows count 3.29 tokens, what a trained model commits of them;
// any other number counts as many as it has), shares of lookups, MB and GB/s of each lane; each lane
// alone (all misses on the CPU, all misses pulled), which gives the ceiling of the floor formula,
// beside the one from the lanes' clocks in these windows; both with the launch floor, the window's
// own graph with kernels that do nothing (only with LODE_BENCH_ROUTING, for 1 row and for 4, which
// stands for all others; 0 elsewhere); stages; what uploads of the VRAM tier cost. Figures count
// only on a quiet machine.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <numeric>

#include "daemon/setup.h"
#include "daemon/window_runner.h"
#include "kernels/kernel_table.h"
#include "shared/base/log.h"
#include "shared/config/config.h"
#include "shared/shm/wait_word.h"
#include "tests/support/places.h"

namespace lode {
namespace {

constexpr uint32_t kKvTokens = 4096;
constexpr uint32_t kWarmWindows = 8, kTimedWindows = 6, kLaneWindows = 16;
constexpr uint64_t kFillNs = 3'000'000'000;  // the tier fills another budget's slots well within
constexpr double kCommittedPer4Rows = 3.29;  // published: tokens that a window of 4 rows commits
constexpr const char* kStageNames[kStages] = {"embed", "hyper", "deltanet", "attention", "ple",
                                              "router", "experts", "pull", "shared", "cpu wait",
                                              "combine", "head", "sample", "draft"};

using Settings = std::map<std::string, std::string>;

// "12GiB,8GiB", "1,4"
StatusOr<std::vector<uint64_t>> ParseList(const std::string& text) {
  std::vector<uint64_t> values;
  for (size_t at = 0; at <= text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    LODE_ASSIGN_OR_RETURN(values.emplace_back(), ParseByteSize(text.substr(at, comma - at)));
    at = comma + 1;
  }
  return values;
}
Status CheckLists(const Settings& settings) {
  for (const char* key : {"rows", "vram", "staging", "use"}) {
    const Status status = ParseList(settings.at(key)).status();
    if (!status.ok()) return InvalidArgument("{}: {}", key, Message(status));
  }
  return OkStatus();
}
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
    o.vram_budget = List("vram")[0];
    o.pull_share = Number(s_, "share");
    o.pull_staging = List("staging")[0];
    o.split_policy = s_.at("split").substr(0, s_.at("split").find(','));
    o.tier_policy = s_.at("tier");
    o.kv_tokens = kKvTokens;
    o.sequences = 1;
    o.lock_memory = false;
    o.log_level = "info";
    o.wait_ms = 2000;
    o.wait_max_ms = 5000;
    LODE_ASSIGN_OR_RETURN(source_, ModelSource::Open(model_));
    for (uint32_t layer = 0; layer < source_->config().layers; ++layer) {
      LODE_ASSIGN_OR_RETURN(const ExpertTensors t, FindExperts(*source_, layer));
      const uint64_t bytes = t.gate->bytes + (t.fused ? 0 : t.up->bytes) + t.down->bytes;
      expert_mb_.push_back(static_cast<double>(bytes) / source_->config().experts / 1e6);
    }
    LODE_ASSIGN_OR_RETURN(const Topology topology,
                          ReadTopology(TopologyOptions::FromEnvironment()));
    LODE_ASSIGN_OR_RETURN(EngineSetup setup, MakeSetup(o, *source_, topology, folder_ + "/w.sock",
                                                       TestBinaries()));
    std::printf("%s\n", setup.summary.c_str());
    tunables_ = setup.scheduler.tunables;
    tunables_.epoch = tunables_epoch_;
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
    if (!link_) return Internal("the GPU worker is gone");
    for (uint32_t b = 0; b < kKvTokens / kKvBlockCells; ++b)
      link_->window->sequences[0].kv_blocks[b] = b;
    return OkStatus();
  }

  Status RunAll() {
    const std::vector<uint64_t> budgets = List("vram");
    const uint64_t slots = static_cast<uint64_t>(Fact("vram expert slots"));
    for (const uint64_t budget : budgets) {
      if (budgets.size() > 1) {
        const uint64_t less = budgets[0] - std::min(budget, budgets[0]);
        if (less > slots) return InvalidArgument("a budget of {} bytes leaves no slots", budget);
        std::printf("vram_budget %.1f GiB:\n", static_cast<double>(budget) / (1 << 30));
        tunables_.vram_budget_bytes = slots - less;
        tunables_.epoch = ++tunables_epoch_;
        for (const uint64_t begin = NowNs(); NowNs() - begin < kFillNs;)
          LODE_RETURN_IF_ERROR(Fresh(1, kWarmWindows).status());
      }
      for (const SplitPolicy split : {SplitPolicy::kFixed, SplitPolicy::kBalanced}) {
        const bool balanced = split == SplitPolicy::kBalanced;
        if (s_.at("split").find(balanced ? "balanced" : "fixed") == std::string::npos) continue;
        tunables_.split_policy = static_cast<uint32_t>(split);
        tunables_.epoch = ++tunables_epoch_;
        for (const uint64_t use : List("use")) {
          tunables_.cpu_threads = static_cast<uint32_t>(use);
          tunables_.epoch = ++tunables_epoch_;
          label_ = fmt::format("{}{}{}", s_.at("name"), balanced ? " balanced" : "",
                               use > 0 ? fmt::format(", {} threads", use) : "");
          for (const uint64_t rows : List("rows"))
            LODE_RETURN_IF_ERROR(Run(static_cast<uint32_t>(rows)));
        }
      }
    }
    return OkStatus();
  }

 private:
  // Checked by CheckLists.
  std::vector<uint64_t> List(const char* key) const { return *ParseList(s_.at(key)); }

  Status Run(uint32_t n_rows) {
    const auto windows = static_cast<uint32_t>(Number(s_, "windows"));
    LODE_RETURN_IF_ERROR(Fresh(n_rows, kWarmWindows).status());
    LODE_ASSIGN_OR_RETURN(const Figures all, Windows(n_rows, windows, 0));
    LODE_ASSIGN_OR_RETURN(const Figures timed, Windows(n_rows, kTimedWindows, kTimeStages));
    LODE_ASSIGN_OR_RETURN(const double cpu_alone, LaneAlone(n_rows, Lane::kCpu));
    LODE_ASSIGN_OR_RETURN(const double pull_alone, LaneAlone(n_rows, Lane::kPull));
    const double pick_ms =
        timed.stage_ns[static_cast<uint32_t>(Stage::kSample)] / timed.n() / 1e6;
    Print(n_rows, all, pick_ms, cpu_alone, pull_alone);
    std::printf(
        "    mean ms: plan to result %.3f, in the worker %.3f, first to last kernel %.3f, of it bell to "
        "answer %.3f (the workers' clock %.3f), the rest %.3f\n",
        all.asked_ns / all.n() / 1e6, std::accumulate(all.ms.begin(), all.ms.end(), 0.0) / all.n(),
        all.device_ns / all.n() / 1e6, all.answer_ns / all.n() / 1e6, all.lane_ms(Lane::kCpu),
        (all.device_ns - all.answer_ns) / all.n() / 1e6);
    PrintStages(timed);
    PrintSwaps(all);
    std::fflush(stdout);
    return OkStatus();
  }

  // Sums over windows.
  struct Figures {
    std::vector<double> ms;  // sorted
    double lookups[kLanes] = {}, bytes[kLanes] = {}, lane_ns[kLanes] = {};
    double stage_ns[kStages] = {};
    double device_ns = 0, answer_ns = 0;  // first to last kernel; of it bell to answer
    double asked_ns = 0;                  // plan given to result taken
    std::vector<std::array<uint16_t, kLanes>> layers;  // lookups, of all windows one behind the other
    double swaps = 0, uploaded = 0;
    // Of windows at whose border copies landed or started, and of the others: [uploads].
    std::vector<double> ms_by[2];
    double pull_bytes_by[2] = {}, pull_ns_by[2] = {};

    double n() const { return static_cast<double>(ms.size()); }
    double median() const { return ms[ms.size() / 2]; }
    double mb(Lane l) const { return bytes[static_cast<uint32_t>(l)] / n() / 1e6; }
    double lane_ms(Lane l) const { return lane_ns[static_cast<uint32_t>(l)] / n() / 1e6; }
    double share(Lane l) const {
      return lookups[static_cast<uint32_t>(l)] / (lookups[0] + lookups[1] + lookups[2]);
    }
    double gbs(Lane l) const { return lane_ms(l) > 0 ? mb(l) / lane_ms(l) : 0; }
  };

  // Of a sequence that begins anew.
  StatusOr<Figures> Fresh(uint32_t n_rows, uint32_t windows) {
    ++epoch_;
    position_ = 0;
    return Windows(n_rows, windows, 0);
  }
  StatusOr<Figures> Windows(uint32_t n_rows, uint32_t windows, uint32_t flags) {
    Figures f;
    bool before = false;
    for (uint32_t i = 0; i < windows; ++i) {
      WindowResult r = {};
      const uint64_t begin = NowNs();
      LODE_RETURN_IF_ERROR(One(n_rows, flags, &r));
      f.asked_ns += static_cast<double>(NowNs() - begin);
      f.device_ns += static_cast<double>(r.device_ns);
      f.answer_ns += static_cast<double>(r.answer_ns);
      for (uint32_t layer = 0; layer < source_->config().layers; ++layer)
        f.layers.push_back(std::to_array(r.layer_lookups[layer]));
      f.ms.push_back(static_cast<double>(r.window_ns) / 1e6);
      for (uint32_t l = 0; l < kLanes; ++l) {
        f.lookups[l] += static_cast<double>(r.lookups[l]);
        f.bytes[l] += static_cast<double>(r.bytes[l]);
        f.lane_ns[l] += static_cast<double>(r.lane_ns[l]);
      }
      for (uint32_t k = 0; k < kStages; ++k) f.stage_ns[k] += static_cast<double>(r.stage_ns[k]);
      f.swaps += static_cast<double>(r.tier_swaps);
      f.uploaded += static_cast<double>(r.tier_upload_bytes);
      // Copies counted at a border ran in the window before it or run in this one.
      const bool uploads = r.tier_swaps > 0 || r.tier_upload_bytes > 0;
      const uint32_t by = uploads || before ? 1 : 0;
      before = r.tier_swaps > 0;
      f.ms_by[by].push_back(f.ms.back());
      f.pull_bytes_by[by] += static_cast<double>(r.bytes[static_cast<uint32_t>(Lane::kPull)]);
      f.pull_ns_by[by] += static_cast<double>(r.lane_ns[static_cast<uint32_t>(Lane::kPull)]);
    }
    std::sort(f.ms.begin(), f.ms.end());
    for (std::vector<double>& ms : f.ms_by) std::sort(ms.begin(), ms.end());
    return f;
  }

  // The lane's rate in GB/s when it has all misses, the tier left alone.
  StatusOr<double> LaneAlone(uint32_t n_rows, Lane lane) {
    const Tunables kept = tunables_;
    tunables_.epoch = ++tunables_epoch_;
    tunables_.split_policy = static_cast<uint32_t>(SplitPolicy::kFixed);
    tunables_.tier_policy = static_cast<uint32_t>(TierPolicy::kStatic);
    tunables_.pull_share = lane == Lane::kPull ? 1.0f : 0.0f;
    LODE_RETURN_IF_ERROR(Windows(n_rows, 2, 0).status());
    LODE_ASSIGN_OR_RETURN(const Figures f, Windows(n_rows, kLaneWindows, 0));
    tunables_ = kept;
    tunables_.epoch = ++tunables_epoch_;
    return f.gbs(lane);
  }

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

  double Fact(const char* name) const {
    const auto it = facts_.find(name);
    return it == facts_.end() ? 0 : std::strtod(it->second.c_str(), nullptr);
  }
  // What every window reads: all dense weights but the embedding, of which it takes a row per token.
  double DenseMb() const {
    const TensorInfo* const embedding = source_->Find("token_embd.weight");
    const bool apart = source_->Find("output.weight") != nullptr && embedding != nullptr;
    return Fact("dense_bytes") / 1e6 - (apart ? static_cast<double>(embedding->bytes) / 1e6 : 0);
  }
  // ms a window: dense bytes, then the slowest lane of each layer (lanes meet at its end), then the
  // picks.
  double Ceiling(const Figures& f, double pick_ms, double pull_gbs, double cpu_gbs) const {
    const double gbs[kLanes] = {Number(s_, "hbm_gbs"), pull_gbs, cpu_gbs};
    double ms = 0;
    for (size_t i = 0; i < f.layers.size(); ++i) {
      double slowest = 0;
      for (uint32_t l = 0; l < kLanes; ++l) {
        const double mb = f.layers[i][l] * expert_mb_[i % expert_mb_.size()];
        if (gbs[l] > 0) slowest = std::max(slowest, mb / gbs[l]);
      }
      ms += slowest;
    }
    return DenseMb() / gbs[0] + ms / f.n() + pick_ms;
  }

  void Print(uint32_t n_rows, const Figures& f, double pick_ms, double cpu_alone,
             double pull_alone) const {
    const double median = f.median();
    const double tokens = n_rows == 4 ? kCommittedPer4Rows : n_rows;
    const double probe = Fact("link_bytes_per_second") / 1e9;
    const double floor_ms = Fact(n_rows == 1 ? "empty graph ms, 1 rows" : "empty graph ms, 4 rows");
    const double own = Ceiling(f, pick_ms, std::max(probe, pull_alone), cpu_alone);
    const double inside = Ceiling(f, pick_ms, f.gbs(Lane::kPull), f.gbs(Lane::kCpu));
    std::printf(
        "[%s] %u rows: %.3f ms median (%.3f min, %.3f max), %.1f tok/s | hit %.3f pull %.3f cpu %.3f "
        "| MB/window hit %.0f pull %.0f cpu %.0f | lane ms %.2f %.2f %.2f (pull %.1f, cpu %.1f GB/s)\n",
        label_.c_str(), n_rows, median, f.ms.front(), f.ms.back(), 1e3 * tokens / median,
        f.share(Lane::kHit), f.share(Lane::kPull), f.share(Lane::kCpu), f.mb(Lane::kHit),
        f.mb(Lane::kPull), f.mb(Lane::kCpu), f.lane_ms(Lane::kHit), f.lane_ms(Lane::kPull),
        f.lane_ms(Lane::kCpu), f.gbs(Lane::kPull), f.gbs(Lane::kCpu));
    std::printf(
        "    ceiling with each lane's own rate (link probe %.1f, cpu alone %.1f GB/s; pulls alone "
        "%.1f): %.2f ms, ratio %.2f, with launch floor of %.2f ms %.2f | with rates inside the window: "
        "%.2f ms, ratio %.2f, with launch floor %.2f\n",
        probe, cpu_alone, pull_alone, own, own / median, floor_ms, (own + floor_ms) / median, inside,
        inside / median, (inside + floor_ms) / median);
  }

  static void PrintStages(const Figures& f) {
    std::printf("    stages, ms (with a stamp behind each):");
    for (uint32_t k = 0; k < kStages; ++k) {
      if (f.stage_ns[k] > 0) std::printf(" %s %.2f", kStageNames[k], f.stage_ns[k] / f.n() / 1e6);
    }
    std::printf("\n");
  }

  static void PrintSwaps(const Figures& f) {
    std::printf("    swaps %.1f, %.1f MB up per window", f.swaps / f.n(), f.uploaded / f.n() / 1e6);
    for (const bool uploads : {false, true}) {
      if (f.ms_by[uploads].empty()) continue;
      std::printf("; %zu windows %s uploads: %.3f ms, pull %.1f GB/s", f.ms_by[uploads].size(),
                  uploads ? "with" : "without", f.ms_by[uploads][f.ms_by[uploads].size() / 2],
                  f.pull_ns_by[uploads] > 0 ? f.pull_bytes_by[uploads] / f.pull_ns_by[uploads] : 0);
    }
    std::printf("\n");
  }

  const std::string model_;
  const Settings s_;
  std::string folder_, label_;
  std::unique_ptr<ModelSource> source_;
  std::unique_ptr<Supervisor> supervisor_;
  std::shared_ptr<const GpuLink> link_;
  std::map<std::string, std::string> facts_;
  std::vector<double> expert_mb_;  // [layer]
  Tunables tunables_ = {};
  uint64_t window_ = 0, epoch_ = 0, tunables_epoch_ = 1;
  uint32_t position_ = 0;
};

Status Main(int argc, char** argv) {
  Settings settings = {{"device", "cuda"}, {"rows", "1,4"},  {"windows", "40"},
                       {"vram", "0"},      {"workers", "1"}, {"threads", "0"}, {"use", "0"},
                       {"share", "-1"},    {"split", "fixed"}, {"tier", "decayed_lfu"},
                       {"hbm_gbs", "4290"}, {"name", "bench"},
                       {"staging", std::to_string(Options{}.pull_staging)}};
  for (int i = 2; i < argc; ++i) {
    const std::string arg = argv[i];
    const size_t equals = arg.find('=');
    if (equals == std::string::npos || !settings.count(arg.substr(0, equals)))
      return InvalidArgument("'{}' is no key=value of this program", arg);
    settings[arg.substr(0, equals)] = arg.substr(equals + 1);
  }
  LODE_RETURN_IF_ERROR(CheckLists(settings));
  Bench bench(argv[1], settings);
  LODE_RETURN_IF_ERROR(bench.Start());
  return bench.RunAll();
}

}  // namespace
}  // namespace lode

int main(int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-') {
    std::fprintf(stderr, "usage: window_bench MODEL [key=value...]; keys: the head of tests/bench/window_bench.cc\n");
    return 2;
  }
  signal(SIGPIPE, SIG_IGN);
  const lode::Status status = lode::Main(argc, argv);
  if (!status.ok()) std::printf("failed: %s\n", lode::Message(status).c_str());
  return status.ok() ? 0 : 1;
}
