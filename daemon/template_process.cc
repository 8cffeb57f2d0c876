// See template_process.h. The two ends talk over a socket pair, so a dead peer is an error code and
// never a signal.

#include "daemon/template_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/template_sandbox.h"
#include "nlohmann/json.hpp"
#include "shared/base/check.h"

namespace lode {
namespace {

using std::chrono::milliseconds;

// Processor time one helper may use in its life; then the kernel ends it and the next request
// starts another.
constexpr uint64_t kCpuSecondsMax = 3600;
// How long a killed process may take to disappear before it is left to init.
constexpr milliseconds kReapTimeout{1000};
constexpr milliseconds kReapPoll{2};
constexpr size_t kReadyBytesMax = 64 * 1024;

}  // namespace

TemplateProcess::TemplateProcess(Options options) : options_(std::move(options)) {}

TemplateProcess::~TemplateProcess() { Stop(); }

Status TemplateProcess::Spawn() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    return ErrnoStatus("socketpair for the template helper", errno);
  }
  socket_.Reset(ends[0]);
  Fd peer(ends[1]);
  Fd null(open("/dev/null", O_WRONLY | O_CLOEXEC));
  if (!null.valid()) return ErrnoStatus("open /dev/null", errno);
  if (fcntl(socket_.get(), F_SETFL, O_NONBLOCK) != 0) return ErrnoStatus("fcntl", errno);

  // Everything the child touches is made before the fork. -I: no variables, no user packages; -B:
  // writes no caches.
  std::string arguments[] = {options_.python, "-I", "-B", options_.script};
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  std::vector<sock_filter> filter = MakeSyscallFilter();
  sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
  SandboxPlan plan{options_.python.c_str(), argv.data(),    peer.get(), null.get(), getpid(),
                   options_.memory_bytes,   kCpuSecondsMax, &program};
  pid_t pid = fork();
  if (pid < 0) return ErrnoStatus("fork for the template helper", errno);
  if (pid == 0) ConfineAndExec(plan);
  pid_ = pid;
  ++starts_;
  return OkStatus();
}

Status TemplateProcess::Start() {
  if (pid_ > 0 && !HasEnded()) return OkStatus();
  Stop();
  LODE_RETURN_IF_ERROR(Spawn());
  auto ready = ReceiveMessage(kReadyBytesMax, Clock::now() + options_.start_timeout);
  std::string reason;
  if (ready.ok()) {
    auto answer = nlohmann::json::parse(*ready, nullptr, /*allow_exceptions=*/false);
    bool readable = answer.is_object() && answer.contains("ok");
    if (readable && answer["ok"] == true) return OkStatus();
    bool explained = readable && answer.contains("error") && answer["error"].is_string();
    reason = explained ? answer["error"].get<std::string>() : "it gives no reason";
  } else {
    reason = Message(ready.status());
  }
  Stop();
  return FailedPrecondition(
      "the chat template helper does not start ({} {}): {}; chat needs Python 3 with Jinja "
      "(package "
      "python3-jinja2)",
      options_.python, options_.script, reason);
}

StatusOr<std::string> TemplateProcess::Exchange(std::string_view request, size_t answer_bytes_max,
                                                Clock::time_point deadline) {
  LODE_RETURN_IF_ERROR(Start());
  uint32_t length = static_cast<uint32_t>(request.size());
  LODE_CHECK(length == request.size(), "template request of {} bytes", request.size());
  std::string header(sizeof(length), '\0');
  std::memcpy(header.data(), &length, sizeof(length));
  Status sent = Send(header, deadline);
  if (sent.ok()) sent = Send(request, deadline);
  StatusOr<std::string> answer =
      sent.ok() ? ReceiveMessage(answer_bytes_max, deadline) : StatusOr<std::string>(sent);
  if (!answer.ok()) Stop();  // half a message may be under way: this helper cannot be used again
  return answer;
}

Status TemplateProcess::WaitFor(short events, Clock::time_point deadline) {
  while (true) {
    auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now()).count();
    if (left <= 0) return DeadlineExceeded("no answer in time");
    pollfd entry{socket_.get(), events, 0};
    int n = poll(&entry, 1, static_cast<int>(std::min<int64_t>(left, 60'000)));
    if (n > 0) return OkStatus();
    if (n < 0 && errno != EINTR) return ErrnoStatus("poll on the template helper", errno);
  }
}

Status TemplateProcess::Send(std::string_view bytes, Clock::time_point deadline) {
  while (!bytes.empty()) {
    ssize_t n = send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n > 0) {
      bytes.remove_prefix(static_cast<size_t>(n));
    } else if (errno == EAGAIN || errno == EINTR) {
      LODE_RETURN_IF_ERROR(WaitFor(POLLOUT, deadline));
    } else {
      Reap();
      return Unavailable("{}", EndText());
    }
  }
  return OkStatus();
}

Status TemplateProcess::Receive(char* out, size_t bytes, Clock::time_point deadline) {
  while (bytes > 0) {
    ssize_t n = recv(socket_.get(), out, bytes, 0);
    if (n > 0) {
      out += n;
      bytes -= static_cast<size_t>(n);
    } else if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
      LODE_RETURN_IF_ERROR(WaitFor(POLLIN, deadline));
    } else {
      Reap();
      return Unavailable("{}", EndText());
    }
  }
  return OkStatus();
}

StatusOr<std::string> TemplateProcess::ReceiveMessage(size_t bytes_max,
                                                      Clock::time_point deadline) {
  uint32_t length = 0;
  LODE_RETURN_IF_ERROR(Receive(reinterpret_cast<char*>(&length), sizeof(length), deadline));
  if (length > bytes_max) return Unavailable("it answered with {} bytes", length);
  std::string message(length, '\0');
  LODE_RETURN_IF_ERROR(Receive(message.data(), length, deadline));
  return message;
}

bool TemplateProcess::HasEnded() {
  if (pid_ < 0) return true;
  pid_t got = waitpid(pid_, &wait_status_, WNOHANG);
  if (got == 0 || (got < 0 && errno == EINTR)) return false;
  pid_ = -1;
  return true;
}

bool TemplateProcess::Reap() {
  for (auto end = Clock::now() + kReapTimeout; Clock::now() < end;) {
    if (HasEnded()) return true;
    std::this_thread::sleep_for(kReapPoll);
  }
  return false;
}

std::string TemplateProcess::EndText() const {
  if (pid_ > 0) return "it closed its connection";
  if (WIFSIGNALED(wait_status_)) {
    return fmt::format("it was ended by signal {}", WTERMSIG(wait_status_));
  }
  int status = WEXITSTATUS(wait_status_);
  if (status == kExitCannotRun) return fmt::format("{} cannot be run", options_.python);
  if (status == kExitCannotConfine) return "the kernel refuses its limits or system call filter";
  return fmt::format("it ended with status {}", status);
}

void TemplateProcess::Stop() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    Reap();
    pid_ = -1;
  }
  socket_.Reset();
}

}  // namespace lode
