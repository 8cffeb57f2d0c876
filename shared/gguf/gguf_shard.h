// One GGUF file of a set: opened, its header copied out of the file and validated. Internal to shared/gguf.
//
// Idea: the header is read with pread into memory of our own, so a file that shrinks or changes afterwards cannot fault
// or alter what was checked; every length is compared with the bytes that remain before anything is allocated for it.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "shared/base/fd.h"
#include "shared/base/status.h"
#include "shared/gguf/gguf.h"

namespace lode {

// Policy bounds. A published 248,320-token vocabulary with merges makes a header of 11 MB.
inline constexpr uint64_t kGgufHeaderBytesMax = uint64_t{512} << 20;
inline constexpr uint64_t kGgufRecordsMax = 1'000'000;  // keys, and tensors, of one file
inline constexpr uint64_t kGgufKeyBytesMax = 65'535;    // the format's own bound
inline constexpr uint64_t kGgufNameBytesMax = 63;       // upstream's tensor name field holds 64 with its terminator
inline constexpr uint64_t kGgufStringBytesMax = uint64_t{64} << 20;
inline constexpr uint64_t kGgufArrayCountMax = uint64_t{1} << 30;
inline constexpr uint32_t kGgufAlignmentMin = 8, kGgufAlignmentMax = 1u << 20, kGgufAlignmentDefault = 32;

// An anonymous or file mapping, unmapped at destruction. Move-only.
class MappedBytes {
 public:
  MappedBytes() = default;
  MappedBytes(uint8_t* data, uint64_t size) : data_(data), size_(size) {}
  MappedBytes(MappedBytes&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  MappedBytes& operator=(MappedBytes&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~MappedBytes() {
    if (data_ != nullptr) ::munmap(data_, size_);
  }
  uint8_t* data() const { return data_; }
  uint64_t size() const { return size_; }

 private:
  uint8_t* data_ = nullptr;
  uint64_t size_ = 0;
};

struct GgufShard {
  std::string path;
  Fd fd;
  uint64_t size = 0;          // bytes, from the one fstat
  MappedBytes header;         // our copy of the first header_bytes bytes (reserved larger)
  uint64_t header_bytes = 0;  // through the last tensor record
  uint64_t data_start = 0;
  uint32_t alignment = kGgufAlignmentDefault;
  MappedBytes map;            // the whole file; only GgufTensor::data points here
  std::vector<std::pair<std::string_view, GgufValue>> values;  // file order; views into `header`
  std::vector<GgufTensor> tensors;                             // file order; shard index still 0
};

// Opens and validates one file. Errors name the path and the key or tensor.
StatusOr<GgufShard> OpenGgufShard(const std::string& path);

const char* GgufTypeName(GgufValueType type);
// Bytes of one scalar; 0 for strings, arrays and unknown types.
uint32_t GgufScalarBytes(GgufValueType type);

}  // namespace lode
