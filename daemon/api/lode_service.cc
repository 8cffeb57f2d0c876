// See lode_service.h. Error mapping: a refused request ends the call with the matching gRPC status;
// a request that fails after it was admitted ends with a Finish message whose reason is ERROR, then
// status OK, so that its usage is not lost.
#include "daemon/api/lode_service.h"

#include <boost/asio/post.hpp>
#include <exception>

#include "daemon/api/stream_reactor.h"
#include "daemon/api/translate.h"
#include "daemon/detokenizer.h"
#include "shared/base/limits.h"
#include "shared/base/version.h"
#include "shared/shm/wait_word.h"

namespace lode {
namespace {

// Preparation threads: Jinja renderings are serialised by their helper, tokenising a long prompt
// takes milliseconds.
constexpr size_t kPrepareThreads = 2;
// Messages above this many bytes (tens of milliseconds) wait for a thread of their own: one, which
// also bounds the memory that long texts take while they are worked on.
constexpr size_t kLongTextBytes = 256 * 1024;
constexpr size_t kLongThreads = 1;
// Ids of one Tokenize call: the longest context there is.
constexpr size_t kTokenizeTokensMax = kContextMax;
// Requests that wait for them; each may hold a message of many megabytes.
constexpr int kPreparingMax = 256;
// One thread writes all streams; a write is serialising a few bytes and one socket call.
constexpr size_t kWriterThreads = 1;

// Libraries below may throw (memory, random device); a request fails by that, not the daemon.
template <class F>
auto Guarded(F f) -> decltype(f()) {
  try {
    return f();
  } catch (const std::exception& error) {
    return Internal("the request could not be prepared: {}", error.what());
  }
}

lode::Status TooMany() {
  return ResourceExhausted("{} requests are being prepared, which is the limit; try again later",
                           kPreparingMax);
}

// A unary call that is answered where it stands.
grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* call, const grpc::Status& status) {
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  reactor->Finish(status);
  return reactor;
}

}  // namespace

LodeService::LodeService(const ApiContext& context)
    : context_(context),
      started_ns_(NowNs()),
      prepare_(kPrepareThreads),
      long_(kLongThreads),
      writers_(kWriterThreads) {}

LodeService::~LodeService() {
  prepare_.stop();
  prepare_.join();
  long_.stop();
  long_.join();
  writers_.stop();
  writers_.join();
}

bool LodeService::EnterPreparation() {
  if (preparing_.fetch_add(1, std::memory_order_relaxed) < kPreparingMax) return true;
  LeavePreparation();
  return false;
}

boost::asio::thread_pool& LodeService::PoolFor(size_t bytes) {
  return bytes > kLongTextBytes ? long_ : prepare_;
}

// Refused at once while stopping, else prepared on the pool.
template <class Response, class Message>
grpc::ServerWriteReactor<Response>* LodeService::Stream(grpc::CallbackServerContext* call,
                                                        const Message* message) {
  auto* reactor = new StreamReactor<Response>(context_, &writers_, &calls_);
  if (draining_.load(std::memory_order_relaxed)) {
    reactor->Start(Unavailable("the daemon is stopping; try again in a few seconds"));
    return reactor;
  }
  if (!EnterPreparation()) {
    reactor->Start(TooMany());
    return reactor;
  }
  // The call's context lives until the reactor has finished, which it cannot before Start.
  const Arrival arrival = {NowNs(), [call] { return call->IsCancelled(); }};
  boost::asio::post(PoolFor(message->ByteSizeLong()), [this, reactor, message, arrival] {
    StatusOr<Request> request = Guarded([&] { return ToRequest(context_, *message, arrival); });
    if (request.ok()) request->id = fmt::format("r{}", next_id_.fetch_add(1));
    reactor->Start(std::move(request));
    LeavePreparation();
  });
  return reactor;
}

grpc::ServerWriteReactor<v1::GenerateResponse>* LodeService::Generate(
    grpc::CallbackServerContext* call, const v1::GenerateRequest* request) {
  return Stream<v1::GenerateResponse>(call, request);
}

grpc::ServerWriteReactor<v1::ChatResponse>* LodeService::Chat(grpc::CallbackServerContext* call,
                                                              const v1::ChatRequest* request) {
  return Stream<v1::ChatResponse>(call, request);
}

grpc::ServerUnaryReactor* LodeService::Tokenize(grpc::CallbackServerContext* call,
                                                const v1::TokenizeRequest* request,
                                                v1::TokenizeResponse* response) {
  if (!EnterPreparation()) return Answer(call, ToGrpc(TooMany()));
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  calls_.Enter();
  boost::asio::post(PoolFor(request->text().size()), [this, call, reactor, request, response] {
    EncodeOptions options;
    options.parse_special = !request->raw_text();
    options.tokens_max = kTokenizeTokensMax;
    options.stop = [call] { return call->IsCancelled(); };
    const auto ids = Guarded([&] { return context_.tokenizer->Encode(request->text(), options); });
    if (ids.ok()) {
      for (int32_t id : *ids) {
        response->add_ids(id);
        response->add_pieces(context_.tokenizer->PrintableToken(id));
      }
    }
    reactor->Finish(
        ToGrpc(ids.status().code() == StatusCode::kOutOfRange
                   ? InvalidArgument("{}; cut it and ask for the parts", Message(ids.status()))
                   : ids.status()));
    LeavePreparation();
    calls_.Leave();
  });
  return reactor;
}

grpc::ServerUnaryReactor* LodeService::Detokenize(grpc::CallbackServerContext* call,
                                                  const v1::DetokenizeRequest* request,
                                                  v1::DetokenizeResponse* response) {
  std::vector<int32_t> ids(request->ids().begin(), request->ids().end());
  for (size_t i = 0; i < ids.size(); ++i) {
    if (!context_.tokenizer->IsValid(ids[i])) {
      return Answer(call, ToGrpc(InvalidArgument(
                              "ids[{}] is {}, which is not a token of the vocabulary (0 to {})", i,
                              ids[i], context_.tokenizer->vocab_size() - 1)));
    }
  }
  Detokenizer::Options options;
  options.keep_special = request->keep_special();
  response->set_text(Detokenizer::Text(*context_.tokenizer, ids, options));
  return Answer(call, grpc::Status::OK);
}

grpc::ServerUnaryReactor* LodeService::ListModels(grpc::CallbackServerContext* call,
                                                  const v1::ListModelsRequest*,
                                                  v1::ListModelsResponse* response) {
  const ModelConfig& config = context_.source->config();
  v1::Model* model = response->add_models();
  model->set_id(context_.model_id);
  model->set_architecture(config.arch);
  model->set_source(context_.source->description());
  model->set_context(context_.engine->context());
  model->set_trained_context(config.context);
  model->set_vocab(config.vocab);
  model->set_layers(config.layers);
  model->set_experts(config.experts);
  model->set_experts_used(config.experts_used);
  return Answer(call, grpc::Status::OK);
}

grpc::ServerUnaryReactor* LodeService::Status(grpc::CallbackServerContext* call,
                                              const v1::StatusRequest*,
                                              v1::StatusResponse* response) {
  ToProto(context_, context_.engine->Snapshot(), response);
  response->set_version(kVersion);
  response->set_uptime_seconds(static_cast<double>(NowNs() - started_ns_) * 1e-9);
  return Answer(call, grpc::Status::OK);
}

}  // namespace lode
