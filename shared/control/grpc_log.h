// The gRPC library writes its own lines to standard error ("E1130 ... server_chttp2.cc:40] ..."),
// beside the one sentence of ours that says the same. This silences them, unless the environment
// asks for them by the library's own variable GRPC_VERBOSITY. Its last words before an abort still
// come. Called by whoever makes a server or a channel, before it does; any thread, any number of
// times. Only for files that know gRPC.
#pragma once

#include <grpc/support/log.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace lode {

inline void SilenceGrpcLog() {
  if (std::getenv("GRPC_VERBOSITY") != nullptr) return;
  gpr_set_log_function([](gpr_log_func_args* line) {
    if (std::strstr(line->message, "assertion failed") != nullptr)
      std::fprintf(stderr, "gRPC: %s\n", line->message);
  });
}

}  // namespace lode
