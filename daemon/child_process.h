// A child process and its pidfd: start, signal, learn how it ended. The pidfd makes this free of
// races: it names this process and no later one of the same number, and it becomes readable when
// the process ends.
//
// Spawn from a thread that outlives the child: the child asks for a signal when its parent *thread*
// ends.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "shared/base/fd.h"
#include "shared/base/status.h"

namespace lode {

class ChildProcess {
 public:
  // Runs argv[0] with `channel` as file descriptor kChannelFd and nothing else open above it but
  // standard streams; signal mask empty, environment inherited.
  static StatusOr<ChildProcess> Spawn(const std::vector<std::string>& argv, const Fd& channel);
  static constexpr int kChannelFd = 3;

  ChildProcess() = default;
  bool running() const { return pidfd_.valid(); }
  pid_t pid() const { return pid_; }
  int pidfd() const { return pidfd_.get(); }
  void Signal(int signal) const;
  // Empty while it runs; once it ended: "exited with status 1" or "was killed by signal 9
  // (Killed)", and running() is false.
  std::optional<std::string> Reap();

 private:
  pid_t pid_ = -1;
  Fd pidfd_;
};

}  // namespace lode
