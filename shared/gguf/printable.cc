// Escaping for messages: see printable.h. Pure function; any thread, any process.
#include "shared/gguf/printable.h"

#include <fmt/format.h>

namespace lode {

std::string Printable(std::string_view bytes, size_t max_bytes) {
  std::string out;
  for (size_t i = 0; i < bytes.size() && i < max_bytes; ++i) {
    const auto byte = static_cast<unsigned char>(bytes[i]);
    if (byte >= 0x20 && byte < 0x7f && byte != '\\') {
      out.push_back(static_cast<char>(byte));
    } else {
      out += fmt::format("\\x{:02x}", byte);
    }
  }
  if (bytes.size() > max_bytes) out += "...";
  return out;
}

}  // namespace lode
