// How fast the matrix product reads weights: format x instruction set x activation rows, one
// thread, in GB/s of weight bytes, once streaming from memory and once from the cache (the
// arithmetic's own limit). First asserts each case against the reference, then times it. The last
// part prices the frozen term order: the same products with independent fp32 lanes, as engines
// usually do, against one ordered accumulator per row. Run alone on a quiet machine: `kernel_bench
// [MiB of weights [format]]`; output is CSV.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "tests/bench/float_lanes.h"
#include "tests/kernels/format_cases.h"

namespace lode::testing {
namespace {

constexpr uint32_t kCols = 2560;           // the flagship's hidden size
constexpr size_t kCacheBytes = 192 << 10;  // fits a second-level cache
constexpr double kMinSeconds = 0.05;       // per repetition
constexpr int kRepetitions = 5;            // the best counts: other load only ever slows down

// The thread's own processor time: equal to wall time on a quiet machine, and blind to other
// processes' time slices.
double ThreadSeconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

double BestSeconds(const std::function<void()>& work) {
  double best = 1e9;
  for (int r = 0; r < kRepetitions; ++r) {
    size_t calls = 0;
    const double start = ThreadSeconds();
    double elapsed = 0;
    do {
      work();
      ++calls;
      elapsed = ThreadSeconds() - start;
    } while (elapsed < kMinSeconds);
    best = std::min(best, elapsed / static_cast<double>(calls));
  }
  return best;
}

// Weights (the same random rows repeated up to the size) and activations of one case.
struct Case {
  Format format;
  uint32_t n_rows, n_acts;
  std::vector<uint8_t> w;
  std::vector<std::vector<float>> x;
  std::vector<reference::QuantizedRow> q;
  std::vector<ActRow> acts;
  std::vector<std::vector<float>> y;
  std::vector<float*> out;

  Case(Format f, size_t bytes, uint32_t rows_of_acts) : format(f), n_acts(rows_of_acts) {
    const size_t row_bytes = RowBytes(f, kCols);
    n_rows = static_cast<uint32_t>(bytes / row_bytes / 16 * 16);
    const std::vector<uint8_t> some = RandomWeights(f, 64 * kCols, 1, false);
    for (size_t done = 0; done < n_rows * row_bytes; done += some.size())
      w.insert(w.end(), some.begin(),
               some.begin() + std::min(some.size(), n_rows * row_bytes - done));
    for (uint32_t a = 0; a < n_acts; ++a) {
      x.push_back(RandomActivations(kCols, 7 + a));
      q.push_back(reference::Quantize(x[a], Info(f).act_block_len ? Info(f).act_block_len : 32));
      y.emplace_back(n_rows);
    }
    for (uint32_t a = 0; a < n_acts; ++a) {
      acts.push_back(AsActRow(q[a], x[a]));
      out.push_back(y[a].data());
    }
  }
  MatArgs Args() const {
    return {w.data(), RowBytes(format, kCols), n_rows, kCols, acts.data(), n_acts, out.data()};
  }

  void CheckFirstRows(const char* name) const {
    for (uint32_t r = 0; r < std::min(n_rows, 20u); ++r) {
      const uint8_t* row = w.data() + r * RowBytes(format, kCols);
      for (uint32_t a = 0; a < n_acts; ++a) {
        const float want = Info(format).act_block_len
                               ? reference::QuantizedDot(format, row, q[a], kCols)
                               : reference::FloatDot(reference::Dequant(format, row, kCols).data(),
                                                     x[a].data(), kCols);
        if (Bits(y[a][r]) == Bits(want)) continue;
        std::fprintf(stderr, "%s %s row %u differs from the reference\n", name, Info(format).name,
                     r);
        std::exit(1);
      }
    }
  }
};

double GigabytesPerSecond(const Case& c, const std::function<void()>& work) {
  return static_cast<double>(c.w.size()) / BestSeconds(work) / 1e9;
}

void Products(size_t memory_bytes, const char* only) {
  std::printf("format,isa,rows,GB/s from memory,GB/s from cache\n");
  for (Format format : AllFormats()) {
    if (only != nullptr && std::strcmp(only, Info(format).name) != 0) continue;
    for (uint32_t n_acts : {1u, 4u, 8u}) {
      const Case memory(format, memory_bytes, n_acts), cache(format, kCacheBytes, n_acts);
      for (const KernelTable* table : RunnableTables()) {
        const MatFn mat = table->mat[static_cast<size_t>(format)];
        const double from_memory = GigabytesPerSecond(memory, [&] { mat(memory.Args()); });
        memory.CheckFirstRows(table->name);
        const double from_cache = GigabytesPerSecond(cache, [&] { mat(cache.Args()); });
        std::printf("%s,%s,%u,%.2f,%.2f\n", Info(format).name, table->name, n_acts, from_memory,
                    from_cache);
        std::fflush(stdout);
      }
    }
  }
}

void PriceOfTheOrder(size_t memory_bytes) {
  const char* why = "";
  const KernelTable* table = FindKernelTable("avx512", &why);
  if (table == nullptr) {
    std::printf("order,not run: %s\n", why);
    return;
  }
  std::printf("order,format,GB/s from memory,GB/s from cache\n");
  for (const auto& [format, lanes] :
       {std::pair(Format::kQ8_0, &FloatLanesQ8_0), std::pair(Format::kQ4_K, &FloatLanesQ4_K)}) {
    const Case memory(format, memory_bytes, 1), cache(format, kCacheBytes, 1);
    const MatFn mat = table->mat[static_cast<size_t>(format)];
    std::printf("ordered,%s,%.2f,%.2f\n", Info(format).name,
                GigabytesPerSecond(memory, [&] { mat(memory.Args()); }),
                GigabytesPerSecond(cache, [&] { mat(cache.Args()); }));
    std::printf("float lanes,%s,%.2f,%.2f\n", Info(format).name,
                GigabytesPerSecond(memory, [&] { lanes(memory.Args()); }),
                GigabytesPerSecond(cache, [&] { lanes(cache.Args()); }));
    // The lanes' sum differs from the ordered one by rounding only; a larger difference means a
    // wrong kernel.
    for (uint32_t r = 0; r < 20; ++r) {
      const float want = reference::QuantizedDot(
          format, memory.w.data() + r * RowBytes(format, kCols), memory.q[0], kCols);
      if (std::fabs(memory.y[0][r] - want) > 1e-3f * (1.0f + std::fabs(want))) {
        std::fprintf(stderr, "float lanes %s row %u: %g, expected %g\n", Info(format).name, r,
                     memory.y[0][r], want);
        std::exit(1);
      }
    }
  }
}

}  // namespace
}  // namespace lode::testing

int main(int argc, char** argv) {
  const char* only = argc > 2 ? argv[2] : nullptr;
  const size_t mib = argc > 1 ? std::strtoul(argv[1], nullptr, 10) : 192;
  if (mib < 1 || mib > 65536) {
    std::fprintf(stderr, "usage: kernel_bench [MiB of weights, 1..65536] [format]\n");
    return 2;
  }
  lode::testing::Products(mib << 20, only);
  lode::testing::PriceOfTheOrder(mib << 20);
  return 0;
}
