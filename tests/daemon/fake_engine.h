// An engine without a model: every admitted request gets a thread that runs a script on its stream.
// Tests set the script; the default answers as the real engine would, in the same order of events.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "daemon/request.h"
#include "shared/shm/wait_word.h"

namespace lode {

class FakeEngine final : public Engine {
 public:
  using Script = std::function<void(const Request&, RequestStream&)>;
  static constexpr uint32_t kContext = 64;

  ~FakeEngine() override { Join(); }

  StatusOr<std::shared_ptr<RequestStream>> Submit(Request request) override {
    if (before_submit) before_submit();
    std::lock_guard lock(mutex_);
    if (!refusal_.ok()) return refusal_;
    auto stream = std::make_shared<RequestStream>();
    requests_.push_back(request);
    threads_.emplace_back(
        [script = script_, request = std::move(request), stream] { script(request, *stream); });
    return stream;
  }
  EngineSnapshot Snapshot() const override {
    std::lock_guard lock(mutex_);
    return snapshot_;
  }
  uint32_t context() const override { return kContext; }

  std::function<void()> before_submit;  // set before any request; any preparation thread

  void SetScript(Script script) {
    std::lock_guard lock(mutex_);
    script_ = std::move(script);
  }
  void SetRefusal(Status refusal) {
    std::lock_guard lock(mutex_);
    refusal_ = std::move(refusal);
  }
  void SetSnapshot(EngineSnapshot snapshot) {
    std::lock_guard lock(mutex_);
    snapshot_ = std::move(snapshot);
  }
  size_t submitted() const {
    std::lock_guard lock(mutex_);
    return requests_.size();
  }
  Request last() const {
    std::lock_guard lock(mutex_);
    return requests_.back();
  }
  void Join() {
    std::vector<std::thread> threads;
    {
      std::lock_guard lock(mutex_);
      threads.swap(threads_);
    }
    for (std::thread& thread : threads) thread.join();
  }

  // -- parts of scripts --
  static StreamEvent Text(std::string text, int32_t id = 1) {
    StreamEvent event;
    event.text = std::move(text);
    event.tokens.push_back({id, -0.5f, {}});
    return event;
  }
  static StreamEvent End(FinishReason reason, const Request& request, uint32_t tokens) {
    StreamEvent event;
    event.finish.emplace();
    event.finish->reason = reason;
    event.finish->seed = request.sampling.seed;
    event.finish->logits_hash = request.hash_logits ? 0xabcdef : 0;
    RequestUsage& usage = event.finish->usage;
    usage.prompt_tokens = static_cast<uint32_t>(request.prompt.size());
    usage.completion_tokens = tokens;
    usage.lookups[0] = 6;
    usage.lookups[1] = 1;
    usage.lookups[2] = 3;
    usage.decode_ns = 2'000'000'000;
    usage.timing.windows = tokens;
    usage.timing.stage_ns[0] = 1'000'000;
    return event;
  }
  // "0 1 2 ..." up to max_tokens, then the end.
  static void Count(const Request& request, RequestStream& stream) {
    if (request.prompt_logprobs) {
      StreamEvent event;
      for (int32_t id : request.prompt) event.prompt_tokens.push_back({id, -1.25f, {}});
      event.prompt_argmax = request.prompt;
      stream.Push(std::move(event));
    }
    for (uint32_t i = 0; i < request.max_tokens; ++i) {
      if (stream.cancelled()) {
        stream.Push(End(FinishReason::kCancelled, request, i));
        return;
      }
      StreamEvent event = Text(fmt::format("{} ", i), static_cast<int32_t>(i));
      if (request.want_logprobs) {
        for (uint32_t k = 0; k < request.top_logprobs; ++k)
          event.tokens[0].top.push_back({static_cast<int32_t>(k), -1.0f - static_cast<float>(k)});
      }
      stream.Push(std::move(event));
    }
    stream.Push(End(FinishReason::kLength, request, request.max_tokens));
  }
  // Goes on until the reader cancels; false when it did not within the time.
  static bool AwaitCancel(const RequestStream& stream, std::chrono::seconds limit) {
    const auto end = std::chrono::steady_clock::now() + limit;
    while (!stream.cancelled()) {
      if (std::chrono::steady_clock::now() > end) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }

 private:
  mutable std::mutex mutex_;  // guards all
  Script script_ = &FakeEngine::Count;
  Status refusal_;
  EngineSnapshot snapshot_;
  std::vector<Request> requests_;
  std::vector<std::thread> threads_;
};

}  // namespace lode
