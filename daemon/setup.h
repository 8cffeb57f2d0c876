// From options, model and machine to what supervisor and scheduler are given: pure, apart from the
// folders it names. All defaults that depend on the machine or the model are decided here and
// nowhere else.
#pragma once

#include <string>

#include "daemon/scheduler.h"
#include "daemon/supervisor.h"
#include "shared/base/status.h"
#include "shared/config/fields.h"
#include "shared/model/model_source.h"
#include "shared/topology/topology.h"

namespace lode {

struct EngineSetup {
  SupervisorConfig supervisor;
  SchedulerConfig scheduler;
  std::string summary;  // one line for the log
};
// `control_socket`: where workers connect. `worker_dir`: where their binaries are. Errors name the
// option or tensor.
StatusOr<EngineSetup> MakeSetup(const Options& options, const ModelSource& source,
                                const Topology& topology, const std::string& control_socket,
                                const std::string& worker_dir);

// Kernel tables by name, in the order of the tables every process has (kernels/kernel_table.h:
// compiled in, best last). The index travels in Tunables. 0 (scalar, which every machine runs) for
// an unknown name.
uint32_t IsaIndex(const std::string& name);

// Bytes of half of the experts, as slots hold them: the cpu device's default tier.
StatusOr<uint64_t> ExpertSlotBytesTotal(const ModelSource& source);

}  // namespace lode
