// Topologies that broke other engines, as descriptions: SMT, cpusets, hybrid cores, sparse and
// memory-only nodes, quotas. Labels: unit.
#include "shared/topology/topology.h"

#include <gtest/gtest.h>
#include <hwloc.h>
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <numeric>
#include <set>

namespace lode {
namespace {

Topology Read(const TopologyOptions& options) {
  auto t = ReadTopology(options);
  EXPECT_TRUE(t.ok()) << t.status().message();
  return t.ok() ? *t : Topology{};
}
Topology Synthetic(const std::string& text) {
  TopologyOptions options;
  options.synthetic = text;
  return Read(options);
}
using Cpus = std::vector<uint32_t>;

TEST(Topology, SmtSiblingsAreOneCore) {
  const Topology t = Synthetic("numanode:2 core:4 pu:2");
  ASSERT_EQ(t.nodes.size(), 2u);
  EXPECT_EQ(t.allowed_cpus, 16u);
  EXPECT_EQ(t.physical_cores, 8u);
  EXPECT_EQ(t.nodes[0].cpus, (Cpus{0, 2, 4, 6}));
  EXPECT_EQ(t.nodes[1].cpus, (Cpus{8, 10, 12, 14}));
  EXPECT_EQ(t.quota_cores, 0);
  EXPECT_FALSE(t.numa_available) << "a described machine has no memory to place";
}

TEST(Topology, OnlyTheMaskCounts) {
  TopologyOptions options;
  options.synthetic = "numanode:2 core:4 pu:2";
  options.allowed = Cpus{1, 2, 3, 9};  // second sibling of core 0, both of core 1, one of node 1
  const Topology t = Read(options);
  EXPECT_EQ(t.allowed_cpus, 4u);
  EXPECT_EQ(t.physical_cores, 3u);
  ASSERT_EQ(t.nodes.size(), 2u);
  EXPECT_EQ(t.nodes[0].cpus, (Cpus{1, 2}));
  EXPECT_EQ(t.nodes[1].cpus, (Cpus{9}));
  options.allowed = Cpus{9};  // node 0 has nothing left: the ids are sparse
  const Topology one = Read(options);
  ASSERT_EQ(one.nodes.size(), 1u);
  EXPECT_EQ(one.nodes[0].os_index, 1u);
  options.allowed = Cpus{};
  EXPECT_FALSE(ReadTopology(options).ok());
}

TEST(Topology, SparseNodeNumbers) {
  const Topology t = Synthetic("numanode:3(indexes=0,4,17) core:2 pu:1");
  ASSERT_EQ(t.nodes.size(), 3u);
  EXPECT_EQ(t.nodes[1].os_index, 4u);
  EXPECT_EQ(t.nodes[2].os_index, 17u);
}

TEST(Topology, OneNodeAndNoCores) {
  const Topology t = Synthetic("pu:3");
  ASSERT_EQ(t.nodes.size(), 1u);
  EXPECT_EQ(t.nodes[0].cpus, (Cpus{0, 1, 2}));
}

// On-package memory beside DRAM: two nodes with the same CPUs are one place to compute.
TEST(Topology, TwinNodesAreOne) {
  const Topology t =
      Synthetic("package:2 [numanode(memory=64GB)] [numanode(memory=16GB)] core:2 pu:1");
  ASSERT_EQ(t.nodes.size(), 2u);
  for (const TopologyNode& n : t.nodes) EXPECT_EQ(n.memory_bytes, 64'000'000'000u);
  EXPECT_EQ(t.usable_cores(), 4u);
}

// Two P cores with SMT and four E cores without, as hwloc exports such a machine.
std::string HybridXml() {
  hwloc_topology_t topology;
  hwloc_topology_init(&topology);
  hwloc_topology_set_synthetic(topology, "numanode:1 core:6 pu:1");
  hwloc_topology_load(topology);
  hwloc_bitmap_t fast = hwloc_bitmap_alloc(), slow = hwloc_bitmap_alloc();
  hwloc_bitmap_set_range(fast, 0, 1);
  hwloc_bitmap_set_range(slow, 2, 5);
  hwloc_cpukinds_register(topology, fast, 10, 0, nullptr, 0);
  hwloc_cpukinds_register(topology, slow, 1, 0, nullptr, 0);
  char* buffer = nullptr;
  int length = 0;
  hwloc_topology_export_xmlbuffer(topology, &buffer, &length, 0);
  const std::string xml(buffer);
  hwloc_free_xmlbuffer(topology, buffer);
  hwloc_bitmap_free(fast);
  hwloc_bitmap_free(slow);
  hwloc_topology_destroy(topology);
  return xml;
}

TEST(Topology, EfficiencyCoresAreLeftOut) {
  TopologyOptions options;
  options.xml = HybridXml();
  const Topology t = Read(options);
  ASSERT_EQ(t.nodes.size(), 1u);
  EXPECT_EQ(t.nodes[0].cpus, (Cpus{0, 1}));
  EXPECT_EQ(t.physical_cores, 6u);
  EXPECT_EQ(t.efficiency_cores, 4u);
  // In a cpuset of efficiency cores alone they are all there is.
  options.allowed = Cpus{3, 4};
  const Topology slow = Read(options);
  EXPECT_EQ(slow.nodes[0].cpus, (Cpus{3, 4}));
  EXPECT_EQ(slow.efficiency_cores, 0u);
}

Topology File(const std::string& name) {
  TopologyOptions options;
  options.xml_path = LODE_SOURCE_DIR "/tests/data/topology/" + name;
  return Read(options);
}

// Performance cores with two threads, efficiency cores with one: one thread per performance core.
TEST(Topology, HybridMachine) {
  const Topology t = File("hybrid-8p4e.xml");
  EXPECT_EQ(t.allowed_cpus, 20u);
  EXPECT_EQ(t.physical_cores, 12u);
  EXPECT_EQ(t.efficiency_cores, 4u);
  EXPECT_EQ(t.nodes[0].cpus, (Cpus{0, 2, 4, 6, 8, 10, 12, 14}));
  EXPECT_EQ(ChooseThreads(t, 1, 0).workers[0].threads, 7u);
  EXPECT_EQ(File("dense-cores.xml").nodes[0].cpus, (Cpus{0, 2}));
}

// Two cores that may clock ten percent higher are no reason to leave six out.
TEST(Topology, FavouredCoresAreNotAKindOfTheirOwn) {
  const Topology t = File("favoured-cores.xml");
  EXPECT_EQ(t.usable_cores(), 8u);
  EXPECT_EQ(t.efficiency_cores, 0u);
}

TEST(Topology, CapacityRanksWhatHwlocDoesNot) {
  const Topology t = File("big-middle-little.xml");
  EXPECT_EQ(t.nodes[0].cpus, (Cpus{4, 5, 6, 7}));
  EXPECT_EQ(t.efficiency_cores, 4u);
}

// The real machine under a narrower mask, as a cpuset, taskset or CPUAffinity gives it.
TEST(Topology, TheProcessMaskBinds) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  uint32_t last = 0;
  for (uint32_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &before)) last = cpu;
  }
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(last, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  const Topology t = Read({});
  sched_setaffinity(0, sizeof(before), &before);
  EXPECT_EQ(t.allowed_cpus, 1u);
  ASSERT_EQ(t.nodes.size(), 1u);
  EXPECT_EQ(t.nodes[0].cpus, (Cpus{last}));
}

TEST(Topology, ThisMachineAndBadDescriptions) {
  const Topology t = Read({});
  EXPECT_GE(t.usable_cores(), 1u);
  EXPECT_GE(t.allowed_cpus, t.physical_cores);
  TopologyOptions bad;
  bad.synthetic = "nonsense:7 what";
  EXPECT_FALSE(ReadTopology(bad).ok());
  bad = {};
  bad.xml_path = "/nowhere.xml";
  EXPECT_FALSE(ReadTopology(bad).ok());
}

TEST(Topology, EnvironmentDescribes) {
  setenv("LODE_TOPOLOGY", "synthetic:numanode:2 core:3 pu:1", 1);
  setenv("LODE_CPU_QUOTA", "2.5", 1);
  const Topology t = Read(TopologyOptions::FromEnvironment());
  unsetenv("LODE_TOPOLOGY");
  unsetenv("LODE_CPU_QUOTA");
  EXPECT_EQ(t.nodes.size(), 2u);
  EXPECT_EQ(t.quota_cores, 2.5);
}

class Quota : public ::testing::Test {
 protected:
  Quota() {
    char name[] = "/tmp/lode-test-XXXXXX";
    folder_ = mkdtemp(name);
    EXPECT_EQ(system(("mkdir -p " + folder_ + "/a/b").c_str()), 0);
  }
  ~Quota() override { EXPECT_EQ(system(("rm -r " + folder_).c_str()), 0); }
  double Read(const std::string& proc, const std::string& root, const std::string& a,
              const std::string& b) {
    Write("/proc", proc);
    Write("/cpu.max", root);
    Write("/a/cpu.max", a);
    Write("/a/b/cpu.max", b);
    return ReadCpuQuota(folder_ + "/proc", folder_);
  }
  void Write(const std::string& name, const std::string& text) {
    std::ofstream(folder_ + name) << text;
  }
  std::string folder_;
};

TEST_F(Quota, SmallestOnTheWayUp) {
  EXPECT_EQ(Read("0::/a/b\n", "", "max 100000", "max 100000"), 0);
  EXPECT_EQ(Read("0::/a/b\n", "", "max 100000", "250000 100000"), 2.5);
  EXPECT_EQ(Read("0::/a/b\n", "", "150000 100000", "250000 100000"), 1.5);
  EXPECT_EQ(Read("0::/a/b\n", "50000 100000", "150000 100000", "250000 100000"), 0.5);
  EXPECT_EQ(Read("0::/a\n", "", "150000 100000", "50000 100000"), 1.5);
  EXPECT_EQ(Read("0::/\n", "400000 100000", "1 100000", ""), 4);
  EXPECT_EQ(Read("2:cpu:/x\n0::/a/b\n", "", "", "300000 100000"), 3);
  EXPECT_EQ(Read("2:cpu:/x\n", "1 1", "", ""), 0);
  EXPECT_EQ(Read("0::/../../etc\n", "1 1", "", ""), 0);
  EXPECT_EQ(Read("0::/a/b\n", "rubbish", "-5 100000", "100 0"), 0);
  EXPECT_EQ(ReadCpuQuota("/nowhere", "/nowhere"), 0);
}

// Version 1 keeps the cpu controller in a hierarchy of its own; the group's path may be the host's.
TEST_F(Quota, VersionOne) {
  const auto group = [&](const std::string& folder, const std::string& quota,
                         const std::string& period) {
    EXPECT_EQ(system(("mkdir -p " + folder_ + folder).c_str()), 0);
    Write(folder + "/cpu.cfs_quota_us", quota);
    Write(folder + "/cpu.cfs_period_us", period);
  };
  const auto read = [&](const std::string& proc) {
    Write("/proc", proc);
    return ReadCpuQuota(folder_ + "/proc", folder_);
  };
  group("/cpu", "-1", "100000");
  EXPECT_EQ(read("4:memory:/x\n1:cpu:/\n"), 0);
  group("/cpu/x/y", "250000", "100000");
  group("/cpu/x", "-1", "100000");
  EXPECT_EQ(read("1:cpu:/x/y\n"), 2.5);
  group("/cpu/x", "50000", "50000");
  EXPECT_EQ(read("1:cpu:/x/y\n"), 1);
  EXPECT_EQ(read("3:cpuset:/x/y\n2:cpuacct:/x/y\n"), 0) << "other controllers limit nothing";
  // Inside a container: the host's path is not there, the mounted root is the container's group.
  group("/cpu", "300000", "100000");
  EXPECT_EQ(read("1:cpu:/docker/0123\n"), 3);
  group("/cpu,cpuacct/a", "150000", "100000");
  EXPECT_EQ(read("2:cpu,cpuacct:/a\n"), 1.5);
  // Both versions mounted: the tighter one binds.
  EXPECT_EQ(system(("mkdir -p " + folder_ + "/unified/a").c_str()), 0);
  Write("/unified/a/cpu.max", "120000 100000");
  EXPECT_EQ(read("2:cpu,cpuacct:/a\n0::/a\n"), 1.2);
  EXPECT_EQ(read("2:cpu,cpuacct:/a/../a\n1:cpu\nrubbish\n"), 0);
  group("/cpu,cpuacct/a", "1000", "0");
  group("/cpu", "rubbish", "100000");
  EXPECT_EQ(read("2:cpu,cpuacct:/a\n"), 0);
}

// ---- ChooseThreads
// -----------------------------------------------------------------------------------------------------

uint32_t Total(const ThreadChoice& c) {
  return std::accumulate(c.workers.begin(), c.workers.end(), 0u,
                         [](uint32_t n, const WorkerThreads& w) { return n + w.threads; });
}
Topology Machine(std::vector<uint32_t> cores_per_node, double quota = 0) {
  Topology t;
  uint32_t cpu = 0;
  for (uint32_t n = 0; n < cores_per_node.size(); ++n) {
    TopologyNode node = {n * 2, {}, 0};
    for (uint32_t c = 0; c < cores_per_node[n]; ++c) node.cpus.push_back(cpu++);
    t.nodes.push_back(node);
  }
  t.quota_cores = quota;
  return t;
}

TEST(ChooseThreads, OneCoreStaysFreeAboveTwo) {
  for (const auto& [cores, threads] :
       {std::pair<uint32_t, uint32_t>{1, 1}, {2, 2}, {3, 2}, {16, 15}}) {
    const ThreadChoice c = ChooseThreads(Machine({cores}), 1, 0);
    EXPECT_EQ(c.workers[0].threads, threads) << cores;
    EXPECT_EQ(c.workers[0].cpus.size(), threads);
    EXPECT_FALSE(c.oversubscribed);
  }
}

TEST(ChooseThreads, WorkersPerNode) {
  const ThreadChoice two = ChooseThreads(Machine({4, 4}), 2, 0);
  EXPECT_EQ(two.workers[0].threads + two.workers[1].threads, 7u);
  EXPECT_EQ(two.workers[1].nodes, Cpus{2});
  const ThreadChoice one = ChooseThreads(Machine({4, 4}), 1, 0);
  EXPECT_EQ(one.workers[0].threads, 7u);
  EXPECT_EQ(one.workers[0].nodes, (Cpus{0, 2}));
  const ThreadChoice split = ChooseThreads(Machine({8}), 3, 0);
  EXPECT_EQ(Total(split), 7u);
  const ThreadChoice crowd = ChooseThreads(Machine({2}), 5, 0);
  EXPECT_EQ(Total(crowd), 5u);
  EXPECT_TRUE(crowd.oversubscribed);
}

TEST(ChooseThreads, QuotaAndWishes) {
  const ThreadChoice quota = ChooseThreads(Machine({16}, 4.9), 1, 0);
  EXPECT_EQ(quota.workers[0].threads, 3u);
  EXPECT_FALSE(quota.oversubscribed);
  EXPECT_EQ(ChooseThreads(Machine({16}, 0.5), 1, 0).workers[0].threads, 1u);
  const ThreadChoice wish = ChooseThreads(Machine({16}), 2, 3);
  EXPECT_EQ(Total(wish), 6u);
  EXPECT_EQ(wish.workers[1].cpus.size(), 3u);
  const ThreadChoice too_many = ChooseThreads(Machine({2}), 1, 8);
  EXPECT_EQ(too_many.workers[0].threads, 8u);
  EXPECT_TRUE(too_many.workers[0].cpus.empty()) << "more threads than cores must be free to move";
  EXPECT_TRUE(too_many.oversubscribed);
}

// Threads beyond a quota are stopped together for most of every period: nobody gets them, not even
// who asks.
TEST(ChooseThreads, NeverMoreThreadsThanTheQuota) {
  for (const double quota : {1.0, 2.0, 3.5, 7.0, 40.0}) {
    for (uint32_t workers = 1; workers <= 4; ++workers) {
      for (const uint32_t wanted : {0u, 1u, 8u}) {
        const Topology t = Machine({16, 16}, quota);
        const ThreadChoice c = ChooseThreads(t, workers, wanted);
        const uint32_t budget = CoreBudget(t);
        EXPECT_LE(Total(c), std::max(budget, workers)) << quota << " " << workers << " " << wanted;
        EXPECT_EQ(c.oversubscribed, workers > budget);
        EXPECT_EQ(c.wish_cut, budget < 32 && wanted > std::max(1u, budget / workers));
      }
    }
  }
  EXPECT_EQ(ChooseThreads(Machine({16}, 2), 1, 8).workers[0].threads, 2u);
  EXPECT_EQ(ChooseThreads(Machine({16}), 1, 16).workers[0].threads, 16u);
  EXPECT_EQ(CoreBudget(Machine({4}, 0.2)), 1u);
  // A worker per node would already be more threads than the quota has cores.
  EXPECT_EQ(ChooseWorkers(Machine({4, 4, 4, 4}, 2.5)), 2u);
  EXPECT_EQ(ChooseWorkers(Machine({4, 4, 4, 4})), 4u);
  EXPECT_EQ(ChooseWorkers(Machine({4, 4}, 0.5)), 1u);
}

TEST(ChooseThreads, SpareCoresAreForTheHost) {
  EXPECT_EQ(ChooseThreads(Machine({4}), 1, 0).spare_cpus, (Cpus{3}));
  EXPECT_EQ(ChooseThreads(Machine({2}), 1, 0).spare_cpus, Cpus{});
  EXPECT_EQ(ChooseThreads(Machine({2, 2}), 2, 1).spare_cpus, (Cpus{1, 3}));
  EXPECT_EQ(ChooseThreads(Machine({8}, 3), 1, 0).spare_cpus.size(), 6u);
}

// Over many shapes: every worker has a thread, no core is given twice, a CPU list fits its threads.
TEST(ChooseThreads, Properties) {
  for (uint32_t nodes = 1; nodes <= 5; ++nodes) {
    for (uint32_t cores = 1; cores <= 6; ++cores) {
      for (uint32_t workers = 1; workers <= 16; ++workers) {
        for (uint32_t wanted : {0u, 1u, 4u}) {
          std::vector<uint32_t> shape(nodes, cores);
          shape[0] += 2;  // uneven
          const ThreadChoice c = ChooseThreads(Machine(shape), workers, wanted);
          ASSERT_EQ(c.workers.size(), workers);
          std::set<uint32_t> used;
          for (const WorkerThreads& w : c.workers) {
            ASSERT_GE(w.threads, 1u);
            ASSERT_FALSE(w.nodes.empty());
            ASSERT_TRUE(w.cpus.empty() || w.cpus.size() == w.threads);
            for (uint32_t cpu : w.cpus) ASSERT_TRUE(used.insert(cpu).second) << "core given twice";
          }
          for (uint32_t cpu : c.spare_cpus)
            ASSERT_TRUE(used.insert(cpu).second) << "spare, and given to a worker";
          const uint32_t all = std::accumulate(shape.begin(), shape.end(), 0u);
          if (wanted == 0 && workers < all && all > 2) {
            ASSERT_LE(Total(c), std::max(workers, all - 1));
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace lode
