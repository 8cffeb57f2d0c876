// See daemon/runtime_dir.h.
#include "daemon/runtime_dir.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>

namespace lode {
namespace {

std::string Choose(const std::string& option) {
  if (!option.empty()) return option;
  if (const char* systemd = std::getenv("RUNTIME_DIRECTORY"); systemd && *systemd) {
    const std::string all = systemd;
    return all.substr(0, all.find(':'));
  }
  if (const char* xdg = std::getenv("XDG_RUNTIME_DIR"); xdg && *xdg)
    return std::string(xdg) + "/lode";
  return fmt::format("/tmp/lode-{}", getuid());
}

// Makes or checks a folder of ours. lstat: in /tmp somebody else may have put a link there.
Status OwnFolder(const std::string& path, bool force_private) {
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST)
    return ErrnoStatus(fmt::format("cannot make the folder '{}'", path), errno);
  struct stat info = {};
  if (lstat(path.c_str(), &info) != 0)
    return ErrnoStatus(fmt::format("cannot look at the folder '{}'", path), errno);
  if (!S_ISDIR(info.st_mode))
    return FailedPrecondition("'{}' is not a folder; remove it or set runtime_dir", path);
  if (info.st_uid != getuid())
    return FailedPrecondition("folder '{}' belongs to another user; set runtime_dir", path);
  if ((info.st_mode & S_IWOTH) != 0)
    return FailedPrecondition("folder '{}' is writable for everybody; take that away", path);
  if (force_private && (info.st_mode & 077) != 0 && chmod(path.c_str(), 0700) != 0) {
    return ErrnoStatus(fmt::format("cannot make the folder '{}' private", path), errno);
  }
  return OkStatus();
}

}  // namespace

StatusOr<RuntimeDir> OpenRuntimeDir(const std::string& option) {
  RuntimeDir dir;
  dir.path = Choose(option);
  dir.control_path = dir.path + "/control";
  LODE_RETURN_IF_ERROR(OwnFolder(dir.path, false));
  LODE_RETURN_IF_ERROR(OwnFolder(dir.control_path, true));
  const std::string lock_path = dir.control_path + "/lock";
  dir.lock.Reset(open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!dir.lock.valid()) return ErrnoStatus(fmt::format("cannot open '{}'", lock_path), errno);
  if (flock(dir.lock.get(), LOCK_EX | LOCK_NB) != 0) {
    return FailedPrecondition("another daemon uses the folder '{}'; stop it or set runtime_dir",
                              dir.path);
  }
  return dir;
}

std::string BinaryDir() {
  std::error_code error;
  const auto path = std::filesystem::read_symlink("/proc/self/exe", error);
  return error ? "." : path.parent_path().string();
}

}  // namespace lode
