// What this machine can really give to compute threads: NUMA nodes, physical cores inside the
// allowed mask, the cgroup's CPU quota. Read once at start by the daemon (how many CPU workers,
// which cores each) and by `lode doctor`. ReadTopology touches the machine; ChooseThreads is a pure
// function. Rules that other engines learnt the hard way: only CPUs of the mask count, two SMT
// siblings are one core, efficiency cores are not used beside performance cores (they would gate
// every phase), node numbers may be sparse, a machine without NUMA is one node, a memory-only node
// is none.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "shared/base/status.h"

namespace lode {

struct TopologyNode {
  uint32_t os_index = 0;  // NUMA node number of the operating system; may be sparse
  std::vector<uint32_t>
      cpus;  // one CPU number (the first sibling) per usable physical core, ascending
  uint64_t memory_bytes = 0;  // 0: unknown
};

struct Topology {
  std::vector<TopologyNode> nodes;  // with at least one usable core each, by os_index; never empty
  bool numa_available = false;      // memory policies work here
  uint32_t allowed_cpus = 0;        // logical CPUs in the mask
  uint32_t physical_cores = 0;      // in the mask, both kinds
  uint32_t efficiency_cores = 0;    // of these, left out because the machine has faster ones
  double quota_cores = 0;           // cgroup CPU quota in cores; 0: none

  uint32_t usable_cores() const {
    uint32_t n = 0;
    for (const TopologyNode& node : nodes) n += static_cast<uint32_t>(node.cpus.size());
    return n;
  }
};

// Where to look. Defaults: this machine. Tests give a description instead; the environment does the
// same for whole programs: LODE_TOPOLOGY=synthetic:DESCRIPTION or xml:PATH (hwloc's own formats),
// LODE_CPU_QUOTA=CORES.
struct TopologyOptions {
  std::string synthetic;  // hwloc synthetic string, e.g. "node:2 core:4 pu:2"
  std::string xml_path;
  std::string xml;  // the text itself
  std::optional<std::vector<uint32_t>>
      allowed;  // CPU mask; default: the process's own (every CPU when described)
  std::optional<double> quota_cores;
  std::string proc_cgroup = "/proc/self/cgroup";
  std::string cgroup_root = "/sys/fs/cgroup";

  static TopologyOptions FromEnvironment();
};
StatusOr<Topology> ReadTopology(const TopologyOptions& options);

// The smallest CPU quota of the process's control groups and their ancestors, in cores; 0 when
// there is none. Version 2 (cpu.max) and version 1 (cpu.cfs_quota_us), also side by side.
double ReadCpuQuota(const std::string& proc_cgroup, const std::string& cgroup_root);

struct WorkerThreads {
  std::vector<uint32_t>
      nodes;  // os_index of the NUMA nodes that this worker's memory and threads live on
  uint32_t threads = 1;
  std::vector<uint32_t> cpus;  // one per thread to pin to; empty: do not pin
};
struct ThreadChoice {
  std::vector<WorkerThreads> workers;  // [n_workers]
  // Usable cores that no worker's thread is pinned to, ascending: the host thread of a GPU worker
  // may have one.
  std::vector<uint32_t> spare_cpus;
  // More threads in all than cores or quota: spinning would take the time of whoever is waited for,
  // so spin budgets must be 0.
  bool oversubscribed = false;
  bool wish_cut = false;  // the quota gave fewer threads than `wanted`
};
// How many cores' worth of time the service may use: usable cores, or the quota when it is smaller,
// rounded down; at least 1.
uint32_t CoreBudget(const Topology& topology);
// CPU workers when the user names no number: one per node with usable cores, but no more than the
// budget has cores, since each has a thread at least.
uint32_t ChooseWorkers(const Topology& topology);
// n_workers >= 1 CPU workers, normally one per node; more share a node, fewer span several. wanted
// = threads of each worker, 0 = chosen: every usable core, less one for the host threads when there
// are more than 2, within the quota. A quota also cuts what is wanted: threads beyond it are not
// slower by a share, they are stopped together for most of every period. (One thread per worker is
// the least, also when there are more workers than the quota has cores.)
ThreadChoice ChooseThreads(const Topology& topology, uint32_t n_workers, uint32_t wanted);

}  // namespace lode
