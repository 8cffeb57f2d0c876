// The CPU lane taken apart: a real CPU worker (arena, pool, worker loop, product kernels) answers
// jobs that this program rings in the device's place, and the time from bell to answer is split
// into its parts. No card, no daemon. Jobs have the flagship's shape: a random number of distinct
// experts around a mean, drawn from an arena that no cache holds, and rows as a trained router
// shares them. Ways of cutting a job answer the same jobs in turn, round by round, and must give
// the same bits.
//
//   lane_bench [pack=q2_0] [layers=8] [threads=14] [experts=13.2] [rows=4] [jobs=200] [rounds=3]
//              [gap=100] [stride=1] [ids=512] [cut=2/1/24]
//
// threads, experts, cut are lists with commas. gap: us between two jobs. stride: thread t runs on
// CPU t * stride. ids: experts of a layer that are drawn from (few: the weights come from a cache).
// cut: shares / quarters of an expert / KiB of job_chunks.h. Needs a CPU more than threads and, with
// 8 layers, 6 GB; on a small machine: threads=1 experts=5 layers=1 ids=32 jobs=20 rounds=1. Columns,
// us of a job: bell to the job seen; its check; its cut into chunks; a thread's first chunk (mean,
// slowest); gate and up; hidden vectors quantised; down; waiting for a hidden vector; between chunks;
// a thread's end to the last one's (mean, first); acknowledgement; GB/s inside the products; chunks.
// Figures count only on a quiet machine.
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu_worker/job_check.h"
#include "cpu_worker/lane_trace.h"
#include "cpu_worker/weight_store.h"
#include "cpu_worker/worker_loop.h"
#include "kernels/kernel_table.h"
#include "shared/pool/node_pool.h"
#include "shared/shm/segment.h"
#include "shared/wire/segment_headers.h"

namespace lode {
namespace {

constexpr uint32_t kGeneration = 7;
constexpr uint64_t kSpinNs = 200'000;  // as the daemon sets it
constexpr uint64_t kPatienceNs = 2'000'000'000;
constexpr uint32_t kWarmups = 10;
constexpr uint32_t kJobsPerHash = 8;  // hashing takes as long as a job
// How many rows of a window of four name one expert: 1.31 in the mean, as bench routing has it.
constexpr double kRowShares[] = {0.78, 0.15, 0.05, 0.02};
constexpr double kCountSpread = 0.5;  // variance of the number of experts, in parts of its mean
constexpr uint32_t kLooksPerClock = 4096;
constexpr uint32_t kPausesPerLook = 16;  // a look over PCIe takes a microsecond
constexpr double kNsPerUs = 1e3;
constexpr uint32_t kSteps = 4;

using Settings = std::map<std::string, std::string>;

std::vector<double> Numbers(const std::string& list, char separator) {
  std::vector<double> values;
  for (const char* p = list.c_str(); *p != '\0';) {
    char* end = nullptr;
    values.push_back(std::strtod(p, &end));
    if (end == p) break;
    p = *end == separator ? end + 1 : end;
  }
  return values;
}

// One way of cutting, and sums over its jobs in us.
struct Variant {
  std::string name;
  ChunkRule rule;
  uint32_t jobs = 0;
  double bell = 0, check = 0, cut = 0, start = 0, start_max = 0, work[kSteps] = {}, between = 0;
  double tail = 0, tail_max = 0, ack = 0, bytes = 0, down_bytes = 0, chunks = 0;
  std::vector<double> totals;
  std::vector<uint64_t> hashes;
};

class Bench {
 public:
  explicit Bench(const Settings& s) : s_(s) {}

  Status Start() {
    const std::string model =
        "synth:qwen3.8-flash-next,pack=" + s_.at("pack") + ",layers=" + s_.at("layers");
    LODE_ASSIGN_OR_RETURN(source_, ModelSource::Open(model));
    const ModelConfig& c = source_->config();
    layout_.shape = {c.hidden, c.expert_width, c.experts_used, 1};
    LODE_ASSIGN_OR_RETURN(exchange_, Segment::Create("exchange", layout_.bytes()));
    InitExchange(*exchange_, layout_.shape, 0);
    LODE_ASSIGN_OR_RETURN(const ArenaLayout arena, ComputeArenaLayout(*source_, 0, 1));
    LODE_ASSIGN_OR_RETURN(std::unique_ptr<Segment> memory, Segment::Create("arena", arena.bytes));
    cores_ = static_cast<uint32_t>(std::max(1l, sysconf(_SC_NPROCESSORS_ONLN)));
    WeightStoreOptions options;
    options.reader_threads = std::max(2u, cores_);
    LODE_ASSIGN_OR_RETURN(store_, WeightStore::Open(*source_, Fd(dup(memory->fd())), options));
    const std::atomic<bool> never{false};
    LODE_RETURN_IF_ERROR(store_->Load([](const std::string&, uint64_t, uint64_t) {}, never));
    std::printf("%s: %.1f GB, pages %s; %u CPUs, isa %s\n", model.c_str(),
                static_cast<double>(arena.bytes) / 1e9, store_->facts().at("pages").c_str(), cores_,
                Table()->name);
    MakeActivations();
    return OkStatus();
  }

  Status Run() {
    for (const double experts : Numbers(s_.at("experts"), ',')) {
      for (const double threads : Numbers(s_.at("threads"), ','))
        LODE_RETURN_IF_ERROR(RunShape(experts, static_cast<uint32_t>(threads)));
    }
    return OkStatus();
  }

 private:
  double Number(const char* key) const { return std::strtod(s_.at(key).c_str(), nullptr); }
  ExchangeHeader& header() { return *exchange_->As<ExchangeHeader>(); }
  static const KernelTable* Table() { return FindKernelTable("auto", nullptr); }

  // Every quantised form of random rows; copied anew for every job, as the device writes them.
  void MakeActivations() {
    std::mt19937 rng(1);
    std::normal_distribution<float> normal(0.0f, 1.0f);
    acts_.assign(kWindowRowsMax * layout_.act_row_bytes(), 0);
    std::vector<float> x(layout_.shape.hidden);
    for (uint32_t r = 0; r < kWindowRowsMax; ++r) {
      for (float& v : x) v = normal(rng);
      for (uint32_t form = 1; form < ExchangeLayout::kForms; ++form) {
        const ActLayout a = FormLayout(form);
        uint8_t* q = acts_.data() + r * layout_.act_row_bytes() + layout_.form_offset(form);
        Table()->quantize(x.data(), x.size(), a.block_len, reinterpret_cast<int8_t*>(q),
                          reinterpret_cast<float*>(q + a.d_offset()),
                          reinterpret_cast<int16_t*>(q + a.sum16_offset()));
      }
    }
  }
  ActLayout FormLayout(uint32_t form) const {
    return {layout_.shape.hidden, form == 1 ? 32u : form == 2 ? 64u : 256u};
  }

  // The index decides everything but the tag, which is never used twice: a flag that another way of
  // cutting left behind would be taken for this job's.
  ExpertJob MakeJob(uint32_t index, double mean_experts) {
    std::mt19937 rng(index * 7919 + 17);
    ExpertJob job = {};
    job.layer = index % static_cast<uint32_t>(store_->layout().layers.size());
    job.tag = JobTag(kGeneration, ++window_, job.layer);
    job.n_rows = static_cast<uint32_t>(Number("rows"));
    const LayerExperts& layer = store_->layout().layers[job.layer];
    job.act_forms = ActFormOf(layer.gate, false) | ActFormOf(layer.up, false);
    const IsaChoice* tables = nullptr;
    for (size_t i = 0, n = IsaChoices(&tables); i < n; ++i) {
      if (tables[i].table == Table()) job.isa[0] = static_cast<uint32_t>(i);
    }
    std::normal_distribution<double> count(mean_experts, std::sqrt(mean_experts * kCountSpread));
    const long most = kJobExpertsMax;
    const size_t n = static_cast<size_t>(std::clamp(std::lround(count(rng)), 1l, most));
    std::vector<uint16_t> ids(std::clamp<size_t>(static_cast<size_t>(Number("ids")), n,
                                                 std::max<size_t>(n, store_->layout().experts)));
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<uint16_t>(i);
    uint32_t used[kWindowRowsMax] = {};
    std::discrete_distribution<uint32_t> shares(std::begin(kRowShares), std::end(kRowShares));
    for (size_t j = 0; j < n; ++j) {
      std::swap(ids[j], ids[j + rng() % (ids.size() - j)]);
      JobExpert& e = job.experts[job.n_experts];
      e = {};
      e.expert = ids[j];
      const uint32_t wanted = std::min(job.n_rows, shares(rng) + 1);
      const uint32_t first = static_cast<uint32_t>(rng() % job.n_rows);
      for (uint32_t k = 0; k < job.n_rows; ++k) {
        const uint32_t r = (first + k) % job.n_rows;
        if (used[r] == layout_.shape.experts_used) continue;
        if (std::popcount(e.rows) == static_cast<int>(wanted)) break;
        e.rows |= RowMask{1} << r;
        e.order[r] = static_cast<uint8_t>(used[r]++);
      }
      if (e.rows != 0) ++job.n_experts;
    }
    return job;
  }

  // One job rung and awaited as the device does; when the answer was seen.
  StatusOr<uint64_t> Ask(const ExpertJob& job, uint64_t* rung) {
    for (uint32_t form = 1; form < ExchangeLayout::kForms; ++form) {
      if ((job.act_forms >> form & 1) == 0) continue;
      for (uint32_t r = 0; r < job.n_rows; ++r) {
        const size_t at = r * layout_.act_row_bytes() + layout_.form_offset(form);
        std::memcpy(exchange_->data() + layout_.acts_offset(job.layer & 1) + at, acts_.data() + at,
                    FormLayout(form).bytes());
      }
    }
    std::memcpy(&header().jobs[job.layer & 1], &job,
                offsetof(ExpertJob, experts) + job.n_experts * sizeof(JobExpert));
    const WorkerLine& line = header().workers[0];
    *rung = NowNs();
    header().bell.value.store(job.tag, std::memory_order_release);
    for (uint32_t i = 1; line.ack.value.load(std::memory_order_acquire) != job.tag; ++i) {
      for (uint32_t k = 0; k < kPausesPerLook; ++k) SpinPause();
      if (i % kLooksPerClock == 0 && NowNs() - *rung > kPatienceNs)
        return Internal("no answer to job {:#x}", job.tag);
    }
    const uint64_t now = NowNs();
    if (line.status.load() != 0)
      return Internal("job {:#x} ended with status {}", job.tag, line.status.load());
    return now;
  }

  // FNV-1a over all result vectors of the job, in lanes: threads go to sleep if it takes long.
  uint64_t HashResults(const ExpertJob& job) const {
    constexpr uint32_t kHashLanes = 8;
    constexpr uint64_t kBasis = 14695981039346656037ull, kPrime = 1099511628211ull;
    uint64_t lanes[kHashLanes], hash = kBasis;
    std::fill(std::begin(lanes), std::end(lanes), kBasis);
    for (uint32_t j = 0; j < job.n_experts; ++j) {
      for (uint32_t r = 0; r < job.n_rows; ++r) {
        if ((job.experts[j].rows >> r & 1) == 0) continue;
        const size_t index = size_t{r} * layout_.shape.experts_used + job.experts[j].order[r];
        const uint32_t* y = reinterpret_cast<const uint32_t*>(
                                exchange_->data() + layout_.result_offset(job.layer & 1)) +
                            index * layout_.shape.hidden;
        for (uint32_t i = 0; i < layout_.shape.hidden; i += kHashLanes) {
          for (uint32_t k = 0; k < kHashLanes; ++k) lanes[k] = (lanes[k] ^ y[i + k]) * kPrime;
        }
      }
    }
    for (const uint64_t lane : lanes) hash = (hash ^ lane) * kPrime;
    return hash;
  }

  Status RunShape(double experts, uint32_t threads) {
    std::vector<Variant> variants;
    for (const char* p = s_.at("cut").c_str(); p != nullptr && *p != '\0';) {
      const char* end = std::strchr(p, ',');
      Variant v;
      v.name = end != nullptr ? std::string(p, end) : std::string(p);
      const std::vector<double> n = Numbers(v.name, '/');
      if (n.size() != 3) return InvalidArgument("cut '{}': wanted shares/quarters/KiB", v.name);
      v.rule = {static_cast<uint32_t>(n[0]), static_cast<uint32_t>(n[1]),
                static_cast<uint32_t>(n[2] * 1024)};
      variants.push_back(v);
      p = end != nullptr ? end + 1 : nullptr;
    }
    for (uint32_t round = 0; round < static_cast<uint32_t>(Number("rounds")); ++round) {
      for (Variant& v : variants) LODE_RETURN_IF_ERROR(RunRound(experts, threads, round, &v));
    }
    bool same = true;
    for (const Variant& v : variants) same = same && v.hashes == variants[0].hashes;
    std::printf("\n%g experts, %s rows, %u threads, %u jobs each; bits: %s\n", experts,
                s_.at("rows").c_str(), threads, variants[0].jobs, same ? "alike" : "DIFFERENT");
    Print(&variants);
    return same ? OkStatus() : Internal("ways of cutting give different bits");
  }

  // The worker's thread: as cpu_worker.cc makes pool and loop.
  void Serve(uint32_t threads, const ChunkRule& rule, LaneTrace* trace,
             const std::atomic<bool>& stop, std::atomic<bool>* ready) {
    NodePoolOptions pool_options;
    pool_options.threads = threads;
    pool_options.spin_ns = kSpinNs;
    for (uint32_t t = 0; t < threads; ++t)
      pool_options.cpus.push_back(t * static_cast<uint32_t>(Number("stride")) % cores_);
    auto pool = NodePool::Start(pool_options);
    if (!pool.ok()) {
      std::fprintf(stderr, "%s\n", Message(pool.status()).c_str());
      std::abort();
    }
    WorkerLoopOptions o;
    o.generation = kGeneration;
    o.spin_ns = kSpinNs;
    o.bell_never_wakes = true;
    o.runner.shape = layout_.shape;
    o.runner.trace = trace;
    o.runner.chunks = rule;
    WorkerLoop loop(store_->layout(), store_->data(), exchange_->data(), pool->get(), o, stop);
    loop.Announce();
    ready->store(true);
    loop.Run();
  }

  Status RunRound(double experts, uint32_t threads, uint32_t round, Variant* v) {
    const uint32_t jobs = static_cast<uint32_t>(Number("jobs")) + kWarmups;
    const uint64_t gap_ns = static_cast<uint64_t>(Number("gap") * kNsPerUs);
    LaneTrace trace(threads);
    std::atomic<bool> stop{false}, ready{false};
    std::thread worker([&] { Serve(threads, v->rule, &trace, stop, &ready); });
    cpu_set_t last;
    CPU_ZERO(&last);
    CPU_SET(cores_ - 1, &last);
    pthread_setaffinity_np(pthread_self(), sizeof(last), &last);
    while (!ready) SpinPause();
    Publish(header().window_epoch, header().window_epoch.value.load() | 1);
    Status status = OkStatus();
    for (uint32_t i = 0; i < jobs && status.ok(); ++i) {
      const ExpertJob job = MakeJob(round * jobs + i, experts);
      for (const uint64_t until = NowNs() + gap_ns; NowNs() < until;) SpinPause();
      trace.Clear();
      uint64_t rung = 0;
      const auto answered = Ask(job, &rung);
      status = answered.status();
      if (status.ok() && i >= kWarmups) Account(job, trace, rung, *answered, v);
      if (i % kJobsPerHash == 0) v->hashes.push_back(HashResults(job));
    }
    Publish(header().window_epoch, (header().window_epoch.value.load() | 1) + 1);
    stop = true;
    worker.join();
    return status;
  }

  void Account(const ExpertJob& job, const LaneTrace& trace, uint64_t rung, uint64_t answered,
               Variant* v) const {
    const auto us = [](uint64_t from, uint64_t to) {
      return (static_cast<double>(to) - static_cast<double>(from)) / kNsPerUs;
    };
    const double n = static_cast<double>(trace.threads.size());
    double starts = 0, start_max = 0, tails = 0, tail_max = 0, work = 0;
    for (const LaneTrace::Thread& thread : trace.threads) {
      const bool idle = thread.events.empty();
      const double start = us(trace.open_ns, idle ? trace.end_ns : thread.events.front().begin_ns);
      const double tail = idle ? 0 : us(thread.events.back().end_ns, trace.end_ns);
      starts += start;
      start_max = std::max(start_max, start);
      tails += tail;
      tail_max = std::max(tail_max, tail);
      for (const LaneTrace::Event& e : thread.events) {
        v->work[static_cast<uint32_t>(e.step)] += us(e.begin_ns, e.end_ns) / n;
        work += us(e.begin_ns, e.end_ns);
        v->chunks += e.step == LaneStep::kGateUp || e.step == LaneStep::kDown;
      }
    }
    const LayerExperts& layer = store_->layout().layers[job.layer];
    const double gate_up_bytes = static_cast<double>(uint64_t{layout_.shape.expert_width} *
                                                     (layer.gate_row_bytes + layer.up_row_bytes));
    const double down_bytes =
        static_cast<double>(uint64_t{layout_.shape.hidden} * layer.down_row_bytes);
    ++v->jobs;
    v->totals.push_back(us(rung, answered));
    v->bell += us(rung, trace.bell_ns);
    v->check += us(trace.bell_ns, trace.run_ns);
    v->cut += us(trace.run_ns, trace.open_ns);
    v->start += starts / n;
    v->start_max += start_max;
    v->between += us(trace.open_ns, trace.end_ns) - (starts + tails + work) / n;
    v->tail += tails / n;
    v->tail_max += tail_max;
    v->ack += us(trace.end_ns, answered);
    v->bytes += job.n_experts * (gate_up_bytes + down_bytes);
    v->down_bytes += job.n_experts * down_bytes;
  }

  // us per job, means. bell: until the loop sees it; check: job copied and checked; cut: chunks
  // listed; start, max: from there to a thread's first chunk, mean and slowest; gate+up, quant.,
  // down, wait: a thread's work and its waits for hidden vectors, mean; between: the rest between a
  // thread's first and last chunk; tail, max: from its last chunk to the end; ack: until the answer
  // is seen. GB/s: of the whole; of gate+up and of down while threads work on them.
  static void Print(std::vector<Variant>* variants) {
    std::printf(
        "%-10s %6s %6s %5s | %4s %5s %4s %5s %5s | %7s %6s %6s %5s %7s | %5s %5s %4s | %5s "
        "%5s %6s\n",
        "cut", "mean", "median", "GB/s", "bell", "check", "cut", "start", "max", "gate+up",
        "quant.", "down", "wait", "between", "tail", "max", "ack", "g+u", "down", "chunks");
    for (Variant& v : *variants) {
      const double n = v.jobs;
      double total = 0;
      for (const double t : v.totals) total += t;
      const auto middle = v.totals.begin() + static_cast<ptrdiff_t>(v.totals.size() / 2);
      std::nth_element(v.totals.begin(), middle, v.totals.end());
      const auto rate = [](double bytes, double us) {
        return bytes / std::max(us, 1.0) / kNsPerUs;
      };
      std::printf(
          "%-10s %6.1f %6.1f %5.1f | %4.2f %5.2f %4.2f %5.2f %5.2f | %7.1f %6.2f %6.1f "
          "%5.2f %7.2f | %5.2f %5.2f %4.2f | %5.1f %5.1f %6.1f\n",
          v.name.c_str(), total / n, *middle, rate(v.bytes, total), v.bell / n, v.check / n,
          v.cut / n, v.start / n, v.start_max / n, v.work[0] / n, v.work[1] / n, v.work[2] / n,
          v.work[3] / n, v.between / n, v.tail / n, v.tail_max / n, v.ack / n,
          rate(v.bytes - v.down_bytes, v.work[0]), rate(v.down_bytes, v.work[2]), v.chunks / n);
    }
    std::fflush(stdout);
  }

  const Settings s_;
  std::unique_ptr<ModelSource> source_;
  ExchangeLayout layout_ = {};
  std::unique_ptr<Segment> exchange_;
  std::unique_ptr<WeightStore> store_;
  std::vector<uint8_t> acts_;
  uint32_t cores_ = 1;
  uint64_t window_ = 0;
};

}  // namespace
}  // namespace lode

int main(int argc, char** argv) {
  lode::Settings s = {{"pack", "q2_0"}, {"layers", "8"}, {"threads", "14"}, {"experts", "13.2"},
                      {"rows", "4"},    {"jobs", "200"}, {"rounds", "3"},   {"gap", "100"},
                      {"stride", "1"},  {"ids", "512"},  {"cut", "2/1/24"}};
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    const size_t eq = arg.find('=');
    if (eq == std::string::npos || s.count(arg.substr(0, eq)) == 0) {
      std::fprintf(stderr, "lane_bench: no such argument: %s\n", argv[i]);
      return 2;
    }
    s[arg.substr(0, eq)] = arg.substr(eq + 1);
  }
  const double rows = std::strtod(s["rows"].c_str(), nullptr);
  if (!(rows >= 1 && rows <= lode::kWindowRowsMax)) {
    std::fprintf(stderr, "lane_bench: rows must be 1..%u\n", lode::kWindowRowsMax);
    return 2;
  }
  lode::Bench bench(s);
  lode::Status status = bench.Start();
  if (status.ok()) status = bench.Run();
  std::printf("lane_bench: %s\n", status.ok() ? "PASS" : lode::Message(status).c_str());
  return status.ok() ? 0 : 1;
}
