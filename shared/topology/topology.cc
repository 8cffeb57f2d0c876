// ReadTopology over hwloc. hwloc knows cpusets, packages, SMT and hybrid cores; the affinity mask
// of the process (taskset, systemd's CPUAffinity) is taken from the kernel, since hwloc by default
// reports the whole machine.
#include "shared/topology/topology.h"

#include <hwloc.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace lode {
namespace {

struct TopologyDeleter {
  void operator()(hwloc_topology* t) const { hwloc_topology_destroy(t); }
};
using TopologyPtr = std::unique_ptr<hwloc_topology, TopologyDeleter>;

struct BitmapDeleter {
  void operator()(hwloc_bitmap_s* b) const { hwloc_bitmap_free(b); }
};
using Bitmap = std::unique_ptr<hwloc_bitmap_s, BitmapDeleter>;

StatusOr<TopologyPtr> Load(const TopologyOptions& options) {
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) return Internal("hwloc does not start");
  TopologyPtr topology(raw);
  int set = 0;
  if (!options.synthetic.empty()) {
    set = hwloc_topology_set_synthetic(raw, options.synthetic.c_str());
  } else if (!options.xml.empty()) {
    set = hwloc_topology_set_xmlbuffer(raw, options.xml.c_str(),
                                       static_cast<int>(options.xml.size() + 1));
  } else if (!options.xml_path.empty()) {
    set = hwloc_topology_set_xml(raw, options.xml_path.c_str());
  }
  if (set != 0)
    return InvalidArgument("hwloc refuses the topology description '{}{}'", options.synthetic,
                           options.xml_path);
  if (hwloc_topology_load(raw) != 0) return Internal("hwloc cannot read the machine's topology");
  return topology;
}

bool Described(const TopologyOptions& options) {
  return !options.synthetic.empty() || !options.xml.empty() || !options.xml_path.empty();
}

// Allowed CPUs: hwloc's (cgroup cpuset) and the process's own mask.
Bitmap AllowedCpus(hwloc_topology_t topology, const TopologyOptions& options) {
  Bitmap allowed(hwloc_bitmap_dup(hwloc_topology_get_allowed_cpuset(topology)));
  Bitmap mask(hwloc_bitmap_alloc());
  if (options.allowed.has_value()) {
    for (uint32_t cpu : *options.allowed) hwloc_bitmap_set(mask.get(), cpu);
  } else if (Described(options) ||
             hwloc_get_cpubind(topology, mask.get(), HWLOC_CPUBIND_PROCESS) != 0) {
    hwloc_bitmap_fill(mask.get());
  }
  hwloc_bitmap_and(allowed.get(), allowed.get(), mask.get());
  return allowed;
}

// A set of CPUs of one kind, as hwloc tells them apart.
struct CpuKind {
  Bitmap cpus;
  int efficiency = -1;    // hwloc's rank: higher is faster; -1: it cannot rank them
  std::string core_type;  // "IntelCore", "IntelAtom"; empty: unknown
  double capacity = 0;    // Linux's relative speed; 0: unknown
  double max_mhz = 0;     // 0: unknown
};

std::vector<CpuKind> KindsIn(hwloc_topology_t topology, hwloc_const_bitmap_t allowed) {
  std::vector<CpuKind> kinds;
  const int count = hwloc_cpukinds_get_nr(topology, 0);
  for (int i = 0; i < count; ++i) {
    CpuKind kind;
    kind.cpus.reset(hwloc_bitmap_alloc());
    unsigned n_infos = 0;
    hwloc_info_s* infos = nullptr;
    if (hwloc_cpukinds_get_info(topology, static_cast<unsigned>(i), kind.cpus.get(),
                                &kind.efficiency, &n_infos, &infos, 0) != 0)
      continue;
    // A kind outside the mask must not rule out what is inside it.
    if (!hwloc_bitmap_intersects(kind.cpus.get(), allowed)) continue;
    for (unsigned k = 0; k < n_infos; ++k) {
      const std::string_view name = infos[k].name;
      if (name == "CoreType") kind.core_type = infos[k].value;
      if (name == "LinuxCapacity") kind.capacity = std::strtod(infos[k].value, nullptr);
      if (name == "FrequencyMaxMHz") kind.max_mhz = std::strtod(infos[k].value, nullptr);
    }
    kinds.push_back(std::move(kind));
  }
  return kinds;
}

// True when cores of `kind` would hold back cores of `best` in every phase. A ranking alone does
// not say so: many processors have a few favoured cores that clock some percent higher, and leaving
// out all others would be the larger mistake.
bool IsSlow(const CpuKind& kind, const CpuKind& best) {
  constexpr double kSlowRatio =
      0.75;  // efficiency cores are at 0.4 to 0.7, favoured ones above 0.9
  if (kind.capacity > 0 && best.capacity > 0) return kind.capacity < kSlowRatio * best.capacity;
  if (kind.efficiency >= best.efficiency) return false;
  if (!kind.core_type.empty() && !best.core_type.empty() && kind.core_type != best.core_type)
    return true;
  if (kind.max_mhz > 0 && best.max_mhz > 0) return kind.max_mhz < kSlowRatio * best.max_mhz;
  return true;  // ranked lower, and nothing says by how much
}

// CPUs that are about as fast as the fastest; every CPU when hwloc knows of one kind only.
Bitmap FastCpus(hwloc_topology_t topology, hwloc_const_bitmap_t allowed) {
  Bitmap fast(hwloc_bitmap_alloc());
  hwloc_bitmap_fill(fast.get());
  const std::vector<CpuKind> kinds = KindsIn(topology, allowed);
  // Not every version of hwloc ranks by capacity.
  const auto best =
      std::max_element(kinds.begin(), kinds.end(), [](const CpuKind& a, const CpuKind& b) {
        return std::tie(a.efficiency, a.capacity) < std::tie(b.efficiency, b.capacity);
      });
  for (const CpuKind& kind : kinds) {
    if (IsSlow(kind, *best)) hwloc_bitmap_andnot(fast.get(), fast.get(), kind.cpus.get());
  }
  return fast;
}

// The first allowed CPU of each core that has one. Machines whose cores hwloc does not know count
// every CPU as a core.
std::vector<uint32_t> CoresIn(hwloc_topology_t topology, hwloc_const_bitmap_t cpus) {
  std::vector<uint32_t> result;
  const int cores = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_CORE);
  if (cores <= 0) {
    for (int cpu = hwloc_bitmap_first(cpus); cpu >= 0; cpu = hwloc_bitmap_next(cpus, cpu))
      result.push_back(static_cast<uint32_t>(cpu));
    return result;
  }
  for (int i = 0; i < cores; ++i) {
    const hwloc_obj_t core =
        hwloc_get_obj_by_type(topology, HWLOC_OBJ_CORE, static_cast<unsigned>(i));
    Bitmap mine(hwloc_bitmap_alloc());
    hwloc_bitmap_and(mine.get(), core->cpuset, cpus);
    const int first = hwloc_bitmap_first(mine.get());
    if (first >= 0) result.push_back(static_cast<uint32_t>(first));
  }
  std::sort(result.begin(), result.end());
  return result;
}

// NUMA nodes with usable cores. Several nodes may have the same CPUs (on-package memory beside
// DRAM): the largest one counts.
std::vector<TopologyNode> NodesOf(hwloc_topology_t topology, hwloc_const_bitmap_t usable) {
  std::vector<TopologyNode> nodes;
  const int count = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_NUMANODE);
  for (int i = 0; i < count; ++i) {
    const hwloc_obj_t object =
        hwloc_get_obj_by_type(topology, HWLOC_OBJ_NUMANODE, static_cast<unsigned>(i));
    Bitmap mine(hwloc_bitmap_alloc());
    hwloc_bitmap_and(mine.get(), object->cpuset, usable);
    TopologyNode node = {object->os_index, CoresIn(topology, mine.get()),
                         object->attr->numanode.local_memory};
    if (node.cpus.empty()) continue;
    const auto twin = std::find_if(nodes.begin(), nodes.end(),
                                   [&](const TopologyNode& n) { return n.cpus == node.cpus; });
    if (twin == nodes.end()) {
      nodes.push_back(std::move(node));
    } else if (node.memory_bytes > twin->memory_bytes) {
      *twin = std::move(node);
    }
  }
  std::sort(nodes.begin(), nodes.end(),
            [](const TopologyNode& a, const TopologyNode& b) { return a.os_index < b.os_index; });
  return nodes;
}

}  // namespace

TopologyOptions TopologyOptions::FromEnvironment() {
  TopologyOptions options;
  if (const char* text = std::getenv("LODE_TOPOLOGY")) {
    const std::string_view value = text;
    if (value.substr(0, 10) == "synthetic:") options.synthetic = value.substr(10);
    if (value.substr(0, 4) == "xml:") options.xml_path = value.substr(4);
  }
  if (const char* text = std::getenv("LODE_CPU_QUOTA"))
    options.quota_cores = std::strtod(text, nullptr);
  return options;
}

StatusOr<Topology> ReadTopology(const TopologyOptions& options) {
  LODE_ASSIGN_OR_RETURN(const TopologyPtr owner, Load(options));
  const hwloc_topology_t topology = owner.get();
  const Bitmap allowed = AllowedCpus(topology, options);
  if (hwloc_bitmap_iszero(allowed.get()))
    return FailedPrecondition(
        "no CPU is allowed for this process; check its cpuset and affinity mask");
  const Bitmap fast = FastCpus(topology, allowed.get());
  Bitmap usable(hwloc_bitmap_alloc());
  hwloc_bitmap_and(usable.get(), allowed.get(), fast.get());

  Topology result;
  result.allowed_cpus = static_cast<uint32_t>(std::max(0, hwloc_bitmap_weight(allowed.get())));
  result.physical_cores = static_cast<uint32_t>(CoresIn(topology, allowed.get()).size());
  result.nodes = NodesOf(topology, usable.get());
  if (result.nodes.empty()) result.nodes.push_back({0, CoresIn(topology, usable.get()), 0});
  result.efficiency_cores =
      result.physical_cores - static_cast<uint32_t>(CoresIn(topology, usable.get()).size());
  const hwloc_topology_membind_support* membind = hwloc_topology_get_support(topology)->membind;
  result.numa_available = !Described(options) && membind->bind_membind != 0;
  result.quota_cores =
      options.quota_cores.has_value()
          ? *options.quota_cores
          : (Described(options) ? 0 : ReadCpuQuota(options.proc_cgroup, options.cgroup_root));
  return result;
}

}  // namespace lode
