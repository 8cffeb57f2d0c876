// Zip central directory, deflate by zlib, .npy header: see npz.h.
#include "tests/support/npz.h"

#include <zlib.h>

#include <cstring>
#include <fstream>
#include <iterator>

namespace lode::testing {
namespace {

constexpr uint32_t kEndOfDirectory = 0x06054b50, kDirectoryEntry = 0x02014b50;
constexpr size_t kEndBytes = 22, kEntryBytes = 46, kLocalBytes = 30;

uint64_t Little(const std::vector<uint8_t>& b, size_t at, size_t n) {
  uint64_t v = 0;
  for (size_t i = 0; i < n && at + i < b.size(); ++i)
    v |= static_cast<uint64_t>(b[at + i]) << (8 * i);
  return v;
}

StatusOr<std::vector<uint8_t>> Inflate(const uint8_t* in, size_t n, size_t size) {
  std::vector<uint8_t> out(size);
  z_stream z = {};
  if (inflateInit2(&z, -MAX_WBITS) != Z_OK) return Internal("zlib does not start");
  z.next_in = const_cast<uint8_t*>(in);
  z.avail_in = static_cast<uInt>(n);
  z.next_out = out.data();
  z.avail_out = static_cast<uInt>(size);
  const int rc = inflate(&z, Z_FINISH);
  inflateEnd(&z);
  if (rc != Z_STREAM_END || z.avail_out != 0)
    return InvalidArgument("deflated member is damaged (zlib {})", rc);
  return out;
}

// {'descr': '<f4', 'fortran_order': False, 'shape': (3, 10), }
StatusOr<NpyArray> ParseNpy(const std::vector<uint8_t>& b) {
  if (b.size() < 12 || std::memcmp(b.data(), "\x93NUMPY", 6) != 0)
    return InvalidArgument("member is no .npy array");
  const size_t length_bytes = b[6] == 1 ? 2 : 4, header_at = 8 + length_bytes;
  const size_t header_size = Little(b, 8, length_bytes);
  if (header_at + header_size > b.size()) return InvalidArgument(".npy header is cut");
  const std::string header(b.begin() + header_at, b.begin() + header_at + header_size);
  NpyArray a;
  const size_t descr = header.find("'descr': '"), shape = header.find("'shape': (");
  if (descr == std::string::npos || shape == std::string::npos ||
      header.find("'fortran_order': False") == std::string::npos) {
    return InvalidArgument(".npy header not understood: {}", header);
  }
  a.dtype = header.substr(descr + 10, header.find('\'', descr + 10) - descr - 10);
  for (const char* p = header.c_str() + shape + 10; *p != ')' && *p != 0;) {
    char* end;
    const uint64_t n = std::strtoull(p, &end, 10);
    if (end == p) {
      ++p;
      continue;
    }
    a.shape.push_back(n);
    p = end;
  }
  a.bytes.assign(b.begin() + header_at + header_size, b.end());
  const uint64_t item = static_cast<uint64_t>(a.dtype.back() - '0');
  if (a.bytes.size() != a.size() * item)
    return InvalidArgument(".npy data has {} bytes, shape wants {}", a.bytes.size(),
                           a.size() * item);
  return a;
}

template <typename T, typename Out>
void Convert(const NpyArray& a, std::vector<Out>* out) {
  for (uint64_t i = 0; i < a.size(); ++i) {
    T v;
    std::memcpy(&v, a.bytes.data() + i * sizeof(T), sizeof(T));
    out->push_back(static_cast<Out>(v));
  }
}

template <typename Out>
std::vector<Out> As(const NpyArray& a) {
  std::vector<Out> out;
  if (a.dtype == "<f4") Convert<float>(a, &out);
  if (a.dtype == "<f8") Convert<double>(a, &out);
  if (a.dtype == "<i4") Convert<int32_t>(a, &out);
  if (a.dtype == "<i8") Convert<int64_t>(a, &out);
  if (a.dtype == "<u2") Convert<uint16_t>(a, &out);
  if (a.dtype == "|u1") Convert<uint8_t>(a, &out);
  return out;
}

}  // namespace

uint64_t NpyArray::size() const {
  uint64_t n = 1;
  for (uint64_t d : shape) n *= d;
  return n;
}
std::vector<float> NpyArray::Floats() const { return As<float>(*this); }
std::vector<int64_t> NpyArray::Ints() const { return As<int64_t>(*this); }

StatusOr<std::map<std::string, NpyArray>> ReadNpz(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return NotFound("cannot open {}", path);
  const std::vector<uint8_t> b((std::istreambuf_iterator<char>(file)),
                               std::istreambuf_iterator<char>());
  if (b.size() < kEndBytes) return InvalidArgument("{} is no zip archive", path);
  size_t end = b.size() - kEndBytes;
  while (end > 0 && Little(b, end, 4) != kEndOfDirectory) --end;
  if (Little(b, end, 4) != kEndOfDirectory) return InvalidArgument("{} is no zip archive", path);
  std::map<std::string, NpyArray> arrays;
  size_t at = Little(b, end + 16, 4);
  for (uint64_t i = 0; i < Little(b, end + 10, 2); ++i) {
    if (at + kEntryBytes > b.size() || Little(b, at, 4) != kDirectoryEntry)
      return InvalidArgument("{}: zip directory is damaged", path);
    const uint64_t method = Little(b, at + 10, 2), packed = Little(b, at + 20, 4),
                   size = Little(b, at + 24, 4);
    const uint64_t name_size = Little(b, at + 28, 2), local = Little(b, at + 42, 4);
    const std::string name(b.begin() + at + kEntryBytes, b.begin() + at + kEntryBytes + name_size);
    at += kEntryBytes + name_size + Little(b, at + 30, 2) + Little(b, at + 32, 2);
    const size_t data = local + kLocalBytes + Little(b, local + 26, 2) + Little(b, local + 28, 2);
    if (data + packed > b.size()) return InvalidArgument("{}: member {} is cut", path, name);
    std::vector<uint8_t> member(b.begin() + data, b.begin() + data + packed);
    if (method == 8) {
      LODE_ASSIGN_OR_RETURN(member, Inflate(b.data() + data, packed, size));
    } else if (method != 0) {
      return InvalidArgument("{}: member {} uses zip method {}", path, name, method);
    }
    LODE_ASSIGN_OR_RETURN(arrays[name.substr(0, name.rfind(".npy"))], ParseNpy(member));
  }
  return arrays;
}

}  // namespace lode::testing
