// Our expert products against ggml's, for the same blocks in the same run: one thread, 1 and 4
// activation rows, weights in the second-level cache and streaming from memory. Prints the ratio of
// times per activation row (above 1: ours is faster). For developers; does nothing but say why when
// ggml's libraries are not there. Run alone on a quiet machine:
//   oracle_bench [--format Q8_0,...] [--ggml FOLDER]       (or LODE_GGML_DIR=FOLDER)
#include <time.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>

#include "cpu_worker/bench/blocks.h"
#include "cpu_worker/page_placement.h"
#include "tests/bench/ggml_oracle.h"

namespace lode::bench {
namespace {

constexpr uint32_t kCols = 2560, kPatternRows = 64;
constexpr size_t kCacheBytes = 192 << 10, kMemoryBytes = 256 << 20;
constexpr double kSeconds = 0.02;  // of a repetition
constexpr int kRepetitions = 5;    // the best counts
constexpr uint32_t kSeed = 42;
// Two 8-bit activations of one float row differ by rounding only.
constexpr double kDifferenceMax = 0.03;

// The thread's own processor time: blind to other processes' time slices.
double Now() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Seconds per call of `work`, whose argument counts up from 0.
double Best(const std::function<void(size_t)>& work) {
  double best = 1e9;
  size_t call = 0;
  for (int r = 0; r < kRepetitions; ++r) {
    const double start = Now();
    const size_t first = call;
    do work(call++);
    while (Now() - start < kSeconds);
    best = std::min(best, (Now() - start) / static_cast<double>(call - first));
  }
  return best;
}

struct Pair {
  double ours, theirs;  // seconds per pass
  double difference;    // of the results, relative
};

// One pass: `n_rows` rows at `w + call * pass_bytes`, wrapped into `memory_bytes`.
Pair Measure(Format format, const KernelTable& table, const GgmlDot& ggml, const uint8_t* w,
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
  Pair pair;
  pair.ours = Best(ours_pass);
  pair.theirs = Best(their_pass);
  ours_pass(0);  // the same rows, to compare
  their_pass(0);
  double error = 0, norm = 1e-30;
  for (uint32_t a = 0; a < n_acts; ++a) {
    for (uint32_t r = 0; r < n_rows; ++r) {
      error += std::pow(static_cast<double>(y[a][r]) - z[a][r], 2);
      norm += std::pow(static_cast<double>(z[a][r]), 2);
    }
  }
  pair.difference = std::sqrt(error / norm);
  return pair;
}

Status Run(const std::string& folder, const std::vector<std::string>& only) {
  LODE_ASSIGN_OR_RETURN(const GgmlOracle oracle, GgmlOracle::Load(folder));
  const KernelTable* table = FindKernelTable("auto", nullptr);
  LODE_ASSIGN_OR_RETURN(auto memory, Segment::Create("oracle", kMemoryBytes));
  const std::atomic<bool> go_on{false};
  LODE_ASSIGN_OR_RETURN(
      const PlacementReport pages,
      PlacePages(
          memory->fd(), memory->data(), memory->size(), {}, [](uint64_t, uint64_t) {}, go_on));
  std::printf("ours: %s, ggml: %s, pages %s\n", table->name, oracle.variant().c_str(),
              pages.pages.c_str());
  std::printf("format    weights   rows  ours GB/s  ggml GB/s  ggml/ours time per row\n");
  for (uint32_t i = 0; i < kFormatCount; ++i) {
    const Format format = static_cast<Format>(i);
    const char* name = Info(format).name;
    if (!only.empty() && std::find(only.begin(), only.end(), name) == only.end()) continue;
    GgmlDot dot;
    if (!oracle.Find(Info(format).type, &dot)) {
      std::printf("%-9s ggml has no product for it\n", name);
      continue;
    }
    const std::vector<uint8_t> pattern = OrdinaryRows(format, kPatternRows, kCols, kSeed);
    for (size_t at = 0; at < memory->size(); at += pattern.size())
      std::memcpy(memory->data() + at, pattern.data(),
                  std::min(pattern.size(), memory->size() - at));
    const size_t row_bytes = RowBytes(format, kCols);
    const uint32_t n_rows = static_cast<uint32_t>(kCacheBytes / row_bytes / 16 * 16);
    for (const bool resident : {true, false}) {
      for (const uint32_t rows : {1u, 4u}) {
        const Pair p = Measure(format, *table, dot, memory->data(), resident ? 0 : memory->size(),
                               n_rows, rows);
        const double gb = static_cast<double>(n_rows * row_bytes) / 1e9;
        std::printf("%-9s %-9s %4u  %9.2f  %9.2f  %6.2f%s\n", name,
                    resident ? "resident" : "streaming", rows, gb / p.ours, gb / p.theirs,
                    p.theirs / p.ours,
                    p.difference > kDifferenceMax ? "  RESULTS DIFFER: not comparable" : "");
        std::fflush(stdout);
      }
    }
  }
  return OkStatus();
}

}  // namespace
}  // namespace lode::bench

int main(int argc, char** argv) {
  CLI::App app("Our expert products against ggml's");
  std::string folder = std::getenv("LODE_GGML_DIR") ? std::getenv("LODE_GGML_DIR") : "";
  std::vector<std::string> formats;
  app.add_option("--ggml", folder, "Folder with ggml's shared libraries (LODE_GGML_DIR)");
  app.add_option("--format", formats, "Formats, e.g. Q8_0,Q4_K (all)")->delimiter(',');
  CLI11_PARSE(app, argc, argv);
  if (folder.empty()) {
    std::printf("skipped: no folder with ggml's libraries (--ggml or LODE_GGML_DIR)\n");
    return 0;
  }
  const lode::Status status = lode::bench::Run(folder, formats);
  if (!status.ok()) std::printf("skipped: %s\n", lode::Message(status).c_str());
  return 0;
}
