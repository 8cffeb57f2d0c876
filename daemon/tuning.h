// `lode tune`: options that need no restart, changed while the daemon runs. The same names,
// spellings and bounds as at start (shared/config); what they become is a change of the scheduler's
// tunables, in force from the next window on. Any thread.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <string>

#include "daemon/scheduler.h"
#include "shared/base/status.h"
#include "shared/config/fields.h"

namespace lode {

// What an option that chooses for itself (vram_budget = 0, pull_share = -1) chose at start.
struct TuningDefaults {
  uint64_t vram_budget_bytes = 0;
  float pull_share = 0;
  bool cuda = false;  // the device
};

// What split_policy means on this device: auto is balanced on cuda unless a pull_share is given.
SplitPolicy ChosenSplit(const Options& options, bool cuda);

class Tuning {
 public:
  using Apply = std::function<Status(const TunablesChange&)>;
  Tuning(const Options& options, const TuningDefaults& defaults, Apply apply)
      : defaults_(defaults), apply_(std::move(apply)), options_(options) {}

  // All changes or none; the values of every such option afterwards. Errors: InvalidArgument naming
  // the option, the value and what is possible.
  StatusOr<std::map<std::string, std::string>> Tune(
      const std::map<std::string, std::string>& changes);

 private:
  const TuningDefaults defaults_;
  const Apply apply_;
  std::mutex mutex_;
  Options options_;  // guarded by mutex_
};

}  // namespace lode
