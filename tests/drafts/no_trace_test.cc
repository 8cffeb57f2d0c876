// A rejected draft leaves no trace: the state (all kinds but the draft head's own cells) after
// drafting, rejecting and going on is, at every position, the state of an engine that never drafted.
// Around the borders where something begins anew: KV blocks, index blocks, the selection budget.
// Compiled for the cpu device and, with LODE_TEST_DEVICE = "cuda", for the emulated card (fewer
// positions: fibers are slow) and for a real one, where the states must also be the cpu device's.
#include <gtest/gtest.h>

#include <map>
#include <string_view>
#include <type_traits>

#include "tests/golden/golden_prompt.h"
#if defined(LODE_TEST_DEVICE)
#include "tests/cuda/cuda_engine.h"
#include "tests/cuda/test_card.h"
#endif

namespace lode::testing {
namespace {

#if defined(LODE_TEST_DEVICE)
using TestedEngine = CudaEngine;
std::string WhyNot() { return TestCard().why_not(); }
bool Slow() { return !TestCard().real(); }
#else
using TestedEngine = LocalEngine;
std::string WhyNot() { return ""; }
bool Slow() { return false; }
#endif

constexpr uint32_t kBefore = 6, kBehind = 10;  // positions around a border that are looked at
// The budget is 512 tokens; the third is for the emulated card: an index block and a convolution.
std::vector<uint32_t> Borders() {
  return Slow() ? std::vector<uint32_t>{16}
                : std::vector<uint32_t>{kKvBlockCells, 2 * kKvBlockCells};
}
std::vector<uint32_t> Drafts() {
  return Slow() ? std::vector<uint32_t>{3} : std::vector<uint32_t>{1, 3, 4, 7};
}

std::vector<int32_t> LongPrompt() {
  const StatusOr<GoldenPrompt> g = LoadGolden("q4", "long");
  EXPECT_TRUE(g.ok()) << g.status();
  return g->ids;
}

template <class E = TestedEngine>
std::unique_ptr<E> Engine(bool drafts) {
  LocalEngineOptions options;
  options.threads = 2;
  options.slots = 2;
  options.context = 768;
  options.drafts = drafts;
  StatusOr<std::unique_ptr<E>> engine = E::Create(DemoModelPath(), options);
  EXPECT_TRUE(engine.ok()) << engine.status();
  return std::move(*engine);
}

template <class E>
void RunWindow(E& engine, const std::vector<LocalRow>& rows) {
  const StatusOr<WindowOutcome> outcome = engine.Run(rows);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  ASSERT_TRUE(outcome->ok());
}

// From an empty slot to `end` accepted positions.
template <class E>
void Feed(E& engine, const std::vector<int32_t>& ids, uint32_t end) {
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
template <class E>
uint64_t Checkpoint(E& engine) {
  const StatusOr<WindowOutcome> outcome = engine.Flush(1);
  EXPECT_TRUE(outcome.ok() && outcome->ok());
  return engine.state().Hash(1);
}

// The head follows the accepted rows of the last window and chains three wrong guesses behind them.
template <class E>
void FollowAndGuess(E& engine, const std::vector<int32_t>& ids, uint32_t first,
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
  if (!WhyNot().empty()) GTEST_SKIP() << WhyNot();
  const std::unique_ptr<TestedEngine> plain = Engine(false), drafted = Engine(true);
  for (const uint32_t border : Borders()) {
    std::map<uint32_t, uint64_t> never;  // position -> state of an engine that never drafted
    Feed(*plain, ids, border - kBefore);
    for (uint32_t p = border - kBefore; p < border + kBehind; ++p) {
      RunWindow(*plain, {{1, p, ids[p], false}});
      plain->Commit(1, p + 1);
      never[p + 1] = Checkpoint(*plain);
    }
    if (!std::is_same_v<TestedEngine, LocalEngine>) {
      const std::unique_ptr<LocalEngine> cpu = Engine<LocalEngine>(false);
      Feed(*cpu, ids, border + kBehind);
      EXPECT_EQ(Checkpoint(*cpu), never[border + kBehind]) << "the cpu device's state";
    }
    // Few and many drafts, every number of right ones; a checkpoint behind every window, or none
    // on the way.
    for (const uint32_t drafts : Drafts()) {
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
  if (!WhyNot().empty()) GTEST_SKIP() << WhyNot();
  const std::unique_ptr<TestedEngine> engine = Engine(false);
  const auto hash = [&](int32_t last) {
    Feed(*engine, ids, 8);
    RunWindow(*engine, {{1, 8, ids[8]}, {1, 9, last}});
    engine->Commit(1, 10);
    return Checkpoint(*engine);
  };
  EXPECT_EQ(hash(ids[9]), hash(ids[9]));
  EXPECT_NE(hash(ids[9]), hash(ids[9] + 1));
}

}  // namespace
}  // namespace lode::testing
