// The folder for sockets, and the promise that one daemon at a time uses it. Main thread at start.
#pragma once

#include <string>

#include "shared/base/fd.h"
#include "shared/base/status.h"

namespace lode {

struct RuntimeDir {
  std::string path;  // the option, $RUNTIME_DIRECTORY, $XDG_RUNTIME_DIR/lode or /tmp/lode-UID
  std::string control_path;  // <path>/control: 0700 whatever the mode of `path`, so that clients
                             // allowed into it stay out
  Fd lock;                   // held for the life of the daemon
};
// Makes both folders, refuses folders of other users and symbolic links, and takes the lock or
// names the daemon that has it.
StatusOr<RuntimeDir> OpenRuntimeDir(const std::string& option);

// The folder of the running binary.
std::string BinaryDir();

}  // namespace lode
