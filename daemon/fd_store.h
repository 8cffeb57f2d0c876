// The service manager's fd store: memory that outlives the daemon. Arenas are put there once they
// are complete and found again after a restart or crash; systemd drops them when the unit is
// stopped. Without systemd every call does nothing. Main thread at start, supervisor thread later.
#pragma once

#include <map>
#include <string>

#include "shared/base/fd.h"

namespace lode {

// The descriptors that were passed to this process, by name; made close-on-exec. Call once.
std::map<std::string, Fd> TakeStoredFds();
// Keeps a duplicate of `fd` under `name`, once: whatever had the name is removed first.
void StoreFd(const std::string& name, int fd);
void RemoveStoredFd(const std::string& name);

}  // namespace lode
