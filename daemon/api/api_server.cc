// Binding and lifetime of the API: one gRPC server on a unix socket and loopback TCP, and the
// Prometheus endpoint. See api.h.
#include <arpa/inet.h>
#include <fcntl.h>
#include <grp.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>

#include "daemon/api/api.h"
#include "daemon/api/lode_service.h"
#include "daemon/api/parse_errors.h"
#include "daemon/api/prometheus.h"
#include "shared/base/fd.h"
#include "shared/base/log.h"
#include "shared/control/grpc_log.h"
#include "shared/shm/wait_word.h"

namespace lode {
namespace {

// One message in either direction: a context of a million tokens as ids or text stays far below.
constexpr int kMessageBytesMax = 64 << 20;

bool IsLoopbackHost(const std::string& host) {
  if (host == "localhost" || host == "[::1]") return true;
  in_addr address;  // digits only: "127.example.org" is a name somebody else resolves
  return inet_pton(AF_INET, host.c_str(), &address) == 1 && (ntohl(address.s_addr) >> 24) == 127;
}

// "host:port" with a loopback host. Anything else would expose an API without a key.
Status CheckLoopback(const char* option, const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos || colon + 1 == address.size()) {
    return InvalidArgument("option {} is '{}'; expected HOST:PORT, e.g. 127.0.0.1:7070", option,
                           address);
  }
  const std::string host = address.substr(0, colon), port = address.substr(colon + 1);
  if (port.find_first_not_of("0123456789") != std::string::npos || port.size() > 5 ||
      std::stoi(port) > 65535) {
    return InvalidArgument("option {} is '{}'; '{}' is no port number (0 to 65535)", option,
                           address, port);
  }
  if (!IsLoopbackHost(host)) {
    return InvalidArgument(
        "option {} is '{}'; only loopback addresses (127.0.0.1, [::1], localhost) are served, as "
        "there is no key",
        option, address);
  }
  return OkStatus();
}

// gRPC reads "unix:PATH" as a URI: other characters would be decoded, or refused with no reason.
constexpr const char* kSocketPathCharacters =
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._~-+,=@:";

// A socket file left by a dead daemon is removed; one that answers belongs to a living daemon.
Status ClaimSocketPath(const std::string& path) {
  sockaddr_un address = {};
  if (path.size() >= sizeof(address.sun_path)) {
    return InvalidArgument(
        "the socket path '{}' has {} bytes; unix sockets allow {} (option socket)", path,
        path.size(), sizeof(address.sun_path) - 1);
  }
  if (const size_t at = path.find_first_not_of(kSocketPathCharacters); at != std::string::npos) {
    return InvalidArgument(
        "the socket path '{}' holds '{}'; letters, digits and /._~-+,=@: are possible (option "
        "socket)",
        path, path[at]);
  }
  struct stat info;
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  if (stat(folder.c_str(), &info) != 0)
    return ErrnoStatus("the folder of the socket path " + path, errno);
  if (lstat(path.c_str(), &info) != 0)
    return errno == ENOENT ? OkStatus() : ErrnoStatus("stat of " + path, errno);
  if (!S_ISSOCK(info.st_mode))
    return FailedPrecondition("'{}' exists and is no socket; choose another path (option socket)",
                              path);
  Fd probe(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!probe.valid()) return ErrnoStatus("socket", errno);
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size());
  if (connect(probe.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) {
    return FailedPrecondition(
        "another daemon answers on '{}'; stop it or choose another path (option socket)", path);
  }
  if (unlink(path.c_str()) != 0) return ErrnoStatus("removing the stale socket " + path, errno);
  return OkStatus();
}

// Mode 0660 and the group of the option, when that group exists and we may give the socket to it.
void OpenToGroup(const std::string& path, const std::string& group) {
  if (chmod(path.c_str(), 0660) != 0)
    spdlog::warn("chmod 0660 of {}: {}", path, std::strerror(errno));
  const struct group* entry = group.empty() ? nullptr : getgrnam(group.c_str());
  if (entry == nullptr) return;
  if (chown(path.c_str(), static_cast<uid_t>(-1), entry->gr_gid) != 0) {
    spdlog::warn("the client socket {} could not be given to group '{}': {}", path, group,
                 std::strerror(errno));
  }
}

// For what ended calls still have to send. Only cut calls make a shutdown wait for all of it.
constexpr std::chrono::milliseconds kLastWords{250};

class ApiServerImpl final : public ApiServer {
 public:
  explicit ApiServerImpl(const ApiContext& context) : service_(context) {}
  ~ApiServerImpl() override { Shutdown(NowNs()); }

  Status Start(const ApiContext& context, const std::string& socket_path) {
    const Options& options = *context.options;
    if (!options.listen.empty()) LODE_RETURN_IF_ERROR(CheckLoopback("listen", options.listen));
    if (!options.metrics_listen.empty())
      LODE_RETURN_IF_ERROR(CheckLoopback("metrics_listen", options.metrics_listen));
    LODE_RETURN_IF_ERROR(ClaimSocketPath(socket_path));
    LODE_RETURN_IF_ERROR(Listen(options.listen, socket_path));
    OpenToGroup(socket_path, options.socket_group);
    SetServing(false);
    if (!options.metrics_listen.empty()) {
      LODE_ASSIGN_OR_RETURN(metrics_, StartMetrics(options.metrics_listen, context));
      endpoints_ += " http://" + metrics_->address() + "/metrics";
    }
    return OkStatus();
  }

  void SetServing(bool serving) override {
    if (auto* health = server_ ? server_->GetHealthCheckService() : nullptr) {
      health->SetServingStatus(serving);
      health->SetServingStatus("lode.v1.LodeService", serving);
    }
  }

  void Shutdown(uint64_t deadline_ns) override {
    if (!server_) return;
    service_.Drain();
    SetServing(false);
    service_.WaitIdle(deadline_ns);
    // Left are calls that are to be cut (ours past the deadline, and health watchers, who never end by
    // themselves) and calls whose handler has just returned: their status still has to leave.
    server_->Shutdown(std::chrono::system_clock::now() + kLastWords);
    server_->Wait();
    server_.reset();
    metrics_.reset();
    unlink(socket_path_.c_str());
  }

  std::string endpoints() const override { return endpoints_; }

 private:
  Status Listen(const std::string& tcp, const std::string& socket_path) {
    SilenceGrpcLog();
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    grpc::ServerBuilder builder;
    builder.SetMaxReceiveMessageSize(kMessageBytesMax);
    builder.SetMaxSendMessageSize(kMessageBytesMax);
    // SO_REUSEPORT would let two daemons share one port and clients reach either.
    builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
    builder.experimental().SetInterceptorCreators(ParseErrorNamerFactory::List());
    builder.RegisterService(&service_);
    int port = -1, unix_port = -1;  // -1: not tried
    if (!tcp.empty()) builder.AddListeningPort(tcp, grpc::InsecureServerCredentials(), &port);
    builder.AddListeningPort("unix:" + socket_path, grpc::InsecureServerCredentials(), &unix_port);
    // The socket is created with no access for others, then opened to its group.
    const mode_t old_mask = umask(0077);
    server_ = builder.BuildAndStart();
    umask(old_mask);
    if (!server_) {
      const bool tcp_failed = !tcp.empty() && port <= 0;
      return Unavailable("cannot listen on {}; is it in use? (option {})",
                         tcp_failed ? tcp : "unix:" + socket_path,
                         tcp_failed ? "listen" : "socket");
    }
    socket_path_ = socket_path;
    endpoints_ = "unix:" + socket_path;
    if (port > 0) endpoints_ += " " + tcp.substr(0, tcp.rfind(':')) + ":" + std::to_string(port);
    return OkStatus();
  }

  LodeService service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<MetricsServer> metrics_;
  std::string socket_path_, endpoints_;
};

}  // namespace

StatusOr<std::unique_ptr<ApiServer>> StartApi(const ApiContext& context) {
  const Options& options = *context.options;
  const std::string path =
      options.socket.empty() ? options.runtime_dir + "/lode.sock" : options.socket;
  auto server = std::make_unique<ApiServerImpl>(context);
  LODE_RETURN_IF_ERROR(server->Start(context, path));
  return StatusOr<std::unique_ptr<ApiServer>>(std::move(server));
}

}  // namespace lode
