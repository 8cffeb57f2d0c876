// Clients of the standard services (grpc.health.v1, server reflection) at the level of bytes: their
// protocol files are not part of the package, and two fields are all a test needs.
#pragma once

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <string>

namespace lode {

// A bidirectional generic call used in lock step; every step has a deadline.
class GenericCall {
 public:
  GenericCall(std::shared_ptr<grpc::Channel> channel, const std::string& method) : stub_(channel) {
    call_.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    stream_ = stub_.PrepareCall(&call_, method, &queue_);
    stream_->StartCall(nullptr);
    Await();
  }
  ~GenericCall() {
    call_.TryCancel();
    End();
    queue_.Shutdown();
    void* tag;
    bool ok;
    while (queue_.Next(&tag, &ok)) {
    }
  }

  bool Write(const std::string& bytes) {
    const grpc::Slice slice(bytes);
    stream_->Write(grpc::ByteBuffer(&slice, 1), nullptr);
    return Await();
  }
  bool Read(std::string* bytes) {
    grpc::ByteBuffer buffer;
    stream_->Read(&buffer, nullptr);
    if (!Await()) return false;
    grpc::Slice slice;
    if (!buffer.DumpToSingleSlice(&slice).ok()) return false;
    bytes->assign(reinterpret_cast<const char*>(slice.begin()), slice.size());
    return true;
  }
  grpc::Status End() {
    if (!ended_) {
      ended_ = true;
      stream_->Finish(&status_, nullptr);
      Await();
    }
    return status_;
  }

 private:
  bool Await() {
    void* tag;
    bool ok = false;
    return queue_.Next(&tag, &ok) && ok;
  }

  grpc::GenericStub stub_;
  grpc::ClientContext call_;
  grpc::CompletionQueue queue_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
  grpc::Status status_;
  bool ended_ = false;
};

// Protobuf field of bytes, short lengths only.
inline std::string Field(int number, const std::string& text) {
  return std::string(1, static_cast<char>(number << 3 | 2)) + static_cast<char>(text.size()) + text;
}

// HealthCheckResponse{status = 1}.
inline std::string HealthName(const std::string& response) {
  if (response.size() != 2 || response[0] != 0x08) return "UNKNOWN";
  return response[1] == 1 ? "SERVING" : response[1] == 2 ? "NOT_SERVING" : "SERVICE_UNKNOWN";
}

inline std::string HealthOf(const std::shared_ptr<grpc::Channel>& channel,
                            const std::string& service) {
  GenericCall call(channel, "/grpc.health.v1.Health/Check");
  std::string response;
  if (!call.Write(service.empty() ? "" : Field(1, service))) return "write failed";
  if (call.Read(&response)) return HealthName(response);
  return call.End().error_code() == grpc::StatusCode::NOT_FOUND
             ? "NOT_FOUND"
             : "failed: " + call.End().error_message();
}

class HealthWatcher {
 public:
  explicit HealthWatcher(const std::shared_ptr<grpc::Channel>& channel)
      : call_(channel, "/grpc.health.v1.Health/Watch") {
    call_.Write("");
  }
  bool ReadOne() {
    std::string response;
    return call_.Read(&response);
  }

 private:
  GenericCall call_;
};

// The answer to "list services" as bytes; names stand in it as they are.
inline std::string ReflectedServices(const std::shared_ptr<grpc::Channel>& channel) {
  GenericCall call(channel, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo");
  std::string response;
  call.Write(Field(7, "*"));
  call.Read(&response);
  return response;
}

}  // namespace lode
