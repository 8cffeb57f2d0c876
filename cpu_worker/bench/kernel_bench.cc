// See kernel_bench.h. A case is timed as phases of the engine's pool. Weights in memory are one
// long stream of rows: every phase goes on where the last one ended, so that nothing is in a cache
// when it is read, whatever the machine's caches are. Weights in cache are one small piece per
// thread, read again and again. The best repetition counts: other load only ever slows down.
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
using ClaimFn = std::function<size_t(uint32_t claim, uint32_t thread)>;

// Bytes per second of the best repetition. `done(claims)` is told after every phase how many claims
// it had. The phase grows until its length is a fair part of the budget; only full-grown ones
// count.
double BestRate(NodePool* pool, double seconds, const ClaimFn& claim,
                const std::function<void(uint32_t)>& done) {
  const double budget_ns = seconds * kNsPerSecond;
  const uint32_t claims_max = NodePool::kChunksMax / 2 / pool->threads() * pool->threads();
  uint32_t claims = pool->threads();
  double best = 0, spent_ns = 0;
  for (int repetition = 0; repetition < kRepetitionsMin || spent_ns < budget_ns;) {
    std::atomic<size_t> bytes{0};
    const uint64_t start = NowNs();
    pool->RunPhase(claims, [&](uint32_t c, uint32_t thread) {
      bytes.fetch_add(claim(c, thread), std::memory_order_relaxed);  // the phase's end orders
    });
    const double ns = std::max(1.0, static_cast<double>(NowNs() - start));
    done(claims);
    spent_ns += ns;
    if (ns < budget_ns / kPhasesPerBudget && claims < claims_max) {
      claims = std::min(claims_max, claims * 2);
      continue;
    }
    best = std::max(best, static_cast<double>(bytes.load()) / ns * kNsPerSecond);
    ++repetition;
  }
  return best;
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
  double MeasureRead(const Place& place, double seconds);  // bytes per second of the best reader
  KernelBenchCase Measure(const Place& place, const KernelTable& table, uint32_t n_acts);
  const uint8_t* NextPiece(uint32_t claim) const;

  const KernelBenchOptions options_;
  const KernelBenchSink& sink_;
  KernelBenchMachine machine_;
  std::vector<Format> formats_;
  std::vector<const KernelTable*> tables_;
  std::vector<uint32_t> threads_;
  std::unique_ptr<Segment> memory_;
  std::map<std::pair<uint32_t, bool>, size_t> winners_;  // best reader by threads and residence
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
    if (std::find(runnable.begin(), runnable.end(), name) == runnable.end())
      return UnknownName("instruction set", name, runnable);
    const char* why_not = nullptr;
    tables_.push_back(FindKernelTable(name.c_str(), &why_not));
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
double Bench::MeasureRead(const Place& place, double seconds) {
  const size_t resident = resident_rows_ * row_bytes_, piece = piece_rows_ * row_bytes_;
  const MemoryReader* readers = nullptr;
  const size_t n = MemoryReaders(&readers);
  // All of them the first time, then the one that won.
  const auto won = winners_.find({place.pool->threads(), place.resident});
  const size_t first = won != winners_.end() ? won->second : 0;
  const size_t end = won != winners_.end() ? won->second + 1 : n;
  std::atomic<uint64_t> sink{0};
  double best = 0;
  size_t best_reader = first;
  for (size_t i = first; i < end; ++i) {
    const auto read = [&](uint32_t claim, uint32_t thread) {
      const uint8_t* p = place.resident ? memory_->data() + thread * resident : NextPiece(claim);
      const size_t bytes =
          (place.resident ? resident : piece) / bench::kReadStride * bench::kReadStride;
      const size_t passes = place.resident ? std::max<size_t>(1, kPieceBytes / bytes) : 1;
      uint64_t all = 0;
      for (size_t pass = 0; pass < passes; ++pass) all += readers[i].read(p, bytes) + pass;
      sink.fetch_add(all, std::memory_order_relaxed);  // so that the loads are needed
      return bytes * passes;
    };
    const double rate =
        BestRate(place.pool, seconds, read, [&](uint32_t claims) { next_piece_ += claims; });
    if (rate > best) best_reader = i;
    best = std::max(best, rate);
  }
  winners_[{place.pool->threads(), place.resident}] = best_reader;
  return best;
}

KernelBenchCase Bench::Measure(const Place& place, const KernelTable& table, uint32_t n_acts) {
  const MatFn mat = table.mat[static_cast<size_t>(format_)];
  Activations acts(format_, n_acts, kCols, kSeed);
  acts.QuantizeWith(table);
  const uint32_t n_threads = place.pool->threads();
  const uint32_t rows = place.resident ? resident_rows_ : piece_rows_;
  // Results of each thread: overwritten by its next piece, as in the engine.
  std::vector<std::vector<float>> out(n_threads * n_acts, std::vector<float>(rows));
  std::vector<std::atomic<bool>> wrong(n_threads);
  const auto multiply = [&](const uint8_t* w, uint32_t thread) {
    float* y[kWindowRowsMax];
    for (uint32_t a = 0; a < n_acts; ++a) y[a] = out[thread * n_acts + a].data();
    mat({w, row_bytes_, rows, kCols, acts.rows(), n_acts, y});
  };
  const size_t bytes = rows * row_bytes_;
  const auto piece = [&](uint32_t claim, uint32_t thread) {
    return place.resident ? memory_->data() + thread * bytes : NextPiece(claim);
  };
  const double rate = BestRate(
      place.pool, options_.seconds,
      [&](uint32_t claim, uint32_t thread) {
        multiply(piece(claim, thread), thread);
        return bytes;
      },
      [&](uint32_t claims) { next_piece_ += claims; });
  // One more pass, looked at number by number.
  place.pool->RunPhase(n_threads, [&](uint32_t claim, uint32_t thread) {
    for (uint32_t a = 0; a < n_acts; ++a)
      std::fill(out[thread * n_acts + a].begin(), out[thread * n_acts + a].end(), kNoResult);
    multiply(piece(claim, thread), thread);
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
  result.ns_per_block = kNsPerSecond * n_threads * Info(format_).block_bytes / rate;
  result.bits_ok = std::none_of(wrong.begin(), wrong.end(), [](const auto& w) { return w.load(); });
  return result;
}

// The yardstick is read before the cases and after them, and the better reading counts for all: on
// a shared host the bus itself is faster in one minute than in the next.
void Bench::MeasurePlace(const Place& place) {
  double read_rate = MeasureRead(place, options_.seconds);
  std::vector<KernelBenchCase> cases;
  for (const KernelTable* table : tables_) {
    for (const uint32_t rows : options_.rows) cases.push_back(Measure(place, *table, rows));
  }
  read_rate = std::max(read_rate, MeasureRead(place, options_.seconds));
  for (KernelBenchCase& c : cases) {
    c.read_bandwidth_share = c.gb_per_s * kBytesPerGb / read_rate;
    sink_.result(c);
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
