// Requests that are wrong, one way each: one clear sentence with the right code, nothing reaches
// the engine, and the service goes on.
#include <cmath>
#include <functional>
#include <limits>

#include "api_fixture.h"
#include "grpc_peers.h"

namespace lode {
namespace {

using grpc::StatusCode;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct BadGenerate {
  const char* name;
  std::function<void(v1::GenerateRequest&)> spoil;
  const char* says;  // part of the sentence
  StatusCode code = StatusCode::INVALID_ARGUMENT;
};

v1::Sampling& S(v1::GenerateRequest& r) { return *r.mutable_sampling(); }
v1::Limits& L(v1::GenerateRequest& r) { return *r.mutable_limits(); }
void AddTokens(v1::GenerateRequest& r, size_t n) {
  for (size_t i = 0; i < n; ++i) r.mutable_tokens()->add_ids(1);
}

std::vector<BadGenerate> BadGenerates() {
  using R = v1::GenerateRequest;
  return {
      {"no prompt", [](R& r) { r.clear_prompt(); }, "no prompt"},
      {"empty text", [](R& r) { r.set_text(""); }, "no tokens"},
      {"empty tokens", [](R& r) { r.mutable_tokens(); }, "no tokens"},
      {"token too large", [](R& r) { r.mutable_tokens()->add_ids(1 << 30); },
       "tokens[0] is 1073741824"},
      {"token negative", [](R& r) { r.mutable_tokens()->add_ids(-1); }, "tokens[0] is -1"},
      {"temperature NaN", [](R& r) { S(r).set_temperature(kNan); }, "sampling.temperature"},
      {"temperature negative", [](R& r) { S(r).set_temperature(-1); },
       "sampling.temperature is -1"},
      {"temperature infinite", [](R& r) { S(r).set_temperature(kInfinity); },
       "sampling.temperature"},
      {"top_p 0", [](R& r) { S(r).set_top_p(0); }, "sampling.top_p is 0"},
      {"top_p 2", [](R& r) { S(r).set_top_p(2); }, "sampling.top_p is 2"},
      {"top_p NaN", [](R& r) { S(r).set_top_p(kNan); }, "sampling.top_p"},
      {"min_p 1", [](R& r) { S(r).set_min_p(1); }, "sampling.min_p is 1"},
      {"min_p negative", [](R& r) { S(r).set_min_p(-0.5f); }, "sampling.min_p"},
      {"repetition 0", [](R& r) { S(r).set_repetition_penalty(0); }, "sampling.repetition_penalty"},
      {"presence inf", [](R& r) { S(r).set_presence_penalty(kInfinity); },
       "sampling.presence_penalty"},
      {"frequency NaN", [](R& r) { S(r).set_frequency_penalty(kNan); },
       "sampling.frequency_penalty"},
      {"bias of no token", [](R& r) { (*S(r).mutable_logit_bias())[-5] = 1; },
       "logit_bias entry -5"},
      {"bias infinite", [](R& r) { (*S(r).mutable_logit_bias())[5] = kInfinity; },
       "logit_bias entry 5"},
      {"too many biases",
       [](R& r) {
         for (int i = 0; i < 1025; ++i) (*S(r).mutable_logit_bias())[i] = 1;
       },
       "logit_bias has 1025"},
      {"too many stops",
       [](R& r) {
         for (int i = 0; i < 17; ++i) L(r).add_stop("x");
       },
       "limits.stop has 17"},
      {"empty stop", [](R& r) { L(r).add_stop(""); }, "string of 0 bytes"},
      {"long stop", [](R& r) { L(r).add_stop(std::string(257, 'x')); }, "string of 257 bytes"},
      {"stop token of none", [](R& r) { L(r).add_stop_tokens(-3); }, "stop_tokens holds -3"},
      {"max_tokens 0", [](R& r) { L(r).set_max_tokens(0); }, "limits.max_tokens is 0"},
      {"max_tokens beyond context", [](R& r) { L(r).set_max_tokens(1000); },
       "limits.max_tokens is 1000"},
      {"max_tokens overflow", [](R& r) { L(r).set_max_tokens(UINT32_MAX); },
       "limits.max_tokens is 4294967295"},
      {"logprobs 21", [](R& r) { L(r).set_logprobs(21); }, "limits.logprobs is 21"},
      {"unknown model", [](R& r) { r.set_model("gpt"); }, "model 'gpt'", StatusCode::NOT_FOUND},
      {"prompt beyond context", [](R& r) { AddTokens(r, 65); }, "prompt has 65 tokens"},
      {"prompt fills context",
       [](R& r) {
         AddTokens(r, 64);
         L(r).clear_max_tokens();
       },
       "fills the context"},
  };
}

TEST_F(ApiTest, MalformedGenerateRequestsAreRefusedOneByOne) {
  ASSERT_TRUE(Start().ok());
  auto stub = Stub();
  for (const BadGenerate& bad : BadGenerates()) {
    v1::GenerateRequest request = Fine();
    bad.spoil(request);
    const Answer answer = Generate(*stub, request);
    EXPECT_EQ(answer.status.error_code(), bad.code)
        << bad.name << ": " << answer.status.error_message();
    EXPECT_NE(answer.status.error_message().find(bad.says), std::string::npos)
        << bad.name << ": " << answer.status.error_message();
    EXPECT_EQ(answer.status.error_message().find('\n'), std::string::npos) << bad.name;
    EXPECT_LT(answer.status.error_message().size(), 250u) << bad.name;
    EXPECT_TRUE(answer.messages.empty()) << bad.name;
  }
  EXPECT_EQ(engine_.submitted(), 0u);
  ExpectServes();
}

struct BadChat {
  const char* name;
  std::function<void(v1::ChatRequest&)> spoil;
  const char* says;
};

TEST_F(ApiTest, MalformedChatRequestsAreRefusedOneByOne) {
  using R = v1::ChatRequest;
  const std::string deep = std::string(500'000, '[') + std::string(500'000, ']');
  const BadChat cases[] = {
      {"no messages", [](R& r) { r.clear_messages(); }, "messages is empty"},
      {"unknown role", [](R& r) { r.mutable_messages(0)->set_role("robot"); },
       "messages[0].role is 'robot'"},
      {"empty role", [](R& r) { r.mutable_messages(0)->set_role(""); }, "messages[0].role is ''"},
      {"bad tools", [](R& r) { r.set_tools_json("[{"); }, "tools"},
      {"tools no array", [](R& r) { r.set_tools_json("{}"); }, "must be a JSON array"},
      {"deep tools", [&](R& r) { r.set_tools_json(deep); }, "deep"},
      {"bad tool calls",
       [](R& r) {
         r.mutable_messages(0)->set_role("assistant");
         r.mutable_messages(0)->set_tool_calls_json("nope");
       },
       "tool_calls of message 0"},
      {"bad option", [](R& r) { (*r.mutable_template_options_json())["enable_thinking"] = "yes"; },
       "template_options_json['enable_thinking']"},
      {"bad option with a long name",
       [](R& r) { (*r.mutable_template_options_json())[std::string(100'000, 'k')] = "yes"; },
       "template_options_json['kkk"},
      {"empty option", [](R& r) { (*r.mutable_template_options_json())["a"] = ""; },
       "template_options_json['a']"},
      {"option that escapes",
       [](R& r) { (*r.mutable_template_options_json())["a"] = "1},\"b\":{"; },
       "template_options_json['a']"},
      {"deep option", [&](R& r) { (*r.mutable_template_options_json())["a"] = deep; }, "deep"},
      {"prompt logprobs", [](R& r) { r.mutable_limits()->set_prompt_logprobs(true); },
       "prompt_logprobs"},
      {"bad sampling", [](R& r) { r.mutable_sampling()->set_top_p(-1); }, "sampling.top_p"},
      {"too long by its bytes",
       [](R& r) { r.mutable_messages(0)->set_content(std::string(1 << 20, '?')); },
       "the conversation has 1048576 bytes"},
      {"too long", [](R& r) { r.mutable_messages(0)->set_content(std::string(5000, '?')); },
       "the context holds"},
  };
  ASSERT_TRUE(Start().ok());
  auto stub = Stub();
  for (const BadChat& bad : cases) {
    v1::ChatRequest request;
    request.add_messages()->set_role("user");
    request.mutable_messages(0)->set_content("Hi");
    bad.spoil(request);
    grpc::ClientContext call;
    SetDeadline(&call);
    auto reader = stub->Chat(&call, request);
    v1::ChatResponse response;
    EXPECT_FALSE(reader->Read(&response)) << bad.name;
    const grpc::Status status = reader->Finish();
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT)
        << bad.name << ": " << status.error_message();
    EXPECT_NE(status.error_message().find(bad.says), std::string::npos)
        << bad.name << ": " << status.error_message();
    EXPECT_LT(status.error_message().size(), 250u) << bad.name;
  }
  EXPECT_EQ(engine_.submitted(), 0u);
  ExpectServes();
}

TEST_F(ApiTest, ChatWithoutATemplateSaysSo) {
  ApiContext context = Context();
  context.chat_template = nullptr;
  auto started = StartApi(context);
  ASSERT_TRUE(started.ok());
  server_ = std::move(*started);
  auto stub = Stub();
  v1::ChatRequest request;
  request.add_messages()->set_role("user");
  grpc::ClientContext call;
  SetDeadline(&call);
  auto reader = stub->Chat(&call, request);
  v1::ChatResponse response;
  EXPECT_FALSE(reader->Read(&response));
  const grpc::Status status = reader->Finish();
  EXPECT_EQ(status.error_code(), StatusCode::FAILED_PRECONDITION);
  EXPECT_NE(status.error_message().find("no chat template"), std::string::npos);
}

TEST_F(ApiTest, MessagesBeyondTheLimitAndTextsBeyondTheirs) {
  ASSERT_TRUE(Start().ok());
  auto stub = Stub();
  v1::GenerateRequest request = Fine();
  request.set_text(std::string(65u << 20, 'x'));  // the message limit is 64 MiB
  EXPECT_EQ(Generate(*stub, request).status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  // A context of 64 tokens cannot hold this, as its length alone says.
  request.set_text(std::string(17u << 20, 'x'));
  Answer answer = Generate(*stub, request);
  EXPECT_EQ(answer.status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_NE(answer.status.error_message().find("the prompt has 17825792 bytes"), std::string::npos)
      << answer.status.error_message();
  request.set_text(std::string(200, '?'));  // might fit by its length, does not by its tokens
  answer = Generate(*stub, request);
  EXPECT_EQ(answer.status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_NE(answer.status.error_message().find("the prompt has more than 64 tokens"),
            std::string::npos)
      << answer.status.error_message();
  // A conversation is measured before the template sees it.
  v1::ChatRequest chat;
  chat.add_messages()->set_role("user");
  chat.mutable_messages(0)->set_content(std::string(10u << 20, 'x'));
  grpc::ClientContext call;
  SetDeadline(&call);
  auto reader = stub->Chat(&call, chat);
  v1::ChatResponse response;
  EXPECT_FALSE(reader->Read(&response));
  const grpc::Status status = reader->Finish();
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_NE(status.error_message().find("the conversation has 10485760 bytes"), std::string::npos)
      << status.error_message();
  EXPECT_EQ(counters_.requests_refused.load(), 3u);  // the one that gRPC refused nobody saw
  EXPECT_EQ(counters_.requests_submitted.load(), 3u);
  ExpectServes();
}

// Bytes that are no message end the call inside the library, which calls that UNIMPLEMENTED.
TEST_F(ApiTest, UnreadableMessagesAreNamed) {
  ASSERT_TRUE(Start().ok());
  const auto channel = Channel("unix:" + options_.socket);
  for (const char* method : {"Generate", "Chat", "Tokenize", "Detokenize", "Status"}) {
    GenericCall call(channel, std::string("/lode.v1.LodeService/") + method);
    call.Write(std::string("\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", 11));
    std::string response;
    EXPECT_FALSE(call.Read(&response)) << method;
    EXPECT_EQ(call.End().error_code(), StatusCode::INVALID_ARGUMENT) << method;
    EXPECT_NE(call.End().error_message().find("cannot be read"), std::string::npos)
        << call.End().error_message();
  }
  // A method that is not there is another matter.
  GenericCall call(channel, "/lode.v1.LodeService/Fly");
  call.Write("");
  std::string response;
  EXPECT_FALSE(call.Read(&response));
  EXPECT_EQ(call.End().error_code(), StatusCode::UNIMPLEMENTED);
  ExpectServes();
}

TEST_F(ApiTest, UnaryCallsCheckTheirInput) {
  ASSERT_TRUE(Start().ok());
  auto stub = Stub();
  for (int32_t id : {-1, INT32_MAX, DemoTokenizer().vocab_size()}) {
    v1::DetokenizeRequest request;
    request.add_ids(0);
    request.add_ids(id);
    v1::DetokenizeResponse response;
    grpc::ClientContext call;
    const grpc::Status status = stub->Detokenize(&call, request, &response);
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
    EXPECT_NE(status.error_message().find("ids[1]"), std::string::npos) << status.error_message();
  }
  v1::TokenizeRequest request;
  request.set_text(std::string(17u << 20, 'x'));
  v1::TokenizeResponse response;
  grpc::ClientContext call;
  EXPECT_EQ(stub->Tokenize(&call, request, &response).error_code(), StatusCode::INVALID_ARGUMENT);
  ExpectServes();
}

}  // namespace
}  // namespace lode
