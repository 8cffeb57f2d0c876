// ChooseThreads: usable cores dealt out to CPU workers. Pure, no machine in sight.
#include <algorithm>
#include <cmath>

#include "shared/base/check.h"
#include "shared/topology/topology.h"

namespace lode {
namespace {

// Below this many cores the host threads share them: leaving one of two idle would halve the CPU
// lane.
constexpr uint32_t kCoresToSpareOne = 3;

// Which cores and nodes each worker gets when nothing limits it.
std::vector<WorkerThreads> DealCores(const Topology& topology, uint32_t n_workers) {
  std::vector<WorkerThreads> workers(n_workers);
  const uint32_t n_nodes = static_cast<uint32_t>(topology.nodes.size());
  if (n_workers <= n_nodes) {
    for (uint32_t i = 0; i < n_nodes; ++i) {
      // Worker w spans nodes [n_nodes*w/n_workers, n_nodes*(w+1)/n_workers): neighbours in number
      // are mostly neighbours in distance.
      const uint32_t w =
          static_cast<uint32_t>((static_cast<uint64_t>(i) * n_workers + n_workers - 1) / n_nodes);
      WorkerThreads& worker = workers[std::min(w, n_workers - 1)];
      worker.nodes.push_back(topology.nodes[i].os_index);
      worker.cpus.insert(worker.cpus.end(), topology.nodes[i].cpus.begin(),
                         topology.nodes[i].cpus.end());
    }
    return workers;
  }
  for (uint32_t i = 0; i < n_nodes; ++i) {
    // Workers i, i + n_nodes, ... share node i and split its cores.
    const TopologyNode& node = topology.nodes[i];
    const uint32_t sharers = (n_workers - i + n_nodes - 1) / n_nodes;
    for (uint32_t s = 0; s < sharers; ++s) {
      WorkerThreads& worker = workers[i + s * n_nodes];
      worker.nodes = {node.os_index};
      const size_t begin = node.cpus.size() * s / sharers,
                   end = node.cpus.size() * (s + 1) / sharers;
      worker.cpus.assign(node.cpus.begin() + static_cast<long>(begin),
                         node.cpus.begin() + static_cast<long>(end));
    }
  }
  return workers;
}

// Takes one core at a time from the worker that has most.
void Shrink(std::vector<WorkerThreads>* workers, uint32_t cores_max) {
  uint32_t total = 0;
  for (const WorkerThreads& w : *workers) total += static_cast<uint32_t>(w.cpus.size());
  while (total > cores_max) {
    const auto most = std::max_element(workers->begin(), workers->end(),
                                       [](const WorkerThreads& a, const WorkerThreads& b) {
                                         return a.cpus.size() < b.cpus.size();
                                       });
    if (most->cpus.size() <= 1) return;
    most->cpus.pop_back();
    --total;
  }
}

// Cores that nobody was given, for host threads.
std::vector<uint32_t> SpareCpus(const Topology& topology,
                                const std::vector<WorkerThreads>& workers) {
  std::vector<uint32_t> spare;
  for (const TopologyNode& node : topology.nodes) {
    for (const uint32_t cpu : node.cpus) {
      const bool taken = std::any_of(workers.begin(), workers.end(), [&](const WorkerThreads& w) {
        return std::find(w.cpus.begin(), w.cpus.end(), cpu) != w.cpus.end();
      });
      if (!taken) spare.push_back(cpu);
    }
  }
  std::sort(spare.begin(), spare.end());
  return spare;
}

}  // namespace

uint32_t CoreBudget(const Topology& topology) {
  const uint32_t cores = std::max(1u, topology.usable_cores());
  if (topology.quota_cores <= 0 || topology.quota_cores >= cores) return cores;
  return std::max(1u, static_cast<uint32_t>(std::floor(topology.quota_cores)));
}

uint32_t ChooseWorkers(const Topology& topology) {
  return std::min(static_cast<uint32_t>(topology.nodes.size()), CoreBudget(topology));
}

ThreadChoice ChooseThreads(const Topology& topology, uint32_t n_workers, uint32_t wanted) {
  LODE_CHECK(n_workers > 0 && !topology.nodes.empty(), "{} workers", n_workers);
  ThreadChoice choice;
  choice.workers = DealCores(topology, n_workers);
  const uint32_t cores = topology.usable_cores();
  // A quota is a budget of CPU time for every thread of the service, the host's included.
  const uint32_t budget = CoreBudget(topology);
  const bool quota_binds = budget < cores;
  const uint32_t compute = budget >= kCoresToSpareOne ? budget - 1 : budget;
  if (wanted == 0) Shrink(&choice.workers, std::max(compute, n_workers));
  if (quota_binds && wanted > std::max(1u, budget / n_workers)) {
    wanted = std::max(1u, budget / n_workers);
    choice.wish_cut = true;
  }
  uint32_t total = 0;
  for (WorkerThreads& w : choice.workers) {
    const uint32_t owned = static_cast<uint32_t>(w.cpus.size());
    w.threads = wanted > 0 ? wanted : std::max(1u, owned);
    // Two threads on one core must be free to move.
    if (w.threads > owned) w.cpus.clear();
    if (w.threads < owned) w.cpus.resize(w.threads);
    total += w.threads;
  }
  choice.spare_cpus = SpareCpus(topology, choice.workers);
  choice.oversubscribed = total > budget;
  return choice;
}

}  // namespace lode
