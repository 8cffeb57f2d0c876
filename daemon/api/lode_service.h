// The gRPC service lode.v1.LodeService. Streams are callback reactors (stream_reactor.h). Encoding
// and templates run on a small pool, never on a gRPC thread or the scheduler's.
#pragma once

#include <atomic>
#include <boost/asio/thread_pool.hpp>

#include "daemon/api/api.h"
#include "daemon/api/stream_reactor.h"
#include "lode/v1/lode.grpc.pb.h"

namespace lode {

class LodeService final : public v1::LodeService::CallbackService {
 public:
  // `context` is copied; its pointers outlive the service.
  explicit LodeService(const ApiContext& context);
  ~LodeService() override;

  // New calls are refused with Unavailable from now on.
  void Drain() { draining_.store(true, std::memory_order_relaxed); }
  // Until the running ones have ended; false at the deadline.
  bool WaitIdle(uint64_t deadline_ns) { return calls_.WaitIdle(deadline_ns); }

  grpc::ServerWriteReactor<v1::GenerateResponse>* Generate(
      grpc::CallbackServerContext* call, const v1::GenerateRequest* request) override;
  grpc::ServerWriteReactor<v1::ChatResponse>* Chat(grpc::CallbackServerContext* call,
                                                   const v1::ChatRequest* request) override;
  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* call,
                                     const v1::TokenizeRequest* request,
                                     v1::TokenizeResponse* response) override;
  grpc::ServerUnaryReactor* Detokenize(grpc::CallbackServerContext* call,
                                       const v1::DetokenizeRequest* request,
                                       v1::DetokenizeResponse* response) override;
  grpc::ServerUnaryReactor* ListModels(grpc::CallbackServerContext* call,
                                       const v1::ListModelsRequest* request,
                                       v1::ListModelsResponse* response) override;
  grpc::ServerUnaryReactor* Status(grpc::CallbackServerContext* call,
                                   const v1::StatusRequest* request,
                                   v1::StatusResponse* response) override;

 private:
  // False: too many wait for the pool already.
  bool EnterPreparation();
  void LeavePreparation() { preparing_.fetch_sub(1, std::memory_order_relaxed); }
  boost::asio::thread_pool& PoolFor(size_t bytes);
  template <class Response, class Message>
  grpc::ServerWriteReactor<Response>* Stream(grpc::CallbackServerContext* call,
                                             const Message* message);

  const ApiContext context_;
  const uint64_t started_ns_;
  std::atomic<bool> draining_{false};
  std::atomic<int> preparing_{0};
  std::atomic<uint64_t> next_id_{1};  // of requests, for the log
  ActiveCalls calls_;
  boost::asio::thread_pool prepare_;  // encoding and templates
  boost::asio::thread_pool long_;     // the same for long texts, so that they delay only each other
  boost::asio::thread_pool writers_;  // events to messages
};

}  // namespace lode
