// Calls that end in unusual ways or at unusual times: cancelled, abandoned, not read, cut by a
// shutdown, too many at once. ASan and TSan watch. A real server before a fake engine.
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <future>
#include <thread>

#include "api_fixture.h"
#include "grpc_peers.h"
#include "lode/v1/lode.grpc.pb.h"

namespace lode {
namespace {

using std::chrono::milliseconds;

TEST_F(ApiTest, ClientCancelReachesTheSequence) {
  std::promise<bool> cancelled;
  engine_.SetScript([&](const Request& request, RequestStream& stream) {
    stream.Push(FakeEngine::Text("a"));
    cancelled.set_value(FakeEngine::AwaitCancel(stream, kLimit));
    stream.Push(FakeEngine::End(FinishReason::kCancelled, request, 1));
  });
  ASSERT_TRUE(Start().ok());
  auto stub = Stub();
  grpc::ClientContext call;
  SetDeadline(&call);
  auto reader = stub->Generate(&call, Fine());
  v1::GenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  call.TryCancel();
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(cancelled.get_future().get());
  engine_.SetScript(&FakeEngine::Count);
  ExpectServes();
}

TEST_F(ApiTest, ClientDeadlineCancelsWithoutAnyEvent) {
  std::promise<bool> cancelled;
  engine_.SetScript([&](const Request&, RequestStream& stream) {
    cancelled.set_value(FakeEngine::AwaitCancel(stream, kLimit));  // and never an event
  });
  ASSERT_TRUE(Start().ok());
  auto stub = Stub();
  grpc::ClientContext call;
  SetDeadline(&call, milliseconds(3000));  // the request must have come through by then
  auto reader = stub->Generate(&call, Fine());
  v1::GenerateResponse response;
  EXPECT_FALSE(reader->Read(&response));
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
  EXPECT_TRUE(cancelled.get_future().get());
}

// Cancelling at every moment: before, while and after the request is prepared. ASan and TSan watch.
TEST_F(ApiTest, CancelAtAnyMoment) {
  engine_.SetScript([](const Request& request, RequestStream& stream) {
    for (int i = 0; i < 50 && !stream.cancelled(); ++i) {
      stream.Push(FakeEngine::Text("x"));
      if (i % 8 == 0) std::this_thread::yield();
    }
    stream.Push(FakeEngine::End(FinishReason::kCancelled, request, 1));
  });
  ASSERT_TRUE(Start().ok());
  std::vector<std::thread> clients;
  for (int c = 0; c < 4; ++c) {
    clients.emplace_back([this, c] {
      auto stub = Stub();
      for (int i = 0; i < 60; ++i) {
        grpc::ClientContext call;
        SetDeadline(&call);
        auto reader = stub->Generate(&call, Fine());
        std::this_thread::sleep_for(std::chrono::microseconds((i * 37 + c * 101) % 2000));
        call.TryCancel();
        v1::GenerateResponse response;
        while (reader->Read(&response)) {
        }
        reader->Finish();
      }
    });
  }
  for (std::thread& client : clients) client.join();
  engine_.SetScript(&FakeEngine::Count);
  ExpectServes();
}

TEST_F(ApiTest, SlowReaderHoldsBackOnlyItself) {
  std::atomic<uint64_t> pushed{0};
  std::promise<void> filled;
  engine_.SetScript([&](const Request& request, RequestStream& stream) {
    if (request.max_tokens != 7) return FakeEngine::Count(request, stream);
    // Pause as the scheduler does: 64 KiB an event overruns the transport's window at once.
    while (stream.Push(FakeEngine::Text(std::string(65536, 'x')))) ++pushed;
    filled.set_value();
    FakeEngine::AwaitCancel(stream, kLimit);
  });
  ASSERT_TRUE(Start().ok());
  auto stub = Stub();
  grpc::ClientContext slow;
  SetDeadline(&slow);
  auto reader = stub->Generate(&slow, Fine(7));
  filled.get_future().get();
  EXPECT_LT(pushed.load(), 2000u);  // bounded by the buffer and the transport
  for (int i = 0; i < 5; ++i) ExpectServes();
  slow.TryCancel();
  v1::GenerateResponse response;
  while (reader->Read(&response)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

// While both preparation threads are busy, waiting requests are bounded; cheap calls still answer.
TEST_F(ApiTest, PreparationIsBounded) {
  std::promise<void> go;
  std::atomic<int> inside{0};
  engine_.before_submit = [&inside, gate = go.get_future().share()] {
    ++inside;
    gate.wait();
  };
  ASSERT_TRUE(Start().ok());
  auto stub = Stub();
  std::vector<std::thread> busy;
  for (int i = 0; i < 2; ++i) busy.emplace_back([this] { ExpectServes(); });
  while (inside < 2) std::this_thread::sleep_for(milliseconds(1));  // ctest bounds it
  struct Call {
    grpc::ClientContext context;
    v1::TokenizeRequest request;
    v1::TokenizeResponse response;
    std::promise<grpc::StatusCode> code;
  };
  std::vector<std::unique_ptr<Call>> calls;
  for (int i = 0; i < 400; ++i) {
    Call* call = calls.emplace_back(std::make_unique<Call>()).get();
    SetDeadline(&call->context);
    call->request.set_text("Hello");
    stub->async()->Tokenize(&call->context, &call->request, &call->response,
                            [call](grpc::Status s) { call->code.set_value(s.error_code()); });
  }
  // The last one is refused at once, though nothing moves.
  EXPECT_EQ(calls.back()->code.get_future().get(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  calls.pop_back();
  grpc::ClientContext call;
  SetDeadline(&call);
  v1::StatusResponse status;
  EXPECT_TRUE(stub->Status(&call, {}, &status).ok());
  go.set_value();
  int ok = 0;
  for (auto& c : calls) ok += c->code.get_future().get() == grpc::StatusCode::OK;
  EXPECT_GE(ok, 200);
  EXPECT_LT(ok, 260);
  for (std::thread& thread : busy) thread.join();
  ExpectServes();
}

// Long messages have a thread of their own: whatever it does, others do not wait for it.
TEST_F(ApiTest, LongMessagesBlockNobodyElse) {
  std::promise<void> go;
  std::atomic<bool> hold{true};
  std::atomic<int> held{0};
  engine_.before_submit = [&, gate = go.get_future().share()] {
    if (!hold) return;
    ++held;
    gate.wait();
  };
  ASSERT_TRUE(Start().ok());
  v1::GenerateRequest request = Fine();  // long by a field that nobody knows
  request.GetReflection()->MutableUnknownFields(&request)->AddLengthDelimited(
      1000, std::string(300 * 1024, 'x'));
  std::vector<std::thread> clients;
  for (int i = 0; i < 3; ++i) {
    clients.emplace_back([this, &request] {
      auto stub = Stub();
      EXPECT_EQ(Generate(*stub, request).text, "0 1 2 ");
    });
  }
  while (held < 1) std::this_thread::sleep_for(milliseconds(1));  // ctest bounds it
  hold = false;
  for (int i = 0; i < 5; ++i) ExpectServes();
  EXPECT_EQ(held, 1);
  go.set_value();
  for (std::thread& client : clients) client.join();
}

TEST_F(ApiTest, ShutdownLetsStreamsEndAndRefusesNewOnes) {
  std::promise<void> go;
  std::shared_future<void> gate = go.get_future().share();
  engine_.SetScript([gate](const Request& request, RequestStream& stream) {
    stream.Push(FakeEngine::Text("first "));
    gate.wait();
    stream.Push(FakeEngine::Text("last"));
    stream.Push(FakeEngine::End(FinishReason::kLength, request, 2));
  });
  ASSERT_TRUE(Start().ok());
  auto stub = Stub();
  grpc::ClientContext call;
  SetDeadline(&call);
  auto reader = stub->Generate(&call, Fine());
  v1::GenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  std::thread stopper([&] { server_->Shutdown(NowNs() + 600'000'000'000ull); });  // ctest bounds it
  // Not serving any more: from here on new ones are refused, while the old one still runs.
  const auto channel = Channel("unix:" + options_.socket);
  while (HealthOf(channel, "") == "SERVING") std::this_thread::sleep_for(milliseconds(1));
  const Answer refused = Generate(*stub, Fine());
  EXPECT_EQ(refused.status.error_code(), grpc::StatusCode::UNAVAILABLE);
  go.set_value();
  std::string text = response.delta().text();
  while (reader->Read(&response)) text += response.delta().text();
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(text, "first last");
  stopper.join();
  EXPECT_FALSE(std::filesystem::exists(options_.socket));
}

TEST_F(ApiTest, ShutdownCutsWhatDoesNotEnd) {
  std::promise<bool> cancelled;
  engine_.SetScript([&](const Request&, RequestStream& stream) {
    stream.Push(FakeEngine::Text("x"));
    cancelled.set_value(FakeEngine::AwaitCancel(stream, kLimit));
  });
  ASSERT_TRUE(Start().ok());
  auto stub = Stub();
  grpc::ClientContext call;
  SetDeadline(&call);
  auto reader = stub->Generate(&call, Fine());
  v1::GenerateResponse response;
  ASSERT_TRUE(reader->Read(&response));
  server_->Shutdown(NowNs() + 100'000'000);
  EXPECT_FALSE(reader->Read(&response));
  EXPECT_FALSE(reader->Finish().ok());
  EXPECT_TRUE(cancelled.get_future().get());
}

}  // namespace
}  // namespace lode
