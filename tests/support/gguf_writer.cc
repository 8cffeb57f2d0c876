// Test-only GGUF writer: see gguf_writer.h. Checks nothing on purpose: tests write wrong files with it.
#include "tests/support/gguf_writer.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "shared/base/check.h"
#include "shared/gguf/gguf_shard.h"

namespace lode::test {
namespace {

constexpr uint64_t kAlignment = 32;

template <typename T>
void Append(std::string* out, T value) {
  out->append(reinterpret_cast<const char*>(&value), sizeof value);
}
void AppendText(std::string* out, std::string_view text) {
  Append(out, uint64_t{text.size()});
  out->append(text);
}
template <typename T>
std::string Encode(T value) {
  std::string bytes;
  Append(&bytes, value);
  return bytes;
}
template <typename T>
std::string EncodeArray(GgufValueType type, const std::vector<T>& values) {
  std::string bytes;
  Append(&bytes, type);
  Append(&bytes, uint64_t{values.size()});
  for (const T& value : values) Append(&bytes, value);
  return bytes;
}
void Pad(std::string* out) { out->resize((out->size() + kAlignment - 1) / kAlignment * kAlignment, '\0'); }

}  // namespace

void GgufWriter::SetRaw(const std::string& key, GgufValueType type, std::string bytes) {
  for (Value& value : values_) {
    if (value.key != key) continue;
    value.type = type;
    value.bytes = std::move(bytes);
    return;
  }
  values_.push_back({key, type, std::move(bytes)});
}
void GgufWriter::SetUint(const std::string& key, uint32_t value) { SetRaw(key, GgufValueType::kU32, Encode(value)); }
void GgufWriter::SetU64(const std::string& key, uint64_t value) { SetRaw(key, GgufValueType::kU64, Encode(value)); }
void GgufWriter::SetFloat(const std::string& key, float value) { SetRaw(key, GgufValueType::kF32, Encode(value)); }
void GgufWriter::SetBool(const std::string& key, bool value) {
  SetRaw(key, GgufValueType::kBool, std::string(1, value ? 1 : 0));
}
void GgufWriter::SetString(const std::string& key, std::string_view value) {
  std::string bytes;
  AppendText(&bytes, value);
  SetRaw(key, GgufValueType::kString, std::move(bytes));
}
void GgufWriter::SetUints(const std::string& key, const std::vector<uint32_t>& values) {
  SetRaw(key, GgufValueType::kArray, EncodeArray(GgufValueType::kU32, values));
}
void GgufWriter::SetU64s(const std::string& key, const std::vector<uint64_t>& values) {
  SetRaw(key, GgufValueType::kArray, EncodeArray(GgufValueType::kU64, values));
}
void GgufWriter::SetStrings(const std::string& key, const std::vector<std::string>& values) {
  std::string bytes;
  Append(&bytes, GgufValueType::kString);
  Append(&bytes, uint64_t{values.size()});
  for (const std::string& value : values) AppendText(&bytes, value);
  SetRaw(key, GgufValueType::kArray, std::move(bytes));
}
void GgufWriter::Remove(const std::string& key) {
  std::erase_if(values_, [&](const Value& value) { return value.key == key; });
}

WrittenTensor* GgufWriter::Find(const std::string& name) {
  for (WrittenTensor& tensor : tensors_) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

GgufWriter GgufWriter::From(const GgufFile& file) {
  GgufWriter writer;
  for (std::string_view key : file.keys()) {
    const GgufValue& value = *file.FindValue(key);
    std::string bytes;
    if (value.type == GgufValueType::kArray) {
      Append(&bytes, value.element_type);
      Append(&bytes, value.count);
    }
    bytes.append(reinterpret_cast<const char*>(value.raw.data()), value.raw.size());
    for (std::string_view text : value.strings) AppendText(&bytes, text);
    writer.values_.push_back({std::string(key), value.type, std::move(bytes)});
  }
  for (const GgufTensor& tensor : file.tensors()) {
    writer.tensors_.push_back({tensor.name, static_cast<uint32_t>(tensor.type),
                               std::vector<uint64_t>(tensor.ne, tensor.ne + tensor.n_dims),
                               std::vector<uint8_t>(tensor.data, tensor.data + tensor.bytes), -1});
  }
  return writer;
}

std::string GgufWriter::Bytes(uint32_t version) const {
  std::string out = "GGUF";
  Append(&out, version);
  Append(&out, uint64_t{tensors_.size()});
  Append(&out, uint64_t{values_.size()});
  for (const Value& value : values_) {
    AppendText(&out, value.key);
    Append(&out, value.type);
    out += value.bytes;
  }
  uint64_t next = 0;
  for (const WrittenTensor& tensor : tensors_) {
    AppendText(&out, tensor.name);
    Append(&out, static_cast<uint32_t>(tensor.ne.size()));
    for (uint64_t n : tensor.ne) Append(&out, n);
    Append(&out, tensor.type);
    Append(&out, tensor.offset >= 0 ? static_cast<uint64_t>(tensor.offset) : next);
    next += (tensor.data.size() + kAlignment - 1) / kAlignment * kAlignment;
  }
  if (tensors_.empty()) return out;
  Pad(&out);
  for (const WrittenTensor& tensor : tensors_) {
    out.append(reinterpret_cast<const char*>(tensor.data.data()), tensor.data.size());
    Pad(&out);
  }
  return out;
}

void GgufWriter::Write(const std::string& path) const { WriteFile(path, Bytes()); }

std::vector<std::string> GgufWriter::WriteShards(const std::string& base, int count, bool empty_first) const {
  uint64_t total = 1;
  for (const WrittenTensor& tensor : tensors_) total += tensor.data.size();
  std::vector<GgufWriter> shards(count);
  shards[0].values_ = values_;
  const uint64_t filled = static_cast<uint64_t>(empty_first ? count - 1 : count);
  uint64_t done = 0;
  for (const WrittenTensor& tensor : tensors_) {
    shards[(empty_first ? 1 : 0) + done * filled / total].tensors_.push_back(tensor);
    done += tensor.data.size();
  }
  std::vector<std::string> paths;
  for (int i = 0; i < count; ++i) {
    shards[i].SetRaw("split.no", GgufValueType::kU16, Encode(static_cast<uint16_t>(i)));
    shards[i].SetRaw("split.count", GgufValueType::kU16, Encode(static_cast<uint16_t>(count)));
    shards[i].SetRaw("split.tensors.count", GgufValueType::kI32, Encode(static_cast<int32_t>(tensors_.size())));
    paths.push_back(fmt::format("{}-{:05}-of-{:05}.gguf", base, i + 1, count));
    shards[i].Write(paths.back());
  }
  return paths;
}

std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  LODE_CHECK(in.good(), "cannot read {}", path);
  std::stringstream bytes;
  bytes << in.rdbuf();
  return bytes.str();
}

void WriteFile(const std::string& path, std::string_view bytes) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  out.close();
  LODE_CHECK(out.good(), "cannot write {}", path);
}

MemoryFile::MemoryFile() : fd_(::memfd_create("lode-test", MFD_CLOEXEC)) {
  LODE_CHECK(fd_.valid(), "memfd_create failed");
  path_ = fmt::format("/proc/self/fd/{}", fd_.get());
}

void MemoryFile::Set(std::string_view bytes) {
  LODE_CHECK(::ftruncate(fd_.get(), static_cast<off_t>(bytes.size())) == 0, "resizing to {} bytes", bytes.size());
  const ssize_t written = bytes.empty() ? 0 : ::pwrite(fd_.get(), bytes.data(), bytes.size(), 0);
  LODE_CHECK(written == static_cast<ssize_t>(bytes.size()), "writing {} bytes to memory", bytes.size());
}

TempFolder::TempFolder() {
  std::string pattern = (std::filesystem::temp_directory_path() / "lode-test-XXXXXX").string();
  LODE_CHECK(::mkdtemp(pattern.data()) != nullptr, "cannot make a temporary folder like {}", pattern);
  path_ = pattern;
}

TempFolder::~TempFolder() {
  std::error_code ignored;  // a leftover folder harms no test
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace lode::test
