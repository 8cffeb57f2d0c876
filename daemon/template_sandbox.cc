// See template_sandbox.h. The filter is a list of refusals, not of permissions: it must work with
// every Python and libc, and it stands behind Jinja's sandbox, which already keeps a template from
// making any system call.

#include "daemon/template_sandbox.h"

#include <fcntl.h>
#include <linux/audit.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

namespace lode {
namespace {

// Refused with EPERM whatever their arguments. Architectures newer than x86-64 lack the first
// group.
constexpr uint32_t kRefused[] = {
#ifdef __NR_fork
    __NR_fork,
    __NR_vfork,
    __NR_creat,
    __NR_unlink,
    __NR_rename,
    __NR_mkdir,
    __NR_rmdir,
    __NR_link,
    __NR_symlink,
    __NR_chmod,
    __NR_chown,
    __NR_lchown,
    __NR_mknod,
    __NR_utime,
    __NR_utimes,
#endif
    __NR_clone,
    __NR_clone3,
    __NR_socket,
    __NR_socketpair,
    __NR_connect,
    __NR_bind,
    __NR_listen,
    __NR_accept,
    __NR_accept4,
    __NR_ptrace,
    __NR_process_vm_readv,
    __NR_process_vm_writev,
    __NR_pidfd_open,
    __NR_pidfd_getfd,
    __NR_pidfd_send_signal,
    __NR_kill,
    __NR_tkill,
    __NR_tgkill,
    __NR_rt_sigqueueinfo,
    __NR_unlinkat,
    __NR_renameat2,
    __NR_mkdirat,
    __NR_linkat,
    __NR_symlinkat,
    __NR_fchmod,
    __NR_fchmodat,
    __NR_fchown,
    __NR_fchownat,
    __NR_mknodat,
    __NR_utimensat,
    __NR_truncate,
    __NR_ftruncate,
    __NR_openat2,
    __NR_open_by_handle_at,
    __NR_memfd_create,
    __NR_mount,
    __NR_umount2,
    __NR_pivot_root,
    __NR_chroot,
    __NR_setns,
    __NR_unshare,
    __NR_bpf,
    __NR_perf_event_open,
    __NR_keyctl,
    __NR_add_key,
    __NR_request_key,
    __NR_io_uring_setup,
    __NR_userfaultfd,
    __NR_shmget,
    __NR_msgget,
    __NR_semget,
    __NR_mq_open,
    __NR_execveat,
    __NR_setpriority,
    __NR_sched_setaffinity,
    __NR_sched_setscheduler};

#if defined(__x86_64__)
constexpr uint32_t kArchitecture = AUDIT_ARCH_X86_64;
#elif defined(__aarch64__)
constexpr uint32_t kArchitecture = AUDIT_ARCH_AARCH64;
#endif
constexpr uint32_t kX32Bit = 0x40000000;  // second numbering of x86-64 system calls
constexpr uint32_t kWriteFlags = O_WRONLY | O_RDWR | O_CREAT | O_TRUNC;
constexpr uint32_t kRefuse = SECCOMP_RET_ERRNO | EPERM;

// Descriptors while Python imports its modules: three of ours, the module being read, a folder
// listing.
constexpr rlim_t kDescriptorsMax = 16;

bool Limit(int resource, rlim_t value) {
  rlimit limit{value, value};
  return setrlimit(static_cast<__rlimit_resource>(resource), &limit) == 0;
}

[[noreturn]] void GiveUp(int status) { _exit(status); }

}  // namespace

std::vector<sock_filter> MakeSyscallFilter() {
  std::vector<sock_filter> code;
  auto load = [&](size_t offset) {
    code.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, static_cast<uint32_t>(offset)));
  };
  auto give = [&](uint32_t verdict) { code.push_back(BPF_STMT(BPF_RET | BPF_K, verdict)); };
  // Each rule is a jump over its own verdict.
  auto if_equal = [&](uint32_t value, uint32_t verdict) {
    code.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 0, 1));
    give(verdict);
  };
  // open(path, flags, mode) and openat(dir, path, flags, mode): reading is allowed. The low half of
  // an argument comes first on the little-endian machines of kArchitecture.
  auto read_only = [&](uint32_t number, int flags_index) {
    code.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 4));
    load(offsetof(seccomp_data, args) + 8 * flags_index);
    code.push_back(BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, kWriteFlags, 0, 1));
    give(kRefuse);
    give(SECCOMP_RET_ALLOW);
  };
  load(offsetof(seccomp_data, arch));
  code.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, kArchitecture, 1, 0));
  give(SECCOMP_RET_KILL_PROCESS);
  load(offsetof(seccomp_data, nr));
  code.push_back(BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, kX32Bit, 0, 1));
  give(kRefuse);
  for (uint32_t number : kRefused) if_equal(number, kRefuse);
#ifdef __NR_open
  read_only(__NR_open, 1);
#endif
  read_only(__NR_openat, 2);
  give(SECCOMP_RET_ALLOW);
  return code;
}

void ConfineAndExec(const SandboxPlan& plan) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != plan.parent) GiveUp(kExitCannotConfine);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  // The socket may itself sit on 0..2 when the daemon was started without them; lift it out of the
  // way first.
  int socket = fcntl(plan.socket, F_DUPFD, 3);
  int null = fcntl(plan.null, F_DUPFD, 3);
  if (socket < 0 || null < 0 || dup2(socket, 0) < 0 || dup2(socket, 1) < 0 || dup2(null, 2) < 0) {
    GiveUp(kExitCannotConfine);
  }
  if (syscall(__NR_close_range, 3u, ~0u, 0u) != 0) {
    for (int fd = 3; fd < 65536; ++fd) close(fd);  // kernels before 5.9
  }
  // Not allowed everywhere (containers, hardened kernels); the filter refuses sockets in any case.
  if (unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWIPC) != 0) unshare(CLONE_NEWNET);
  bool confined = Limit(RLIMIT_AS, plan.memory_bytes) && Limit(RLIMIT_CPU, plan.cpu_seconds) &&
                  Limit(RLIMIT_FSIZE, 0) && Limit(RLIMIT_CORE, 0) && Limit(RLIMIT_NPROC, 0) &&
                  Limit(RLIMIT_MEMLOCK, 0) && Limit(RLIMIT_NOFILE, kDescriptorsMax) &&
                  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
                  prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, plan.filter, 0, 0) == 0;
  if (!confined) GiveUp(kExitCannotConfine);
  char* const empty[] = {nullptr};
  execve(plan.program, plan.argv, empty);
  GiveUp(kExitCannotRun);
}

}  // namespace lode
