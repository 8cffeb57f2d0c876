// GGUF v3 files, single or split, memory-mapped and fully validated before anything is used. Files are untrusted: every
// length, offset, count and type is checked; a bad file gives one sentence naming the shard and the key or tensor.
// Facts: docs/design/formats.md. Used by every process; immutable after Open, so any thread may read.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "kernels/formats.h"
#include "shared/base/status.h"

namespace lode {

enum class GgufValueType : uint32_t {
  kU8 = 0, kI8 = 1, kU16 = 2, kI16 = 3, kU32 = 4, kI32 = 5, kF32 = 6, kBool = 7,
  kString = 8, kArray = 9, kU64 = 10, kI64 = 11, kF64 = 12,
};

struct GgufValue {
  GgufValueType type;
  GgufValueType element_type;   // arrays only
  uint64_t count = 1;           // arrays: elements
  std::span<const uint8_t> raw; // scalars and arrays of scalars: little-endian bytes in the map
  std::vector<std::string_view> strings;  // string (1) or array of strings; point into the map
};

struct GgufTensor {
  std::string name;
  TensorType type;
  uint32_t n_dims;
  uint64_t ne[4];      // ne[0] = row length; missing dimensions are 1
  uint64_t bytes;
  uint32_t shard;      // index into the shard list
  uint64_t offset;     // from the start of that shard's file
  const uint8_t* data; // in the map
};

class GgufFile {
 public:
  // `path`: a single file, any shard of a split set, or a folder that holds exactly one model.
  static StatusOr<std::unique_ptr<GgufFile>> Open(const std::string& path);
  ~GgufFile();

  const std::vector<std::string>& shard_paths() const;
  int shard_fd(uint32_t shard) const;  // open for reading as long as this object lives
  const std::vector<GgufTensor>& tensors() const;
  const GgufTensor* FindTensor(std::string_view name) const;  // nullptr: absent
  const GgufValue* FindValue(std::string_view key) const;     // nullptr: absent
  std::vector<std::string_view> keys() const;

  // Typed access. Integer keys are accepted in any integer width and range-checked. Absent key: NotFound naming it;
  // wrong type: InvalidArgument naming key, wanted and found type.
  StatusOr<uint64_t> GetUint(std::string_view key, uint64_t max) const;
  StatusOr<double> GetFloat(std::string_view key) const;
  StatusOr<bool> GetBool(std::string_view key) const;
  StatusOr<std::string_view> GetString(std::string_view key) const;
  StatusOr<std::vector<uint64_t>> GetUintArray(std::string_view key, uint64_t max_count) const;
  StatusOr<std::vector<std::string_view>> GetStringArray(std::string_view key, uint64_t max_count) const;

  // 128-bit identity of the set: hash of sizes, metadata and tensor infos of all shards (not of the data).
  const std::string& identity() const;  // 32 hex digits

 private:
  GgufFile();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lode
