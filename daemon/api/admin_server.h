// The gRPC end of administration (proto/lode/admin/v1): its own server on its own socket, whose
// folder only the daemon's user and root may enter. That folder is the access control.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "shared/base/status.h"

namespace lode {

class AdminServer {
 public:
  using Tune = std::function<StatusOr<std::map<std::string, std::string>>(
      const std::map<std::string, std::string>&)>;
  // `tune` is called on gRPC threads, several at a time. Fails when the socket cannot be bound.
  static StatusOr<std::unique_ptr<AdminServer>> Start(const std::string& socket_path, Tune tune);
  virtual ~AdminServer() = default;  // ends calls at once, removes the socket
};

}  // namespace lode
