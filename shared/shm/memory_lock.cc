// See memory_lock.h.
#include "shared/shm/memory_lock.h"

#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstring>

namespace lode {

int LockPages(const void* data, size_t bytes) { return mlock(data, bytes) == 0 ? 0 : errno; }

std::string LockWarning(const std::string& what, size_t bytes, int error) {
  rlimit limit = {};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  return fmt::format(
      "cannot lock {} MiB of {} ({}); the limit is {}: set LimitMEMLOCK=infinity in the unit or "
      "run `ulimit -l unlimited`",
      bytes >> 20, what, std::strerror(error),
      limit.rlim_cur == RLIM_INFINITY ? "not the cause"
                                      : fmt::format("{} KiB", limit.rlim_cur >> 10));
}

}  // namespace lode
