// Resolves a model path to its shard files: see gguf_set.h. Runs once at start.
#include "shared/gguf/gguf_set.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <string_view>
#include <system_error>

#include "shared/gguf/printable.h"

namespace lode {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kSuffix = ".gguf";
constexpr size_t kDigits = 5;

// Five decimal digits at `text[at]`; false when there is anything else.
bool FiveDigits(std::string_view text, size_t at, uint32_t* value) {
  *value = 0;
  for (size_t i = at; i < at + kDigits; ++i) {
    if (text[i] < '0' || text[i] > '9') return false;
    *value = *value * 10 + static_cast<uint32_t>(text[i] - '0');
  }
  return true;
}

std::string ShardPath(const GgufShardName& name, uint32_t index) {
  return fmt::format("{}-{:05}-of-{:05}.gguf", name.base, index + 1, name.count);
}

StatusOr<std::string> OnlyModelIn(const std::string& folder) {
  std::set<std::string> models;  // one path per model: a file, or the first shard's name of a set
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string file = it->path().filename().string();
    if (!file.ends_with(kSuffix) || file.starts_with("mmproj")) continue;
    const GgufShardName name = ParseGgufShardName(it->path().string());
    models.insert(name.count == 0 ? it->path().string() : ShardPath(name, 0));
  }
  if (error) return ErrnoStatus(fmt::format("listing folder {}", folder), error.value());
  if (models.empty()) return NotFound("folder {} holds no .gguf file", folder);
  if (models.size() > 1) {
    return InvalidArgument("folder {} holds {} models (such as {} and {}); name one of the files", folder,
                           models.size(), *models.begin(), *std::next(models.begin()));
  }
  return *models.begin();
}

}  // namespace

GgufShardName ParseGgufShardName(const std::string& path) {
  constexpr std::string_view kOf = "-of-";
  constexpr size_t kTail = 1 + kDigits + kOf.size() + kDigits + kSuffix.size();
  GgufShardName name;
  if (path.size() <= kTail || !path.ends_with(kSuffix)) return name;
  const size_t at = path.size() - kTail;
  uint32_t number = 0, count = 0;
  if (path[at] != '-' || !FiveDigits(path, at + 1, &number) || path.compare(at + 1 + kDigits, kOf.size(), kOf) != 0 ||
      !FiveDigits(path, at + 1 + kDigits + kOf.size(), &count) || number == 0 || number > count) {
    return name;
  }
  return {path.substr(0, at), number - 1, count};
}

StatusOr<std::vector<std::string>> FindGgufShards(const std::string& path) {
  std::error_code error;
  std::string file = path;
  if (fs::is_directory(path, error)) {
    LODE_ASSIGN_OR_RETURN(file, OnlyModelIn(path));
  }
  const GgufShardName name = ParseGgufShardName(file);
  if (name.count <= 1) return std::vector<std::string>{file};
  if (name.count > kGgufShardsMax) {
    return InvalidArgument("{}: a set of {} shards is more than the {} allowed", file, name.count, kGgufShardsMax);
  }
  std::vector<std::string> paths;
  for (uint32_t i = 0; i < name.count; ++i) {
    paths.push_back(ShardPath(name, i));
    if (!fs::exists(paths.back(), error)) {
      return NotFound("shard {} of {} is missing: {} is not there; put all {} files into one folder", i + 1, name.count,
                      paths.back(), name.count);
    }
  }
  return paths;
}

}  // namespace lode
