// A GGUF model as one object: the shards of a set joined and compared, typed access to keys, identity (see gguf.h).
// Opened once at start by each process; immutable afterwards.
#include "shared/gguf/gguf.h"

#include <xxhash.h>

#include <cstring>
#include <optional>
#include <unordered_map>

#include "shared/gguf/gguf_set.h"
#include "shared/gguf/gguf_shard.h"
#include "shared/gguf/printable.h"

namespace lode {

struct GgufFile::Impl {
  std::vector<GgufShard> shards;
  std::vector<std::string> paths;
  std::vector<GgufTensor> tensors;
  std::unordered_map<std::string_view, size_t> tensor_index;
  std::unordered_map<std::string_view, const GgufValue*> values;  // of shard 0
  std::string identity;

  Status CheckSplitKeys() const;
  Status JoinTensors();
  void Identify();
  StatusOr<const GgufValue*> Find(std::string_view key) const;
  Status WrongType(std::string_view key, const char* wanted, const GgufValue& value) const;
};

namespace {

template <typename T>
T Load(const uint8_t* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

// Element `i` as a signed or unsigned integer of any width, bool included. nullopt: not an integer type or negative.
std::optional<uint64_t> UintElement(const GgufValue& value, uint64_t i) {
  const uint8_t* bytes = value.raw.data() + i * GgufScalarBytes(value.element_type);
  int64_t number = 0;
  switch (value.element_type) {
    case GgufValueType::kU8: case GgufValueType::kBool: return Load<uint8_t>(bytes);
    case GgufValueType::kU16: return Load<uint16_t>(bytes);
    case GgufValueType::kU32: return Load<uint32_t>(bytes);
    case GgufValueType::kU64: return Load<uint64_t>(bytes);
    case GgufValueType::kI8: number = Load<int8_t>(bytes); break;
    case GgufValueType::kI16: number = Load<int16_t>(bytes); break;
    case GgufValueType::kI32: number = Load<int32_t>(bytes); break;
    case GgufValueType::kI64: number = Load<int64_t>(bytes); break;
    default: return std::nullopt;
  }
  if (number < 0) return std::nullopt;
  return static_cast<uint64_t>(number);
}

bool IsInteger(GgufValueType type) {
  switch (type) {
    case GgufValueType::kU8: case GgufValueType::kI8: case GgufValueType::kU16: case GgufValueType::kI16:
    case GgufValueType::kU32: case GgufValueType::kI32: case GgufValueType::kU64: case GgufValueType::kI64: return true;
    default: return false;
  }
}

// A split key of one shard; nullopt when it is absent.
StatusOr<std::optional<uint64_t>> SplitKey(const GgufShard& shard, std::string_view key) {
  for (const auto& [name, value] : shard.values) {
    if (name != key) continue;
    std::optional<uint64_t> number;
    if (IsInteger(value.type)) number = UintElement(value, 0);
    if (!number) return InvalidArgument("{}: key '{}' must be a non-negative integer", shard.path, key);
    return number;
  }
  return std::optional<uint64_t>();
}

}  // namespace

GgufFile::GgufFile() : impl_(std::make_unique<Impl>()) {}
GgufFile::~GgufFile() = default;

StatusOr<std::unique_ptr<GgufFile>> GgufFile::Open(const std::string& path) {
  std::unique_ptr<GgufFile> file(new GgufFile());
  Impl& impl = *file->impl_;
  LODE_ASSIGN_OR_RETURN(impl.paths, FindGgufShards(path));
  for (const std::string& shard_path : impl.paths) {
    LODE_ASSIGN_OR_RETURN(GgufShard shard, OpenGgufShard(shard_path));
    impl.shards.push_back(std::move(shard));
  }
  LODE_RETURN_IF_ERROR(impl.CheckSplitKeys());
  LODE_RETURN_IF_ERROR(impl.JoinTensors());
  for (const auto& [key, value] : impl.shards[0].values) impl.values.emplace(key, &value);
  impl.Identify();
  return file;
}

// What the names promised must be what the files say: number, count and total of tensors in every shard.
Status GgufFile::Impl::CheckSplitKeys() const {
  const size_t n = shards.size();
  uint64_t total = 0;
  for (size_t i = 0; i < n; ++i) {
    const GgufShard& shard = shards[i];
    total += shard.tensors.size();
    LODE_ASSIGN_OR_RETURN(const std::optional<uint64_t> count, SplitKey(shard, "split.count"));
    if (n == 1 && count.value_or(0) <= 1) return OkStatus();
    if (!count) {
      return InvalidArgument("{}: is named as shard {} of {} but has no key 'split.count'", shard.path, i + 1, n);
    }
    if (n == 1) {
      return InvalidArgument("{}: is one of {} shards but is not named like BASE-00001-of-{:05}.gguf; give the files "
                             "their names back", shard.path, *count, *count);
    }
    if (*count != n) {
      return InvalidArgument("{}: says it is one of {} shards, its name says {}", shard.path, *count, n);
    }
    LODE_ASSIGN_OR_RETURN(const std::optional<uint64_t> number, SplitKey(shard, "split.no"));
    if (number != i) {
      return InvalidArgument("{}: says it is shard {}, its name says {}; files of the set were mixed up", shard.path,
                             number ? std::to_string(*number + 1) : "(key 'split.no' missing)", i + 1);
    }
  }
  for (const GgufShard& shard : shards) {
    LODE_ASSIGN_OR_RETURN(const std::optional<uint64_t> tensors, SplitKey(shard, "split.tensors.count"));
    if (tensors != total) {
      return InvalidArgument("{}: says the set has {} tensors, the shards hold {}; files of different sets were mixed",
                             shard.path, tensors ? std::to_string(*tensors) : "(key 'split.tensors.count' missing)",
                             total);
    }
  }
  return OkStatus();
}

Status GgufFile::Impl::JoinTensors() {
  size_t total = 0;
  for (const GgufShard& shard : shards) total += shard.tensors.size();
  tensors.reserve(total);  // tensor_index views the names: no reallocation after this line
  tensor_index.reserve(total);
  for (size_t i = 0; i < shards.size(); ++i) {
    for (GgufTensor& tensor : shards[i].tensors) {
      tensor.shard = static_cast<uint32_t>(i);
      tensors.push_back(std::move(tensor));
      const auto [it, inserted] = tensor_index.emplace(tensors.back().name, tensors.size() - 1);
      if (!inserted) {
        return InvalidArgument("{}: tensor '{}' is already in {}; files of different sets were mixed", shards[i].path,
                               Printable(it->first), shards[tensors[it->second].shard].path);
      }
    }
    shards[i].tensors.clear();
  }
  return OkStatus();
}

void GgufFile::Impl::Identify() {
  XXH3_state_t* state = XXH3_createState();
  XXH3_128bits_reset(state);
  for (const GgufShard& shard : shards) {
    XXH3_128bits_update(state, &shard.size, sizeof shard.size);
    XXH3_128bits_update(state, shard.header.data(), shard.header_bytes);
  }
  const XXH128_hash_t hash = XXH3_128bits_digest(state);
  XXH3_freeState(state);
  identity = fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

StatusOr<const GgufValue*> GgufFile::Impl::Find(std::string_view key) const {
  const auto it = values.find(key);
  if (it == values.end()) return NotFound("{}: key '{}' is missing", paths[0], key);
  return it->second;
}

Status GgufFile::Impl::WrongType(std::string_view key, const char* wanted, const GgufValue& value) const {
  const bool array = value.type == GgufValueType::kArray;
  return InvalidArgument("{}: key '{}' must be {}, it is {}{}", paths[0], key, wanted, array ? "an array of " : "",
                         GgufTypeName(value.element_type));
}

const std::vector<std::string>& GgufFile::shard_paths() const { return impl_->paths; }
int GgufFile::shard_fd(uint32_t shard) const { return impl_->shards.at(shard).fd.get(); }
const std::vector<GgufTensor>& GgufFile::tensors() const { return impl_->tensors; }
const std::string& GgufFile::identity() const { return impl_->identity; }

const GgufTensor* GgufFile::FindTensor(std::string_view name) const {
  const auto it = impl_->tensor_index.find(name);
  return it == impl_->tensor_index.end() ? nullptr : &impl_->tensors[it->second];
}

const GgufValue* GgufFile::FindValue(std::string_view key) const {
  const auto it = impl_->values.find(key);
  return it == impl_->values.end() ? nullptr : it->second;
}

std::vector<std::string_view> GgufFile::keys() const {
  std::vector<std::string_view> keys;
  for (const auto& [key, value] : impl_->shards[0].values) keys.push_back(key);
  return keys;
}

StatusOr<uint64_t> GgufFile::GetUint(std::string_view key, uint64_t max) const {
  LODE_ASSIGN_OR_RETURN(const GgufValue* value, impl_->Find(key));
  if (!IsInteger(value->type)) return impl_->WrongType(key, "an integer", *value);
  const std::optional<uint64_t> number = UintElement(*value, 0);
  if (!number) return InvalidArgument("{}: key '{}' is negative", impl_->paths[0], key);
  if (*number > max) {
    return InvalidArgument("{}: key '{}' is {}, the largest allowed value is {}", impl_->paths[0], key, *number, max);
  }
  return *number;
}

StatusOr<double> GgufFile::GetFloat(std::string_view key) const {
  LODE_ASSIGN_OR_RETURN(const GgufValue* value, impl_->Find(key));
  if (value->type == GgufValueType::kF32) return Load<float>(value->raw.data());
  if (value->type == GgufValueType::kF64) return Load<double>(value->raw.data());
  return impl_->WrongType(key, "a float", *value);
}

StatusOr<bool> GgufFile::GetBool(std::string_view key) const {
  LODE_ASSIGN_OR_RETURN(const GgufValue* value, impl_->Find(key));
  if (value->type != GgufValueType::kBool) return impl_->WrongType(key, "a bool", *value);
  return value->raw[0] != 0;
}

StatusOr<std::string_view> GgufFile::GetString(std::string_view key) const {
  LODE_ASSIGN_OR_RETURN(const GgufValue* value, impl_->Find(key));
  if (value->type != GgufValueType::kString) return impl_->WrongType(key, "a string", *value);
  return value->strings[0];
}

StatusOr<std::vector<uint64_t>> GgufFile::GetUintArray(std::string_view key, uint64_t max_count) const {
  LODE_ASSIGN_OR_RETURN(const GgufValue* value, impl_->Find(key));
  const bool integers = IsInteger(value->element_type) || value->element_type == GgufValueType::kBool;
  if (value->type != GgufValueType::kArray || !integers) {
    return impl_->WrongType(key, "an array of integers", *value);
  }
  if (value->count > max_count) {
    return InvalidArgument("{}: key '{}' has {} elements, at most {} are allowed", impl_->paths[0], key, value->count,
                           max_count);
  }
  std::vector<uint64_t> numbers(value->count);
  for (uint64_t i = 0; i < value->count; ++i) {
    const std::optional<uint64_t> number = UintElement(*value, i);
    if (!number) return InvalidArgument("{}: element {} of key '{}' is negative", impl_->paths[0], i, key);
    numbers[i] = *number;
  }
  return numbers;
}

StatusOr<std::vector<std::string_view>> GgufFile::GetStringArray(std::string_view key, uint64_t max_count) const {
  LODE_ASSIGN_OR_RETURN(const GgufValue* value, impl_->Find(key));
  if (value->type != GgufValueType::kArray || value->element_type != GgufValueType::kString) {
    return impl_->WrongType(key, "an array of strings", *value);
  }
  if (value->count > max_count) {
    return InvalidArgument("{}: key '{}' has {} elements, at most {} are allowed", impl_->paths[0], key, value->count,
                           max_count);
  }
  return value->strings;
}

}  // namespace lode
