// See process_limits.h.
#include "shared/base/process_limits.h"

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <new>
#include <system_error>

namespace lode {
namespace {

const char* program_name = "lode";

Status Check(int resource, const char* what, const char* flag, uint64_t unit, const char* unit_name,
             const char* systemd, uint64_t needed) {
  rlimit limit = {};
  if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return OkStatus();
  if (limit.rlim_cur >= needed) return OkStatus();
  return ResourceExhausted("the limit of {} is {}{}, at least {} are needed (ulimit {}, {})", what,
                           limit.rlim_cur / unit, unit_name, (needed + unit - 1) / unit, flag,
                           systemd);
}

void LastWords() {
  const char* what = "an error that nobody handled";
  char text[256];
  if (const std::exception_ptr error = std::current_exception()) {
    try {
      std::rethrow_exception(error);
    } catch (const std::bad_alloc&) {
      what = "out of memory; check the machine, ulimit -v and the cgroup";
    } catch (const std::system_error& e) {
      std::snprintf(text, sizeof(text),
                    "the system refused a thread or a lock (%s); check ulimit -u, "
                    "ulimit -v and the cgroup",
                    e.what());
      what = text;
    } catch (const std::exception& e) {
      std::snprintf(text, sizeof(text), "an error that nobody handled: %s", e.what());
      what = text;
    } catch (...) {
    }
  }
  std::fprintf(stderr, "%s: %s\n", program_name, what);
  _exit(1);
}

}  // namespace

Status CheckProcessLimits(const LimitNeeds& needs) {
  constexpr uint64_t kKiB = 1024;
  LODE_RETURN_IF_ERROR(
      Check(RLIMIT_NOFILE, "open files", "-n", 1, "", "LimitNOFILE", needs.open_files));
  LODE_RETURN_IF_ERROR(
      Check(RLIMIT_AS, "address space", "-v", kKiB, " KiB", "LimitAS", needs.address_space_bytes));
  return Check(RLIMIT_FSIZE, "file sizes", "-f", kKiB, " KiB", "LimitFSIZE", needs.file_bytes);
}

void InstallLastWords(const char* program) {
  program_name = program;
  signal(SIGXFSZ, SIG_IGN);
  std::set_terminate(LastWords);
}

}  // namespace lode
