// Keeping memory in RAM: mlock, and the sentence for people when the limit is too small. Used for
// the arenas (cpu_worker/page_placement.h) and for what the cpu device allocates. Any thread.
#pragma once

#include <cstddef>
#include <string>

namespace lode {

// 0, or errno.
int LockPages(const void* data, size_t bytes);
// "cannot lock 512 MiB of expert weights (...); the limit is 8192 KiB: set LimitMEMLOCK=..."
std::string LockWarning(const std::string& what, size_t bytes, int error);

}  // namespace lode
