// See fake_daemon.h.
#include "tests/cpu_worker/fake_daemon.h"

#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "lode/control/v1/control.grpc.pb.h"
#include "shared/base/check.h"
#include "shared/shm/segment.h"

namespace lode::test {
namespace {

namespace pb = ::lode::control::v1;
using Stream = grpc::ServerReaderWriter<pb::AttachResponse, pb::AttachRequest>;

void FillPlan(const LoadPlan& in, pb::LoadPlan* out) {
  out->set_model(in.model);
  out->set_identity(in.identity);
  out->set_n_nodes(in.n_nodes);
  out->set_threads(in.threads);
  for (uint32_t cpu : in.cpus) out->add_cpus(cpu);
  out->set_isa(in.isa);
  out->set_spin_us(in.spin_us);
  out->set_wait_ms(in.wait_ms);
  out->set_wait_max_ms(in.wait_max_ms);
  out->set_device(in.device);
  out->set_huge_pages(in.huge_pages);
  out->set_lock_memory(in.lock_memory);
}

}  // namespace

struct FakeDaemon::Service final : pb::ControlService::Service {
  FakeDaemon* daemon = nullptr;
  std::unique_ptr<grpc::Server> server;
  std::map<WorkerKey, Stream*> streams;  // guarded by daemon->mutex_

  grpc::Status Attach(grpc::ServerContext*, Stream* stream) override {
    pb::AttachRequest request;
    if (!stream->Read(&request) || !request.has_register_())
      return grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "no Register");
    const WorkerKey key = {request.register_().index(), request.register_().generation()};
    pb::AttachResponse response;
    {
      std::lock_guard<std::mutex> lock(daemon->mutex_);
      daemon->records_[key].registered = true;
      daemon->records_[key].pid = request.register_().pid();
      streams[key] = stream;
      FillPlan(daemon->plans_[key], response.mutable_load_plan());
    }
    daemon->changed_.notify_all();
    stream->Write(response);
    while (stream->Read(&request)) {
      std::lock_guard<std::mutex> lock(daemon->mutex_);
      Note(request, &daemon->records_[key]);
      daemon->changed_.notify_all();
    }
    std::lock_guard<std::mutex> lock(daemon->mutex_);
    streams.erase(key);
    daemon->records_[key].ended = true;
    daemon->changed_.notify_all();
    return grpc::Status::OK;
  }

  static void Note(const pb::AttachRequest& request, WorkerRecord* record) {
    if (request.has_progress()) record->phases.push_back(request.progress().phase());
    if (request.has_failed()) record->failure = request.failed().message();
    if (request.has_drained()) record->drained = true;
    if (request.has_ready()) {
      record->ready = true;
      for (const auto& [name, value] : request.ready().facts()) record->facts[name] = value;
    }
    if (request.has_statistics()) {
      for (const auto& [name, value] : request.statistics().values())
        record->statistics[name] = value;
    }
  }

  void Send(const WorkerKey& key, const pb::AttachResponse& response) {
    std::lock_guard<std::mutex> lock(daemon->mutex_);
    if (streams.count(key) != 0) streams[key]->Write(response);
  }
};

FakeDaemon::FakeDaemon() : service_(std::make_unique<Service>()) {
  char folder[] = "/tmp/lode-test-XXXXXX";
  LODE_CHECK(mkdtemp(folder) != nullptr, "mkdtemp");
  folder_ = folder;
  service_->daemon = this;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("unix:" + socket_path(), grpc::InsecureServerCredentials());
  builder.RegisterService(service_.get());
  service_->server = builder.BuildAndStart();
  LODE_CHECK(service_->server != nullptr, "test server on {}", socket_path());
}

FakeDaemon::~FakeDaemon() {
  Die();
  unlink(socket_path().c_str());
  rmdir(folder_.c_str());
}

std::string FakeDaemon::socket_path() const { return folder_ + "/control"; }

void FakeDaemon::Die() {
  if (service_->server == nullptr) return;
  service_->server->Shutdown(std::chrono::system_clock::now());
  service_->server.reset();
}

std::vector<std::string> FakeDaemon::Arguments(const Child& child, int worker_fd) const {
  return {LODE_BINARY_DIR "/bin/lode-cpu-worker",
          "--control=" + socket_path(),
          "--fd=" + std::to_string(worker_fd),
          "--role=cpu",
          "--index=" + std::to_string(child.index),
          "--generation=" + std::to_string(child.generation),
          "--log-level=warn"};
}

FakeDaemon::Child FakeDaemon::Spawn(uint32_t index, uint32_t generation, const LoadPlan& plan,
                                    const std::string& fault) {
  Child child;
  child.index = index;
  child.generation = generation;
  SetPlan(index, generation, plan);
  int pair[2] = {-1, -1};
  LODE_CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0, "socketpair");
  child.socket.Reset(pair[0]);
  const int worker_fd = dup(pair[1]);  // without CLOEXEC
  close(pair[1]);
  // Everything is prepared before the fork: this process has threads.
  std::vector<std::string> arguments = Arguments(child, worker_fd);
  std::vector<char*> argv;
  for (std::string& a : arguments) argv.push_back(a.data());
  argv.push_back(nullptr);
  std::string fault_variable = "LODE_FAULT=" + fault;
  char* env[] = {fault_variable.data(), nullptr};
  child.pid = fork();
  if (child.pid == 0) {
    execve(argv[0], argv.data(), env);
    _exit(127);
  }
  close(worker_fd);
  return child;
}

void FakeDaemon::SetPlan(uint32_t index, uint32_t generation, const LoadPlan& plan) {
  std::lock_guard<std::mutex> lock(mutex_);
  plans_[{index, generation}] = plan;
}

void FakeDaemon::SendSegments(const Child& child, int exchange_fd, uint64_t exchange_bytes,
                              int arena_fd, uint64_t arena_bytes) {
  // A worker that died already has closed its end; the test sees that elsewhere.
  (void)SendFd(child.socket.get(),
               MakeFdMessage("arena", child.index, child.generation, arena_bytes), arena_fd);
  (void)SendFd(child.socket.get(), MakeFdMessage("exchange", 0, child.generation, exchange_bytes),
               exchange_fd);
}

WorkerRecord FakeDaemon::Record(const Child& child) {
  std::lock_guard<std::mutex> lock(mutex_);
  return records_[Key(child)];
}

int FakeDaemon::WaitExit(Child& child, uint32_t timeout_ms) {
  for (uint32_t waited = 0; waited <= timeout_ms; waited += 5) {
    int status = 0;
    if (child.pid <= 0) return -1;
    if (waitpid(child.pid, &status, WNOHANG) == child.pid) {
      child.pid = -1;
      return status;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return -1;
}

void FakeDaemon::Drain(const Child& child) {
  pb::AttachResponse response;
  response.mutable_drain();
  service_->Send(Key(child), response);
}

void FakeDaemon::CollectStatistics(const Child& child) {
  pb::AttachResponse response;
  response.mutable_collect_statistics();
  service_->Send(Key(child), response);
}

}  // namespace lode::test
