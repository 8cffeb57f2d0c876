// Which files make up a model: a single file, the shards of a split set, or the one model of a folder. Names only; the
// files' contents are compared by gguf.cc. Internal to shared/gguf.
#pragma once

#include <string>
#include <vector>

#include "shared/base/status.h"

namespace lode {

inline constexpr uint32_t kGgufShardsMax = 1024;  // bounds open files; published sets have 2 to 8

// "<base>-00002-of-00005.gguf" taken apart. count 0: the name is not of this form.
struct GgufShardName {
  std::string base;    // with its folder
  uint32_t index = 0;  // from 0
  uint32_t count = 0;
};
GgufShardName ParseGgufShardName(const std::string& path);

// All paths of the model that `path` belongs to, in shard order. A shard that is not there, and a folder with no or
// several models, are errors that name it. Files named mmproj* (vision towers) in a folder are passed over.
StatusOr<std::vector<std::string>> FindGgufShards(const std::string& path);

}  // namespace lode
