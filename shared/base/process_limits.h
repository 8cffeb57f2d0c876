// What the shell or the service manager allows this process, checked before any library meets the
// limit: libraries answer a missing descriptor or a failed allocation with abort() and their own
// words, or none. First thing in every main; one thread.
#pragma once

#include <cstdint>

#include "shared/base/status.h"

namespace lode {

struct LimitNeeds {
  uint64_t open_files = 0;
  uint64_t address_space_bytes = 0;
  uint64_t file_bytes = 0;  // largest file or shared segment
};
// Fails naming the first limit that is too low, what is needed and how to raise it.
Status CheckProcessLimits(const LimitNeeds& needs);

// The program's last resort: an exception that nobody caught (no memory, no thread) ends it with
// one sentence and exit code 1 instead of a crash, and a write beyond `ulimit -f` is an error
// instead of a signal. `program` must outlive the process.
void InstallLastWords(const char* program);

}  // namespace lode
