// `lode bench kernels`: how fast the expert products read weights, for every format of the list and
// every instruction set of this machine, at 1 to 8 activation rows, on one thread and on all of
// them, from the second-level cache (the arithmetic's own limit) and streaming from memory (what
// decoding does). Each case also says which share of the plain vector-read bandwidth it reaches,
// measured in the same run, over the same pages, with the same threads; and whether its results
// have the bits of the definition. The engine's own parts are used: its thread pool, its way of
// placing pages, its kernel tables.
// Thread: RunKernelBench starts threads of its own and returns when all is measured.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "shared/base/status.h"

namespace lode {

struct KernelBenchOptions {
  std::vector<std::string> formats;  // names of kFormats; empty: all
  std::vector<std::string> isas;     // names of kernel tables; empty: all that this machine runs
  std::vector<uint32_t> rows = {1, 2, 4, 8};  // activation rows, 1..8
  std::vector<uint32_t> threads;              // 1..cpus; empty: 1 and all cpus
  bool resident = true, streaming = true;     // at least one
  double seconds = 0.05;                      // per case, less the time to prepare
  uint64_t stream_bytes =
      0;                   // weights in memory; 0: four times the last-level cache, 256 MiB..2 GiB
  bool huge_pages = true;  // ask for 2 MiB pages
  std::vector<uint32_t> cpus;        // one per physical core to use; thread t is pinned to cpus[t]
  std::vector<uint32_t> numa_nodes;  // where the weights lie; empty: wherever
};

// Facts that hold for the whole run.
struct KernelBenchMachine {
  std::string cpu;                        // model name
  uint32_t cores = 0;                     // threads at most
  std::string pages;                      // "2 MiB (100 %)", "4 KiB"
  uint64_t stream_bytes = 0;              // weights in memory
  uint64_t resident_bytes = 0;            // weights per thread of a resident case
  std::vector<std::string> isas;          // that are measured
  std::vector<std::string> refused_isas;  // "avx512: the CPU has no AVX-512 F"
  std::vector<std::string> warnings;
  size_t cases = 0;  // that follow
};

struct KernelBenchCase {
  std::string format, isa;
  uint32_t rows = 0, threads = 0;
  bool resident = false;
  double gb_per_s = 0;              // weight bytes, all threads together
  double read_bandwidth_share = 0;  // of vector reads with these threads, taking turns with it
  double ns_per_block = 0;          // of one thread, for all rows
  bool bits_ok = false;             // every result of a whole pass equals the definition's
};

struct KernelBenchSink {
  std::function<void(const KernelBenchMachine&)> machine;  // once, before the first case
  std::function<void(const KernelBenchCase&)> result;      // in the order of measurement
};

// Errors: a name or number that does not exist here (lists what does), no memory. Wrong bits are no
// error of this function.
Status RunKernelBench(const KernelBenchOptions& options, const KernelBenchSink& sink);

}  // namespace lode
