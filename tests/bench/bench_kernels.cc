// `lode bench kernels` as a program of its own, without gRPC: for machines that Lode is not
// installed on. The same flags, the same output.
#include <CLI/CLI.hpp>

#include "cpu_worker/bench/report.h"

int main(int argc, char** argv) {
  CLI::App app{lode::kBenchKernelsAbout};
  lode::KernelBenchOptions options;
  bool json = false;
  lode::AddBenchKernelsFlags(&app, &options, &json);
  CLI11_PARSE(app, argc, argv);
  const lode::Status status = lode::BenchKernels(options, json, stdout, stderr);
  if (!status.ok()) std::fprintf(stderr, "bench_kernels: %s\n", lode::Message(status).c_str());
  return status.ok() ? 0 : 1;
}
