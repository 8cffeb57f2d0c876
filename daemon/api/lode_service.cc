// See lode_service.h. Error mapping: a refused request ends the call with the matching gRPC status; a request that fails after
// it was admitted ends with a Finish message whose reason is ERROR, then status OK, so that its usage is not lost.
#include "daemon/api/lode_service.h"

#include <boost/asio/post.hpp>
#include <mutex>

#include "daemon/api/translate.h"
#include "daemon/detokenizer.h"
#include "shared/base/log.h"
#include "shared/base/version.h"
#include "shared/shm/wait_word.h"

namespace lode {
namespace {

// Preparation threads: Jinja renderings are serialised by their helper, tokenising a long prompt takes milliseconds.
constexpr size_t kPrepareThreads = 2;

grpc::Status ToGrpc(const lode::Status& status) {
  return grpc::Status(static_cast<grpc::StatusCode>(status.raw_code()), Message(status));
}

// One answer stream. The gRPC library owns the calls of On*; the object deletes itself in OnDone.
template <class Response>
class StreamReactor final : public grpc::ServerWriteReactor<Response> {
 public:
  StreamReactor(const ApiContext& context, grpc::CallbackServerContext* call)
      : context_(context), call_(call), link_(std::make_shared<Link>()) {
    link_->reactor = this;
  }

  // Prepare thread: the request has become a stream, or a refusal.
  void Start(StatusOr<Request> request) {
    StatusOr<std::shared_ptr<RequestStream>> stream =
        request.ok() ? context_.engine->Submit(std::move(request).value()) : request.status();
    std::unique_lock lock(link_->mutex);
    if (!stream.ok()) {
      finished_ = true;
      lock.unlock();
      this->Finish(ToGrpc(stream.status()));
      return;
    }
    stream_ = std::move(stream).value();
    if (cancelled_) stream_->Cancel();
    lock.unlock();
    // The link outlives the reactor, so a late notification finds no reactor instead of a freed one.
    stream_->SetNotify([link = link_] {
      std::lock_guard guard(link->mutex);
      if (link->reactor != nullptr) link->reactor->Pump();
    });
    std::lock_guard guard(link_->mutex);
    Pump();
  }

  void OnWriteDone(bool ok) override {
    std::lock_guard guard(link_->mutex);
    writing_ = false;
    if (!ok) {
      Stop();
    } else if (last_written_) {
      FinishOnce(grpc::Status::OK);
    } else {
      Pump();
    }
  }

  void OnCancel() override {
    std::lock_guard guard(link_->mutex);
    Stop();
  }

  void OnDone() override {
    {
      std::lock_guard guard(link_->mutex);
      link_->reactor = nullptr;
      if (stream_) stream_->Cancel();  // no effect on a finished one
    }
    delete this;
  }

 private:
  struct Link {
    std::mutex mutex;                  // guards every member of the reactor below
    StreamReactor* reactor = nullptr;  // null once the reactor is gone
  };

  // REQUIRES: link_->mutex held. Writes the next event when none is being written.
  void Pump() {
    if (writing_ || finished_ || !stream_) return;
    StreamEvent event;
    if (!stream_->TryPop(&event)) return;
    if (!Fill(event)) {
      Pump();
      return;
    }
    writing_ = true;
    this->StartWrite(&response_);
  }

  // False when there is nothing to send in this event.
  bool Fill(const StreamEvent& event) {
    response_.Clear();
    if (event.finish.has_value()) {
      ToProto(*event.finish, response_.mutable_finish());
      last_written_ = true;
      return true;
    }
    if constexpr (requires { response_.mutable_prompt(); }) {
      if (!event.prompt_tokens.empty()) {
        ToProto(*context_.tokenizer, event, response_.mutable_prompt());
        return true;
      }
    }
    if (event.text.empty() && event.tokens.empty()) return false;
    ToProto(*context_.tokenizer, event, response_.mutable_delta());
    return true;
  }

  // REQUIRES: link_->mutex held. The client is gone: cancel the sequence, end the call.
  void Stop() {
    cancelled_ = true;
    if (!stream_) return;  // Start is still preparing; it will cancel
    stream_->Cancel();
    if (!writing_) FinishOnce(grpc::Status(grpc::StatusCode::CANCELLED, "the client went away"));
  }
  void FinishOnce(const grpc::Status& status) {
    if (finished_) return;
    finished_ = true;
    this->Finish(status);
  }

  const ApiContext& context_;
  grpc::CallbackServerContext* const call_;
  const std::shared_ptr<Link> link_;
  std::shared_ptr<RequestStream> stream_;
  Response response_;
  bool writing_ = false, finished_ = false, cancelled_ = false, last_written_ = false;
};

// A unary call that is answered where it stands.
grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* call, const grpc::Status& status) {
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  reactor->Finish(status);
  return reactor;
}

}  // namespace

LodeService::LodeService(const ApiContext& context) : context_(context), started_ns_(NowNs()), pool_(kPrepareThreads) {}

LodeService::~LodeService() {
  pool_.stop();
  pool_.join();
}

grpc::ServerWriteReactor<v1::GenerateResponse>* LodeService::Generate(grpc::CallbackServerContext* call,
                                                                      const v1::GenerateRequest* request) {
  auto* reactor = new StreamReactor<v1::GenerateResponse>(context_, call);
  if (draining_.load(std::memory_order_relaxed)) {
    reactor->Start(Unavailable("the daemon is stopping; try again in a few seconds"));
  } else {
    boost::asio::post(pool_, [this, reactor, request] { reactor->Start(ToRequest(context_, *request)); });
  }
  return reactor;
}

grpc::ServerWriteReactor<v1::ChatResponse>* LodeService::Chat(grpc::CallbackServerContext* call,
                                                              const v1::ChatRequest* request) {
  auto* reactor = new StreamReactor<v1::ChatResponse>(context_, call);
  if (draining_.load(std::memory_order_relaxed)) {
    reactor->Start(Unavailable("the daemon is stopping; try again in a few seconds"));
  } else {
    boost::asio::post(pool_, [this, reactor, request] { reactor->Start(ToRequest(context_, *request)); });
  }
  return reactor;
}

grpc::ServerUnaryReactor* LodeService::Tokenize(grpc::CallbackServerContext* call, const v1::TokenizeRequest* request,
                                                v1::TokenizeResponse* response) {
  const auto ids = context_.tokenizer->Encode(request->text(), !request->raw_text());
  if (!ids.ok()) return Answer(call, ToGrpc(ids.status()));
  for (int32_t id : *ids) {
    response->add_ids(id);
    response->add_pieces(context_.tokenizer->PrintableToken(id));
  }
  return Answer(call, grpc::Status::OK);
}

grpc::ServerUnaryReactor* LodeService::Detokenize(grpc::CallbackServerContext* call, const v1::DetokenizeRequest* request,
                                                  v1::DetokenizeResponse* response) {
  std::vector<int32_t> ids(request->ids().begin(), request->ids().end());
  for (size_t i = 0; i < ids.size(); ++i) {
    if (!context_.tokenizer->IsValid(ids[i])) {
      return Answer(call, ToGrpc(InvalidArgument("ids[{}] is {}, which is not a token of the vocabulary (0 to {})", i, ids[i],
                                                 context_.tokenizer->vocab_size() - 1)));
    }
  }
  Detokenizer::Options options;
  options.keep_special = request->keep_special();
  response->set_text(Detokenizer::Text(*context_.tokenizer, ids, options));
  return Answer(call, grpc::Status::OK);
}

grpc::ServerUnaryReactor* LodeService::ListModels(grpc::CallbackServerContext* call, const v1::ListModelsRequest*,
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

grpc::ServerUnaryReactor* LodeService::Status(grpc::CallbackServerContext* call, const v1::StatusRequest*,
                                              v1::StatusResponse* response) {
  ToProto(context_, context_.engine->Snapshot(), response);
  response->set_version(kVersion);
  response->set_uptime_seconds(static_cast<double>(NowNs() - started_ns_) * 1e-9);
  return Answer(call, grpc::Status::OK);
}

}  // namespace lode
