// Text of untrusted files in messages and logs. Token and key strings may hold any byte; control bytes would let a file
// write to the reader's terminal. Used wherever an error quotes a file.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace lode {

// `bytes` with everything outside printable ASCII (and the backslash) as \xNN, cut after `max_bytes` with "...".
std::string Printable(std::string_view bytes, size_t max_bytes = 96);

}  // namespace lode
