// See daemon/tuning.h.
#include "daemon/tuning.h"

#include <algorithm>
#include <vector>

#include "shared/base/log.h"
#include "shared/config/config.h"

namespace lode {

SplitPolicy ChosenSplit(const Options& options, bool cuda) {
  const bool balanced = options.split_policy == "balanced" ||
                        (options.split_policy == "auto" && cuda && options.pull_share < 0);
  return balanced ? SplitPolicy::kBalanced : SplitPolicy::kFixed;
}

StatusOr<std::map<std::string, std::string>> Tuning::Tune(
    const std::map<std::string, std::string>& changes) {
  const std::vector<std::string> names = OptionsWithoutRestart();
  std::lock_guard lock(mutex_);
  Options next = options_;
  for (const auto& [name, value] : changes) {
    if (std::find(names.begin(), names.end(), name) == names.end()) {
      return InvalidArgument("option '{}' cannot be changed while the daemon runs; {} can",
                             name.substr(0, 64), fmt::join(names, ", "));
    }
    LODE_RETURN_IF_ERROR(ApplyValue(name, value, "lode tune", &next));
  }
  LODE_RETURN_IF_ERROR(ValidateOptions(next));
  TunablesChange change;
  change.vram_budget_bytes = next.vram_budget ? next.vram_budget : defaults_.vram_budget_bytes;
  change.pull_share =
      next.pull_share >= 0 ? static_cast<float>(next.pull_share) : defaults_.pull_share;
  change.split_policy = ChosenSplit(next, defaults_.cuda);
  change.tier_policy = next.tier_policy == "static" ? TierPolicy::kStatic : TierPolicy::kDecayedLfu;
  change.prompt_rows = next.prompt_rows;
  if (!changes.empty()) {
    LODE_RETURN_IF_ERROR(apply_(change));
    options_ = next;
    for (const auto& [name, value] : changes) spdlog::info("tuned: {} = {}", name, value);
  }
  std::map<std::string, std::string> values;
  for (const std::string& name : names) values[name] = OptionText(name, options_);
  return values;
}

}  // namespace lode
