// ReadCpuQuota: how much processor time the control groups of this process give it, in cores.
// Version 2 has cpu.max, "QUOTA PERIOD" in microseconds or "max PERIOD", in one hierarchy; version
// 1 has cpu.cfs_quota_us (-1: none) and cpu.cfs_period_us in the hierarchy of the cpu controller. A
// machine may mount both. A limit on any ancestor binds as well, so the smallest one from the
// process's group up to the root counts; inside a container, where the path of /proc/self/cgroup
// may be the host's and not exist, the walk ends at the mounted root, which is the container's own.
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "shared/topology/topology.h"

namespace lode {
namespace {

constexpr int kDepthMax = 64;  // deeper trees do not exist; bounds the loop against an odd path

// A hierarchy that can limit processor time: where it may be mounted, the process's path in it.
struct Hierarchy {
  std::vector<std::string> folders;  // below the cgroup root; those that are not there are harmless
  std::string path;
  bool v2;
};

// Lines of /proc/self/cgroup: "0::/a/b" is version 2, "4:cpu,cpuacct:/a/b" one of version 1.
std::vector<Hierarchy> HierarchiesOf(const std::string& proc_cgroup) {
  std::vector<Hierarchy> result;
  std::ifstream file(proc_cgroup);
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    // Nothing above the root is ours, whatever a file says.
    if (path.empty() || path.find("..") != std::string::npos) continue;
    if (line.rfind("0::", 0) == 0) {
      result.push_back({{"", "/unified"}, path, true});
      continue;
    }
    std::istringstream names(controllers);
    for (std::string name; std::getline(names, name, ',');) {
      if (name == "cpu")
        result.push_back({{"/" + controllers, "/cpu", "/cpu,cpuacct"}, path, false});
    }
  }
  return result;
}

// Cores of quota and period in microseconds; 0: no limit.
double Cores(double quota_us, double period_us) {
  return quota_us > 0 && period_us > 0 ? quota_us / period_us : 0;
}

double QuotaV2(const std::string& folder) {
  std::ifstream file(folder + "/cpu.max");
  std::string quota;
  double period_us = 0;
  if (!(file >> quota >> period_us) || quota == "max") return 0;
  return Cores(std::strtod(quota.c_str(), nullptr), period_us);
}

double QuotaV1(const std::string& folder) {
  std::ifstream quota_file(folder + "/cpu.cfs_quota_us"),
      period_file(folder + "/cpu.cfs_period_us");
  double quota_us = 0, period_us = 0;
  if (!(quota_file >> quota_us) || !(period_file >> period_us)) return 0;
  return Cores(quota_us, period_us);
}

// The smallest limit from the hierarchy's group up to its root; 0: none.
double SmallestOnTheWayUp(const Hierarchy& hierarchy, const std::string& root) {
  double smallest = 0;
  for (const std::string& folder : hierarchy.folders) {
    std::string path = hierarchy.path == "/" ? "" : hierarchy.path;
    for (int depth = 0; depth < kDepthMax; ++depth) {
      const std::string group = root + folder + path;
      const double quota = hierarchy.v2 ? QuotaV2(group) : QuotaV1(group);
      if (quota > 0) smallest = smallest > 0 ? std::min(smallest, quota) : quota;
      const size_t slash = path.rfind('/');
      if (slash == std::string::npos) break;
      path.resize(slash);
    }
  }
  return smallest;
}

}  // namespace

double ReadCpuQuota(const std::string& proc_cgroup, const std::string& cgroup_root) {
  double smallest = 0;
  for (const Hierarchy& hierarchy : HierarchiesOf(proc_cgroup)) {
    const double quota = SmallestOnTheWayUp(hierarchy, cgroup_root);
    if (quota > 0) smallest = smallest > 0 ? std::min(smallest, quota) : quota;
  }
  return smallest;
}

}  // namespace lode
