// `lode bench kernels`: every format of the list and every instruction set of this machine is
// measured and has the definition's bits; the JSON is what docs/HACKING.md promises; wrong names
// and numbers are refused by name; blocks are ordinary numbers for every format. Speeds are not
// judged here. Labels: unit.
#include "cpu_worker/bench/kernel_bench.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "cpu_worker/bench/blocks.h"
#include "cpu_worker/bench/memory_reader.h"
#include "cpu_worker/bench/report.h"
#include "kernels/reference/reference.h"

namespace lode {
namespace {

using ::testing::HasSubstr;

KernelBenchOptions Quick() {
  KernelBenchOptions options;
  options.rows = {1, 3};
  options.threads = {1};
  options.seconds = 0.0005;
  options.stream_bytes = 32 << 20;
  options.cpus = {0};
  return options;
}

struct Output {
  Status status;
  std::string text, notes;
};
Output Print(const KernelBenchOptions& options, bool json) {
  Output output;
  char *text = nullptr, *notes = nullptr;
  size_t text_size = 0, notes_size = 0;
  std::FILE* out = open_memstream(&text, &text_size);
  std::FILE* note = open_memstream(&notes, &notes_size);
  output.status = BenchKernels(options, json, out, note);
  std::fclose(out);
  std::fclose(note);
  output.text = text;
  output.notes = notes;
  std::free(text);
  std::free(notes);
  return output;
}

TEST(KernelBench, MeasuresEveryFormatAndIsa) {
  const Output output = Print(Quick(), true);
  ASSERT_TRUE(output.status.ok()) << output.status;
  std::set<std::string> formats, isas;
  size_t cases = 0, resident = 0;
  std::istringstream lines(output.text);
  for (std::string line; std::getline(lines, line); ++cases) {
    const nlohmann::json c = nlohmann::json::parse(line);
    EXPECT_EQ(c.size(), 9u) << line;
    formats.insert(c.at("format").get<std::string>());
    isas.insert(c.at("isa").get<std::string>());
    resident += c.at("resident").get<bool>();
    EXPECT_EQ(c.at("threads"), 1) << line;
    EXPECT_TRUE(c.at("rows") == 1 || c.at("rows") == 3) << line;
    EXPECT_TRUE(c.at("bits_ok").get<bool>()) << line;
    EXPECT_GT(c.at("gb_per_s").get<double>(), 0) << line;
    EXPECT_GT(c.at("read_bandwidth_share").get<double>(), 0) << line;
    EXPECT_GT(c.at("ns_per_block").get<double>(), 0) << line;
  }
  const IsaChoice* choices = nullptr;
  size_t runnable = 0;
  const size_t n = IsaChoices(&choices);
  for (size_t i = 0; i < n; ++i) runnable += choices[i].supported;
  EXPECT_EQ(formats.size(), kFormatCount);
  EXPECT_EQ(isas.size(), runnable);
  EXPECT_EQ(cases, kFormatCount * runnable * 2 * 2);
  EXPECT_EQ(resident, cases / 2);
  EXPECT_THAT(output.notes, HasSubstr(fmt::format("{} cases", cases)));
  EXPECT_THAT(output.notes, HasSubstr("32 MiB streamed"));
}

TEST(KernelBench, TableHasALinePerFormatAndThreads) {
  KernelBenchOptions options = Quick();
  options.formats = {"Q8_0", "F32"};
  options.isas = {"scalar"};
  options.resident = false;
  const Output output = Print(options, false);
  ASSERT_TRUE(output.status.ok()) << output.status;
  EXPECT_EQ(std::count(output.text.begin(), output.text.end(), '\n'), 3);
  EXPECT_THAT(output.text, HasSubstr("Q8_0"));
  EXPECT_THAT(output.text, HasSubstr("streaming"));
  EXPECT_THAT(output.text, ::testing::Not(HasSubstr("WRONG")));
}

// The caller's affinity is its own: the pool pins a thread of the benchmark.
TEST(KernelBench, TheCallerStaysUnpinned) {
  cpu_set_t before, after;
  sched_getaffinity(0, sizeof(before), &before);
  KernelBenchOptions options = Quick();
  options.formats = {"Q8_0"};
  ASSERT_TRUE(RunKernelBench(options, {[](const auto&) {}, [](const auto&) {}}).ok());
  sched_getaffinity(0, sizeof(after), &after);
  EXPECT_TRUE(CPU_EQUAL(&before, &after));
}

TEST(KernelBench, RefusesByName) {
  const auto message = [](auto change) {
    KernelBenchOptions options = Quick();
    change(options);
    const Status status = RunKernelBench(
        options, {[](const auto&) {}, [](const auto&) { ADD_FAILURE() << "measured"; }});
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return Message(status);
  };
  EXPECT_THAT(message([](auto& o) { o.formats = {"Q9_X"}; }), HasSubstr("format 'Q9_X'"));
  EXPECT_THAT(message([](auto& o) { o.formats = {"Q9_X"}; }), HasSubstr("Q8_0"));
  EXPECT_THAT(message([](auto& o) { o.isas = {"mmx"}; }), HasSubstr("'mmx'"));
  EXPECT_THAT(message([](auto& o) { o.rows = {9}; }), HasSubstr("1..8"));
  EXPECT_THAT(message([](auto& o) { o.threads = {2}; }), HasSubstr("2 threads"));
  EXPECT_THAT(message([](auto& o) { o.stream_bytes = 1; }), HasSubstr("16 MiB"));
  EXPECT_THAT(message([](auto& o) { o.seconds = 0; }), HasSubstr("seconds"));
  EXPECT_THAT(message([](auto& o) { o.resident = o.streaming = false; }), HasSubstr("nothing"));
}

TEST(Blocks, AreOrdinaryNumbersAndTheSameEverywhere) {
  for (uint32_t i = 0; i < kFormatCount; ++i) {
    const Format format = static_cast<Format>(i);
    const std::vector<uint8_t> rows = bench::OrdinaryRows(format, 2, 512, 7);
    EXPECT_EQ(rows, bench::OrdinaryRows(format, 2, 512, 7));
    EXPECT_NE(rows, bench::OrdinaryRows(format, 2, 512, 8));
    size_t zeros = 0;
    for (const float w : reference::Dequant(format, rows.data(), 1024)) {
      ASSERT_TRUE(std::isfinite(w) && std::fabs(w) <= 0x1p20f) << Info(format).name;
      zeros += w == 0;
    }
    EXPECT_LT(zeros, 700u) << Info(format).name << ": weights that are mostly zero test nothing";
  }
}

// Every byte counts in what a reader returns: one that skipped loads would measure too much.
TEST(MemoryReader, ReadsEveryByte) {
  std::vector<uint8_t> memory(4 * bench::kReadStride);
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<uint8_t>(i * 37 + 11);
  const bench::MemoryReader* readers = nullptr;
  const size_t n = bench::MemoryReaders(&readers);
  ASSERT_GE(n, 2u);
  for (size_t k = 0; k < n; ++k) {
    const uint64_t calm = readers[k].read(memory.data(), memory.size());
    for (size_t i = 0; i < memory.size(); ++i) {
      memory[i] ^= 0x10;
      ASSERT_NE(readers[k].read(memory.data(), memory.size()), calm) << readers[k].name << " " << i;
      memory[i] ^= 0x10;
    }
  }
}

}  // namespace
}  // namespace lode
