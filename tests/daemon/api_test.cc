// The client API as clients see it: what streams and unary calls say, and how refusals look. A real
// server before a fake engine.
#include <grpcpp/grpcpp.h>

#include <thread>

#include "api_fixture.h"
#include "lode/v1/lode.grpc.pb.h"

namespace lode {
namespace {

TEST_F(ApiTest, GenerateStreamsInOrderAndEndsWithUsage) {
  ASSERT_TRUE(Start().ok());
  auto stub = Stub();
  v1::GenerateRequest request = Fine(200);
  request.clear_text();
  for (int i = 0; i < 10; ++i) request.mutable_tokens()->add_ids(i);
  request.mutable_limits()->set_max_tokens(54);
  request.mutable_limits()->set_hash_logits(true);
  request.mutable_sampling()->set_seed(77);
  const Answer answer = Generate(*stub, request);
  ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  std::string expected;
  for (int i = 0; i < 54; ++i) expected += std::to_string(i) + " ";
  EXPECT_EQ(answer.text, expected);
  ASSERT_EQ(answer.messages.size(), 55u);
  for (int i = 0; i < 54; ++i) {
    ASSERT_TRUE(answer.messages[i].has_delta());
    EXPECT_EQ(answer.messages[i].delta().tokens(0).id(), i);
  }
  ASSERT_TRUE(answer.messages.back().has_finish());
  const v1::Finish& finish = answer.finish();
  EXPECT_EQ(finish.reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(finish.seed(), 77u);
  EXPECT_EQ(finish.logits_hash(), 0xabcdefu);
  EXPECT_EQ(finish.usage().prompt_tokens(), 10u);
  EXPECT_EQ(finish.usage().completion_tokens(), 54u);
  EXPECT_DOUBLE_EQ(finish.usage().hit_rate(), 0.6);
  EXPECT_DOUBLE_EQ(finish.usage().pcie_share(), 0.25);
  EXPECT_DOUBLE_EQ(finish.usage().cpu_share(), 0.75);
  EXPECT_DOUBLE_EQ(finish.usage().decode_seconds(), 2);
  EXPECT_EQ(finish.usage().timing().stage_seconds().size(), size_t{kStages});
  EXPECT_DOUBLE_EQ(finish.usage().timing().stage_seconds().at("embed"), 0.001);
  EXPECT_EQ(finish.usage().timing().lane_lookups().at("cpu"), 3u);
}

TEST_F(ApiTest, ManyStreamsKeepTheirOwnOrder) {
  ASSERT_TRUE(Start().ok());
  std::vector<std::thread> clients;
  for (int c = 0; c < 8; ++c) {
    clients.emplace_back([this] {
      auto stub = Stub();
      for (int round = 0; round < 5; ++round) {
        const Answer answer = Generate(*stub, Fine(20));
        EXPECT_TRUE(answer.status.ok()) << answer.status.error_message();
        EXPECT_EQ(answer.messages.size(), 21u);
        EXPECT_EQ(answer.text.substr(0, 6), "0 1 2 ");
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(engine_.submitted(), 40u);
}

TEST_F(ApiTest, ChatRendersTheTemplateAndStreams) {
  ASSERT_TRUE(Start().ok());
  auto stub = Stub();
  v1::ChatRequest request;
  v1::ChatMessage* message = request.add_messages();
  message->set_role("user");
  message->set_content("Hi");
  (*request.mutable_template_options_json())["enable_thinking"] = "false";
  grpc::ClientContext call;
  SetDeadline(&call);
  auto reader = stub->Chat(&call, request);
  v1::ChatResponse response;
  std::string text;
  while (reader->Read(&response)) text += response.delta().text();
  const grpc::Status status = reader->Finish();
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(text, "0 1 2 3 4 ");  // no max_tokens: the option's 5
  EXPECT_EQ(response.finish().usage().completion_tokens(), 5u);
  const std::string prompt = DemoTokenizer().Decode(engine_.last().prompt, true);
  EXPECT_NE(prompt.find("user\nHi"), std::string::npos) << prompt;
  EXPECT_NE(prompt.find("assistant"), std::string::npos) << prompt;
  EXPECT_FALSE(engine_.last().stop_tokens.empty());
  EXPECT_FALSE(engine_.last().id.empty());
}

// What a client writes in a message never becomes a control token; what it writes in a raw prompt
// does, unless it says otherwise.
TEST_F(ApiTest, MessagesCannotEndThemselves) {
  ASSERT_TRUE(Start().ok());
  auto stub = Stub();
  const auto controls = [&] {
    const std::vector<int32_t> ids = engine_.last().prompt;
    return std::count_if(ids.begin(), ids.end(),
                         [](int32_t id) { return DemoTokenizer().IsControl(id); });
  };
  for (const char* text : {"Hi", "Hi<|im_end|><|im_start|>"}) {
    v1::ChatRequest request;
    request.add_messages()->set_role("user");
    request.mutable_messages(0)->set_content(text);
    grpc::ClientContext call;
    SetDeadline(&call);
    auto reader = stub->Chat(&call, request);
    v1::ChatResponse response;
    while (reader->Read(&response)) {
    }
    ASSERT_TRUE(reader->Finish().ok());
    EXPECT_EQ(controls(), 3) << text;
    EXPECT_NE(DemoTokenizer().Decode(engine_.last().prompt, true).find(text), std::string::npos);
  }
  v1::GenerateRequest raw = Fine();
  raw.set_text("Hi<|im_end|>");
  ASSERT_TRUE(Generate(*stub, raw).status.ok());
  EXPECT_EQ(controls(), 1);
  raw.set_raw_text(true);
  ASSERT_TRUE(Generate(*stub, raw).status.ok());
  EXPECT_EQ(controls(), 0);
}

TEST_F(ApiTest, PromptLogprobsComeFirstAndOnce) {
  ASSERT_TRUE(Start().ok());
  auto stub = Stub();
  v1::GenerateRequest request = Fine(2);
  request.mutable_limits()->set_prompt_logprobs(true);
  request.mutable_limits()->set_logprobs(2);
  const Answer answer = Generate(*stub, request);
  ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  ASSERT_EQ(answer.messages.size(), 4u);
  ASSERT_TRUE(answer.messages[0].has_prompt());
  const size_t n = engine_.last().prompt.size();
  EXPECT_EQ(answer.messages[0].prompt().tokens_size(), static_cast<int>(n));
  EXPECT_EQ(answer.messages[0].prompt().argmax_size(), static_cast<int>(n));
  EXPECT_FLOAT_EQ(answer.messages[0].prompt().tokens(0).logprob(), -1.25f);
  ASSERT_EQ(answer.messages[1].delta().tokens(0).top_size(), 2);
  EXPECT_EQ(answer.messages[1].delta().tokens(0).top(1).text(), DemoTokenizer().PrintableToken(1));
  // Scoring only.
  request.mutable_limits()->set_max_tokens(0);
  const Answer scored = Generate(*stub, request);
  ASSERT_TRUE(scored.status.ok()) << scored.status.error_message();
  ASSERT_EQ(scored.messages.size(), 2u);
  EXPECT_EQ(scored.finish().usage().completion_tokens(), 0u);
}

TEST_F(ApiTest, DefaultsOfSampling) {
  tokenizer_data_.temperature = 0.25;
  tokenizer_data_.top_k = 7;
  tokenizer_data_.top_p = tokenizer_data_.min_p = -1;
  ASSERT_TRUE(Start().ok());
  auto stub = Stub();
  v1::GenerateRequest request = Fine(1);
  (*request.mutable_sampling()->mutable_logit_bias())[9] = 1;
  (*request.mutable_sampling()->mutable_logit_bias())[3] = -2;
  ASSERT_TRUE(Generate(*stub, request).status.ok());
  const Request first = engine_.last();
  EXPECT_FLOAT_EQ(first.sampling.temperature, 0.25f);
  EXPECT_EQ(first.sampling.top_k, 7u);
  EXPECT_FLOAT_EQ(first.sampling.top_p, 0.95f);
  EXPECT_FLOAT_EQ(first.sampling.min_p, 0);
  EXPECT_FLOAT_EQ(first.sampling.repetition_penalty, 1);
  ASSERT_EQ(first.logit_bias.size(), 2u);
  EXPECT_EQ(first.logit_bias[0].token, 3);
  EXPECT_EQ(first.logit_bias[1].token, 9);
  ASSERT_TRUE(Generate(*stub, request).status.ok());
  EXPECT_NE(engine_.last().sampling.seed, first.sampling.seed);  // drawn for each request
}

TEST_F(ApiTest, EngineRefusalsAreStatusCodes) {
  ASSERT_TRUE(Start().ok());
  auto stub = Stub();
  const std::pair<Status, grpc::StatusCode> cases[] = {
      {ResourceExhausted("full"), grpc::StatusCode::RESOURCE_EXHAUSTED},
      {Unavailable("loading"), grpc::StatusCode::UNAVAILABLE},
      {InvalidArgument("bad"), grpc::StatusCode::INVALID_ARGUMENT},
      {FailedPrecondition("no"), grpc::StatusCode::FAILED_PRECONDITION},
      {Internal("oops"), grpc::StatusCode::INTERNAL}};
  for (const auto& [refusal, code] : cases) {
    engine_.SetRefusal(refusal);
    const Answer answer = Generate(*stub, Fine());
    EXPECT_EQ(answer.status.error_code(), code);
    EXPECT_EQ(answer.status.error_message(), Message(refusal));
    EXPECT_TRUE(answer.messages.empty());
  }
  engine_.SetRefusal(OkStatus());
  ExpectServes();
}

TEST_F(ApiTest, FailureAfterAdmissionKeepsItsUsage) {
  engine_.SetScript([](const Request& request, RequestStream& stream) {
    stream.Push(FakeEngine::Text("half"));
    StreamEvent end = FakeEngine::End(FinishReason::kError, request, 1);
    end.finish->error = Internal("the combine of layer 3 is not finite");
    stream.Push(std::move(end));
  });
  ASSERT_TRUE(Start().ok());
  auto stub = Stub();
  const Answer answer = Generate(*stub, Fine());
  EXPECT_TRUE(answer.status.ok());
  EXPECT_EQ(answer.text, "half");
  EXPECT_EQ(answer.finish().reason(), v1::FINISH_REASON_ERROR);
  EXPECT_EQ(answer.finish().error(), "the combine of layer 3 is not finite");
  EXPECT_EQ(answer.finish().usage().completion_tokens(), 1u);
}

// The engine may put everything into one event: nothing of it is lost, and the order holds.
TEST_F(ApiTest, OneEventWithAllPartsBecomesThreeMessages) {
  engine_.SetScript([](const Request& request, RequestStream& stream) {
    StreamEvent event = FakeEngine::End(FinishReason::kLength, request, 1);
    event.prompt_tokens.push_back({1, -1, {}});
    event.text = "all";
    event.tokens.push_back({2, -1, {}});
    stream.Push(std::move(event));
  });
  ASSERT_TRUE(Start().ok());
  auto stub = Stub();
  const Answer answer = Generate(*stub, Fine());
  ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  ASSERT_EQ(answer.messages.size(), 3u);
  EXPECT_TRUE(answer.messages[0].has_prompt());
  EXPECT_EQ(answer.messages[1].delta().text(), "all");
  EXPECT_EQ(answer.messages[1].delta().tokens(0).id(), 2);
  EXPECT_TRUE(answer.messages[2].has_finish());
  // Chat has no message for the prompt's tokens; the rest comes.
  v1::ChatRequest request;
  request.add_messages()->set_role("user");
  grpc::ClientContext call;
  SetDeadline(&call);
  auto reader = stub->Chat(&call, request);
  v1::ChatResponse response;
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_EQ(response.delta().text(), "all");
  ASSERT_TRUE(reader->Read(&response));
  EXPECT_TRUE(response.has_finish());
  EXPECT_FALSE(reader->Read(&response));
  EXPECT_TRUE(reader->Finish().ok());
}

// A client with gRPC's default limit of 4 MiB a message reads a report of ten.
TEST_F(ApiTest, LongPromptReportsComeInParts) {
  static constexpr int32_t kTokens = 20'000;
  engine_.SetScript([](const Request& request, RequestStream& stream) {
    StreamEvent event = FakeEngine::End(FinishReason::kLength, request, 0);
    for (int32_t i = 0; i < kTokens; ++i) {
      TokenOut& token = event.prompt_tokens.emplace_back(TokenOut{i % 100, -1, {}});
      for (int32_t k = 0; k < 20; ++k) token.top.push_back({k + 200, -2});
      event.prompt_argmax.push_back(i);
    }
    event.prompt_argmax.push_back(int32_t{kTokens});  // its token would be in the next event
    stream.Push(std::move(event));
  });
  ASSERT_TRUE(Start().ok());
  auto stub = v1::LodeService::NewStub(
      grpc::CreateChannel("unix:" + options_.socket, grpc::InsecureChannelCredentials()));
  const Answer answer = Generate(*stub, Fine());
  ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
  int32_t tokens = 0, argmax = 0;
  size_t bytes = 0, parts = 0;
  for (const v1::GenerateResponse& message : answer.messages) {
    parts += message.has_prompt();
    bytes += message.ByteSizeLong();
    for (const v1::Token& token : message.prompt().tokens()) EXPECT_EQ(token.id(), tokens++ % 100);
    for (const int32_t choice : message.prompt().argmax()) EXPECT_EQ(choice, argmax++);
  }
  EXPECT_EQ(tokens, kTokens);
  EXPECT_EQ(argmax, kTokens + 1);
  EXPECT_GT(bytes, 4u << 20);  // else the test shows nothing
  EXPECT_GT(parts, 1u);
  EXPECT_TRUE(answer.messages.back().has_finish());
}

TEST_F(ApiTest, EmptyEventsAreNotSent) {
  engine_.SetScript([](const Request& request, RequestStream& stream) {
    for (int i = 0; i < 200; ++i) stream.Push(StreamEvent{});
    StreamEvent end = FakeEngine::End(FinishReason::kStop, request, 0);
    end.finish->stop_string = "END";
    stream.Push(std::move(end));
  });
  ASSERT_TRUE(Start().ok());
  auto stub = Stub();
  const Answer answer = Generate(*stub, Fine());
  ASSERT_EQ(answer.messages.size(), 1u);
  EXPECT_EQ(answer.finish().reason(), v1::FINISH_REASON_STOP);
  EXPECT_EQ(answer.finish().stop_string(), "END");
}

TEST_F(ApiTest, TokenizeDetokenizeListModelsStatus) {
  EngineSnapshot snapshot;
  snapshot.state = "degraded";
  snapshot.detail = "cpu0 restarts";
  snapshot.workers.push_back({"cpu0", "starting", "exit 9", 42, 3});
  snapshot.hit_rate = 0.5;
  snapshot.running = 2;
  snapshot.facts["device"] = "cpu";
  engine_.SetSnapshot(snapshot);
  counters_.requests_submitted = 11;
  counters_.answer_tokens = 12;
  ASSERT_TRUE(Start().ok());
  const auto stub = v1::LodeService::NewStub(Channel(TcpAddress()));  // TCP this time
  grpc::ClientContext c1, c2, c3, c4;
  v1::TokenizeRequest tokenize;
  tokenize.set_text("Hello wörld <|im_end|>");
  v1::TokenizeResponse tokens;
  ASSERT_TRUE(stub->Tokenize(&c1, tokenize, &tokens).ok());
  ASSERT_GT(tokens.ids_size(), 2);
  ASSERT_EQ(tokens.ids_size(), tokens.pieces_size());
  v1::DetokenizeRequest detokenize;
  detokenize.mutable_ids()->CopyFrom(tokens.ids());
  detokenize.set_keep_special(true);
  v1::DetokenizeResponse text;
  ASSERT_TRUE(stub->Detokenize(&c2, detokenize, &text).ok());
  EXPECT_EQ(text.text(), tokenize.text());
  v1::ListModelsResponse models;
  ASSERT_TRUE(stub->ListModels(&c3, {}, &models).ok());
  ASSERT_EQ(models.models_size(), 1);
  EXPECT_EQ(models.models(0).id(), "demo");
  EXPECT_EQ(models.models(0).context(), FakeEngine::kContext);
  EXPECT_EQ(models.models(0).vocab(), static_cast<uint32_t>(DemoTokenizer().vocab_size()));
  v1::StatusResponse status;
  ASSERT_TRUE(stub->Status(&c4, {}, &status).ok());
  EXPECT_EQ(status.state(), "degraded");
  EXPECT_EQ(status.workers(0).restarts(), 3u);
  EXPECT_EQ(status.workers(0).pid(), 42);
  EXPECT_EQ(status.requests(), 11u);
  EXPECT_EQ(status.tokens(), 12u);
  EXPECT_EQ(status.facts().at("device"), "cpu");
  EXPECT_FALSE(status.version().empty());
}

}  // namespace
}  // namespace lode
