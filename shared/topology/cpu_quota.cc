// ReadCpuQuota: cgroup v2's cpu.max, "QUOTA PERIOD" in microseconds or "max PERIOD". A limit on any
// ancestor binds as well, so the smallest one from the process's cgroup up to the root counts.
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

#include "shared/topology/topology.h"

namespace lode {
namespace {

// Path of the process in the unified hierarchy ("0::/a/b"), or empty.
std::string CgroupPath(const std::string& proc_cgroup) {
  std::ifstream file(proc_cgroup);
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("0::", 0) == 0) return line.substr(3);
  }
  return "";
}

double QuotaOf(const std::string& cpu_max_file) {
  std::ifstream file(cpu_max_file);
  std::string quota;
  double period_us = 0;
  if (!(file >> quota >> period_us) || quota == "max" || period_us <= 0) return 0;
  const double quota_us = std::strtod(quota.c_str(), nullptr);
  return quota_us > 0 ? quota_us / period_us : 0;
}

}  // namespace

double ReadCpuQuota(const std::string& proc_cgroup, const std::string& cgroup_root) {
  constexpr int kDepthMax = 64;  // deeper trees do not exist; bounds the loop against an odd path
  std::string path = CgroupPath(proc_cgroup);
  if (path.empty() || path.find("..") != std::string::npos) return 0;
  double smallest = 0;
  for (int depth = 0; depth < kDepthMax; ++depth) {
    const double quota = QuotaOf(cgroup_root + path + "/cpu.max");
    if (quota > 0) smallest = smallest > 0 ? std::min(smallest, quota) : quota;
    const size_t slash = path.rfind('/');
    if (path == "/" || path.empty() || slash == std::string::npos) break;
    path.resize(slash);
  }
  return smallest;
}

}  // namespace lode
