// `lode bench kernels` as people and programs read it. Flags are declared once, for the command
// line and for the stand-alone program alike. Main thread.
#pragma once

#include <cstdio>

#include "cpu_worker/bench/kernel_bench.h"

namespace lode {

// Measures and prints to `out`: a table, or with `json` one object per case and line:
//   {"format":"Q8_0","isa":"avx512","rows":1,"threads":1,"resident":true,"gb_per_s":51.3,
//    "read_bandwidth_share":0.41,"ns_per_block":0.66,"bits_ok":true}
// Facts of the machine and warnings go to `notes`. The cores and the node are chosen here when the
// options name none. Internal: some result has not the bits of the definition.
Status BenchKernels(KernelBenchOptions options, bool json, std::FILE* out, std::FILE* notes);

// Declares the flags of `bench kernels` on a CLI11 app; a template, so that this header needs no
// CLI11.
inline constexpr const char* kBenchKernelsAbout =
    R"(How fast this machine computes expert products: GB/s of weight bytes for every format of the
engine and every instruction set of this CPU.

A case is a format, an instruction set, 1 to 8 activation rows (rows of a window that share one decode
of the weights), a number of threads, and where the weights lie: "resident" in the second-level cache
shows what the arithmetic can do, "streaming" from memory shows what decoding does. "share" divides by
the best plain vector read of the same pages with the same threads in the same run; 0.9 means that the
memory bus is the limit. "bits" says whether every result equals the definition bit for bit.

Nothing else may run on the machine while it measures.

Examples:
  lode bench kernels                                   all of it, about a minute per ten formats
  lode bench kernels --format Q4_K,Q8_0 --rows 1,4     two formats, one and four rows
  lode bench kernels --isa avx2 --threads 1 --resident the arithmetic alone
  lode bench kernels --json > kernels.jsonl            one object per case)";

template <class App>
void AddBenchKernelsFlags(App* app, KernelBenchOptions* o, bool* json) {
  app->add_flag("--json", *json, "One JSON object per case and line instead of the table");
  app->add_option("--format", o->formats, "Formats, e.g. Q8_0,Q4_K (all)")->delimiter(',');
  app->add_option("--isa", o->isas, "Instruction sets, e.g. scalar,avx2 (all this CPU has)")
      ->delimiter(',');
  app->add_option("--rows", o->rows, "Activation rows, of 1..8 (1,2,4,8)")->delimiter(',');
  app->add_option("--threads", o->threads, "Numbers of threads (1 and one per physical core)")
      ->delimiter(',');
  app->add_option("--seconds", o->seconds, "Time per case (0.05)");
  app->template add_option_function<uint64_t>(
      "--mib", [o](uint64_t mib) { o->stream_bytes = mib << 20; },
      "MiB of weights to stream from memory (four times the last-level cache, 256 to 2048)");
  auto* resident = app->add_flag_callback(
      "--resident", [o] { o->streaming = false; }, "Only weights in the second-level cache");
  app->add_flag_callback(
         "--streaming", [o] { o->resident = false; }, "Only weights in memory")
      ->excludes(resident);
  app->add_flag_callback(
      "--small-pages", [o] { o->huge_pages = false; },
      "Ordinary pages, for comparison with 2 MiB ones");
}

}  // namespace lode
