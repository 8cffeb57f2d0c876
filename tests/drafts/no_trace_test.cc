// A rejected draft leaves no trace: the state (all kinds but the draft head's own cells) after
// drafting, rejecting and going on is, at every position, the state of an engine that never drafted.
// Around the borders where something begins anew: KV blocks, index blocks, the selection budget.
#include <gtest/gtest.h>

#include <map>

#include "tests/golden/golden_prompt.h"

namespace lode::testing {
namespace {

constexpr uint32_t kBefore = 6, kBehind = 10;  // positions around a border that are looked at
constexpr uint32_t kBorders[] = {kKvBlockCells, 2 * kKvBlockCells};  // the budget is 512 tokens
constexpr uint32_t kDrafts[] = {1, 3, 4, 7};

std::vector<int32_t> LongPrompt() {
  const StatusOr<GoldenPrompt> g = LoadGolden("q4", "long");
  EXPECT_TRUE(g.ok()) << g.status();
  return g->ids;
}

std::unique_ptr<LocalEngine> Engine(bool drafts) {
  LocalEngineOptions options;
  options.threads = 2;
  options.slots = 2;
  options.context = 768;
  options.drafts = drafts;
  StatusOr<std::unique_ptr<LocalEngine>> engine = LocalEngine::Create(DemoModelPath(), options);
  EXPECT_TRUE(engine.ok()) << engine.status();
  return std::move(*engine);
}

void RunWindow(LocalEngine& engine, const std::vector<LocalRow>& rows) {
  const StatusOr<WindowOutcome> outcome = engine.Run(rows);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  ASSERT_TRUE(outcome->ok());
}

// From an empty slot to `end` accepted positions.
void Feed(LocalEngine& engine, const std::vector<int32_t>& ids, uint32_t end) {
  engine.Restart(1);
  for (uint32_t begin = 0; begin < end; begin += kWindowRowsMax) {
    std::vector<LocalRow> rows;
    for (uint32_t p = begin; p < std::min(begin + kWindowRowsMax, end); ++p)
      rows.push_back({1, p, ids[p], false});
    engine.Commit(1, begin);
    RunWindow(engine, rows);
  }
  engine.Commit(1, end);
}

// A checkpoint: accepted rows folded, then the hash.
uint64_t Checkpoint(LocalEngine& engine) {
  const StatusOr<WindowOutcome> outcome = engine.Flush(1);
  EXPECT_TRUE(outcome.ok() && outcome->ok());
  return engine.state().Hash(1);
}

// The head follows the accepted rows of the last window and chains three wrong guesses behind them.
void FollowAndGuess(LocalEngine& engine, const std::vector<int32_t>& ids, uint32_t first,
                    uint32_t accepted) {
  std::vector<LocalDraftRow> rows;
  for (uint32_t i = 0; i < accepted; ++i)
    rows.push_back({1, first + i, ids[first + i + 1], i, i + 1 == accepted});
  ASSERT_TRUE(engine.Draft(rows, false)->ok());
  for (uint32_t depth = 1; depth <= 3; ++depth) {
    const LocalDraftRow row = {1, first + accepted - 1 + depth, 5, depth == 1 ? accepted - 1 : 0};
    ASSERT_TRUE(engine.Draft(std::span(&row, 1), true)->ok());
  }
}

TEST(NoTrace, StateAfterRejectedDraftsIsThatOfNeverDrafted) {
  const std::vector<int32_t> ids = LongPrompt();
  const std::unique_ptr<LocalEngine> plain = Engine(false), drafted = Engine(true);
  for (const uint32_t border : kBorders) {
    std::map<uint32_t, uint64_t> never;  // position -> state of an engine that never drafted
    Feed(*plain, ids, border - kBefore);
    for (uint32_t p = border - kBefore; p < border + kBehind; ++p) {
      RunWindow(*plain, {{1, p, ids[p], false}});
      plain->Commit(1, p + 1);
      never[p + 1] = Checkpoint(*plain);
    }
    // Few and many drafts, every number of right ones; a checkpoint behind every window, or none
    // on the way.
    for (const uint32_t drafts : kDrafts) {
      for (const bool checkpoints : {true, false}) {
        SCOPED_TRACE(fmt::format("border {}, {} drafts, checkpoints {}", border, drafts, checkpoints));
        Feed(*drafted, ids, border - kBefore);
        uint32_t position = border - kBefore;
        for (uint32_t window = 0; position < border + 2; ++window) {
          const uint32_t right = window % (drafts + 1);
          std::vector<LocalRow> rows;
          for (uint32_t i = 0; i <= drafts; ++i) {
            const int32_t wrong = 17 + static_cast<int32_t>(i + window);
            rows.push_back({1, position + i, i <= right ? ids[position + i] : wrong});
          }
          RunWindow(*drafted, rows);
          FollowAndGuess(*drafted, ids, position, right + 1);
          position += right + 1;
          drafted->Commit(1, position);
          if (checkpoints) {
            ASSERT_EQ(Checkpoint(*drafted), never[position]) << "position " << position;
          }
        }
        ASSERT_EQ(Checkpoint(*drafted), never[position]) << "position " << position;
      }
    }
  }
}

// The comparison would see it: one row more accepted, or one other token, is another state.
TEST(NoTrace, AcceptedWrongDraftIsSeen) {
  const std::vector<int32_t> ids = LongPrompt();
  const std::unique_ptr<LocalEngine> engine = Engine(false);
  const auto hash = [&](int32_t last) {
    Feed(*engine, ids, 30);
    RunWindow(*engine, {{1, 30, ids[30]}, {1, 31, last}});
    engine->Commit(1, 32);
    return Checkpoint(*engine);
  };
  EXPECT_EQ(hash(ids[31]), hash(ids[31]));
  EXPECT_NE(hash(ids[31]), hash(ids[31] + 1));
}

}  // namespace
}  // namespace lode::testing
