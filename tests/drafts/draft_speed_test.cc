// What drafts bring on this machine, for code, chat and prose: share of drafts that hold, tokens per
// window, speed beside plain decoding. Prints figures; judges only what no load can change (answers,
// and that windows give more than one token). docs/design/drafts.md quotes a run on an idle machine.
#include <gtest/gtest.h>

#include <cstdio>

#include "shared/shm/wait_word.h"
#include "tests/bits/answers.h"
#include "tests/bits/engine_stack.h"
#include "tests/support/places.h"

namespace lode {
namespace {

constexpr uint32_t kTokens = 96, kTokensOfACard = 400;
constexpr struct {
  const char* kind;
  const char* prompt;
} kTexts[] = {
    {"code",
     "import os\n\n\ndef read_file(path):\n    \"\"\"Read a text file and return its content.\"\"\"\n"},
    {"chat",
     "<|im_start|>user\nWrite a Python function is_even that returns True if the number is "
     "even.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"},
    {"prose", "The server reads its configuration file when it starts. If the file"},
};

class DraftSpeed : public ::testing::Test {
 protected:
  void SetUp() override {
    source_ = std::move(*ModelSource::Open(FindBitsModel("demo")->description));
    data_ = *source_->tokenizer();
    tokenizer_ = std::move(*Tokenizer::Create(data_));
    auto stack = EngineStack::Start(*source_, *tokenizer_, {.cpu_workers = 1, .threads = MeasuredThreads()});
    ASSERT_TRUE(stack.ok()) << stack.status();
    stack_ = std::move(*stack);
    ASSERT_TRUE(stack_->UseBestIsa(1).ok());
  }

  struct Answer {
    std::vector<int32_t> tokens;
    RequestUsage usage;
    double rate = 0;  // tokens per second of decoding
  };
  Answer Ask(const char* prompt, float temperature, const DraftOptions& drafts) {
    Request request;
    request.id = "speed";
    request.prompt = tokenizer_->Encode(prompt, true).value();
    request.sampling.top_p = 0.8f;
    request.sampling.top_k = 20;
    request.sampling.temperature = temperature;
    request.sampling.repetition_penalty = 1;
    request.sampling.seed = 11;
    request.max_tokens = TestDevice() == "cuda" ? kTokensOfACard : kTokens;
    request.drafts = drafts;
    auto stream = stack_->scheduler().Submit(std::move(request));
    EXPECT_TRUE(stream.ok()) << stream.status();
    Answer answer;
    StreamEvent event;
    const uint64_t deadline = NowNs() + 240'000'000'000ull;
    do {
      event = {};
      if (!(*stream)->Pop(&event, deadline)) {
        ADD_FAILURE() << "no answer in time";
        return answer;
      }
      for (const TokenOut& token : event.tokens) answer.tokens.push_back(token.id);
    } while (!event.finish);
    answer.usage = event.finish->usage;
    answer.rate = (answer.usage.completion_tokens - 1) /
                  (static_cast<double>(answer.usage.decode_ns) * 1e-9);
    return answer;
  }

  std::unique_ptr<ModelSource> source_;
  TokenizerData data_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<EngineStack> stack_;
};

TEST_F(DraftSpeed, CodeChatProse) {
  for (const auto& text : kTexts) {
    for (const float temperature : {0.0f, 0.7f}) {
      const Answer plain = Ask(text.prompt, temperature, {});
      for (const bool coupled : {false, true}) {
        if (coupled && temperature == 0) continue;  // greedy: the same guesses
        DraftOptions drafts;
        drafts.max = kDraftsMax;
        drafts.coupled = coupled;
        const Answer drafted = Ask(text.prompt, temperature, drafts);
        EXPECT_EQ(drafted.tokens, plain.tokens) << text.kind;
        const RequestUsage& u = drafted.usage;
        const double windows = static_cast<double>(u.completion_tokens) / u.decode_windows;
        EXPECT_GT(windows, 1.0) << text.kind;
        std::printf(
            "figure: drafts, %-5s temperature %.1f%s: %u of %u held (first depth %u of %u), %.2f "
            "tokens per window, %.1f tokens/s, without %.1f, speed-up %.2f\n",
            text.kind, temperature, coupled ? " coupled" : "        ", u.accepted_draft_tokens,
            u.drafted_tokens, u.drafts_held[0][1] + u.drafts_held[1][1],
            u.drafts_offered[0][1] + u.drafts_offered[1][1], windows, drafted.rate, plain.rate,
            drafted.rate / plain.rate);
      }
    }
  }
}

}  // namespace
}  // namespace lode
