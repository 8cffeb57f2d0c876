// See admin_server.h.
#include "daemon/api/admin_server.h"

#include <grpcpp/grpcpp.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>

#include "lode/admin/v1/admin.grpc.pb.h"
#include "shared/control/grpc_log.h"

namespace lode {
namespace {

namespace pb = ::lode::admin::v1;

class AdminServerImpl final : public AdminServer, public pb::AdminService::Service {
 public:
  explicit AdminServerImpl(AdminServer::Tune tune) : tune_(std::move(tune)) {}
  ~AdminServerImpl() override {
    if (!server_) return;
    server_->Shutdown(std::chrono::system_clock::now());
    unlink(path_.c_str());
  }

  lode::Status Listen(const std::string& path) {
    if (path.size() >= sizeof(sockaddr_un::sun_path))
      return InvalidArgument("socket path '{}' is too long; choose a shorter runtime_dir", path);
    SilenceGrpcLog();
    unlink(path.c_str());  // of a daemon that died; a live one holds the folder's lock
    grpc::ServerBuilder builder;
    builder.AddListeningPort("unix:" + path, grpc::InsecureServerCredentials());
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    if (!server_) return Unavailable("cannot listen on '{}' for administration", path);
    path_ = path;
    return OkStatus();
  }

  grpc::Status Tune(grpc::ServerContext*, const pb::TuneRequest* request,
                    pb::TuneResponse* response) override {
    const auto values = tune_({request->changes().begin(), request->changes().end()});
    if (!values.ok()) {
      return {static_cast<grpc::StatusCode>(values.status().raw_code()), Message(values.status())};
    }
    for (const auto& [name, value] : *values) (*response->mutable_values())[name] = value;
    return grpc::Status::OK;
  }

 private:
  const AdminServer::Tune tune_;
  std::string path_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace

StatusOr<std::unique_ptr<AdminServer>> AdminServer::Start(const std::string& socket_path,
                                                          AdminServer::Tune tune) {
  auto server = std::make_unique<AdminServerImpl>(std::move(tune));
  LODE_RETURN_IF_ERROR(server->Listen(socket_path));
  return StatusOr<std::unique_ptr<AdminServer>>(std::move(server));
}

}  // namespace lode
