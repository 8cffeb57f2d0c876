// Measures the term order of the arithmetic on a GPU before it is frozen: what "block terms added
// in ascending order" and "32 partials, one tree" cost against a free order, and whether the device
// gives the host's bits. One section per call, so that a fault in one cannot spoil another:
// tests/device/run.sh calls them all and prints the summary.
//   term_order SECTION FOLDER [--bits]   section: exact, gemv_q8, gemv_q4, gemm, deltanet, launch
// Writes FOLDER/SECTION.json and FOLDER/SECTION.table; --bits checks without measuring. Exit status
// 0 when all checks held.
#include <cstring>

#include "tests/device/term_order/deltanet_section.cuh"
#include "tests/device/term_order/exact_section.cuh"
#include "tests/device/term_order/gemm_section.cuh"
#include "tests/device/term_order/gemv_section.cuh"
#include "tests/device/term_order/launch_section.cuh"

namespace {

using lode::term_order::Section;

int Run(const std::string& name, const std::string& folder, bool measure) {
  using namespace lode::term_order;
  Section section(name);
  cudaDeviceProp prop;
  if (section.Ok(cudaGetDeviceProperties(&prop, 0), "no usable CUDA device", __LINE__)) {
    std::printf("[%s] %s, %d multiprocessors, compute capability %d.%d\n", name.c_str(), prop.name,
                prop.multiProcessorCount, prop.major, prop.minor);
    if (name == "exact") RunExact(section);
    if (name == "gemv_q8") RunGemvQ8(section, measure);
    if (name == "gemv_q4") RunGemvQ4(section, measure);
    if (name == "gemm") RunGemm(section, measure);
    if (name == "deltanet") RunDelta(section, measure);
    if (name == "launch") RunLaunch(section, measure);
    section.Ok(cudaDeviceSynchronize(), "end of the section", __LINE__);
  }
  if (!section.Write(folder)) {
    std::fprintf(stderr, "term_order: cannot write the results of section %s into %s\n",
                 name.c_str(), folder.c_str());
    return 1;
  }
  std::printf("[%s] %s\n", name.c_str(), section.passed() ? "PASS" : "FAIL");
  return section.passed() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--version") == 0) {
    std::printf("term_order, arithmetic version %u\n", lode::kArithmeticVersion);
    return 0;
  }
  if (argc < 3) {
    std::fprintf(stderr,
                 "usage: term_order exact|gemv_q8|gemv_q4|gemm|deltanet|launch FOLDER [--bits]\n");
    return 2;
  }
  return Run(argv[1], argv[2], argc < 4 || std::strcmp(argv[3], "--bits") != 0);
}
