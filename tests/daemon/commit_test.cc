// Commit: rows to tokens, text and the end of an answer, including drafts and stop strings over
// token borders.
#include "daemon/commit.h"

#include <gtest/gtest.h>

#include "daemon/window_planner.h"
#include "tests/daemon/tokenizer_fixture.h"

namespace lode {
namespace {

constexpr uint32_t kVocab = 256;

const Tokenizer& Bytes() {  // token id = byte
  static const auto tokenizer = SmallVocabulary().Make().value();
  return *tokenizer;
}

Request MakeRequest(const std::string& prompt, uint32_t max_tokens) {
  Request request;
  for (const char c : prompt) request.prompt.push_back(static_cast<uint8_t>(c));
  request.max_tokens = max_tokens;
  request.sampling.top_p = 1;
  request.sampling.repetition_penalty = 1;
  return request;
}

std::unique_ptr<Sequence> Make(Request request) {
  auto made = Sequence::Create(std::move(request), std::make_shared<RequestStream>(), &Bytes(), 1);
  EXPECT_TRUE(made.ok()) << made.status();
  return std::move(*made);
}

// Plans `n` rows, lets the last one pick `token`, commits.
Committed Step(Sequence* sequence, uint32_t n, int32_t token) {
  WindowPlan plan = {};
  AppendRows(*sequence, n, &plan);
  WindowResult result = {};
  for (uint32_t i = 0; i < n; ++i) {
    result.rows[i].token = plan.rows[i].pick ? token : -1;
    result.rows[i].logits_hash = 100 + static_cast<uint64_t>(token);
    result.rows[i].argmax = static_cast<int32_t>(plan.rows[i].position);
    result.rows[i].target_logprob = -static_cast<float>(plan.rows[i].position + 1);
    result.rows[i].lookups[1] = 2;
  }
  return CommitRows(plan, result, 0, kVocab, 10, sequence);
}

TEST(Commit, PromptThenTokensThenLength) {
  auto sequence = Make(MakeRequest("abc", 2));
  EXPECT_FALSE(sequence->decoding());
  Committed done = Step(sequence.get(), 2, 'x');
  EXPECT_FALSE(done.has_event);
  EXPECT_EQ(done.prompt_rows, 2u);
  done = Step(sequence.get(), 1, 'x');
  EXPECT_EQ(done.event.text, "x");
  EXPECT_FALSE(done.event.finish);
  EXPECT_TRUE(sequence->decoding());
  EXPECT_EQ(sequence->last_accepted, 1u);
  done = Step(sequence.get(), 1, 'y');
  EXPECT_EQ(done.event.text, "y");
  ASSERT_TRUE(done.event.finish);
  EXPECT_EQ(done.event.finish->reason, FinishReason::kLength);
  EXPECT_EQ(done.event.finish->usage.completion_tokens, 2u);
  EXPECT_EQ(done.event.finish->usage.lookups[1], 8u);
}

TEST(Commit, StopStringOverTokenBordersNeverLeaksItsStart) {
  Request request = MakeRequest("p", 100);
  request.stop = {"own fox"};
  auto sequence = Make(std::move(request));
  std::string text;
  const std::string answer = "a brown fox jumps";
  Committed done;
  for (const char c : answer) {
    done = Step(sequence.get(), 1, c);
    text += done.event.text;
    if (done.event.finish) break;
  }
  ASSERT_TRUE(done.event.finish);
  EXPECT_EQ(done.event.finish->reason, FinishReason::kStop);
  EXPECT_EQ(done.event.finish->stop_string, "own fox");
  EXPECT_EQ(text, "a br");
  EXPECT_EQ(sequence->answer_size(), 11u);  // "a brown fox"
}

TEST(Commit, HeldTextComesOutWhenTheAnswerEndsOtherwise) {
  Request request = MakeRequest("p", 3);
  request.stop = {"own fox"};
  auto sequence = Make(std::move(request));
  std::string text;
  for (const char c : std::string("own")) text += Step(sequence.get(), 1, c).event.text;
  EXPECT_EQ(text, "own");
  request = MakeRequest("p", 9);
  request.stop = {"own fox"};
  sequence = Make(std::move(request));
  EXPECT_EQ(Step(sequence.get(), 1, 'o').event.text, "");
  EXPECT_EQ(FinishNow(sequence.get(), FinishReason::kCancelled, OkStatus(), 20).text, "o");
}

TEST(Commit, StopTokenIsNoText) {
  Request request = MakeRequest("p", 9);
  request.stop_tokens = {'!'};
  auto sequence = Make(std::move(request));
  EXPECT_EQ(Step(sequence.get(), 1, 'k').event.text, "k");
  const Committed done = Step(sequence.get(), 1, '!');
  ASSERT_TRUE(done.event.finish);
  EXPECT_EQ(done.event.finish->reason, FinishReason::kStop);
  EXPECT_EQ(done.event.text, "");
  EXPECT_EQ(done.event.finish->stop_string, "");
}

TEST(Commit, HalfACharacterIsHeldAndReplacedAtTheEnd) {
  auto sequence = Make(MakeRequest("p", 2));
  EXPECT_EQ(Step(sequence.get(), 1, 0xE4).event.text, "");
  EXPECT_EQ(Step(sequence.get(), 1, 0xB8).event.text, "\xEF\xBF\xBD");
}

TEST(Commit, HashIsAChainOverAnswerRows) {
  Request request = MakeRequest("pq", 2);
  request.hash_logits = true;
  auto sequence = Make(std::move(request));
  Step(sequence.get(), 2, 'a');
  const Committed done = Step(sequence.get(), 1, 'b');
  EXPECT_EQ(done.event.finish->logits_hash,
            ChainLogitsHash(ChainLogitsHash(0, 100 + 'a'), 100 + 'b'));
  EXPECT_NE(ChainLogitsHash(ChainLogitsHash(0, 1), 2), ChainLogitsHash(ChainLogitsHash(0, 2), 1));
}

TEST(Commit, PromptLogprobsAreReportedOnce) {
  Request request = MakeRequest("abcd", 0);
  request.prompt_logprobs = true;
  auto sequence = Make(std::move(request));
  EXPECT_FALSE(Step(sequence.get(), 3, 0).has_event);
  sequence->StartOver(9);  // the worker died: rows run again, nothing is reported twice
  EXPECT_FALSE(Step(sequence.get(), 2, 0).has_event);
  const Committed done = Step(sequence.get(), 2, 0);
  ASSERT_EQ(done.event.prompt_tokens.size(), 4u);
  EXPECT_EQ(done.event.prompt_argmax, (std::vector<int32_t>{0, 1, 2, 3}));
  for (uint32_t i = 1; i < 4; ++i)
    EXPECT_EQ(done.event.prompt_tokens[i].logprob, -static_cast<float>(i));
  EXPECT_EQ(done.event.prompt_tokens[2].id, 'c');
  ASSERT_TRUE(done.event.finish);
  EXPECT_EQ(done.event.finish->reason, FinishReason::kLength);
}

TEST(Commit, LongPromptsAreReportedInParts) {
  const size_t n = 2 * kPromptPartRows + 13;
  Request request = MakeRequest(std::string(n, 'x'), 0);
  request.prompt_logprobs = true;
  auto sequence = Make(std::move(request));
  std::vector<int32_t> argmax;
  size_t tokens = 0, events = 0;
  bool restarted = false;
  for (size_t done = 0; done < n;) {
    if (!restarted && done > kPromptPartRows + 5) {  // the worker dies: nothing is reported twice
      sequence->StartOver(9);
      restarted = true;
    }
    const uint32_t rows = static_cast<uint32_t>(std::min<size_t>(5, n - sequence->rows_done));
    const Committed out = Step(sequence.get(), rows, 0);
    done = sequence->rows_done;
    events += out.has_event;
    tokens += out.event.prompt_tokens.size();
    argmax.insert(argmax.end(), out.event.prompt_argmax.begin(), out.event.prompt_argmax.end());
    EXPECT_LE(out.event.prompt_tokens.size(), kPromptPartRows + kWindowRowsMax);
  }
  EXPECT_EQ(events, 3u);
  EXPECT_EQ(tokens, n);
  ASSERT_EQ(argmax.size(), n);
  for (size_t i = 0; i < n; ++i) EXPECT_EQ(argmax[i], static_cast<int32_t>(i));
}

TEST(Commit, DraftsCountOnlyWhileTheyArePicked) {
  auto sequence = Make(MakeRequest("p", 9));
  Step(sequence.get(), 1, 'a');
  // Rows: decode 'a' picks 'b'; draft 'b' picks 'c'; draft 'x' (wrong) picks 'y'; draft 'y' hangs
  // on the wrong one.
  WindowPlan plan = {};
  AppendRows(*sequence, 1, &plan);
  const int32_t drafts[3] = {'b', 'x', 'y'}, picks[4] = {'b', 'c', 'y', 'z'};
  WindowResult result = {};
  for (uint32_t i = 0; i < 4; ++i) {
    if (i > 0) {
      plan.rows[i] = plan.rows[0];
      plan.rows[i].kind = RowKind::kDraft;
      plan.rows[i].position = plan.rows[0].position + i;
      plan.rows[i].token = drafts[i - 1];
    }
    result.rows[i].token = picks[i];
  }
  plan.n_rows = 4;
  const Committed done = CommitRows(plan, result, 0, kVocab, 10, sequence.get());
  EXPECT_EQ(done.event.text, "bc");
  EXPECT_EQ(sequence->last_accepted, 2u);
  EXPECT_EQ(sequence->rows_done, 3u);
  EXPECT_EQ(sequence->usage.drafted_tokens, 3u);
  EXPECT_EQ(sequence->usage.accepted_draft_tokens, 1u);
}

TEST(Commit, TokenOutsideTheVocabularyFailsTheSequence) {
  for (const int32_t bad : {-1, static_cast<int32_t>(kVocab), 1 << 30}) {
    auto sequence = Make(MakeRequest("p", 9));
    const Committed done = Step(sequence.get(), 1, bad);
    ASSERT_TRUE(done.event.finish);
    EXPECT_EQ(done.event.finish->reason, FinishReason::kError);
    EXPECT_EQ(sequence->answer_size(), 0u);
  }
}

TEST(Commit, UnusableStopStringIsRefused) {
  Request request = MakeRequest("p", 9);
  request.stop = {""};
  EXPECT_FALSE(
      Sequence::Create(std::move(request), std::make_shared<RequestStream>(), &Bytes(), 1).ok());
}

}  // namespace
}  // namespace lode
