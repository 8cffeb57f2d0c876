// See kernel_bench.h. A case is timed as phases of the engine's pool. Weights in memory are one
// long stream of rows: every phase goes on where the last one ended, so that nothing is in a cache
// when it is read, whatever the machine's caches are. Weights in cache are one small piece per
// thread, read again and again. Phases of the product and of the yardstick, plain reads of the same
// pieces, take turns.
#include "cpu_worker/bench/kernel_bench.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <thread>

#include "cpu_worker/bench/blocks.h"
#include "cpu_worker/bench/memory_reader.h"
#include "cpu_worker/page_placement.h"
#include "kernels/canonical.h"
#include "shared/base/limits.h"
#include "shared/pool/node_pool.h"
#include "shared/shm/segment.h"

namespace lode {
namespace {

using bench::Activations;
using bench::MemoryReader;

constexpr uint32_t kCols = 2560;       // the flagship's hidden size; whole blocks of every format
constexpr uint32_t kPatternRows = 64;  // different rows; memory repeats them
constexpr size_t kPieceBytes = 256 << 10;  // of a stream per claim: a chunk of an expert's rows
constexpr size_t kResidentBytes = 192
                                  << 10;  // per thread: fits every second-level cache since 2017
constexpr uint64_t kStreamMin = 256ull << 20, kStreamMax = 2ull << 30;
constexpr uint64_t kStreamLeast = 16ull << 20;  // some pieces for every thread of a small machine
constexpr uint64_t kCacheMultiple = 4;  // a stream this many times the cache leaves nothing in it
constexpr int kRepetitionsMin = 3;
constexpr uint32_t kPhasesPerBudget = 8;  // a phase lasts about this part of a case's time
constexpr uint64_t kSpinNs = 100'000;     // the pool's: between phases of a case nobody sleeps
constexpr double kNsPerSecond = 1e9, kBytesPerGb = 1e9;
constexpr uint32_t kSeed = 42;
constexpr float kNoResult = -1.25e30f;  // no product of ordinary numbers: an unwritten result shows

uint32_t Bits(float x) { return x != x ? 0x7fc00000u : canonical::BitsOf(x); }

std::string CpuName() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) == 0 && line.find(": ") != std::string::npos)
      return line.substr(line.find(": ") + 2);
  }
  return "unknown";
}

uint64_t StreamBytes(const KernelBenchOptions& options) {
  if (options.stream_bytes > 0) return options.stream_bytes;
  const long cache = std::max(0l, sysconf(_SC_LEVEL3_CACHE_SIZE));
  return std::clamp(kCacheMultiple * static_cast<uint64_t>(cache), kStreamMin, kStreamMax);
}

// Does one claim of a phase and returns the bytes that it read.
using ClaimFn = std::function<size_t(uint32_t claim, uint32_t thread, NodePool::Next& next)>;

// Something to be timed: bytes per second of its phases so far.
struct Work {
  ClaimFn claim;
  uint32_t claims = 0;  // of its next phase
  std::vector<double> rates = {};
};

double Median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + static_cast<ptrdiff_t>(v.size() / 2), v.end());
  return v[v.size() / 2];
}

// One phase; its length in ns.
double RunPhase(NodePool* pool, Work* work, double* rate) {
  std::atomic<size_t> bytes{0};
  const uint64_t start = NowNs();
  pool->RunPhase(work->claims, [&](uint32_t c, uint32_t thread, NodePool::Next& next) {
    bytes.fetch_add(work->claim(c, thread, next),
                    std::memory_order_relaxed);  // the phase's end orders
  });
  const double ns = std::max(1.0, static_cast<double>(NowNs() - start));
  *rate = static_cast<double>(bytes.load()) / ns * kNsPerSecond;
  return ns;
}

// Phases of all works in turn, so that a bus that is faster in one minute than in the next is so
// for all of them, until the first one has had its seconds. `done(claims)` is told after every
// phase how many claims it had. A phase grows until its length is a fair part of the budget; only
// full-grown ones count.
void RunInTurn(NodePool* pool, double seconds, std::vector<Work>* works,
               const std::function<void(uint32_t)>& done) {
  const double budget_ns = seconds * kNsPerSecond;
  const uint32_t claims_max = NodePool::kChunksMax / 2 / pool->threads() * pool->threads();
  double rate;
  for (Work& work : *works) {
    work.claims = pool->threads();
    while (RunPhase(pool, &work, &rate) < budget_ns / kPhasesPerBudget &&
           work.claims < claims_max) {
      done(work.claims);
      work.claims = std::min(claims_max, work.claims * 2);
    }
    done(work.claims);
  }
  double spent_ns = 0;
  for (int repetition = 0; repetition < kRepetitionsMin || spent_ns < budget_ns; ++repetition) {
    for (Work& work : *works) {
      const double ns = RunPhase(pool, &work, &rate);
      done(work.claims);
      work.rates.push_back(rate);
      if (&work == &works->front()) spent_ns += ns;
    }
  }
}

// The run: one buffer, filled with the rows of one format after the other.
class Bench {
 public:
  Bench(const KernelBenchOptions& options, const KernelBenchSink& sink)
      : options_(options), sink_(sink) {}
  Status Run();

 private:
  struct Place {  // what a case reads
    bool resident;
    NodePool* pool;
  };

  Status Choose();
  Status MakeMemory();
  Status MeasureFormat(Format format);
  void Fill(const std::vector<uint8_t>& pattern, size_t row_bytes);
  void MeasurePlace(const Place& place);
  ClaimFn Reader(const Place& place, size_t reader);
  ClaimFn BestReader(const Place& place);
  KernelBenchCase Measure(const Place& place, const KernelTable& table, uint32_t n_acts,
                          const ClaimFn& reader);
  double RateOf(const Place& place, const std::vector<double>& rates) const;
  const uint8_t* NextPiece(uint32_t claim) const;

  const KernelBenchOptions options_;
  const KernelBenchSink& sink_;
  KernelBenchMachine machine_;
  std::vector<Format> formats_;
  std::vector<const KernelTable*> tables_;
  std::vector<uint32_t> threads_;
  std::unique_ptr<Segment> memory_;
  std::map<std::pair<uint32_t, bool>, size_t> winners_;  // best reader by threads and residence
  std::atomic<uint64_t> sink_of_reads_{0};               // so that the loads are needed
  // Of the format at hand.
  Format format_ = Format::kF32;
  size_t row_bytes_ = 0;
  uint32_t piece_rows_ = 0, resident_rows_ = 0;  // whole patterns
  uint64_t pieces_ = 0, next_piece_ = 0;
  std::vector<std::vector<float>> expected_;  // [act][pattern row]
};

template <class T>
Status UnknownName(const char* what, const std::string& name, const std::vector<T>& known) {
  return InvalidArgument("{} '{}' is not here; there are: {}", what, name, fmt::join(known, ", "));
}

bool IsIsaName(const IsaChoice* choices, size_t n, const std::string& name) {
  return std::any_of(choices, choices + n,
                     [&](const IsaChoice& c) { return name == c.table->name; });
}

Status Bench::Choose() {
  std::vector<std::string> names;
  for (const FormatInfo& info : kFormats) names.push_back(info.name);
  for (uint32_t i = 0; i < kFormatCount; ++i) {
    if (options_.formats.empty()) formats_.push_back(static_cast<Format>(i));
  }
  for (const std::string& name : options_.formats) {
    const auto it = std::find(names.begin(), names.end(), name);
    if (it == names.end()) return UnknownName("format", name, names);
    formats_.push_back(static_cast<Format>(it - names.begin()));
  }
  const IsaChoice* choices = nullptr;
  const size_t n = IsaChoices(&choices);
  std::vector<std::string> runnable;
  for (size_t i = 0; i < n; ++i) {
    if (choices[i].supported)
      runnable.push_back(choices[i].table->name);
    else
      machine_.refused_isas.push_back(
          fmt::format("{}: {}", choices[i].table->name, choices[i].why_not));
  }
  machine_.isas = options_.isas.empty() ? runnable : options_.isas;
  for (const std::string& name : machine_.isas) {
    const char* why_not = nullptr;
    const KernelTable* table = FindKernelTable(name.c_str(), &why_not);
    if (table == nullptr && why_not != nullptr && IsIsaName(choices, n, name))
      return InvalidArgument("instruction set '{}' cannot run here: {}", name, why_not);
    if (table == nullptr) return UnknownName("instruction set", name, runnable);
    tables_.push_back(table);
  }
  if (options_.cpus.empty()) return InvalidArgument("no core to measure on");
  const uint32_t cores = machine_.cores = static_cast<uint32_t>(options_.cpus.size());
  threads_ = options_.threads.empty() ? std::vector<uint32_t>{1, cores} : options_.threads;
  threads_.erase(std::unique(threads_.begin(), threads_.end()), threads_.end());
  for (const uint32_t t : threads_) {
    if (t == 0 || t > cores)
      return InvalidArgument("{} threads: this machine gives 1..{} (one per physical core)", t,
                             cores);
  }
  for (const uint32_t r : options_.rows) {
    if (r == 0 || r > kWindowRowsMax)
      return InvalidArgument("{} rows: a window has 1..{}", r, kWindowRowsMax);
  }
  if (options_.rows.empty() || !(options_.resident || options_.streaming))
    return InvalidArgument("nothing to measure: no rows, or neither resident nor streaming");
  if (options_.stream_bytes != 0 && options_.stream_bytes < kStreamLeast)
    return InvalidArgument("{} bytes to stream: at least {} MiB", options_.stream_bytes,
                           kStreamLeast >> 20);
  if (!(options_.seconds > 0 && options_.seconds <= 60))
    return InvalidArgument("{} seconds per case: must be above 0, at most 60", options_.seconds);
  machine_.cases = formats_.size() * tables_.size() * threads_.size() * options_.rows.size() *
                   (options_.resident + options_.streaming);
  return OkStatus();
}

Status Bench::MakeMemory() {
  // Resident cases use the first pages of the same memory.
  const uint64_t resident = kResidentBytes * machine_.cores * 2;
  const uint64_t bytes =
      std::max(options_.streaming ? StreamBytes(options_) : uint64_t{0}, resident);
  LODE_ASSIGN_OR_RETURN(memory_, Segment::Create("bench", bytes));
  PlacementOptions place;
  place.numa_nodes = options_.numa_nodes;
  place.collapse = options_.huge_pages;
  const std::atomic<bool> go_on{false};
  LODE_ASSIGN_OR_RETURN(const PlacementReport report,
                        PlacePages(
                            memory_->fd(), memory_->data(), memory_->size(), place,
                            [](uint64_t, uint64_t) {}, go_on));
  machine_.cpu = CpuName();
  machine_.pages = report.pages;
  machine_.warnings = report.warnings;
  machine_.stream_bytes = memory_->size();
  machine_.resident_bytes = kResidentBytes;
  return OkStatus();
}

// Rows of the format from the first byte to the last, the pattern again and again.
void Bench::Fill(const std::vector<uint8_t>& pattern, size_t row_bytes) {
  row_bytes_ = row_bytes;
  const size_t pattern_bytes = pattern.size();
  const auto patterns = [&](size_t bytes) {
    return static_cast<uint32_t>(std::max<size_t>(1, bytes / pattern_bytes)) * kPatternRows;
  };
  piece_rows_ = patterns(kPieceBytes);
  resident_rows_ = patterns(kResidentBytes);
  // A resident piece of a wide format may be one whole pattern, larger than asked for.
  if (pattern_bytes > kResidentBytes) resident_rows_ = kPatternRows / 4;
  const size_t piece_bytes = piece_rows_ * row_bytes;
  pieces_ = std::max<uint64_t>(1, memory_->size() / piece_bytes);
  next_piece_ = 0;
  for (size_t at = 0; at < memory_->size(); at += pattern_bytes)
    std::memcpy(memory_->data() + at, pattern.data(),
                std::min(pattern_bytes, memory_->size() - at));
}

const uint8_t* Bench::NextPiece(uint32_t claim) const {
  return memory_->data() + (next_piece_ + claim) % pieces_ * piece_rows_ * row_bytes_;
}

// The yardstick: the same pieces, the same threads, the same pages, nothing but loads.
ClaimFn Bench::Reader(const Place& place, size_t reader) {
  const MemoryReader* readers = nullptr;
  MemoryReaders(&readers);
  const size_t resident = resident_rows_ * row_bytes_, piece = piece_rows_ * row_bytes_;
  const size_t bytes =
      (place.resident ? resident : piece) / bench::kReadStride * bench::kReadStride;
  const size_t passes = place.resident ? std::max<size_t>(1, kPieceBytes / bytes) : 1;
  return [this, resident, bytes, passes, is_resident = place.resident, read = readers[reader].read](
             uint32_t claim, uint32_t thread, NodePool::Next&) {
    const uint8_t* p = is_resident ? memory_->data() + thread * resident : NextPiece(claim);
    uint64_t all = 0;
    for (size_t pass = 0; pass < passes; ++pass) all += read(p, bytes) + pass;
    sink_of_reads_.fetch_add(all, std::memory_order_relaxed);
    return bytes * passes;
  };
}

// All readers are tried the first time; the one with the best median stays.
ClaimFn Bench::BestReader(const Place& place) {
  const auto won = winners_.find({place.pool->threads(), place.resident});
  if (won != winners_.end()) return Reader(place, won->second);
  const MemoryReader* readers = nullptr;
  const size_t n = MemoryReaders(&readers);
  std::vector<Work> works;
  for (size_t i = 0; i < n; ++i) works.push_back({Reader(place, i)});
  RunInTurn(place.pool, options_.seconds, &works, [&](uint32_t claims) { next_piece_ += claims; });
  const auto best = std::max_element(works.begin(), works.end(), [](const Work& a, const Work& b) {
    return Median(a.rates) < Median(b.rates);
  });
  const size_t reader = static_cast<size_t>(best - works.begin());
  winners_[{place.pool->threads(), place.resident}] = reader;
  return Reader(place, reader);
}

// In its own cache a core is disturbed by other load only, so the best phase counts; the memory is
// everybody's, so the median does.
double Bench::RateOf(const Place& place, const std::vector<double>& rates) const {
  return place.resident ? *std::max_element(rates.begin(), rates.end()) : Median(rates);
}

KernelBenchCase Bench::Measure(const Place& place, const KernelTable& table, uint32_t n_acts,
                               const ClaimFn& reader) {
  const MatFn mat = table.mat[static_cast<size_t>(format_)];
  Activations acts(format_, n_acts, kCols, kSeed);
  acts.QuantizeWith(table);
  const uint32_t n_threads = place.pool->threads();
  const uint32_t rows = place.resident ? resident_rows_ : piece_rows_;
  // Results of each thread: overwritten by its next piece, as in the engine.
  std::vector<std::vector<float>> out(n_threads * n_acts, std::vector<float>(rows));
  std::vector<std::atomic<bool>> wrong(n_threads);
  const auto multiply = [&](const uint8_t* w, uint32_t thread, NodePool::Next* next) {
    float* y[kWindowRowsMax];
    for (uint32_t a = 0; a < n_acts; ++a) y[a] = out[thread * n_acts + a].data();
    MatArgs args = {w, row_bytes_, rows, kCols, acts.rows(), n_acts, y};
    const auto ahead = [&]() -> const uint8_t* {
      const uint32_t claim = next->Claim();
      return claim == NodePool::Next::kNone ? nullptr : NextPiece(claim);
    };
    if (next != nullptr) SetNext(&ahead, &args);
    mat(args);
  };
  const size_t bytes = rows * row_bytes_;
  const auto piece = [&](uint32_t claim, uint32_t thread) {
    return place.resident ? memory_->data() + thread * bytes : NextPiece(claim);
  };
  std::vector<Work> works;
  works.push_back({[&](uint32_t claim, uint32_t thread, NodePool::Next& next) {
    multiply(piece(claim, thread), thread, place.resident ? nullptr : &next);
    return bytes;
  }});
  works.push_back({reader});
  RunInTurn(place.pool, options_.seconds, &works, [&](uint32_t claims) { next_piece_ += claims; });
  const double rate = RateOf(place, works[0].rates), read_rate = RateOf(place, works[1].rates);
  // One more pass, looked at number by number.
  place.pool->RunPhase(n_threads, [&](uint32_t claim, uint32_t thread) {
    for (uint32_t a = 0; a < n_acts; ++a)
      std::fill(out[thread * n_acts + a].begin(), out[thread * n_acts + a].end(), kNoResult);
    multiply(piece(claim, thread), thread, nullptr);
    const uint32_t first = place.resident ? thread * rows % kPatternRows : 0;
    for (uint32_t a = 0; a < n_acts; ++a) {
      for (uint32_t r = 0; r < rows; ++r) {
        if (Bits(out[thread * n_acts + a][r]) != Bits(expected_[a][(first + r) % kPatternRows]))
          wrong[thread].store(true, std::memory_order_relaxed);  // the phase's end orders
      }
    }
  });
  next_piece_ += n_threads;
  KernelBenchCase result;
  result.format = Info(format_).name;
  result.isa = table.name;
  result.rows = n_acts;
  result.threads = n_threads;
  result.resident = place.resident;
  result.gb_per_s = rate / kBytesPerGb;
  result.read_bandwidth_share = rate / read_rate;
  result.ns_per_block = kNsPerSecond * n_threads * Info(format_).block_bytes / rate;
  result.bits_ok = std::none_of(wrong.begin(), wrong.end(), [](const auto& w) { return w.load(); });
  return result;
}

void Bench::MeasurePlace(const Place& place) {
  const ClaimFn reader = BestReader(place);
  for (const KernelTable* table : tables_) {
    for (const uint32_t rows : options_.rows) sink_.result(Measure(place, *table, rows, reader));
  }
}

Status Bench::MeasureFormat(Format format) {
  format_ = format;
  const std::vector<uint8_t> pattern = bench::OrdinaryRows(format, kPatternRows, kCols, kSeed);
  Fill(pattern, RowBytes(format, kCols));
  const uint32_t acts_max = *std::max_element(options_.rows.begin(), options_.rows.end());
  expected_ = bench::ReferenceResults(format, pattern, kPatternRows, kCols,
                                      Activations(format, acts_max, kCols, kSeed), acts_max);
  for (const uint32_t threads : threads_) {
    NodePoolOptions pool_options;
    pool_options.threads = threads;
    pool_options.cpus.assign(options_.cpus.begin(), options_.cpus.begin() + threads);
    pool_options.spin_ns = kSpinNs;
    LODE_ASSIGN_OR_RETURN(const std::unique_ptr<NodePool> pool, NodePool::Start(pool_options));
    pool->SetAwake(true);
    for (const bool resident : {true, false}) {
      if (!(resident ? options_.resident : options_.streaming)) continue;
      MeasurePlace({resident, pool.get()});
    }
  }
  return OkStatus();
}

Status Bench::Run() {
  LODE_RETURN_IF_ERROR(Choose());
  LODE_RETURN_IF_ERROR(MakeMemory());
  sink_.machine(machine_);
  for (const Format format : formats_) LODE_RETURN_IF_ERROR(MeasureFormat(format));
  return OkStatus();
}

}  // namespace

Status RunKernelBench(const KernelBenchOptions& options, const KernelBenchSink& sink) {
  // On a thread of its own: the pool pins the thread that runs its phases, which is not to be the
  // caller's.
  Status status;
  std::thread([&] { status = Bench(options, sink).Run(); }).join();
  return status;
}

}  // namespace lode
