// One option as data: what the macro list of shared/config/fields.h becomes. Internal to
// shared/config.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "shared/base/status.h"
#include "shared/config/fields.h"

namespace lode {

enum class OptionKind { kString, kBool, kUint32, kInt32, kBytes, kDouble };

struct OptionRow {
  const char* section;
  const char* name;
  OptionKind kind;
  double minimum, maximum;  // of numbers; every bound is exact in a double
  bool restart;
  const char* help;
  void* (*field)(Options*);
};

const std::vector<OptionRow>& OptionRows();          // in the order of the list
const OptionRow* FindOption(std::string_view name);  // '-' and '_' alike; nullptr: unknown
Status SetOption(const OptionRow& row, std::string_view value, const std::string& where,
                 Options* options);

// Whole text of a configuration file. Refuses what is not a regular file of at most 1 MiB.
StatusOr<std::string> ReadTextFile(const std::string& path);

}  // namespace lode
