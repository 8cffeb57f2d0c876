// `lode tune [option=value...]`: shows or changes the options of a running daemon that need no
// restart.
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdio>
#include <map>
#include <string>

#include "daemon/cli/commands.h"
#include "lode/admin/v1/admin.grpc.pb.h"

namespace lode::cli {
namespace {

constexpr std::chrono::seconds kAnswer{10};

}  // namespace

Status Tune(ConnectOptions connect, const std::vector<std::string>& changes) {
  admin::v1::TuneRequest request;
  for (const std::string& change : changes) {
    const size_t equals = change.find('=');
    if (equals == std::string::npos || equals == 0)
      return InvalidArgument("'{}' is not option=value", change);
    std::string name = change.substr(0, equals);
    for (char& c : name) c = c == '-' ? '_' : c;
    if (!request.mutable_changes()->insert({name, change.substr(equals + 1)}).second)
      return InvalidArgument("option '{}' is given twice", name);
  }
  connect.wait_ready = false;
  LODE_ASSIGN_OR_RETURN(const auto client, Client::Connect(connect));
  grpc::ClientContext status_call;
  status_call.set_deadline(std::chrono::system_clock::now() + kAnswer);
  v1::StatusResponse status;
  LODE_RETURN_IF_ERROR(FromGrpc(client->stub().Status(&status_call, {}, &status)));
  const auto socket = status.facts().find("admin_socket");
  if (socket == status.facts().end())
    return FailedPrecondition("the daemon on {} cannot be tuned", client->target());
  const auto stub = admin::v1::AdminService::NewStub(
      grpc::CreateChannel("unix:" + socket->second, grpc::InsecureChannelCredentials()));
  grpc::ClientContext call;
  call.set_deadline(std::chrono::system_clock::now() + kAnswer);
  admin::v1::TuneResponse response;
  const grpc::Status done = stub->Tune(&call, request, &response);
  if (done.error_code() == grpc::StatusCode::UNAVAILABLE) {
    return Error(StatusCode::kPermissionDenied,
                 "{} cannot be opened; only the daemon's user and root may tune it",
                 socket->second);
  }
  LODE_RETURN_IF_ERROR(FromGrpc(done));
  const std::map<std::string, std::string> sorted(response.values().begin(),
                                                  response.values().end());
  for (const auto& [name, value] : sorted) std::printf("%s = %s\n", name.c_str(), value.c_str());
  return OkStatus();
}

}  // namespace lode::cli
