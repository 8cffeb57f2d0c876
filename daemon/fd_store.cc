// See daemon/fd_store.h.
#include "daemon/fd_store.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <systemd/sd-daemon.h>

#include <cstdlib>

namespace lode {

std::map<std::string, Fd> TakeStoredFds() {
  std::map<std::string, Fd> fds;
  char** names = nullptr;
  const int n =
      sd_listen_fds_with_names(1, &names);  // 1: unset the variables, workers must not see them
  for (int i = 0; i < n; ++i) {
    const int fd = SD_LISTEN_FDS_START + i;
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    fds[names[i]] = Fd(fd);  // a name twice: the later one stays, the other is closed
    std::free(names[i]);
  }
  std::free(names);
  return fds;
}

void StoreFd(const std::string& name, int fd) {
  RemoveStoredFd(name);
  sd_pid_notify_with_fds(0, 0, fmt::format("FDSTORE=1\nFDNAME={}", name).c_str(), &fd, 1);
}

void RemoveStoredFd(const std::string& name) {
  sd_notify(0, fmt::format("FDSTOREREMOVE=1\nFDNAME={}", name).c_str());
}

}  // namespace lode
