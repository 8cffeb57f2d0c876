// See daemon/control_service.h. The synchronous gRPC API: a thread per worker is little, and every
// message is slow path.
#include "daemon/control_service.h"

#include <grpcpp/grpcpp.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <mutex>

#include "kernels/canonical.h"
#include "lode/control/v1/control.grpc.pb.h"
#include "shared/base/limits.h"
#include "shared/base/log.h"
#include "shared/base/version.h"
#include "shared/control/grpc_log.h"

namespace lode {
namespace {

namespace pb = ::lode::control::v1;
using Stream = grpc::ServerReaderWriter<pb::AttachResponse, pb::AttachRequest>;

constexpr std::chrono::milliseconds kShutdownWait{
    300};  // a worker that still writes is cut off after this

void FillLoadPlan(const LoadPlan& plan, pb::LoadPlan* out) {
  out->set_model(plan.model);
  out->set_identity(plan.identity);
  out->set_n_nodes(plan.n_nodes);
  out->set_threads(plan.threads);
  out->mutable_cpus()->Add(plan.cpus.begin(), plan.cpus.end());
  out->set_isa(plan.isa);
  out->set_kv_type(plan.kv_type);
  out->set_kv_blocks(plan.kv_blocks);
  out->set_sequence_slots(plan.sequence_slots);
  out->set_context(plan.context);
  out->set_vram_budget_bytes(plan.vram_budget_bytes);
  out->set_pull_staging_bytes(plan.pull_staging_bytes);
  out->set_profile(plan.profile);
  out->set_save_profile(plan.save_profile);
  out->set_spin_us(plan.spin_us);
  out->set_wait_ms(plan.wait_ms);
  out->set_wait_max_ms(plan.wait_max_ms);
  out->set_float_reference(plan.float_reference);
  out->set_draft_head(plan.draft_head);
  out->set_mtp(plan.mtp);
  out->set_mtp_full_width_norm(plan.mtp_full_width_norm);
  out->set_draft_vocab(plan.draft_vocab);
  out->set_draft_vocab_top(plan.draft_vocab_top);
  out->set_device(plan.device);
  out->set_device_index(plan.device_index);
  out->set_lock_memory(plan.lock_memory);
  out->set_huge_pages(plan.huge_pages);
}

// The text of a worker goes into logs and error messages: keep it short and on one line.
std::string OneLine(const std::string& text) {
  constexpr size_t kTextMax = 2000;
  std::string out = text.substr(0, kTextMax);
  for (char& c : out) {
    if (static_cast<unsigned char>(c) < 0x20) c = ' ';
  }
  return out;
}

class ControlServerImpl final : public ControlServer, public pb::ControlService::Service {
 public:
  explicit ControlServerImpl(Sink sink) : sink_(std::move(sink)) {}
  ~ControlServerImpl() override {
    if (server_) server_->Shutdown(std::chrono::system_clock::now() + kShutdownWait);
  }

  Status Listen(const std::string& path) {
    if (path.size() >= sizeof(sockaddr_un::sun_path)) {
      return InvalidArgument(
          "socket path '{}' is longer than {} bytes; choose a shorter runtime_dir", path,
          sizeof(sockaddr_un::sun_path) - 1);
    }
    unlink(path.c_str());  // of a daemon that died; a live one holds the runtime folder's lock
    SilenceGrpcLog();
    grpc::ServerBuilder builder;
    builder.AddListeningPort("unix:" + path, grpc::InsecureServerCredentials());
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    if (!server_)
      return Unavailable("cannot listen on '{}'; look for another daemon or missing permissions",
                         path);
    return OkStatus();
  }

  grpc::Status Attach(grpc::ServerContext*, Stream* stream) override {
    pb::AttachRequest request;
    if (!stream->Read(&request) || request.message_case() != pb::AttachRequest::kRegister) {
      return {grpc::StatusCode::INVALID_ARGUMENT, "the first message must be Register"};
    }
    ControlEvent event;
    const Status checked = TakeRegister(request.register_(), &event);
    if (!checked.ok()) return {grpc::StatusCode::FAILED_PRECONDITION, Message(checked)};
    const WorkerKey key = event.key;
    {
      std::lock_guard lock(mutex_);
      if (!streams_.emplace(key, stream).second)
        return {grpc::StatusCode::ALREADY_EXISTS, "this worker has a stream already"};
    }
    sink_(std::move(event));
    while (stream->Read(&request)) Forward(key, request);
    {
      std::lock_guard lock(mutex_);
      streams_.erase(key);
    }
    ControlEvent closed;
    closed.key = key;
    sink_(std::move(closed));
    return grpc::Status::OK;
  }

  bool SendLoadPlan(const WorkerKey& to, const LoadPlan& plan) override {
    pb::AttachResponse response;
    FillLoadPlan(plan, response.mutable_load_plan());
    return Send(to, response);
  }
  bool SendDrain(const WorkerKey& to) override {
    pb::AttachResponse response;
    response.mutable_drain();
    return Send(to, response);
  }
  bool SendCpuWorkerReplaced(const WorkerKey& to, uint32_t index, uint32_t generation) override {
    pb::AttachResponse response;
    response.mutable_cpu_worker_replaced()->set_index(index);
    response.mutable_cpu_worker_replaced()->set_generation(generation);
    return Send(to, response);
  }
  bool SendCollectStatistics(const WorkerKey& to) override {
    pb::AttachResponse response;
    response.mutable_collect_statistics();
    return Send(to, response);
  }

 private:
  Status TakeRegister(const pb::Register& in, ControlEvent* event) {
    const bool known = in.role() == pb::WORKER_ROLE_CPU || in.role() == pb::WORKER_ROLE_GPU;
    if (!known || in.index() >= kCpuWorkersMax) return InvalidArgument("unknown role or index");
    event->key = {in.role() == pb::WORKER_ROLE_CPU ? WorkerRole::kCpu : WorkerRole::kGpu,
                  in.index(), in.generation()};
    event->kind = ControlEvent::Kind::kRegistered;
    event->pid = in.pid();
    if (in.version() == kVersion && in.arithmetic_version() == kArithmeticVersion)
      return OkStatus();
    event->kind = ControlEvent::Kind::kFailed;
    event->status = FailedPrecondition(
        "the worker is version {} with arithmetic {}, the daemon is {} with {}; install both from "
        "one build",
        OneLine(in.version()), in.arithmetic_version(), kVersion, kArithmeticVersion);
    const Status status = event->status;
    sink_(*event);
    return status;
  }

  void Forward(const WorkerKey& key, const pb::AttachRequest& request) {
    ControlEvent event;
    event.key = key;
    switch (request.message_case()) {
      case pb::AttachRequest::kProgress:
        event.kind = ControlEvent::Kind::kProgress;
        event.text = OneLine(request.progress().phase());
        event.done = request.progress().done_bytes();
        event.total = request.progress().total_bytes();
        break;
      case pb::AttachRequest::kReady:
        event.kind = ControlEvent::Kind::kReady;
        event.text = OneLine(request.ready().summary());
        for (const auto& [name, value] : request.ready().facts())
          event.facts[name] = OneLine(value);
        break;
      case pb::AttachRequest::kFailed: {
        event.kind = ControlEvent::Kind::kFailed;
        const int code = request.failed().code();
        const bool valid = code > 0 && code <= static_cast<int>(StatusCode::kUnauthenticated);
        event.status = Status(valid ? static_cast<StatusCode>(code) : StatusCode::kInternal,
                              OneLine(request.failed().message()));
        break;
      }
      case pb::AttachRequest::kStatistics:
        event.kind = ControlEvent::Kind::kStatistics;
        for (const auto& [name, value] : request.statistics().values()) event.values[name] = value;
        break;
      case pb::AttachRequest::kDrained:
        event.kind = ControlEvent::Kind::kDrained;
        break;
      case pb::AttachRequest::kRegister:
      case pb::AttachRequest::MESSAGE_NOT_SET:
        return;
    }
    sink_(std::move(event));
  }

  bool Send(const WorkerKey& to, const pb::AttachResponse& response) {
    // Under the lock: the stream lives until its handler takes this lock, and one writer at a time
    // is all it allows.
    std::lock_guard lock(mutex_);
    const auto it = streams_.find(to);
    return it != streams_.end() && it->second->Write(response);
  }

  const Sink sink_;
  std::unique_ptr<grpc::Server> server_;
  std::mutex mutex_;
  std::map<WorkerKey, Stream*> streams_;  // guarded by mutex_
};

}  // namespace

StatusOr<std::unique_ptr<ControlServer>> ControlServer::Start(const std::string& socket_path,
                                                              Sink sink) {
  auto server = std::make_unique<ControlServerImpl>(std::move(sink));
  LODE_RETURN_IF_ERROR(server->Listen(socket_path));
  return StatusOr<std::unique_ptr<ControlServer>>(std::move(server));
}

}  // namespace lode
