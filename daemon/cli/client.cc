// See client.h. The private stack: loded beside this binary, its own 0700 folder, no TCP port,
// ended by SIGTERM and by our death.
#include "daemon/cli/client.h"

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include "daemon/cli/interrupt.h"
#include "shared/base/fd.h"
#include "shared/control/grpc_log.h"
#include "shared/model/model_source.h"

namespace lode::cli {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr milliseconds kProbe{5000};  // a daemon that does not answer Status by then is not there
constexpr milliseconds kPoll{50};     // between two looks at a loading daemon
constexpr seconds kStopGrace{10};     // after SIGTERM
constexpr seconds kListenLimit{120};  // a private daemon listens by then: its model file is open
constexpr const char* kPrivatePrefix = "lode-private-";
constexpr const char* kOwnerFile = "owner";
constexpr seconds kUnansweredLimit{20};  // a daemon that was there and stopped answering

std::vector<std::string> UsualTargets() {
  std::vector<std::string> targets;
  if (const char* xdg = std::getenv("XDG_RUNTIME_DIR"))
    targets.push_back(std::string(xdg) + "/lode/lode.sock");
  targets.push_back("/run/lode/lode.sock");
  targets.push_back("/tmp/lode-" + std::to_string(getuid()) + "/lode.sock");
  return targets;
}

std::string BinaryFolder() {
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  return error ? std::string(".") : self.parent_path().string();
}

std::string LastLines(const std::string& path, size_t bytes) {
  std::FILE* file = std::fopen(path.c_str(), "r");
  if (file == nullptr) return "";
  std::string text;
  char buffer[4096];
  size_t n;
  while ((n = std::fread(buffer, 1, sizeof(buffer), file)) > 0) text.append(buffer, n);
  std::fclose(file);
  if (text.size() <= bytes) return text;
  const size_t cut = text.find('\n', text.size() - bytes);
  return cut == std::string::npos ? text.substr(text.size() - bytes) : text.substr(cut + 1);
}

// A folder is in use while its owner (or, for some seconds after the owner was killed, its daemon)
// lives: each holds a lock that the kernel releases with the process.
bool Held(const std::string& lock_file) {
  Fd fd(open(lock_file.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  return fd.valid() && flock(fd.get(), LOCK_EX | LOCK_NB) != 0;
}

// Removes what private stacks left whose owner was killed before it could clean up.
void RemoveStaleFolders(const std::filesystem::path& temp) {
  constexpr time_t kYoungSeconds = 10;  // its owner may be about to take the lock
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(temp, error)) {
    const std::string path = entry.path().string();
    if (entry.path().filename().string().rfind(kPrivatePrefix, 0) != 0) continue;
    struct stat info = {};
    if (lstat(path.c_str(), &info) != 0 || !S_ISDIR(info.st_mode) || info.st_uid != getuid())
      continue;
    if (time(nullptr) - info.st_mtime < kYoungSeconds) continue;
    if (Held(path + "/" + kOwnerFile) || Held(path + "/control/lock")) continue;
    std::filesystem::remove_all(path, error);
  }
}

}  // namespace

Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return OkStatus();
  return Status(static_cast<StatusCode>(status.error_code()), status.error_message());
}

ProgressLine::ProgressLine(bool quiet) : quiet_(quiet), terminal_(isatty(STDERR_FILENO) != 0) {}
ProgressLine::~ProgressLine() { Clear(); }

void ProgressLine::Show(double fraction, const std::string& what) {
  if (quiet_) return;
  // Parts of the load report by turns, each with its own share: a bar never runs backwards.
  fraction = most_ = std::max(most_, fraction);
  if (terminal_) {
    constexpr int kWidth = 30;
    const int filled = static_cast<int>(fraction * kWidth);
    std::string bar(static_cast<size_t>(std::max(0, std::min(kWidth, filled))), '#');
    bar.resize(kWidth, '.');
    std::fprintf(stderr, "\r\033[K[%s] %3.0f%% %s", bar.c_str(), fraction * 100, what.c_str());
    drawn_ = true;
  } else if (const int tenth = static_cast<int>(fraction * 10); tenth != last_tenth_) {
    last_tenth_ = tenth;
    std::fprintf(stderr, "%3.0f%% %s\n", fraction * 100, what.c_str());
  }
}

void ProgressLine::Clear() {
  if (drawn_) std::fprintf(stderr, "\r\033[K");
  drawn_ = false;
}

StatusOr<std::unique_ptr<Client>> Client::Connect(const ConnectOptions& options) {
  std::unique_ptr<Client> client(new Client);
  // Flags of a daemon mean one that starts with them, never one that runs already.
  if (!options.private_stack && options.daemon_flags.empty()) {
    // One that was named is meant: no other one is tried.
    const char* env = std::getenv("LODE_SOCKET");
    const std::string named = !options.socket.empty() ? options.socket : env != nullptr ? env : "";
    if (!named.empty()) {
      const std::string target = named.find(':') == std::string::npos ? "unix:" + named : named;
      if (!client->TryTarget(target)) {
        return Unavailable(
            "no daemon answers on {}; is the path right, and may you open it (group lode)?",
            target);
      }
      if (!options.model.empty()) {
        LODE_ASSIGN_OR_RETURN(const bool serves, client->Serves(options.model));
        if (!serves) {
          return FailedPrecondition(
              "the daemon on {} serves another model than '{}'; unset LODE_SOCKET, or give "
              "--private",
              target, options.model);
        }
      }
    } else {
      for (const std::string& path : UsualTargets()) {
        if (access(path.c_str(), F_OK) != 0 || !client->TryTarget("unix:" + path)) continue;
        if (options.model.empty()) break;
        LODE_ASSIGN_OR_RETURN(const bool serves, client->Serves(options.model));
        if (serves) break;
        client->stub_.reset();
        if (!options.quiet) {
          std::fprintf(stderr, "the daemon on %s serves another model; starting a private one\n",
                       path.c_str());
        }
      }
    }
  }
  const bool found = client->stub_ != nullptr;
  if (!found) LODE_RETURN_IF_ERROR(client->StartPrivate(options));
  if (options.wait_ready || !found) LODE_RETURN_IF_ERROR(client->WaitReady(options.quiet));
  return client;
}

bool Client::TryTarget(const std::string& target) {
  SilenceGrpcLog();
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  // Calls of one process share connections by default; a private stack that was replaced must not
  // be found again.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  auto stub = v1::LodeService::NewStub(
      grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments));
  grpc::ClientContext call;
  call.set_deadline(std::chrono::system_clock::now() + kProbe);
  v1::StatusResponse response;
  if (!stub->Status(&call, {}, &response).ok()) return false;
  stub_ = std::move(stub);
  target_ = target;
  return true;
}

// Whether the daemon's model is this one: the same file, or the same synth: description.
StatusOr<bool> Client::Serves(const std::string& model) {
  LODE_ASSIGN_OR_RETURN(const auto wanted, ModelSource::Open(model));
  grpc::ClientContext call;
  call.set_deadline(std::chrono::system_clock::now() + kProbe);
  v1::ListModelsResponse models;
  LODE_RETURN_IF_ERROR(FromGrpc(stub_->ListModels(&call, {}, &models)));
  const std::string there = models.models_size() > 0 ? models.models(0).source() : "";
  if (there == wanted->description()) return true;
  std::error_code error;
  return std::filesystem::equivalent(there, wanted->description(), error) && !error;
}

Status Client::StartPrivate(const ConnectOptions& options) {
  if (options.model.empty() && (options.private_stack || !options.daemon_flags.empty())) {
    return InvalidArgument(
        "a private stack (--private, --daemon-flag) needs a model: give --model FILE");
  }
  if (options.model.empty()) {
    return NotFound(
        "no daemon is running and no model is named; start the service, or give --model FILE to "
        "start a private one");
  }
  const std::filesystem::path temp = std::filesystem::temp_directory_path();
  RemoveStaleFolders(temp);
  std::string dir = (temp / (std::string(kPrivatePrefix) + "XXXXXX")).string();
  if (mkdtemp(dir.data()) == nullptr) return ErrnoStatus("making a folder like " + dir, errno);
  private_dir_ = dir;
  owner_lock_.Reset(
      open((dir + "/" + kOwnerFile).c_str(), O_CREAT | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!owner_lock_.valid() || flock(owner_lock_.get(), LOCK_EX | LOCK_NB) != 0)
    return ErrnoStatus("locking the folder " + dir, errno);
  SetInterruptCleanup([this] { StopPrivate(); });
  const std::string log = dir + "/loded.log";
  std::vector<std::string> args = {
      BinaryFolder() + "/loded", "--model", options.model, "--runtime_dir", dir, "--listen", "",
      "--metrics_listen",        ""};
  args.insert(args.end(), options.daemon_flags.begin(), options.daemon_flags.end());
  std::vector<char*> argv;
  for (std::string& arg : args) argv.push_back(arg.data());
  argv.push_back(nullptr);
  Fd log_fd(open(log.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600));
  if (!log_fd.valid()) return ErrnoStatus("opening " + log, errno);
  const pid_t parent = getpid();
  daemon_ = fork();
  if (daemon_ < 0) return ErrnoStatus("fork", errno);
  if (daemon_ == 0) {
    setpgid(0, 0);  // Ctrl-C is for us: it cancels an answer, the stack lives on
    UnblockInterrupts();
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) _exit(127);
    dup2(log_fd.get(), STDERR_FILENO);
    dup2(log_fd.get(), STDOUT_FILENO);
    execv(argv[0], argv.data());
    _exit(127);
  }
  const std::string target = "unix:" + dir + "/lode.sock";
  const auto deadline = std::chrono::steady_clock::now() + kListenLimit;
  for (;;) {
    if (std::chrono::steady_clock::now() > deadline) {
      return DeadlineExceeded("the private daemon did not listen within {} s; its last words:\n{}",
                              kListenLimit.count(), LastLines(log, 2000));
    }
    if (access((dir + "/lode.sock").c_str(), F_OK) == 0 && TryTarget(target)) return OkStatus();
    int status = 0;
    if (waitpid(daemon_, &status, WNOHANG) == daemon_) {
      daemon_ = -1;
      return Unavailable("the private daemon ended while starting; its last words:\n{}",
                         LastLines(log, 2000));
    }
    std::this_thread::sleep_for(kPoll);
  }
}

Status Client::WaitReady(bool quiet) {
  ProgressLine progress(quiet);
  auto answered = std::chrono::steady_clock::now();
  for (;;) {
    grpc::ClientContext call;
    call.set_deadline(std::chrono::system_clock::now() + kProbe);
    v1::StatusResponse response;
    const grpc::Status status = stub_->Status(&call, {}, &response);
    const auto now = std::chrono::steady_clock::now();
    if (status.ok()) {
      answered = now;
      if (response.state() == "ready" || response.state() == "degraded") return OkStatus();
      if (response.state() == "failed")
        return FailedPrecondition("the daemon cannot serve: {}", response.detail());
      if (response.state() == "draining")
        return Unavailable("the daemon is stopping; try again in a few seconds");
      progress.Show(response.load_progress(), response.detail());
    }
    int exit_status = 0;
    if (daemon_ > 0 && waitpid(daemon_, &exit_status, WNOHANG) == daemon_) {
      daemon_ = -1;
      progress.Clear();
      return Unavailable("the private daemon ended while loading; its last words:\n{}",
                         LastLines(private_dir_ + "/loded.log", 2000));
    }
    if (now - answered > kUnansweredLimit)
      return Unavailable("the daemon on {} stopped answering: {}", target_, status.error_message());
    std::this_thread::sleep_for(kPoll);
  }
}

Client::~Client() {
  SetInterruptCleanup(nullptr);
  stub_.reset();
  StopPrivate();
}

void Client::StopPrivate() {
  if (daemon_ > 0) {
    kill(daemon_, SIGTERM);
    const auto deadline = std::chrono::steady_clock::now() + kStopGrace;
    while (waitpid(daemon_, nullptr, WNOHANG) == 0) {
      if (std::chrono::steady_clock::now() > deadline) {
        kill(daemon_, SIGKILL);
        waitpid(daemon_, nullptr, 0);
        break;
      }
      std::this_thread::sleep_for(milliseconds(10));
    }
  }
  std::error_code ignored;
  if (!private_dir_.empty()) std::filesystem::remove_all(private_dir_, ignored);
}

}  // namespace lode::cli
