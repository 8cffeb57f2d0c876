// A request whose bytes are no message of lode.v1 never reaches the service: the gRPC library ends
// the call itself, with UNIMPLEMENTED and no word, as if the method were missing. This interceptor
// gives such an end its right code and a sentence. Runs on gRPC's threads, once per status sent.
#pragma once

#include <google/protobuf/descriptor.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/support/server_interceptor.h>

#include <memory>
#include <string>
#include <vector>

namespace lode {

class ParseErrorNamer final : public grpc::experimental::Interceptor {
 public:
  explicit ParseErrorNamer(const char* method) : method_(method) {}

  void Intercept(grpc::experimental::InterceptorBatchMethods* batch) override {
    if (batch->QueryInterceptionHookPoint(
            grpc::experimental::InterceptionHookPoints::PRE_SEND_STATUS)) {
      // Every method of ours is implemented, and no refusal of ours is without words.
      const grpc::Status status = batch->GetSendStatus();
      if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED &&
          status.error_message().empty()) {
        batch->ModifySendStatus(
            {grpc::StatusCode::INVALID_ARGUMENT,
             "the request of " + method_ +
                 " cannot be read: its bytes are no such message of lode.v1, or its text is not "
                 "UTF-8"});
      }
    }
    batch->Proceed();
  }

 private:
  const std::string method_;
};

class ParseErrorNamerFactory final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  // For builder.experimental().SetInterceptorCreators.
  static std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>>
  List() {
    std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> list;
    list.push_back(std::make_unique<ParseErrorNamerFactory>());
    return list;
  }
  // The library owns the result until the call ends; null for methods that are really missing.
  grpc::experimental::Interceptor* CreateServerInterceptor(
      grpc::experimental::ServerRpcInfo* call) override {
    std::string name = call->method();  // "/lode.v1.LodeService/Chat"
    for (char& c : name) c = c == '/' ? '.' : c;
    const auto* pool = google::protobuf::DescriptorPool::generated_pool();
    const bool known = name.size() > 1 && pool->FindMethodByName(name.substr(1)) != nullptr;
    return known ? new ParseErrorNamer(call->method()) : nullptr;
  }
};

}  // namespace lode
