// The CPU lane taken apart: a real CPU worker (arena, pool, worker loop, product kernels) answers
// jobs that this program rings in the device's place, and the time from bell to answer is split into
// its parts. No GPU, no daemon. Jobs have the flagship's shape: a random number of distinct experts
// per layer around a mean, drawn from an arena that no cache holds, routed by one to four rows with
// the shares of a trained router. All variants answer the same jobs in turn, round by round, and
// must give the same bits.
//
//   lane_bench [pack=q2_0] [layers=8] [threads=14] [experts=13.2] [rows=4] [jobs=200] [rounds=3]
//              [gap=100] [variant=NAME,...]     lists: threads, experts; gap: us between two jobs
//
// Columns, us per job: see Print. Figures count only on a quiet machine.
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
#include "shared/base/log.h"
#include "shared/pool/node_pool.h"
#include "shared/shm/segment.h"
#include "shared/wire/segment_headers.h"

namespace lode {
namespace {

constexpr uint32_t kGeneration = 7;
constexpr uint64_t kSpinNs = 200'000;  // as the daemon sets it
constexpr uint64_t kPatienceNs = 2'000'000'000;
// How many rows of a window of four name one expert: 1.31 in the mean, as bench routing has it.
constexpr double kRowShares[] = {0.78, 0.15, 0.05, 0.02};
constexpr double kNsPerUs = 1e3;

using Settings = std::map<std::string, std::string>;

struct Variant {
  std::string name;
  bool flow;
  ChunkRule rule;
  bool prefetch = true;
  uint32_t progress_every = 8;
  const KernelTable* table = nullptr;
};

std::atomic<uint64_t> sink;
// Reads the weights and computes nothing; asks for the next piece as the products do.
void ReadOnly(const MatArgs& m) {
  const uint8_t* const end = m.w + size_t{m.n_rows} * m.row_bytes;
  const uint8_t* const last = end - std::min<size_t>(size_t{kRowGranule} * m.row_bytes, static_cast<size_t>(end - m.w));
  uint64_t sum = 0;
  const auto read = [&](const uint8_t* from, const uint8_t* to) {
    for (; from + 64 <= to; from += 64) {
      uint64_t x;
      std::memcpy(&x, from, 8);
      sum += x;
    }
  };
  read(m.w, last);
  const uint8_t* next = m.next != nullptr ? m.next(m.next_context) : nullptr;
  if (next != nullptr) for (size_t i = 0; i < 4096; i += 64) __builtin_prefetch(next + i, 0, 2);
  read(last, end);
  if (sum == 0x123456789) sink.store(sum);
  for (uint32_t a = 0; a < m.n_acts; ++a) std::memset(m.out[a], 0, m.n_rows * sizeof(float));
}
// The products as they are, the second time from the cache: their arithmetic alone.
KernelTable ReadTable() {
  KernelTable t = *FindKernelTable("auto", nullptr);
  for (MatFn& f : t.mat) f = &ReadOnly;
  return t;
}
const KernelTable kRead = ReadTable();

struct Times {  // sums over jobs, us
  double total = 0, seen = 0, checked = 0, open = 0, start_mean = 0, start_max = 0, gate_up = 0,
         quantise = 0, down = 0, waited = 0, gaps = 0, tail_mean = 0, tail_max = 0, ack = 0, bytes = 0,
         down_bytes = 0, chunks = 0;
  uint32_t jobs = 0;
  std::vector<double> totals;
};

void Pin(uint32_t cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
}

void SpinUntil(uint64_t ns) {
  while (NowNs() < ns) SpinPause();
}

class Bench {
 public:
  explicit Bench(Settings s) : s_(std::move(s)) {}

  Status Start() {
    const std::string model = "synth:qwen3.8-flash-next,pack=" + s_.at("pack") + ",layers=" + s_.at("layers");
    LODE_ASSIGN_OR_RETURN(source_, ModelSource::Open(model));
    const ModelConfig& c = source_->config();
    layout_.shape = {c.hidden, c.expert_width, c.experts_used, 1};
    LODE_ASSIGN_OR_RETURN(exchange_, Segment::Create("exchange", layout_.bytes()));
    InitExchange(*exchange_, layout_.shape, 0);
    LODE_ASSIGN_OR_RETURN(const ArenaLayout arena, ComputeArenaLayout(*source_, 0, 1));
    LODE_ASSIGN_OR_RETURN(std::unique_ptr<Segment> memory, Segment::Create("arena", arena.bytes));
    cores_ = static_cast<uint32_t>(sysconf(_SC_NPROCESSORS_ONLN));
    WeightStoreOptions options;
    options.reader_threads = std::max(2u, cores_);
    LODE_ASSIGN_OR_RETURN(store_, WeightStore::Open(*source_, Fd(dup(memory->fd())), options));
    const uint64_t begin = NowNs();
    std::atomic<bool> never{false};
    LODE_RETURN_IF_ERROR(store_->Load([](const std::string&, uint64_t, uint64_t) {}, never));
    std::printf("%s: %.1f GB, pages %s, made in %.1f s; %u CPUs, isa %s\n", model.c_str(),
                static_cast<double>(arena.bytes) / 1e9, store_->facts().at("pages").c_str(),
                static_cast<double>(NowNs() - begin) / 1e9, cores_, FindKernelTable("auto", nullptr)->name);
    MakeActivations();
    return OkStatus();
  }

  Status Again(const std::string& line, const Variant* all, size_t n_all) {
    std::string variant;
    for (size_t at = 0; at < line.size();) {
      const size_t end = std::min(line.find(' ', at), line.size()), eq = line.find('=', at);
      const std::string key = line.substr(at, eq - at), value = line.substr(eq + 1, end - eq - 1);
      s_[key] = value;
      at = end + 1;
    }
    std::printf("\n---- %s", line.c_str());
    std::vector<Variant> variants;
    for (size_t i = 0; i < n_all; ++i) {
      if (s_["variant"].empty() || ("," + s_["variant"] + ",").find("," + all[i].name + ",") != std::string::npos) variants.push_back(all[i]);
    }
    return Run(variants);
  }
  Status Run(const std::vector<Variant>& variants) {
    for (const double experts : Numbers("experts")) {
      for (const double threads : Numbers("threads")) {
        LODE_RETURN_IF_ERROR(RunShape(variants, experts, static_cast<uint32_t>(threads)));
      }
    }
    return OkStatus();
  }

 private:
  std::vector<double> Numbers(const char* key) const {
    std::vector<double> values;
    for (const char* p = s_.at(key).c_str(); *p != '\0';) {
      char* end = nullptr;
      values.push_back(std::strtod(p, &end));
      if (end == p) break;
      p = *end == ',' ? end + 1 : end;
    }
    return values;
  }
  ExchangeHeader& header() { return *exchange_->As<ExchangeHeader>(); }

  // Every quantised form of random rows; copied anew for every job, as the device writes them anew.
  void MakeActivations() {
    std::mt19937 rng(1);
    std::normal_distribution<float> normal(0.0f, 1.0f);
    const KernelTable* table = FindKernelTable("scalar", nullptr);
    acts_.assign(kWindowRowsMax * layout_.act_row_bytes(), 0);
    std::vector<float> x(layout_.shape.hidden);
    for (uint32_t r = 0; r < kWindowRowsMax; ++r) {
      for (float& v : x) v = normal(rng);
      uint8_t* base = acts_.data() + r * layout_.act_row_bytes();
      const uint32_t blocks[] = {32, 64, 256};
      for (uint32_t f = 0; f < 3; ++f) {
        const ActLayout a = {layout_.shape.hidden, blocks[f]};
        uint8_t* q = base + layout_.form_offset(f + 1);
        table->quantize(x.data(), x.size(), blocks[f], reinterpret_cast<int8_t*>(q),
                        reinterpret_cast<float*>(q + a.d_offset()),
                        reinterpret_cast<int16_t*>(q + a.sum16_offset()));
      }
    }
  }

  ExpertJob MakeJob(uint32_t index, double mean_experts, uint32_t n_rows) {
    std::mt19937 rng(index * 7919 + 17);
    ExpertJob job = {};
    job.layer = index % static_cast<uint32_t>(store_->layout().layers.size());
    // No tag is ever used twice: a stale flag of another variant would be taken for this job's.
    job.tag = JobTag(kGeneration, ++window_, job.layer);
    job.n_rows = n_rows;
    const LayerExperts& layer = store_->layout().layers[job.layer];
    job.act_forms = ActFormOf(layer.gate, false) | ActFormOf(layer.up, false);
    const IsaChoice* tables = nullptr;
    const size_t n_tables = IsaChoices(&tables);
    for (size_t i = 0; i < n_tables; ++i) {
      if (tables[i].table == FindKernelTable("auto", nullptr)) job.isa[0] = static_cast<uint32_t>(i);
    }
    std::normal_distribution<double> spread(mean_experts, std::sqrt(mean_experts * 0.5));
    uint32_t n = static_cast<uint32_t>(std::clamp(std::lround(spread(rng)), 1l, 80l));
    std::vector<uint16_t> ids(store_->layout().experts);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<uint16_t>(i);
    uint32_t used[kWindowRowsMax] = {};
    std::discrete_distribution<uint32_t> shares(std::begin(kRowShares), std::end(kRowShares));
    for (uint32_t j = 0; j < n; ++j) {
      std::swap(ids[j], ids[j + rng() % (ids.size() - j)]);
      JobExpert& e = job.experts[job.n_experts];
      e = {};
      e.expert = ids[j];
      uint32_t wanted = std::min(n_rows, shares(rng) + 1);
      for (uint32_t k = 0, r = rng() % n_rows; k < n_rows && wanted > 0; ++k, r = (r + 1) % n_rows) {
        if (used[r] == layout_.shape.experts_used) continue;
        e.rows |= 1u << r;
        e.order[r] = static_cast<uint8_t>(used[r]++);
        --wanted;
      }
      if (e.rows != 0) ++job.n_experts;
    }
    return job;
  }

  // One job rung and awaited as the device does; ns from bell to answer.
  StatusOr<uint64_t> Ask(const ExpertJob& job, uint64_t* rung) {
    uint8_t* to = exchange_->data() + layout_.acts_offset(job.layer & 1);
    const uint32_t form = static_cast<uint32_t>(std::countr_zero(job.act_forms));
    const size_t at = layout_.form_offset(form);
    const size_t bytes = ActLayout{layout_.shape.hidden, form == 1 ? 32u : form == 2 ? 64u : 256u}.bytes();
    for (uint32_t r = 0; r < job.n_rows; ++r) {
      std::memcpy(to + r * layout_.act_row_bytes() + at, acts_.data() + r * layout_.act_row_bytes() + at, bytes);
    }
    std::memcpy(&header().jobs[job.layer & 1], &job,
                offsetof(ExpertJob, experts) + job.n_experts * sizeof(JobExpert));
    *rung = NowNs();
    header().bell.value.store(job.tag, std::memory_order_release);
    for (uint32_t i = 0; header().workers[0].ack.value.load(std::memory_order_acquire) != job.tag; ++i) {
      for (int k = 0; k < 16; ++k) SpinPause();  // a look over PCIe takes a microsecond
      if (i % 4096 == 0 && NowNs() - *rung > kPatienceNs) return Internal("no answer to job {:#x}", job.tag);
    }
    const uint64_t now = NowNs();
    if (header().workers[0].status.load() != 0) return Internal("job {:#x}: status {}", job.tag, header().workers[0].status.load());
    return now;
  }

  uint64_t HashResults(const ExpertJob& job) const {
    uint64_t hash = 14695981039346656037ull;
    for (uint32_t j = 0; j < job.n_experts; ++j) {
      for (uint32_t r = 0; r < job.n_rows; ++r) {
        if ((job.experts[j].rows >> r & 1) == 0) continue;
        const size_t index = size_t{r} * layout_.shape.experts_used + job.experts[j].order[r];
        const uint32_t* y = reinterpret_cast<const uint32_t*>(exchange_->data() + layout_.result_offset(job.layer & 1)) +
                            index * layout_.shape.hidden;
        for (uint32_t i = 0; i < layout_.shape.hidden; ++i) hash = (hash ^ y[i]) * 1099511628211ull;
      }
    }
    return hash;
  }

  Status RunShape(const std::vector<Variant>& variants, double experts, uint32_t threads) {
    const uint32_t rounds = static_cast<uint32_t>(Numbers("rounds")[0]);
    std::vector<Times> times(variants.size());
    std::vector<uint64_t> hashes;
    bool same = true;
    for (uint32_t round = 0; round < rounds; ++round) {
      for (size_t v = 0; v < variants.size(); ++v) {
        std::vector<uint64_t> got;
        LODE_RETURN_IF_ERROR(RunVariant(variants[v], experts, threads, round, &times[v], &got));
        if (v == 0) hashes = got;
        same = same && (got == hashes || variants[v].table != nullptr);
      }
    }
    std::printf("\n%g experts, %u threads, %u jobs a variant; bits: %s\n", experts, threads, times[0].jobs,
                same ? "all variants alike" : "DIFFERENT");
    Print(variants, times, threads);
    return same ? OkStatus() : Internal("variants give different bits");
  }

  Status RunVariant(const Variant& v, double experts, uint32_t threads, uint32_t round, Times* times,
                    std::vector<uint64_t>* hashes) {
    const uint32_t jobs = static_cast<uint32_t>(Numbers("jobs")[0]), n_rows = static_cast<uint32_t>(Numbers("rows")[0]);
    const uint64_t gap_ns = static_cast<uint64_t>(Numbers("gap")[0] * kNsPerUs);
    LaneTrace trace(threads);
    std::atomic<bool> stop{false}, ready{false};
    Status failed = OkStatus();
    std::thread worker([&] {
      NodePoolOptions pool_options;
      pool_options.threads = threads;
      pool_options.spin_ns = kSpinNs;
      for (uint32_t t = 0; t < threads; ++t) pool_options.cpus.push_back(t * static_cast<uint32_t>(Numbers("stride")[0]) % cores_);
      auto pool = NodePool::Start(pool_options);
      if (!pool.ok()) std::abort();
      WorkerLoopOptions o;
      o.generation = kGeneration;
      o.spin_ns = kSpinNs;
      o.bell_never_wakes = true;
      o.runner.shape = layout_.shape;
      o.runner.trace = &trace;
      o.runner.chunks = v.rule;
      WorkerLoop loop(store_->layout(), store_->data(), exchange_->data(), pool->get(), o, stop);
      loop.Announce();
      ready = true;
      loop.Run();
    });
    Pin(cores_ - 1);
    while (!ready) SpinPause();
    Publish(header().window_epoch, header().window_epoch.value.load() | 1);
    constexpr uint32_t kWarmups = 10;
    for (uint32_t i = 0; i < jobs + kWarmups && failed.ok(); ++i) {
      const ExpertJob job = MakeJob(round * (jobs + kWarmups) + i + 1, experts, n_rows);
      SpinUntil(NowNs() + gap_ns);
      trace.Clear();
      uint64_t rung = 0;
      const auto answered = Ask(job, &rung);
      if (!answered.ok()) failed = answered.status();
      if (failed.ok() && i >= kWarmups) Account(job, trace, rung, *answered, times);
      if (i % 8 == 0) hashes->push_back(HashResults(job));
    }
    Publish(header().window_epoch, (header().window_epoch.value.load() | 1) + 1);
    stop = true;
    worker.join();
    return failed;
  }

  void Account(const ExpertJob& job, const LaneTrace& trace, uint64_t rung, uint64_t answered, Times* t) const {
    const auto us = [](uint64_t from, uint64_t to) { return (static_cast<double>(to) - static_cast<double>(from)) / kNsPerUs; };
    const uint32_t n = static_cast<uint32_t>(trace.threads.size());
    double start_sum = 0, start_max = 0, tail_sum = 0, tail_max = 0, work[4] = {}, chunks = 0;
    for (const LaneTrace::Thread& thread : trace.threads) {
      double start = us(trace.open_ns, trace.end_ns), tail = 0;
      if (!thread.events.empty()) {
        start = us(trace.open_ns, thread.events.front().begin_ns);
        tail = us(thread.events.back().end_ns, trace.end_ns);
      }
      start_sum += start;
      start_max = std::max(start_max, start);
      tail_sum += tail;
      tail_max = std::max(tail_max, tail);
      for (const LaneTrace::Event& e : thread.events) {
        work[static_cast<uint32_t>(e.step)] += us(e.begin_ns, e.end_ns);
        chunks += e.step == LaneStep::kGateUp || e.step == LaneStep::kDown;
      }
    }
    const LayerExperts& layer = store_->layout().layers[job.layer];
    const double down_bytes = double{1} * job.n_experts * layout_.shape.hidden * layer.down_row_bytes;
    const double bytes = double{1} * job.n_experts * layout_.shape.expert_width * (layer.gate_row_bytes + layer.up_row_bytes) + down_bytes;
    ++t->jobs;
    t->total += us(rung, answered);
    t->totals.push_back(us(rung, answered));
    t->seen += us(rung, trace.bell_ns);
    t->checked += us(trace.bell_ns, trace.run_ns);
    t->open += us(trace.run_ns, trace.open_ns);
    t->start_mean += start_sum / n;
    t->start_max += start_max;
    t->gate_up += work[0] / n;
    t->quantise += work[1] / n;
    t->down += work[2] / n;
    t->waited += work[3] / n;
    t->gaps += us(trace.open_ns, trace.end_ns) - (start_sum + tail_sum + work[0] + work[1] + work[2] + work[3]) / n;
    t->tail_mean += tail_sum / n;
    t->tail_max += tail_max;
    t->ack += us(trace.end_ns, answered);
    t->bytes += bytes;
    t->down_bytes += down_bytes;
    t->chunks += chunks;
  }

  // us per job, means. bell: until the loop sees it; check: job copied and checked; cut: list of
  // chunks; start: from there to a thread's first chunk (mean, slowest); gate+up, quantise, down:
  // work, mean of the threads; wait: for hidden vectors; between: everything else between a thread's
  // first and last chunk (claims, barriers); tail: from its last chunk to the end (mean, slowest).
  void Print(const std::vector<Variant>& variants, const std::vector<Times>& times, uint32_t threads) const {
    std::printf("%-16s %7s %7s %6s | %5s %5s %5s %5s %5s | %7s %6s %6s %6s %7s | %6s %6s %5s | %6s %6s %6s\n", "variant", "total",
                "median", "GB/s", "bell", "check", "cut", "start", "max", "gate+up", "quant.", "down", "wait", "between", "tail",
                "max", "ack", "g GB/s", "d GB/s", "chunks");
    for (size_t i = 0; i < variants.size(); ++i) {
      Times t = times[i];
      const double n = t.jobs;
      std::nth_element(t.totals.begin(), t.totals.begin() + static_cast<ptrdiff_t>(t.totals.size() / 2), t.totals.end());
      std::printf("%-16s %7.1f %7.1f %6.1f | %5.2f %5.2f %5.2f %5.2f %5.2f | %7.1f %6.2f %6.1f %6.2f %7.2f | %6.2f %6.2f %5.2f | %6.1f %6.1f %6.1f\n",
                  variants[i].name.c_str(), t.total / n, t.totals[t.totals.size() / 2], t.bytes / t.total / kNsPerUs, t.seen / n,
                  t.checked / n, t.open / n, t.start_mean / n, t.start_max / n, t.gate_up / n, t.quantise / n, t.down / n,
                  t.waited / n, t.gaps / n, t.tail_mean / n, t.tail_max / n, t.ack / n,
                  (t.bytes - t.down_bytes) / t.gate_up / kNsPerUs, t.down_bytes / t.down / kNsPerUs, t.chunks / n);
    }
    std::fflush(stdout);
    (void)threads;
  }

  Settings s_;
  std::unique_ptr<ModelSource> source_;
  ExchangeLayout layout_ = {};
  std::unique_ptr<Segment> exchange_;
  std::unique_ptr<WeightStore> store_;
  std::vector<uint8_t> acts_;
  uint32_t cores_ = 1;
  uint64_t window_ = 0;
};

const Variant kVariants[] = {
    {"phases", false, {}},
    {"flow3", true, {3, 1, 12u << 10}},
    {"flow2", true, {2, 1, 12u << 10}},
    {"flow4", true, {4, 1, 12u << 10}},
    {"flow6", true, {6, 1, 12u << 10}},
    {"flow3-min24", true, {3, 1, 24u << 10}},
    {"flow3-min6", true, {3, 1, 6u << 10}},
    {"flow3-half", true, {3, 2, 12u << 10}},
    {"flow3-whole", true, {3, 4, 12u << 10}},
    {"flow3-nopre", true, {3, 1, 12u << 10}, false},
    {"flow3-prog1", true, {3, 1, 12u << 10}, true, 1},
    {"read", true, {3, 1, 12u << 10}, true, 8, &kRead},
    {"read-phases", false, {}, true, 8, &kRead},
};

int Main(int argc, char** argv) {
  Settings s = {{"pack", "q2_0"}, {"layers", "8"}, {"threads", "14"}, {"experts", "13.2"}, {"rows", "4"},
                {"jobs", "200"}, {"rounds", "3"}, {"gap", "100"}, {"stride", "1"}, {"variant", ""}};
  std::vector<std::string> more;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg.find(' ') != std::string::npos) {
      more.push_back(arg);
      continue;
    }
    const size_t eq = arg.find('=');
    if (eq == std::string::npos || s.count(arg.substr(0, eq)) == 0) {
      std::fprintf(stderr, "unknown argument %s\n", arg.c_str());
      return 2;
    }
    s[arg.substr(0, eq)] = arg.substr(eq + 1);
  }
  std::vector<Variant> variants;
  for (const Variant& v : kVariants) {
    if (s["variant"].empty() || ("," + s["variant"] + ",").find("," + v.name + ",") != std::string::npos) variants.push_back(v);
  }
  Bench bench(s);
  Status status = bench.Start();
  if (status.ok()) status = bench.Run(variants);
  for (int i = 0; i < static_cast<int>(more.size()) && status.ok(); ++i) status = bench.Again(more[static_cast<size_t>(i)], kVariants, std::size(kVariants));
  std::printf("lane_bench: %s\n", status.ok() ? "PASS" : Message(status).c_str());
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace lode

int main(int argc, char** argv) { return lode::Main(argc, argv); }
