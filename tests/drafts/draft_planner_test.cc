// The glue between sequences and the draft policy, window by window without an engine: drafts that
// are there anyway are tried again after they ceased to pay, a fixed number is always verified, a
// window's room is not exceeded, and replayed drafts are right as often as was asked for.
#include "daemon/draft_planner.h"

#include <gtest/gtest.h>

#include "tests/daemon/tokenizer_fixture.h"

namespace lode {
namespace {

constexpr uint32_t kAnswer = 2000;

const Tokenizer& Bytes() {  // token id = byte
  static const auto tokenizer = SmallVocabulary().Make().value();
  return *tokenizer;
}

class DraftPlannerTest : public ::testing::Test {
 protected:
  // A sequence that decodes, its answer known; `right` of its drafts are.
  std::unique_ptr<Sequence> Decoding(double right, bool fixed, std::vector<uint8_t> turns = {}) {
    Request request;
    request.prompt = {76};
    request.max_tokens = kAnswer;
    request.sampling.top_p = 1;
    request.sampling.repetition_penalty = 1;
    auto replay = std::make_shared<ReplayDrafts>();
    for (uint32_t i = 0; i < kAnswer; ++i) replay->answer.push_back(static_cast<int32_t>(i % 50));
    replay->right = right;
    replay->turns = std::move(turns);
    request.drafts.replay = replay;
    request.drafts.max = kDraftsMax;
    request.drafts.fixed = fixed;
    auto made =
        Sequence::Create(std::move(request), std::make_shared<RequestStream>(), &Bytes(), 1);
    EXPECT_TRUE(made.ok()) << made.status();
    std::unique_ptr<Sequence> sequence = std::move(*made);
    sequence->tokens.push_back(0);
    sequence->usage.decode_windows = 1;  // the prompt's, which gave that token
    sequence->rows_done = static_cast<uint32_t>(sequence->tokens.size()) - 1;
    return sequence;
  }

  // One window of all sequences, whose rows cost as many ms as there are; the drafts verified of
  // each.
  std::vector<uint32_t> Window(const std::vector<std::unique_ptr<Sequence>>& sequences) {
    std::vector<Sequence*> all;
    std::vector<RowShare> shares;
    for (const auto& sequence : sequences) {
      shares.push_back({static_cast<uint32_t>(all.size()), 1});
      all.push_back(sequence.get());
    }
    planner_.Choose(all, shares, kWindowRowsMax);
    WindowPlan plan = {};
    WindowResult result = {};
    std::vector<uint32_t> verified;
    for (uint32_t i = 0; i < all.size(); ++i) {
      Sequence& sequence = *all[i];
      const std::vector<int32_t>& offered = sequence.drafts.offered;
      const auto n = static_cast<uint32_t>(offered.size()), at = sequence.answer_size();
      uint32_t held = 0;
      while (held < n && ReplayIsRight(*sequence.request.drafts.replay, at + held)) ++held;
      plan.n_rows += 1 + n;
      verified.push_back(n);
      for (uint32_t t = 0; t <= held; ++t)
        sequence.tokens.push_back(sequence.request.drafts.replay->answer[at + t]);
      sequence.rows_done += held + 1;
      ++sequence.usage.decode_windows;
      planner_.Observe(result, i, held, false, &sequence, &counters_);
    }
    for (uint32_t r = 0; r < plan.n_rows; ++r) plan.rows[r].kind = RowKind::kDecode;
    planner_.ObserveWindow(plan, result, plan.n_rows * 1'000'000ull, &counters_);
    return verified;
  }

  DraftPlanner planner_{DraftSetup()};
  EngineCounters counters_;
};

TEST_F(DraftPlannerTest, DraftsThatDoNotPayAreTriedNowAndThen) {
  std::vector<std::unique_ptr<Sequence>> one;
  one.push_back(Decoding(0, false));
  for (int w = 0; w < 60; ++w) Window(one);
  uint32_t tried = 0, drafts = 0;
  for (int w = 0; w < 256; ++w) {
    const uint32_t n = Window(one)[0];
    tried += n > 0 ? 1 : 0;
    drafts += n;
  }
  EXPECT_EQ(tried, 256 / PolicyConstants().explore_every);
  EXPECT_LE(drafts, tried + 1);  // one of them was a far one
}

TEST_F(DraftPlannerTest, AFixedNumberIsAlwaysVerified) {
  std::vector<std::unique_ptr<Sequence>> one;
  one.push_back(Decoding(0, true));
  for (int w = 0; w < 20; ++w) EXPECT_EQ(Window(one)[0], kDraftsMax);
}

// Replayed drafts may be given in turns: so many in the first window with drafts, and so on.
TEST_F(DraftPlannerTest, ReplayedTurnsAreKept) {
  std::vector<std::unique_ptr<Sequence>> one;
  one.push_back(Decoding(0.5, true, {3, 0, 7, 1}));
  for (const uint32_t turn : {3u, 0u, 7u, 1u, 3u, 0u, 7u, 1u}) EXPECT_EQ(Window(one)[0], turn);
}

// Also when all of them want to try a draft.
TEST_F(DraftPlannerTest, SeveralSequencesShareTheRoom) {
  for (const uint32_t n : {3u, 7u, 8u}) {
    std::vector<std::unique_ptr<Sequence>> all;
    for (uint32_t i = 0; i < n; ++i) all.push_back(Decoding(i % 2 == 0 ? 0.9 : 0, false));
    for (int w = 0; w < 100; ++w) {
      uint32_t rows = n;
      for (const uint32_t drafts : Window(all)) rows += drafts;
      ASSERT_LE(rows, kWindowRowsMax) << n << " sequences, window " << w;
    }
  }
}

TEST(ReplayedDrafts, EveryStretchHasItsShare) {
  for (const double right : {0.0, 0.5, 0.7, 0.87, 1.0}) {
    ReplayDrafts replay;
    replay.right = right;
    uint32_t all = 0;
    for (uint32_t run = 0; run < 10; ++run) {
      uint32_t n = 0;
      for (uint32_t i = 0; i < kReplayRun; ++i)
        n += ReplayIsRight(replay, run * kReplayRun + i) ? 1 : 0;
      EXPECT_NEAR(n, right * kReplayRun, 1) << right << ", run " << run;
      all += n;
    }
    EXPECT_EQ(all, static_cast<uint32_t>(right * 10 * kReplayRun + 0.5));
  }
}

}  // namespace
}  // namespace lode
