// Writes small GGUF files for tests: valid ones, and ones that are wrong in one chosen place. Also cuts a GGUF file into
// shards. Test-only; LODE_CHECKs on I/O errors because a test cannot go on.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shared/base/fd.h"
#include "shared/gguf/gguf.h"

namespace lode::test {

struct WrittenTensor {
  std::string name;
  uint32_t type = 0;                // GGUF id; any number, to write wrong ones
  std::vector<uint64_t> ne;
  std::vector<uint8_t> data;
  int64_t offset = -1;              // -1: right behind the tensor before
};

class GgufWriter {
 public:
  // Values are encoded here and appended in call order; Set replaces an earlier value of the key.
  void SetUint(const std::string& key, uint32_t value);
  void SetU64(const std::string& key, uint64_t value);
  void SetFloat(const std::string& key, float value);
  void SetBool(const std::string& key, bool value);
  void SetString(const std::string& key, std::string_view value);
  void SetUints(const std::string& key, const std::vector<uint32_t>& values);
  void SetU64s(const std::string& key, const std::vector<uint64_t>& values);
  void SetStrings(const std::string& key, const std::vector<std::string>& values);
  // Type and bytes as they are.
  void SetRaw(const std::string& key, GgufValueType type, std::string bytes);
  void Remove(const std::string& key);

  std::vector<WrittenTensor>& tensors() { return tensors_; }
  WrittenTensor* Find(const std::string& name);  // nullptr: absent

  // Keys and tensors of an existing file, data included.
  static GgufWriter From(const GgufFile& file);

  std::string Bytes(uint32_t version = 3) const;
  void Write(const std::string& path) const;

  // BASE-00001-of-0000N.gguf ...: all keys in the first shard, tensors in order, shards of about equal bytes. With
  // `empty_first` the first shard has no tensor. Returns the paths.
  std::vector<std::string> WriteShards(const std::string& base, int count, bool empty_first) const;

 private:
  struct Value {
    std::string key;
    GgufValueType type;
    std::string bytes;
  };
  std::vector<Value> values_;
  std::vector<WrittenTensor> tensors_;
};

std::string ReadFile(const std::string& path);
void WriteFile(const std::string& path, std::string_view bytes);

// A file in memory with a path to open it by: thousands of variants without touching a disk.
class MemoryFile {
 public:
  MemoryFile();
  void Set(std::string_view bytes);
  const std::string& path() const { return path_; }

 private:
  Fd fd_;
  std::string path_;
};

// A folder of its own under the system's temporary folder, removed with everything in it.
class TempFolder {
 public:
  TempFolder();
  ~TempFolder();
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  std::string File(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace lode::test
