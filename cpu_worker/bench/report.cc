// See report.h. The table has one line per format, instruction set and number of threads; rows are
// columns.
#include "cpu_worker/bench/report.h"


#include "shared/topology/topology.h"

namespace lode {
namespace {

// A share above this says that the reads were disturbed, not that the kernel is that fast.
constexpr double kShareMax = 1.1;

// One case as its line of JSON. Names come from our own lists and need no escapes.
std::string AsJson(const KernelBenchCase& c) {
  return fmt::format(
      R"({{"format":"{}","isa":"{}","rows":{},"threads":{},"resident":{},"gb_per_s":{:.3f},)"
      R"("read_bandwidth_share":{:.4f},"ns_per_block":{:.3f},"bits_ok":{}}})",
      c.format, c.isa, c.rows, c.threads, c.resident, c.gb_per_s, c.read_bandwidth_share,
      c.ns_per_block, c.bits_ok);
}

// Collects the cases of one line of the table: format, instruction set, threads, place.
class Table {
 public:
  Table(const KernelBenchOptions& options, std::FILE* out) : rows_(options.rows), out_(out) {}

  void Head() const {
    std::string line = fmt::format("{:8} {:12} {:>7} {:9}", "format", "isa", "threads", "weights");
    for (const uint32_t r : rows_)
      line += fmt::format(" | {:>3} row{}  GB/s share", r, r == 1 ? " " : "s");
    fmt::print(out_, "{} | ns/block  bits\n", line);
  }
  void Add(const KernelBenchCase& c) {
    line_.push_back(c);
    if (line_.size() < rows_.size()) return;
    std::string text = fmt::format("{:8} {:12} {:>7} {:9}", c.format, c.isa, c.threads,
                                   c.resident ? "resident" : "streaming");
    bool ok = true;
    for (const KernelBenchCase& one : line_) {
      text += fmt::format(" | {:14.2f} {:5.2f}", one.gb_per_s, one.read_bandwidth_share);
      ok &= one.bits_ok;
    }
    fmt::print(out_, "{} | {:8.2f}  {}\n", text, line_.front().ns_per_block, ok ? "ok" : "WRONG");
    std::fflush(out_);
    line_.clear();
  }

 private:
  const std::vector<uint32_t> rows_;
  std::FILE* const out_;
  std::vector<KernelBenchCase> line_;
};

void PrintMachine(const KernelBenchMachine& m, double seconds, std::FILE* notes) {
  fmt::print(notes,
             "{}: {} cores used at most, pages {}, {} MiB streamed, {} KiB per thread resident\n",
             m.cpu, m.cores, m.pages, m.stream_bytes >> 20, m.resident_bytes >> 10);
  for (const std::string& isa : m.refused_isas) fmt::print(notes, "not measured: {}\n", isa);
  for (const std::string& warning : m.warnings) fmt::print(notes, "warning: {}\n", warning);
  fmt::print(notes, "{} cases, about {:.0f} s\n", m.cases,
             2.8 * seconds * static_cast<double>(m.cases));
  std::fflush(notes);
}

// The cores of one NUMA node, as a CPU worker of this machine would get them, but every one.
Status ChooseCores(KernelBenchOptions* options) {
  if (!options->cpus.empty()) return OkStatus();
  LODE_ASSIGN_OR_RETURN(const Topology topology, ReadTopology(TopologyOptions::FromEnvironment()));
  const TopologyNode& node = topology.nodes.front();
  options->cpus = node.cpus;
  if (topology.quota_cores > 0 && topology.quota_cores < static_cast<double>(node.cpus.size()))
    options->cpus.resize(std::max<size_t>(1, static_cast<size_t>(topology.quota_cores)));
  if (topology.numa_available && topology.nodes.size() > 1) options->numa_nodes = {node.os_index};
  return OkStatus();
}

}  // namespace

Status BenchKernels(KernelBenchOptions options, bool json, std::FILE* out, std::FILE* notes) {
  LODE_RETURN_IF_ERROR(ChooseCores(&options));
  Table table(options, out);
  size_t wrong = 0, faster_than_reads = 0;
  KernelBenchSink sink;
  sink.machine = [&](const KernelBenchMachine& machine) {
    PrintMachine(machine, options.seconds, notes);
    if (!json) table.Head();
  };
  sink.result = [&](const KernelBenchCase& c) {
    wrong += !c.bits_ok;
    faster_than_reads += c.read_bandwidth_share > kShareMax;
    if (!json) return table.Add(c);
    fmt::print(out, "{}\n", AsJson(c));
    std::fflush(out);
  };
  LODE_RETURN_IF_ERROR(RunKernelBench(options, sink));
  if (faster_than_reads > 0) {
    fmt::print(notes,
               "warning: {} cases read faster than the plain reads they are compared with, so this "
               "machine was not quiet; stop what else runs, or give --seconds 0.5\n",
               faster_than_reads);
  }
  if (wrong > 0)
    return Internal(
        "{} cases gave other bits than the definition of the arithmetic; please report the CPU and "
        "the cases",
        wrong);
  return OkStatus();
}

}  // namespace lode
