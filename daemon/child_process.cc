// See daemon/child_process.h.
#include "daemon/child_process.h"

#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

namespace lode {

StatusOr<ChildProcess> ChildProcess::Spawn(const std::vector<std::string>& argv,
                                           const Fd& channel) {
  std::vector<char*> args;
  for (const std::string& arg : argv) args.push_back(const_cast<char*>(arg.c_str()));
  args.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, channel.get(), kChannelFd);
  posix_spawn_file_actions_addclosefrom_np(&actions, kChannelFd + 1);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none, all;
  sigemptyset(&none);
  sigfillset(&all);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &all);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);

  ChildProcess child;
  const int error = posix_spawn(&child.pid_, args[0], &actions, &attributes, args.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) return ErrnoStatus(fmt::format("cannot start '{}'", argv[0]), error);
  // Nobody else reaps our children, so the number still means this process.
  child.pidfd_.Reset(static_cast<int>(syscall(SYS_pidfd_open, child.pid_, 0)));
  if (child.pidfd_.valid()) return child;
  const int open_error = errno;
  kill(child.pid_, SIGKILL);
  waitpid(child.pid_, nullptr, 0);
  return ErrnoStatus("pidfd_open", open_error);
}

void ChildProcess::Signal(int signal) const {
  if (running()) syscall(SYS_pidfd_send_signal, pidfd_.get(), signal, nullptr, 0);
}

std::optional<std::string> ChildProcess::Reap() {
  if (!running()) return std::nullopt;
  int status = 0;
  if (waitpid(pid_, &status, WNOHANG) != pid_) return std::nullopt;
  pidfd_.Reset();
  if (WIFEXITED(status)) return fmt::format("exited with status {}", WEXITSTATUS(status));
  return fmt::format("was killed by signal {} ({})", WTERMSIG(status), strsignal(WTERMSIG(status)));
}

}  // namespace lode
