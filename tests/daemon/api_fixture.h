// A real API server (unix socket, TCP and metrics on ports the kernel chooses) before a fake engine
// and the demo model's tokenizer and chat template.
#pragma once

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>

#include "daemon/api/api.h"
#include "fake_engine.h"
#include "lode/v1/lode.grpc.pb.h"
#include "tokenizer_fixture.h"

namespace lode {

using std::chrono::seconds;

// Longer than anything takes, also under sanitizers on a busy machine.
inline constexpr seconds kLimit{60};

inline ChatTemplate& DemoTemplate() {
  static const std::unique_ptr<ChatTemplate> chat = [] {
    ChatTemplateOptions options;
    options.script_path = LODE_BINARY_DIR "/bin/lode-template-helper.py";
    options.control_tokens = DemoTokenizer().ControlNames();
    options.deadline = std::chrono::milliseconds(30'000);
    options.start_timeout = std::chrono::milliseconds(60'000);
    auto made = ChatTemplate::Create(DemoModel().tokenizer()->chat_template, options);
    LODE_CHECK(made.ok(), "{}", Message(made.status()));
    return std::move(*made);
  }();
  return *chat;
}

inline void SetDeadline(grpc::ClientContext* call, std::chrono::milliseconds limit = kLimit) {
  call->set_deadline(std::chrono::system_clock::now() + limit);
}

class ApiTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string dir = "/tmp/lode-api-test-XXXXXX";
    ASSERT_NE(mkdtemp(dir.data()), nullptr);
    dir_ = dir;
    options_.listen = "127.0.0.1:0";
    options_.metrics_listen.clear();  // stopping its server takes two seconds
    options_.socket = dir_ + "/lode.sock";
    options_.max_tokens = 5;
    tokenizer_data_ = *DemoModel().tokenizer();
  }
  void TearDown() override {
    if (server_) server_->Shutdown(NowNs() + 1'000'000'000);
    server_.reset();
    engine_.Join();
    std::filesystem::remove_all(dir_);
  }

  ApiContext Context() {
    ApiContext context;
    context.options = &options_;
    context.source = &DemoModel();
    context.tokenizer_data = &tokenizer_data_;
    context.tokenizer = &DemoTokenizer();
    context.chat_template = &DemoTemplate();
    context.engine = &engine_;
    context.counters = &counters_;
    context.model_id = "demo";
    return context;
  }
  Status Start() {
    auto started = StartApi(Context());
    if (!started.ok()) return started.status();
    server_ = std::move(*started);
    server_->SetServing(true);
    return OkStatus();
  }
  // Second word of "unix:... 127.0.0.1:1234 http://...".
  std::string TcpAddress() const {
    const std::string all = server_->endpoints();
    const size_t from = all.find(' ') + 1;
    return all.substr(from, all.find(' ', from) - from);
  }
  std::string MetricsUrl() const {
    const std::string all = server_->endpoints();
    return all.substr(all.find("http://"));
  }
  std::shared_ptr<grpc::Channel> Channel(const std::string& target) const {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments);
  }
  std::unique_ptr<v1::LodeService::Stub> Stub() const {
    return v1::LodeService::NewStub(Channel("unix:" + options_.socket));
  }

  struct Answer {
    std::string text;
    std::vector<v1::GenerateResponse> messages;
    grpc::Status status;
    const v1::Finish& finish() const { return messages.back().finish(); }
  };
  static Answer Generate(v1::LodeService::Stub& stub, const v1::GenerateRequest& request) {
    Answer answer;
    grpc::ClientContext call;
    SetDeadline(&call);
    auto reader = stub.Generate(&call, request);
    v1::GenerateResponse response;
    while (reader->Read(&response)) {
      answer.text += response.delta().text();
      answer.messages.push_back(response);
    }
    answer.status = reader->Finish();
    return answer;
  }
  // A request that is fine.
  static v1::GenerateRequest Fine(uint32_t max_tokens = 3) {
    v1::GenerateRequest request;
    request.set_text("Hello");
    request.mutable_limits()->set_max_tokens(max_tokens);
    return request;
  }
  void ExpectServes() {
    auto stub = Stub();
    const Answer answer = Generate(*stub, Fine());
    EXPECT_TRUE(answer.status.ok()) << answer.status.error_message();
    EXPECT_EQ(answer.text, "0 1 2 ");
  }

  std::string dir_;
  Options options_;
  TokenizerData tokenizer_data_;
  EngineCounters counters_;
  FakeEngine engine_;
  std::unique_ptr<ApiServer> server_;
};

}  // namespace lode
