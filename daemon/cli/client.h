// The connection of the command line to a daemon: one that runs already, or a private stack started
// for this command and stopped with it. Blocking gRPC; single thread.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "lode/v1/lode.grpc.pb.h"
#include "shared/base/fd.h"
#include "shared/base/status.h"

namespace lode::cli {

struct ConnectOptions {
  std::string socket;                     // empty: $LODE_SOCKET, then the usual places
  std::string model;                      // for a private stack
  bool private_stack = false;             // start one even when a daemon runs
  std::vector<std::string> daemon_flags;  // passed on to a private loded
  bool quiet = false;                     // no progress on stderr
  bool wait_ready = true;                 // false: a daemon that still loads will do
};

class Client {
 public:
  // Connects to a ready daemon (waits while it loads), or starts a private one. Errors say what to
  // do next.
  static StatusOr<std::unique_ptr<Client>> Connect(const ConnectOptions& options);
  ~Client();  // stops a private stack

  v1::LodeService::Stub& stub() { return *stub_; }
  const std::string& target() const { return target_; }

 private:
  Client() = default;
  Status StartPrivate(const ConnectOptions& options);
  Status WaitReady(bool quiet);
  bool TryTarget(const std::string& target);
  StatusOr<bool> Serves(const std::string& model);
  void StopPrivate();

  std::unique_ptr<v1::LodeService::Stub> stub_;
  std::string target_;
  std::string private_dir_;  // removed at the end
  Fd owner_lock_;            // held while this process lives: the folder is in use
  pid_t daemon_ = -1;
};

// grpc::Status as ours.
Status FromGrpc(const grpc::Status& status);

// One line of progress on a terminal (redrawn), or a line per ten percent elsewhere. stderr.
class ProgressLine {
 public:
  explicit ProgressLine(bool quiet);
  ~ProgressLine();
  void Show(double fraction, const std::string& what);
  void Clear();

 private:
  const bool quiet_, terminal_;
  int last_tenth_ = -1;
  double most_ = 0;
  bool drawn_ = false;
};

}  // namespace lode::cli
