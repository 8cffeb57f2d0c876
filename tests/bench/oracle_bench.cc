// Our expert products against ggml's, for the same blocks in the same run: one thread, 1 and 4
// activation rows, weights in the second-level cache and streaming from memory, all taking turns
// with plain reads of the same bytes. Prints the ratio of times per activation row (above 1: ours
// is faster). For developers; does nothing but say why when ggml's libraries are not there. Run
// alone on a quiet machine:
//   oracle_bench [--format Q8_0,...] [--isa avx2 --variant haswell] [--ggml FOLDER]
// (or LODE_GGML_DIR=FOLDER)
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>

#include "cpu_worker/bench/blocks.h"
#include "cpu_worker/bench/memory_reader.h"
#include "cpu_worker/page_placement.h"
#include "tests/bench/ggml_oracle.h"

namespace lode::bench {
namespace {

constexpr uint32_t kCols = 2560, kPatternRows = 64;
constexpr size_t kCacheBytes = 192 << 10, kMemoryBytes = 256 << 20;
// A turn of a case, and all turns of all that is compared. In the cache a turn is so short that
// many of them meet nobody else on the core; the shortest counts.
constexpr double kTurnResident = 30e-6, kTurnStreaming = 0.02;
constexpr double kSecondsResident = 0.15, kSecondsStreaming = 0.6;
constexpr uint32_t kSeed = 42;
// Two 8-bit activations of one float row differ by rounding only.
constexpr double kDifferenceMax = 0.03;

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

using Work = std::function<void(size_t)>;  // one pass; its argument counts up over all works

// Seconds per pass of every work: they take turns of about `turn` seconds, and the best turn
// counts. The clock is read twice a turn, not after every pass: reading it takes as long as some
// passes do.
std::vector<double> TakeTurns(const std::vector<Work>& works, double turn, double seconds) {
  std::vector<double> best(works.size(), 1e9);
  std::vector<size_t> passes(works.size(), 1);
  size_t done = 0;
  const double begin = Now();
  for (bool first = true; first || Now() - begin < seconds; first = false) {
    for (size_t i = 0; i < works.size(); ++i) {
      const double start = Now();
      for (size_t k = 0; k < passes[i]; ++k) works[i](done++);
      const double each = (Now() - start) / static_cast<double>(passes[i]);
      passes[i] = std::max<size_t>(1, static_cast<size_t>(turn / each));
      if (!first) best[i] = std::min(best[i], each);  // the first turn finds out how long one is
    }
  }
  return best;
}

struct Triple {
  double ours, theirs, reads;  // seconds per pass; reads: the fastest loop of nothing but loads
  double difference;           // of the results, relative
};

// One pass: `n_rows` rows at `w + call * pass_bytes`, wrapped into `memory_bytes`.
Triple Measure(Format format, const KernelTable& table, const GgmlDot& ggml, const uint8_t* w,
               size_t memory_bytes, uint32_t n_rows, uint32_t n_acts) {
  const size_t row_bytes = RowBytes(format, kCols), pass = n_rows * row_bytes;
  const size_t passes = std::max<size_t>(1, memory_bytes / pass);
  Activations acts(format, n_acts, kCols, kSeed);
  acts.QuantizeWith(table);
  std::vector<std::vector<uint8_t>> theirs;
  for (uint32_t a = 0; a < n_acts; ++a) theirs.push_back(ggml.Quantize(acts.x(a)));
  std::vector<std::vector<float>> y(n_acts, std::vector<float>(n_rows)), z = y;
  std::vector<float*> out;
  for (auto& v : y) out.push_back(v.data());
  const auto ours_pass = [&](size_t call) {
    table.mat[static_cast<size_t>(format)](
        {w + call % passes * pass, row_bytes, n_rows, kCols, acts.rows(), n_acts, out.data()});
  };
  const auto their_pass = [&](size_t call) {
    const uint8_t* first = w + call % passes * pass;
    for (uint32_t r = 0; r < n_rows; ++r) {
      for (uint32_t a = 0; a < n_acts; ++a)
        z[a][r] = ggml.Dot(first + r * row_bytes, theirs[a].data(), kCols);
    }
  };
  const MemoryReader* readers = nullptr;
  const size_t n_readers = MemoryReaders(&readers);
  uint64_t sink = 0;
  std::vector<Work> works = {ours_pass, their_pass};
  for (size_t i = 0; i < n_readers; ++i)
    works.push_back(
        [&, i](size_t call) { sink += readers[i].read(w + call % passes * pass, pass); });
  const bool resident = passes == 1;
  const std::vector<double> best = TakeTurns(works, resident ? kTurnResident : kTurnStreaming,
                                             resident ? kSecondsResident : kSecondsStreaming);
  Triple result = {best[0], best[1], *std::min_element(best.begin() + 2, best.end()), 0};
  if (sink == 1) std::printf("\n");  // so that the loads are needed
  ours_pass(0);                      // the same rows, to compare
  their_pass(0);
  double error = 0, norm = 1e-30;
  for (uint32_t a = 0; a < n_acts; ++a) {
    for (uint32_t r = 0; r < n_rows; ++r) {
      error += std::pow(static_cast<double>(y[a][r]) - z[a][r], 2);
      norm += std::pow(static_cast<double>(z[a][r]), 2);
    }
  }
  result.difference = std::sqrt(error / norm);
  return result;
}

struct Options {
  std::string folder, isa = "auto", variant;
  std::vector<std::string> formats;
};

void MeasureFormat(Format format, const KernelTable& table, const GgmlDot& dot, Segment* memory) {
  const std::vector<uint8_t> pattern = OrdinaryRows(format, kPatternRows, kCols, kSeed);
  for (size_t at = 0; at < memory->size(); at += pattern.size())
    std::memcpy(memory->data() + at, pattern.data(), std::min(pattern.size(), memory->size() - at));
  const size_t row_bytes = RowBytes(format, kCols);
  const uint32_t n_rows = static_cast<uint32_t>(kCacheBytes / row_bytes / 16 * 16);
  const double gb = static_cast<double>(n_rows * row_bytes) / 1e9;
  for (const bool resident : {true, false}) {
    for (const uint32_t rows : {1u, 4u}) {
      const Triple p =
          Measure(format, table, dot, memory->data(), resident ? 0 : memory->size(), n_rows, rows);
      std::printf("%-9s %-9s %4u  %10.2f  %9.2f  %9.2f  %6.2f%s\n", Info(format).name,
                  resident ? "resident" : "streaming", rows, gb / p.reads, gb / p.ours,
                  gb / p.theirs, p.theirs / p.ours,
                  p.difference > kDifferenceMax ? "  RESULTS DIFFER: not comparable" : "");
      std::fflush(stdout);
    }
  }
}

Status Run(const Options& options) {
  LODE_ASSIGN_OR_RETURN(const GgmlOracle oracle, GgmlOracle::Load(options.folder, options.variant));
  const char* why_not = nullptr;
  const KernelTable* table = FindKernelTable(options.isa.c_str(), &why_not);
  if (table == nullptr) return InvalidArgument("table {}: {}", options.isa, why_not);
  LODE_ASSIGN_OR_RETURN(auto memory, Segment::Create("oracle", kMemoryBytes));
  const std::atomic<bool> go_on{false};
  LODE_ASSIGN_OR_RETURN(
      const PlacementReport pages,
      PlacePages(
          memory->fd(), memory->data(), memory->size(), {}, [](uint64_t, uint64_t) {}, go_on));
  std::printf("ours: %s, ggml: %s, pages %s\n", table->name, oracle.variant().c_str(),
              pages.pages.c_str());
  std::printf(
      "format    weights   rows  reads GB/s  ours GB/s  ggml GB/s  ggml/ours time per row\n");
  const std::vector<std::string>& only = options.formats;
  for (uint32_t i = 0; i < kFormatCount; ++i) {
    const Format format = static_cast<Format>(i);
    const char* name = Info(format).name;
    if (!only.empty() && std::find(only.begin(), only.end(), name) == only.end()) continue;
    GgmlDot dot;
    if (oracle.Find(Info(format).type, &dot)) {
      MeasureFormat(format, *table, dot, memory.get());
    } else {
      std::printf("%-9s ggml has no product for it\n", name);
    }
  }
  return OkStatus();
}

}  // namespace
}  // namespace lode::bench

int main(int argc, char** argv) {
  CLI::App app("Our expert products against ggml's");
  lode::bench::Options options;
  if (const char* folder = std::getenv("LODE_GGML_DIR")) options.folder = folder;
  app.add_option("--ggml", options.folder, "Folder with ggml's shared libraries (LODE_GGML_DIR)");
  app.add_option("--format", options.formats, "Formats, e.g. Q8_0,Q4_K (all)")->delimiter(',');
  app.add_option("--isa", options.isa, "Our kernel table (auto)");
  app.add_option("--variant", options.variant, "ggml's variant, e.g. haswell (the best here)");
  CLI11_PARSE(app, argc, argv);
  if (options.folder.empty()) {
    std::printf("skipped: no folder with ggml's libraries (--ggml or LODE_GGML_DIR)\n");
    return 0;
  }
  const lode::Status status = lode::bench::Run(options);
  if (!status.ok()) std::printf("skipped: %s\n", lode::Message(status).c_str());
  return 0;
}
