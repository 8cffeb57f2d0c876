// The chat template helper as seen by the daemon: start, one exchange of messages at a time, end.
//
// Used by ChatTemplate's own thread only. Every wait has a deadline; a helper that misses one,
// answers nonsense or dies is killed and reaped, and the next exchange starts a new one.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "shared/base/fd.h"
#include "shared/base/status.h"

namespace lode {

class TemplateProcess {
 public:
  using Clock = std::chrono::steady_clock;
  struct Options {
    std::string python;     // absolute path of the interpreter
    std::string script;     // path of render.py
    uint64_t memory_bytes;  // address space of the helper
    std::chrono::milliseconds start_timeout;
  };

  explicit TemplateProcess(Options options);
  ~TemplateProcess();
  TemplateProcess(const TemplateProcess&) = delete;
  TemplateProcess& operator=(const TemplateProcess&) = delete;

  // Starts a helper unless one is running, and waits until it is ready. Must be called by a thread
  // that lives as long as the helper: the kernel ends the helper together with the thread that made
  // it. Errors: FailedPrecondition when this machine cannot run it (no Python, no Jinja), with the
  // reason.
  Status Start();

  // Sends `request` and returns the answer, both without the length in front.
  // Errors: DeadlineExceeded (the helper was killed), Unavailable (it died; the status says how).
  StatusOr<std::string> Exchange(std::string_view request, size_t answer_bytes_max,
                                 Clock::time_point deadline);

  // Kills and reaps; nothing when none runs.
  void Stop();
  pid_t pid() const { return pid_; }  // -1: none
  uint64_t starts() const { return starts_; }

 private:
  Status Spawn();
  Status Send(std::string_view bytes, Clock::time_point deadline);
  Status Receive(char* out, size_t bytes, Clock::time_point deadline);
  StatusOr<std::string> ReceiveMessage(size_t bytes_max, Clock::time_point deadline);
  Status WaitFor(short events, Clock::time_point deadline);
  bool HasEnded();  // reaps it if so
  bool Reap();  // waits a moment for the end of a helper that was killed or has closed its socket
  std::string EndText() const;

  const Options options_;
  pid_t pid_ = -1;
  Fd socket_;
  int wait_status_ = 0;  // of the last helper that ended
  uint64_t starts_ = 0;
};

}  // namespace lode
