// See interrupt.h.
#include "daemon/cli/interrupt.h"

#include <signal.h>
#include <unistd.h>

#include <mutex>
#include <thread>
#include <utility>

namespace lode::cli {
namespace {

std::mutex mutex;  // guards the three below
bool interrupted = false;
grpc::ClientContext* current_call = nullptr;
std::function<void()> cleanup_at_end;

sigset_t Signals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGTERM);
  return set;
}

void Watch() {
  const sigset_t set = Signals();
  for (;;) {
    int signal = 0;
    if (sigwait(&set, &signal) != 0) continue;
    std::function<void()> cleanup;
    {
      std::lock_guard lock(mutex);
      if (signal == SIGINT && current_call != nullptr) {
        current_call->TryCancel();
        current_call = nullptr;  // a second one ends the program
        interrupted = true;
        continue;
      }
      cleanup = std::move(cleanup_at_end);
      cleanup_at_end = nullptr;
    }
    if (cleanup) cleanup();
    _exit(128 + signal);  // other threads may be inside a call: no destructors
  }
}

}  // namespace

void WatchInterrupts() {
  const sigset_t set = Signals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  std::thread(Watch).detach();
}

void UnblockInterrupts() {
  const sigset_t set = Signals();
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
}

CancelOnInterrupt::CancelOnInterrupt(grpc::ClientContext* call) {
  std::lock_guard lock(mutex);
  current_call = call;
  interrupted = false;
}

bool WasInterrupted() {
  std::lock_guard lock(mutex);
  return interrupted;
}

CancelOnInterrupt::~CancelOnInterrupt() {
  std::lock_guard lock(mutex);
  current_call = nullptr;
}

void SetInterruptCleanup(std::function<void()> cleanup) {
  std::lock_guard lock(mutex);
  cleanup_at_end = std::move(cleanup);
}

}  // namespace lode::cli
