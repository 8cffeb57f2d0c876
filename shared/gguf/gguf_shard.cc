// Parses and validates one GGUF file (see gguf_shard.h; rules: docs/design/formats.md). The file is hostile until this
// file has returned OK. Runs once per shard at start, on the opening thread.
#include "shared/gguf/gguf_shard.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <unordered_set>

#include "shared/gguf/printable.h"

static_assert(std::endian::native == std::endian::little, "GGUF fields are read in place as little-endian");

namespace lode {
namespace {

// The header is fetched in pieces of this size: small files cost one read, an 11 MB vocabulary a dozen.
constexpr uint64_t kReadPieceBytes = 1 << 20;
constexpr uint64_t kMinKvBytes = 8 + 1 + 4 + 1;          // key length, one-byte key, type, one-byte value
constexpr uint64_t kMinTensorBytes = 8 + 4 + 4 + 8;      // name length, n_dims, type, offset
constexpr uint32_t kMagic = 0x46554747;                  // "GGUF"

// A read position in the header copy. Every take is checked against the file's size and the header bound, and fetches
// the missing bytes from the file.
class HeaderCursor {
 public:
  HeaderCursor(const std::string& path, int fd, uint64_t file_bytes, uint8_t* copy)
      : path_(path), fd_(fd), limit_(std::min(file_bytes, kGgufHeaderBytesMax)), file_bytes_(file_bytes), copy_(copy) {}

  uint64_t position() const { return position_; }
  uint64_t remaining() const { return limit_ - position_; }

  // Points `*bytes` at the next `n` bytes and moves past them. `what` names the thing for the error.
  Status Take(uint64_t n, std::string_view what, const uint8_t** bytes) {
    if (n > remaining()) {
      if (limit_ < file_bytes_) {
        return InvalidArgument("{}: the header is larger than {} bytes at {}; this is no model file we can read", path_,
                               kGgufHeaderBytesMax, what);
      }
      return InvalidArgument("{}: the file ends inside {} (needs {} bytes at offset {}, {} are left); download it again",
                             path_, what, n, position_, remaining());
    }
    LODE_RETURN_IF_ERROR(Fetch(position_ + n));
    *bytes = copy_ + position_;
    position_ += n;
    return OkStatus();
  }

  template <typename T>
  Status Scalar(std::string_view what, T* out) {
    const uint8_t* bytes = nullptr;
    LODE_RETURN_IF_ERROR(Take(sizeof(T), what, &bytes));
    std::memcpy(out, bytes, sizeof(T));
    return OkStatus();
  }

  Status String(std::string_view what, uint64_t max_bytes, std::string_view* out) {
    uint64_t length = 0;
    LODE_RETURN_IF_ERROR(Scalar(what, &length));
    if (length > max_bytes) {
      return InvalidArgument("{}: {} at offset {} claims {} bytes, the limit is {}", path_, what, position_ - 8, length,
                             max_bytes);
    }
    const uint8_t* bytes = nullptr;
    LODE_RETURN_IF_ERROR(Take(length, what, &bytes));
    *out = {reinterpret_cast<const char*>(bytes), length};
    return OkStatus();
  }

 private:
  Status Fetch(uint64_t end) {
    if (end <= fetched_) return OkStatus();
    uint64_t want = std::min(limit_, (end + kReadPieceBytes - 1) / kReadPieceBytes * kReadPieceBytes);
    while (fetched_ < want) {
      ssize_t got = ::pread(fd_, copy_ + fetched_, want - fetched_, static_cast<off_t>(fetched_));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return ErrnoStatus(fmt::format("{}: reading the header at offset {}", path_, fetched_), errno);
      if (got == 0) return Unavailable("{}: the file shrank to {} bytes while it was read", path_, fetched_);
      fetched_ += static_cast<uint64_t>(got);
    }
    return OkStatus();
  }

  const std::string& path_;
  const int fd_;
  const uint64_t limit_;
  const uint64_t file_bytes_;
  uint8_t* const copy_;
  uint64_t position_ = 0;
  uint64_t fetched_ = 0;
};

bool CheckedAdd(uint64_t a, uint64_t b, uint64_t* out) { return !__builtin_add_overflow(a, b, out); }
bool CheckedMul(uint64_t a, uint64_t b, uint64_t* out) { return !__builtin_mul_overflow(a, b, out); }
bool RoundUp(uint64_t n, uint64_t alignment, uint64_t* out) {
  if (!CheckedAdd(n, alignment - 1, out)) return false;
  *out &= ~(alignment - 1);
  return true;
}

class ShardParser {
 public:
  explicit ShardParser(GgufShard* shard)
      : shard_(*shard), cursor_(shard->path, shard->fd.get(), shard->size, shard->header.data()) {}

  Status Parse() {
    uint64_t n_tensors = 0, n_kv = 0;
    LODE_RETURN_IF_ERROR(ReadCounts(&n_tensors, &n_kv));
    LODE_RETURN_IF_ERROR(ReadValues(n_kv));
    LODE_RETURN_IF_ERROR(ReadAlignment());
    LODE_RETURN_IF_ERROR(CheckCount("tensors", n_tensors, kMinTensorBytes));
    LODE_RETURN_IF_ERROR(ReadTensors(n_tensors));
    shard_.header_bytes = cursor_.position();
    return PlaceTensors();
  }

 private:
  Status ReadCounts(uint64_t* n_tensors, uint64_t* n_kv) {
    uint32_t magic = 0, version = 0;
    LODE_RETURN_IF_ERROR(cursor_.Scalar("the magic number", &magic));
    if (magic != kMagic) return InvalidArgument("{}: not a GGUF file (it starts with 0x{:08x})", shard_.path, magic);
    LODE_RETURN_IF_ERROR(cursor_.Scalar("the version", &version));
    if ((version & 0xffff) == 0 && version != 0) {
      return InvalidArgument("{}: a big-endian GGUF file (version 0x{:08x}); convert it to little-endian", shard_.path,
                             version);
    }
    if (version != 2 && version != 3) {
      return InvalidArgument("{}: GGUF version {} is not readable, only 2 and 3 are", shard_.path, version);
    }
    LODE_RETURN_IF_ERROR(cursor_.Scalar("the tensor count", n_tensors));
    LODE_RETURN_IF_ERROR(cursor_.Scalar("the key count", n_kv));
    LODE_RETURN_IF_ERROR(CheckCount("tensors", *n_tensors, kMinTensorBytes));
    return CheckCount("keys", *n_kv, kMinKvBytes);
  }

  Status CheckCount(const char* what, uint64_t count, uint64_t min_bytes) {
    if (count > kGgufRecordsMax || count > cursor_.remaining() / min_bytes) {
      return InvalidArgument("{}: claims {} {}, but at most {} fit into what is left of the file", shard_.path, count,
                             what, std::min(kGgufRecordsMax, cursor_.remaining() / min_bytes));
    }
    return OkStatus();
  }

  Status ReadValues(uint64_t n_kv) {
    std::unordered_set<std::string_view> seen;
    seen.reserve(n_kv);
    shard_.values.reserve(n_kv);
    for (uint64_t i = 0; i < n_kv; ++i) {
      std::string_view key;
      LODE_RETURN_IF_ERROR(cursor_.String(fmt::format("key {}", i), kGgufKeyBytesMax, &key));
      if (key.empty()) return InvalidArgument("{}: key {} has an empty name", shard_.path, i);
      if (!seen.insert(key).second) return InvalidArgument("{}: key '{}' occurs twice", shard_.path, Printable(key));
      const std::string what = fmt::format("the value of key '{}'", Printable(key));
      GgufValue value{};
      LODE_RETURN_IF_ERROR(ReadValue(key, what, &value));
      shard_.values.emplace_back(key, std::move(value));
    }
    return OkStatus();
  }

  Status ReadValue(std::string_view key, const std::string& what, GgufValue* value) {
    uint32_t type = 0;
    LODE_RETURN_IF_ERROR(cursor_.Scalar(what, &type));
    value->type = value->element_type = static_cast<GgufValueType>(type);
    value->count = 1;
    if (value->type == GgufValueType::kArray) {
      LODE_RETURN_IF_ERROR(cursor_.Scalar(what, &type));
      value->element_type = static_cast<GgufValueType>(type);
      LODE_RETURN_IF_ERROR(cursor_.Scalar(what, &value->count));
      if (value->element_type == GgufValueType::kArray) {
        return InvalidArgument("{}: key '{}' is an array of arrays, which no model file needs", shard_.path,
                               Printable(key));
      }
    }
    if (value->element_type == GgufValueType::kString) return ReadStrings(key, what, value);
    const uint64_t element_bytes = GgufScalarBytes(value->element_type);
    if (element_bytes == 0) {
      return InvalidArgument("{}: key '{}' has unknown value type {}", shard_.path, Printable(key), type);
    }
    if (value->count > kGgufArrayCountMax || value->count > cursor_.remaining() / element_bytes) {
      return InvalidArgument("{}: key '{}' claims {} elements of type {}, more than the file holds", shard_.path,
                             Printable(key), value->count, GgufTypeName(value->element_type));
    }
    const uint8_t* bytes = nullptr;
    LODE_RETURN_IF_ERROR(cursor_.Take(value->count * element_bytes, what, &bytes));
    value->raw = {bytes, value->count * element_bytes};
    if (value->element_type == GgufValueType::kBool) {
      for (uint8_t byte : value->raw) {
        if (byte > 1) {
          return InvalidArgument("{}: key '{}' holds a bool with value {}, only 0 and 1 are", shard_.path,
                                 Printable(key), byte);
        }
      }
    }
    return OkStatus();
  }

  Status ReadStrings(std::string_view key, const std::string& what, GgufValue* value) {
    if (value->type == GgufValueType::kArray &&
        (value->count > kGgufArrayCountMax || value->count > cursor_.remaining() / sizeof(uint64_t))) {
      return InvalidArgument("{}: key '{}' claims {} strings, more than the file holds", shard_.path, Printable(key),
                             value->count);
    }
    value->strings.resize(value->count);
    for (std::string_view& text : value->strings) {
      LODE_RETURN_IF_ERROR(cursor_.String(what, kGgufStringBytesMax, &text));
    }
    return OkStatus();
  }

  Status ReadAlignment() {
    for (const auto& [key, value] : shard_.values) {
      if (key != "general.alignment") continue;
      if (value.type != GgufValueType::kU32) {
        return InvalidArgument("{}: key 'general.alignment' must be u32, it is {}", shard_.path,
                               GgufTypeName(value.type));
      }
      std::memcpy(&shard_.alignment, value.raw.data(), sizeof shard_.alignment);
      if (!std::has_single_bit(shard_.alignment) || shard_.alignment < kGgufAlignmentMin ||
          shard_.alignment > kGgufAlignmentMax) {
        return InvalidArgument("{}: key 'general.alignment' is {}; it must be a power of two from {} to {}",
                               shard_.path, shard_.alignment, kGgufAlignmentMin, kGgufAlignmentMax);
      }
    }
    return OkStatus();
  }

  Status ReadTensors(uint64_t n_tensors) {
    std::unordered_set<std::string_view> seen;
    seen.reserve(n_tensors);
    shard_.tensors.reserve(n_tensors);
    for (uint64_t i = 0; i < n_tensors; ++i) {
      std::string_view name;
      LODE_RETURN_IF_ERROR(cursor_.String(fmt::format("the name of tensor {}", i), kGgufNameBytesMax, &name));
      if (name.empty()) return InvalidArgument("{}: tensor {} has an empty name", shard_.path, i);
      if (!seen.insert(name).second) {
        return InvalidArgument("{}: tensor '{}' occurs twice", shard_.path, Printable(name));
      }
      GgufTensor tensor{};
      tensor.name = name;
      LODE_RETURN_IF_ERROR(ReadTensor(&tensor));
      shard_.tensors.push_back(std::move(tensor));
    }
    return OkStatus();
  }

  Status ReadTensor(GgufTensor* tensor) {
    const std::string shown = Printable(tensor->name);
    const std::string what = fmt::format("the record of tensor '{}'", shown);
    LODE_RETURN_IF_ERROR(cursor_.Scalar(what, &tensor->n_dims));
    if (tensor->n_dims < 1 || tensor->n_dims > 4) {
      return InvalidArgument("{}: tensor '{}' has {} dimensions, 1 to 4 are allowed", shard_.path, shown,
                             tensor->n_dims);
    }
    std::fill(tensor->ne, tensor->ne + 4, 1);
    uint64_t weights = 1;
    for (uint32_t d = 0; d < tensor->n_dims; ++d) {
      LODE_RETURN_IF_ERROR(cursor_.Scalar(what, &tensor->ne[d]));
      if (tensor->ne[d] == 0 || tensor->ne[d] > INT64_MAX || weights > INT64_MAX / tensor->ne[d]) {
        return InvalidArgument("{}: dimension {} of tensor '{}' is {}, which is zero or makes the tensor too large",
                               shard_.path, d, shown, tensor->ne[d]);
      }
      weights *= tensor->ne[d];
    }
    uint32_t type = 0;
    LODE_RETURN_IF_ERROR(cursor_.Scalar(what, &type));
    LODE_RETURN_IF_ERROR(cursor_.Scalar(what, &tensor->offset));
    const TensorTypeInfo* info = FindTensorType(type);
    if (info == nullptr) {
      return InvalidArgument("{}: tensor '{}' has type {}, which is unknown, retired or a fork's own", shard_.path,
                             shown, type);
    }
    tensor->type = info->type;
    if (tensor->ne[0] % info->block_len != 0) {
      return InvalidArgument("{}: tensor '{}' has rows of {} weights, but {} needs a multiple of {}", shard_.path,
                             shown, tensor->ne[0], info->name, info->block_len);
    }
    if (!CheckedMul(weights / info->block_len, info->block_bytes, &tensor->bytes)) {
      return InvalidArgument("{}: the size of tensor '{}' does not fit 64 bits", shard_.path, shown);
    }
    return OkStatus();
  }

  // Offsets become positions in the file. Each tensor must start exactly where the one before ends (padded), which
  // excludes overlaps and holes and finds types whose block size is not what the writer used.
  Status PlaceTensors() {
    if (!RoundUp(shard_.header_bytes, shard_.alignment, &shard_.data_start)) {
      return InvalidArgument("{}: the data section starts beyond 64 bits", shard_.path);
    }
    if (shard_.tensors.empty()) return OkStatus();
    if (shard_.data_start > shard_.size) {
      return InvalidArgument("{}: the file ends at {}, before its data section at {}; download it again", shard_.path,
                             shard_.size, shard_.data_start);
    }
    const uint64_t data_bytes = shard_.size - shard_.data_start;
    uint64_t expected = 0;
    const GgufTensor* before = nullptr;
    for (GgufTensor& tensor : shard_.tensors) {
      const std::string shown = Printable(tensor.name);
      if (tensor.offset != expected) {
        return InvalidArgument(
            "{}: tensor '{}' starts at data offset {}, expected {}: it {} the tensor before it{}", shard_.path, shown,
            tensor.offset, expected, tensor.offset < expected ? "overlaps" : "leaves a hole after",
            Q2Hint(before, tensor.offset));
      }
      uint64_t padded = 0;
      if (!RoundUp(tensor.bytes, shard_.alignment, &padded) || !CheckedAdd(expected, padded, &expected)) {
        return InvalidArgument("{}: the size of tensor '{}' does not fit 64 bits", shard_.path, shown);
      }
      if (tensor.offset > data_bytes || tensor.bytes > data_bytes - tensor.offset) {
        return InvalidArgument("{}: tensor '{}' needs {} bytes at data offset {}, but the data section has {}; "
                               "the file is cut short, download it again{}",
                               shard_.path, shown, tensor.bytes, tensor.offset, data_bytes,
                               Q2Hint(&tensor, data_bytes));
      }
      before = &tensor;
    }
    for (GgufTensor& tensor : shard_.tensors) tensor.offset += shard_.data_start;
    return OkStatus();
  }

  // A fork wrote id 42 with 34-byte blocks of 128 weights. Says so when `end` is where such a tensor would have ended.
  std::string Q2Hint(const GgufTensor* tensor, uint64_t end) const {
    if (tensor == nullptr || tensor->type != TensorType::kQ2_0 || tensor->ne[0] % 128 != 0) return "";
    const uint64_t fork_bytes = tensor->bytes / 36 * 34;  // two 18-byte blocks hold 128 weights
    uint64_t fork_end = 0, fork_end_padded = 0;
    if (!CheckedAdd(tensor->offset, fork_bytes, &fork_end)) return "";
    if (!RoundUp(fork_end, shard_.alignment, &fork_end_padded)) return "";
    if (end != fork_end && end != fork_end_padded) return "";
    return fmt::format("; '{}' is stored in the PrismML fork's Q2_0 (128 weights in 34 bytes) under the id of "
                       "today's Q2_0 (64 in 18): convert the model again",
                       Printable(tensor->name));
  }

  GgufShard& shard_;
  HeaderCursor cursor_;
};

StatusOr<MappedBytes> Map(const std::string& path, uint64_t bytes, int prot, int flags, int fd) {
  void* address = ::mmap(nullptr, bytes, prot, flags, fd, 0);
  if (address == MAP_FAILED) return ErrnoStatus(fmt::format("{}: mapping {} bytes", path, bytes), errno);
  return MappedBytes(static_cast<uint8_t*>(address), bytes);
}

}  // namespace

StatusOr<GgufShard> OpenGgufShard(const std::string& path) {
  GgufShard shard;
  shard.path = path;
  // O_NONBLOCK: opening a fifo by mistake must not hang; it means nothing for regular files.
  shard.fd = Fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!shard.fd.valid()) return ErrnoStatus(fmt::format("cannot open model file {}", path), errno);
  struct stat info;
  if (::fstat(shard.fd.get(), &info) != 0) return ErrnoStatus(fmt::format("{}: fstat", path), errno);
  if (!S_ISREG(info.st_mode)) return InvalidArgument("{}: not a regular file", path);
  shard.size = static_cast<uint64_t>(info.st_size);
  if (shard.size < sizeof(uint32_t)) {
    return InvalidArgument("{}: the file has {} bytes, too few for a GGUF file", path, shard.size);
  }
  // Address space for the whole header, memory only for what is read: views stay valid while it grows.
  LODE_ASSIGN_OR_RETURN(shard.header, Map(path, std::min(shard.size, kGgufHeaderBytesMax), PROT_READ | PROT_WRITE,
                                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1));
  LODE_RETURN_IF_ERROR(ShardParser(&shard).Parse());
  if (!shard.tensors.empty()) {
    LODE_ASSIGN_OR_RETURN(shard.map, Map(path, shard.size, PROT_READ, MAP_PRIVATE, shard.fd.get()));
    for (GgufTensor& tensor : shard.tensors) tensor.data = shard.map.data() + tensor.offset;
  }
  return shard;
}

const char* GgufTypeName(GgufValueType type) {
  static constexpr const char* kNames[] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                           "bool", "string", "array", "u64", "i64", "f64"};
  const auto index = static_cast<uint32_t>(type);
  return index < std::size(kNames) ? kNames[index] : "unknown";
}

uint32_t GgufScalarBytes(GgufValueType type) {
  switch (type) {
    case GgufValueType::kU8: case GgufValueType::kI8: case GgufValueType::kBool: return 1;
    case GgufValueType::kU16: case GgufValueType::kI16: return 2;
    case GgufValueType::kU32: case GgufValueType::kI32: case GgufValueType::kF32: return 4;
    case GgufValueType::kU64: case GgufValueType::kI64: case GgufValueType::kF64: return 8;
    case GgufValueType::kString: case GgufValueType::kArray: return 0;
  }
  return 0;
}

}  // namespace lode
