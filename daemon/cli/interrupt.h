// Ctrl-C. While an answer streams it cancels that call; otherwise it ends the program, after the
// clean-up of whatever was started (a private stack). A thread takes the signal, so that what it
// does may lock and allocate, which a signal handler must not.
#pragma once

#include <grpcpp/client_context.h>

#include <functional>

namespace lode::cli {

// First thing in main, before any other thread: blocks SIGINT and SIGTERM and starts the thread.
void WatchInterrupts();
// In a forked child before exec: the mask is inherited.
void UnblockInterrupts();

// While one lives, Ctrl-C cancels `call`.
class CancelOnInterrupt {
 public:
  explicit CancelOnInterrupt(grpc::ClientContext* call);
  ~CancelOnInterrupt();
};
// Whether the last call that Ctrl-C could cancel was cancelled by it.
bool WasInterrupted();
// What a shell expects of a program that SIGINT ended, by whatever way.
inline constexpr int kInterruptedExit = 130;

// What to do before the program ends by a signal; empty: nothing. Runs on the watching thread, at
// most once.
void SetInterruptCleanup(std::function<void()> cleanup);

}  // namespace lode::cli
