// A supervisor configuration for the fake worker: two CPU workers with arenas of a few pages.
#pragma once

#include <unistd.h>

#include <string>

#include "daemon/supervisor.h"

namespace lode {

inline SupervisorConfig FakeSupervisorConfig(const std::string& binary_dir,
                                             const std::string& socket_path) {
  SupervisorConfig config;
  config.cpu_binary = config.gpu_binary = binary_dir + "/bin/fake_worker";
  config.socket_path = socket_path;
  config.log_level = "error";
  config.shape = {64, 32, 2, 2};
  config.identity = "test";
  config.vocab = 256;
  config.load_seconds = 20;
  for (uint32_t node = 0; node < 2; ++node) {
    ArenaLayout layout = {};
    layout.node = node;
    layout.n_nodes = 2;
    layout.bytes = 1 << 16;
    config.arenas.push_back(layout);
    LoadPlan plan;
    plan.n_nodes = 2;
    plan.threads = 1;
    config.cpu_plans.push_back(plan);
    config.gpu_plan = plan;
  }
  return config;
}

}  // namespace lode
