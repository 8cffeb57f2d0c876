// See worker_client.h. The synchronous gRPC API: one reader thread, writes under a mutex; both ends
// of the stream are slow paths.
#include "shared/control/worker_client.h"

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "kernels/canonical.h"
#include "lode/control/v1/control.grpc.pb.h"
#include "shared/base/limits.h"
#include "shared/base/version.h"
#include "shared/control/grpc_log.h"
#include "shared/shm/wait_word.h"

namespace lode {
namespace {

namespace pb = ::lode::control::v1;

std::chrono::system_clock::time_point SystemDeadline(uint64_t deadline_ns) {
  const uint64_t now = NowNs();
  return std::chrono::system_clock::now() +
         std::chrono::nanoseconds(deadline_ns > now ? deadline_ns - now : 0);
}

// The counts that size loops or arrays are checked here; everything else is checked by whoever uses
// it.
StatusOr<LoadPlan> TakeLoadPlan(const pb::LoadPlan& in) {
  constexpr int kThreadsMax = 4096;
  if (in.n_nodes() == 0 || in.n_nodes() > kCpuWorkersMax || in.threads() > kThreadsMax ||
      in.cpus_size() > kThreadsMax) {
    return InvalidArgument("load plan with {} nodes, {} threads, {} cpus is out of range",
                           in.n_nodes(), in.threads(), in.cpus_size());
  }
  LoadPlan plan;
  plan.model = in.model();
  plan.identity = in.identity();
  plan.n_nodes = in.n_nodes();
  plan.threads = in.threads();
  plan.cpus.assign(in.cpus().begin(), in.cpus().end());
  plan.isa = in.isa();
  plan.kv_type = in.kv_type();
  plan.kv_blocks = in.kv_blocks();
  plan.sequence_slots = in.sequence_slots();
  plan.context = in.context();
  plan.vram_budget_bytes = in.vram_budget_bytes();
  plan.pull_staging_bytes = in.pull_staging_bytes();
  plan.profile = in.profile();
  plan.save_profile = in.save_profile();
  plan.spin_us = in.spin_us();
  plan.wait_ms = in.wait_ms();
  plan.wait_max_ms = in.wait_max_ms();
  plan.float_reference = in.float_reference();
  plan.draft_head = in.draft_head();
  plan.mtp = in.mtp();
  plan.mtp_full_width_norm = in.mtp_full_width_norm();
  plan.draft_vocab = in.draft_vocab();
  plan.draft_vocab_top = in.draft_vocab_top();
  plan.device = in.device();
  plan.device_index = in.device_index();
  plan.lock_memory = in.lock_memory();
  plan.huge_pages = in.huge_pages();
  return plan;
}

}  // namespace

struct WorkerClient::Impl {
  // Const after Connect.
  WorkerEvents events;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<pb::ControlService::Stub> stub;
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReaderWriter<pb::AttachRequest, pb::AttachResponse>> stream;
  std::thread reader;

  // One writer at a time, as the stream demands.
  std::mutex write_mutex;
  bool write_closed = false;

  // Guarded by `mutex`: what the reader thread hands over.
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<StatusOr<LoadPlan>> plan;
  bool ended = false;    // the reader has left its loop
  bool closing = false;  // we end the stream ourselves: no `broken`
  Status why;

  bool Write(const pb::AttachRequest& request) {
    std::lock_guard<std::mutex> lock(write_mutex);
    return !write_closed && stream->Write(request);
  }

  void ReadLoop() {
    pb::AttachResponse response;
    while (stream->Read(&response)) Handle(response);
    const grpc::Status status = stream->Finish();
    const Status end =
        Unavailable("the control stream to the daemon ended: {}",
                    status.ok() ? std::string("closed by the daemon") : status.error_message());
    bool report = false;
    {
      std::lock_guard<std::mutex> lock(mutex);
      ended = true;
      why = end;
      report = !closing;
    }
    changed.notify_all();
    if (report && events.broken) events.broken(end);
  }

  void Handle(const pb::AttachResponse& response) {
    switch (response.message_case()) {
      case pb::AttachResponse::kLoadPlan: {
        std::lock_guard<std::mutex> lock(mutex);
        if (!plan.has_value()) plan = TakeLoadPlan(response.load_plan());
        changed.notify_all();
        return;
      }
      case pb::AttachResponse::kDrain:
        if (events.drain) events.drain();
        return;
      case pb::AttachResponse::kCollectStatistics: {
        pb::AttachRequest reply;
        auto* values = reply.mutable_statistics()->mutable_values();
        if (events.collect_statistics) {
          for (const auto& [name, value] : events.collect_statistics()) (*values)[name] = value;
        }
        Write(reply);
        return;
      }
      case pb::AttachResponse::kCpuWorkerReplaced:
        if (events.cpu_worker_replaced) {
          events.cpu_worker_replaced(response.cpu_worker_replaced().index(),
                                     response.cpu_worker_replaced().generation());
        }
        return;
      case pb::AttachResponse::MESSAGE_NOT_SET:
        return;  // a newer daemon's message: versions are compared at Register, so this is only a
                 // keep-alive
    }
  }
};

WorkerClient::WorkerClient() : impl_(std::make_unique<Impl>()) {}

StatusOr<std::unique_ptr<WorkerClient>> WorkerClient::Connect(const std::string& socket_path,
                                                              const WorkerIdentity& identity,
                                                              WorkerEvents events,
                                                              uint64_t deadline_ns) {
  std::unique_ptr<WorkerClient> client(new WorkerClient());
  Impl& impl = *client->impl_;
  impl.events = std::move(events);
  SilenceGrpcLog();
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY,
                   0);  // a proxy variable of the environment must not catch a unix socket
  impl.channel = grpc::CreateCustomChannel("unix:" + socket_path,
                                           grpc::InsecureChannelCredentials(), arguments);
  if (!impl.channel->WaitForConnected(SystemDeadline(deadline_ns))) {
    return Unavailable("cannot reach the daemon's control socket {}; is the daemon running?",
                       socket_path);
  }
  impl.stub = pb::ControlService::NewStub(impl.channel);
  impl.stream = impl.stub->Attach(&impl.context);
  pb::AttachRequest hello;
  pb::Register* r = hello.mutable_register_();
  r->set_role(identity.role == WorkerRole::kCpu ? pb::WORKER_ROLE_CPU : pb::WORKER_ROLE_GPU);
  r->set_index(identity.index);
  r->set_generation(identity.generation);
  r->set_pid(static_cast<int32_t>(getpid()));
  r->set_version(kVersion);
  r->set_arithmetic_version(kArithmeticVersion);
  const bool written = impl.Write(hello);
  impl.reader = std::thread([&impl] { impl.ReadLoop(); });
  if (!written)
    return Unavailable("the daemon closed the control stream of {} before Register", socket_path);
  return client;
}

WorkerClient::~WorkerClient() {
  if (!impl_->reader.joinable()) return;
  {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    impl_->closing = true;
  }
  {
    std::lock_guard<std::mutex> lock(impl_->write_mutex);
    if (!impl_->write_closed) impl_->stream->WritesDone();
    impl_->write_closed = true;
  }
  // The daemon answers the half-close by ending the stream; one that does not is not waited for.
  constexpr auto kFarewell = std::chrono::milliseconds(300);
  {
    std::unique_lock<std::mutex> lock(impl_->mutex);
    impl_->changed.wait_for(lock, kFarewell, [this] { return impl_->ended; });
  }
  impl_->context.TryCancel();
  impl_->reader.join();
}

StatusOr<LoadPlan> WorkerClient::WaitLoadPlan(uint64_t deadline_ns) {
  std::unique_lock<std::mutex> lock(impl_->mutex);
  const uint64_t now = NowNs();
  const auto left = std::chrono::nanoseconds(deadline_ns > now ? deadline_ns - now : 0);
  impl_->changed.wait_for(lock, left, [this] { return impl_->plan.has_value() || impl_->ended; });
  if (impl_->plan.has_value()) return *impl_->plan;
  if (impl_->ended) return impl_->why;
  return DeadlineExceeded("the daemon sent no load plan in time");
}

bool WorkerClient::SendProgress(const std::string& phase, uint64_t done_bytes,
                                uint64_t total_bytes) {
  pb::AttachRequest request;
  request.mutable_progress()->set_phase(phase);
  request.mutable_progress()->set_done_bytes(done_bytes);
  request.mutable_progress()->set_total_bytes(total_bytes);
  return impl_->Write(request);
}

bool WorkerClient::SendReady(const ReadyReport& report) {
  pb::AttachRequest request;
  pb::Ready* ready = request.mutable_ready();
  ready->set_summary(report.summary);
  ready->set_memory_bytes(report.memory_bytes);
  for (const auto& [name, value] : report.facts) (*ready->mutable_facts())[name] = value;
  return impl_->Write(request);
}

bool WorkerClient::SendFailed(const Status& status) {
  pb::AttachRequest request;
  request.mutable_failed()->set_code(static_cast<int32_t>(status.code()));
  request.mutable_failed()->set_message(Message(status));
  return impl_->Write(request);
}

bool WorkerClient::SendStatistics(const std::map<std::string, double>& values) {
  pb::AttachRequest request;
  for (const auto& [name, value] : values)
    (*request.mutable_statistics()->mutable_values())[name] = value;
  return impl_->Write(request);
}

bool WorkerClient::SendDrained() {
  pb::AttachRequest request;
  request.mutable_drained();
  return impl_->Write(request);
}

}  // namespace lode
