// Confinement of the chat template helper: what the child process does between fork and exec.
//
// The helper runs code from an untrusted model file. Jinja's sandbox is the first wall; this is the
// second: no new privileges, no descriptors but the socket, an empty environment, limits on memory,
// processor time, file size and processes, an own (empty) network where the kernel allows it, and a
// system call filter that refuses sockets, children, signals to others and every way to change a
// file.
#pragma once

#include <linux/filter.h>
#include <sys/types.h>

#include <cstdint>
#include <vector>

namespace lode {

struct SandboxPlan {
  const char* program;       // absolute path
  char* const* argv;         // ends with nullptr
  int socket;                // becomes descriptors 0 and 1
  int null;                  // /dev/null, becomes descriptor 2
  pid_t parent;              // the child ends itself when this process is gone already
  uint64_t memory_bytes;     // RLIMIT_AS
  uint64_t cpu_seconds;      // RLIMIT_CPU, hard; the helper sets the soft limit per request
  const sock_fprog* filter;  // from MakeSyscallFilter
};

// Exit statuses of the child when it never became the helper. Chosen outside Python's own 0..2.
inline constexpr int kExitCannotConfine = 126;
inline constexpr int kExitCannotRun = 127;

// The program of the system call filter; keep the vector while the plan is used.
std::vector<sock_filter> MakeSyscallFilter();

// Never returns. Only async-signal-safe calls, as other threads of the parent may hold any lock.
[[noreturn]] void ConfineAndExec(const SandboxPlan& plan);

}  // namespace lode
