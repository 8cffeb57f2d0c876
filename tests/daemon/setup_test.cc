// What machines of all kinds are given to do: threads, cores, nodes and spin budgets of every
// process, from described topologies and quotas. Labels: unit.
#include "daemon/setup.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

namespace lode {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr char kModel[] =
    "synth:pack=q8_0,hidden=96,width=40,layers=2,experts=6,experts_used=4,vocab=300,ple=0,heads=2,"
    "kv_heads=1,ssm_key_heads=1,ssm_value_heads=1";

EngineSetup Given(const std::string& machine, double quota = 0,
                  const std::function<void(Options*)>& change = nullptr) {
  TopologyOptions where;
  where.synthetic = machine;
  where.quota_cores = quota;
  const auto topology = ReadTopology(where);
  EXPECT_TRUE(topology.ok()) << topology.status();
  const auto source = ModelSource::Open(kModel);
  EXPECT_TRUE(source.ok()) << source.status();
  Options options;
  options.device = "cpu";
  if (change) change(&options);
  auto setup = MakeSetup(options, **source, *topology, "/nowhere/workers.sock", "/nowhere");
  EXPECT_TRUE(setup.ok()) << setup.status();
  return setup.ok() ? std::move(*setup) : EngineSetup{};
}
uint32_t CpuThreads(const EngineSetup& setup) {
  uint32_t n = 0;
  for (const LoadPlan& plan : setup.supervisor.cpu_plans) n += plan.threads;
  return n;
}

// A worker per node, on its node's cores, one core of the machine left for the host.
TEST(Setup, TwoSockets) {
  const EngineSetup setup = Given("numanode:2 core:4 pu:2");
  ASSERT_EQ(setup.supervisor.cpu_plans.size(), 2u);
  EXPECT_EQ(setup.supervisor.shape.n_workers, 2u);
  EXPECT_EQ(CpuThreads(setup), 7u);
  std::set<uint32_t> cores;
  for (uint32_t w = 0; w < 2; ++w) {
    const LoadPlan& plan = setup.supervisor.cpu_plans[w];
    ASSERT_EQ(plan.cpus.size(), plan.threads);
    for (const uint32_t cpu : plan.cpus) {
      EXPECT_EQ(cpu % 2, 0u) << "a second sibling";
      EXPECT_EQ(cpu / 8, w) << "a core of the other node";
      EXPECT_TRUE(cores.insert(cpu).second);
    }
  }
  // Rows are split, none twice, none left out.
  const auto& arenas = setup.supervisor.arenas;
  EXPECT_EQ(arenas[0].width_rows().end, arenas[1].width_rows().begin);
  EXPECT_EQ(arenas[1].width_rows().end, 40u);
}

TEST(Setup, SeveralWorkersOnOneNode) {
  const EngineSetup setup =
      Given("numanode:1 core:8 pu:1", 0, [](Options* o) { o->cpu_workers = 3; });
  ASSERT_EQ(setup.supervisor.cpu_plans.size(), 3u);
  EXPECT_EQ(CpuThreads(setup), 7u);
  std::set<uint32_t> cores;
  for (const LoadPlan& plan : setup.supervisor.cpu_plans)
    cores.insert(plan.cpus.begin(), plan.cpus.end());
  EXPECT_EQ(cores.size(), 7u);
}

// Never more threads than the quota, whoever asks; nobody spins while others need the time.
TEST(Setup, Quota) {
  for (const char* machine : {"numanode:1 core:16 pu:2", "numanode:4 core:8 pu:1"}) {
    for (const double quota : {0.5, 1.0, 2.5, 6.0}) {
      for (const uint32_t wish : {0u, 8u}) {
        const EngineSetup setup = Given(machine, quota, [&](Options* o) { o->cpu_threads = wish; });
        const uint32_t budget = std::max(1u, static_cast<uint32_t>(quota));
        EXPECT_LE(CpuThreads(setup), budget) << machine << " " << quota << " " << wish;
        EXPECT_LE(setup.supervisor.gpu_plan.threads, budget);
        EXPECT_EQ(setup.scheduler.spin_ns, 0u);
        EXPECT_EQ(setup.supervisor.cpu_plans[0].spin_us, 0u);
      }
    }
  }
  EXPECT_THAT(Given("core:16 pu:1", 2, [](Options* o) { o->cpu_threads = 8; }).summary,
              HasSubstr("cut to the CPU quota of 2.0 cores"));
}

// The cpu device shares its cores with the CPU workers unless there are enough for both: then it is
// pinned to others, and spinning costs nobody anything.
TEST(Setup, DeviceThreads) {
  const EngineSetup shared = Given("core:4 pu:1");
  EXPECT_THAT(shared.supervisor.gpu_plan.cpus, IsEmpty());
  EXPECT_EQ(shared.supervisor.gpu_plan.threads, 4u);
  EXPECT_EQ(shared.scheduler.spin_ns, 0u);
  const EngineSetup apart = Given("core:8 pu:1", 0, [](Options* o) {
    o->cpu_threads = 4;
    o->device_threads = 2;
  });
  EXPECT_THAT(apart.supervisor.cpu_plans[0].cpus, ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(apart.supervisor.gpu_plan.cpus, ElementsAre(4, 5));
  EXPECT_GT(apart.scheduler.spin_ns, 0u);
}

}  // namespace
}  // namespace lode
