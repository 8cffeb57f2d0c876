// No draft changes a bit. The real engine (supervisor, scheduler, worker processes) answers greedy
// and drawn requests of one to four clients at once, with drafts of each source, depth and way of
// guessing; every answer's tokens and logits hash must be those of the in-process engine, which
// knows no drafts. Which combinations: every triple of values of any three factors
// (tests/bits/combinations.h).
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdio>
#include <cstdlib>

#include "shared/shm/wait_word.h"
#include "tests/bits/answers.h"
#include "tests/bits/combinations.h"
#include "tests/bits/engine_stack.h"

namespace lode {
namespace {

constexpr uint32_t kAnswerTokens = 24;
constexpr const char* kPrompts[] = {
    "def read_lines(path):\n    \"\"\"Return the lines of a text file.\"\"\"\n    with",
    "x = 1\ny = 1\nx = 1\ny = 1\nx = 1\ny =",
    "The operating system is the program that",
    "<|im_start|>user\nCount to ten.<|im_end|>\n<|im_start|>assistant\n",
};
constexpr uint32_t kClientsMax = 4;
static_assert(std::size(kPrompts) == kClientsMax);

constexpr const char* kSources[] = {"head", "lookup", "both"};
constexpr float kMinP[] = {0, 0.3f, 0.6f, 1};
// Factors: source, depth 1..7, coupled, min-p, policy, clients 1..4.
const std::vector<uint32_t> kFactors = {3, 7, 2, 4, 2, kClientsMax};

DraftOptions DraftsOf(const Combination& c) {
  DraftOptions drafts;
  drafts.head = c[0] != 1;
  drafts.lookup = c[0] != 0;
  drafts.max = c[1] + 1;
  drafts.coupled = c[2] != 0;
  drafts.min_p = kMinP[c[3]];
  drafts.fixed = c[4] != 0;
  return drafts;
}

struct Answer {
  std::vector<int32_t> tokens;
  uint64_t hash = 0;
  RequestUsage usage;
};

class DraftMatrix : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    const std::string model = FindBitsModel("demo")->description;
    auto source = ModelSource::Open(model);
    ASSERT_TRUE(source.ok()) << source.status();
    source_ = std::move(*source);
    auto data = source_->tokenizer();
    ASSERT_TRUE(data.ok()) << data.status();
    auto tokenizer = Tokenizer::Create(*data);
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    tokenizer_ = std::move(*tokenizer);
    auto stack = EngineStack::Start(*source_, *tokenizer_, {.cpu_workers = 1, .threads = 2});
    ASSERT_TRUE(stack.ok()) << stack.status();
    stack_ = std::move(*stack);
    ASSERT_TRUE(stack_->UseBestIsa(1).ok());

    auto engine = LocalEngine::Create(model, {.threads = 2, .context = 512});
    ASSERT_TRUE(engine.ok()) << engine.status();
    for (uint32_t client = 0; client < kClientsMax; ++client) {
      for (const Request& request : RequestsOf(client)) {
        const auto answer = AnswerLocally(**engine, {request}, kWindowRowsMax);
        ASSERT_TRUE(answer.ok()) << answer.status();
        expected_[client].push_back({answer->tokens[0], answer->logits_hash[0], {}});
      }
    }
  }
  static void TearDownTestSuite() {
    stack_.reset();
    tokenizer_.reset();
    source_.reset();
  }

  // Greedy, and drawn through every filter and penalty.
  static std::vector<Request> RequestsOf(uint32_t client) {
    BitsModel model = *FindBitsModel("demo");
    model.prompt = kPrompts[client];
    model.answer_tokens = kAnswerTokens;
    std::vector<Request> requests = BitsRequests(model, *tokenizer_);
    requests[1].sampling.seed += client;
    return requests;
  }

  static Answer Read(RequestStream* stream) {
    Answer answer;
    StreamEvent event;
    const uint64_t deadline = NowNs() + 120'000'000'000ull;
    while (true) {
      event = {};
      if (!stream->Pop(&event, deadline)) {
        ADD_FAILURE() << "no answer in time";
        return answer;
      }
      for (const TokenOut& token : event.tokens) answer.tokens.push_back(token.id);
      if (!event.finish) continue;
      EXPECT_EQ(event.finish->reason, FinishReason::kLength) << Message(event.finish->error);
      answer.hash = event.finish->logits_hash;
      answer.usage = event.finish->usage;
      return answer;
    }
  }

  // Clients 0..n-1 at once, alternately greedy and drawn.
  static std::vector<Answer> Ask(const DraftOptions& drafts, uint32_t clients, uint32_t turn) {
    std::vector<std::shared_ptr<RequestStream>> streams;
    for (uint32_t client = 0; client < clients; ++client) {
      Request request = RequestsOf(client)[(client + turn) % 2];
      request.drafts = drafts;
      auto stream = stack_->scheduler().Submit(std::move(request));
      EXPECT_TRUE(stream.ok()) << stream.status();
      streams.push_back(*stream);
    }
    std::vector<Answer> answers;
    for (const auto& stream : streams) answers.push_back(Read(stream.get()));
    return answers;
  }

  static void ExpectAnswers(const std::vector<Answer>& answers, uint32_t turn) {
    for (uint32_t client = 0; client < answers.size(); ++client) {
      const Answer& want = expected_[client][(client + turn) % 2];
      EXPECT_EQ(answers[client].tokens, want.tokens) << "client " << client;
      EXPECT_EQ(answers[client].hash, want.hash) << "client " << client;
    }
  }

  static inline std::unique_ptr<ModelSource> source_;
  static inline std::unique_ptr<Tokenizer> tokenizer_;
  static inline std::unique_ptr<EngineStack> stack_;
  static inline std::vector<Answer> expected_[kClientsMax];  // [client][greedy, drawn]
};

uint32_t Sum(const uint32_t (&counts)[kDraftsMax + 1]) {
  uint32_t sum = 0;
  for (const uint32_t n : counts) sum += n;
  return sum;
}

TEST_F(DraftMatrix, EveryWayOfDraftingGivesTheSameBits) {
  // LODE_DRAFT_PAIRS: only every pair of values, for a busy machine.
  const bool pairs = std::getenv("LODE_DRAFT_PAIRS") != nullptr;
  const std::vector<Combination> list = ChooseCombinations(kFactors, 1, pairs ? 2 : 3);
  uint64_t offered[kDraftSources] = {}, held[kDraftSources] = {};
  for (uint32_t i = 0; i < list.size(); ++i) {
    const Combination& c = list[i];
    const DraftOptions drafts = DraftsOf(c);
    SCOPED_TRACE(fmt::format("source {}, depth {}, coupled {}, min-p {}, fixed {}, {} clients",
                             kSources[c[0]], drafts.max, drafts.coupled, drafts.min_p, drafts.fixed,
                             c[5] + 1));
    const std::vector<Answer> answers = Ask(drafts, c[5] + 1, i);
    ExpectAnswers(answers, i);
    if (HasFailure()) return;
    if (i % 10 == 0) std::fprintf(stderr, "%u of %zu combinations\n", i, list.size());
    uint32_t deepest = 0, by_source[kDraftSources] = {};
    for (const Answer& answer : answers) {
      const RequestUsage& usage = answer.usage;
      EXPECT_EQ(Sum(usage.drafts_offered[0]) + Sum(usage.drafts_offered[1]), usage.drafted_tokens);
      EXPECT_EQ(Sum(usage.drafts_held[0]) + Sum(usage.drafts_held[1]), usage.accepted_draft_tokens);
      for (uint32_t s = 0; s < kDraftSources; ++s) {
        by_source[s] += Sum(answer.usage.drafts_offered[s]);
        held[s] += Sum(answer.usage.drafts_held[s]);
        for (uint32_t depth = 1; depth <= kDraftsMax; ++depth) {
          if (answer.usage.drafts_offered[s][depth] > 0) deepest = std::max(deepest, depth);
        }
      }
    }
    for (uint32_t s = 0; s < kDraftSources; ++s) offered[s] += by_source[s];
    // A combination that silently ran as another one would prove nothing.
    EXPECT_LE(deepest, drafts.max);
    EXPECT_TRUE(drafts.head || by_source[0] == 0);
    EXPECT_TRUE(drafts.lookup || by_source[1] == 0);
    const bool all = drafts.head && !drafts.lookup && drafts.fixed && drafts.min_p == 0;
    EXPECT_TRUE(!all || c[5] > 0 || deepest == drafts.max);
  }
  for (uint32_t s = 0; s < kDraftSources; ++s) {
    std::printf("figure: draft matrix, source %-6s %llu drafts offered, %llu held, %zu combinations\n",
                DraftSourceName(static_cast<DraftSource>(s)),
                static_cast<unsigned long long>(offered[s]), static_cast<unsigned long long>(held[s]),
                list.size());
    EXPECT_GT(offered[s], pairs ? 50u : 300u);
    EXPECT_GT(held[s], pairs ? 10u : 60u);
  }
}

TEST_F(DraftMatrix, DraftsOffIsDraftsOff) {
  for (uint32_t turn = 0; turn < 2; ++turn) {
    DraftOptions drafts;
    const std::vector<Answer> answers = Ask(drafts, kClientsMax, turn);
    ExpectAnswers(answers, turn);
    for (const Answer& answer : answers) {
      EXPECT_EQ(answer.usage.drafted_tokens, 0u);
      EXPECT_EQ(answer.usage.timing.draft_ns, 0u);
    }
  }
}

TEST_F(DraftMatrix, WorkerKilledInMidAnswer) {
  DraftOptions drafts;
  drafts.max = 5;
  drafts.min_p = 0;
  drafts.fixed = true;
  Request request = RequestsOf(0)[1];
  request.drafts = drafts;
  auto stream = stack_->scheduler().Submit(request);
  ASSERT_TRUE(stream.ok()) << stream.status();
  StreamEvent first;
  ASSERT_TRUE((*stream)->Pop(&first, NowNs() + 60'000'000'000ull));
  for (const auto& worker : stack_->scheduler().Snapshot().workers) {
    if (worker.name == "gpu0") kill(worker.pid, SIGKILL);
  }
  const Answer rest = Read(stream->get());
  std::vector<int32_t> tokens;
  for (const TokenOut& token : first.tokens) tokens.push_back(token.id);
  tokens.insert(tokens.end(), rest.tokens.begin(), rest.tokens.end());
  EXPECT_EQ(tokens, expected_[0][1].tokens);
  EXPECT_EQ(rest.hash, expected_[0][1].hash);
}

}  // namespace
}  // namespace lode
