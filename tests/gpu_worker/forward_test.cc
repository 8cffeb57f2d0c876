// One arithmetic, seen from outside: the same tokens give the same logits bits and the same state,
// however they are cut into windows, whatever was drafted and rejected, aborted and repeated,
// computed beside others, or by which threads and instructions.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/kernel_table.h"
#include "tests/golden/golden_prompt.h"

namespace lode::testing {
namespace {

using Logits = std::vector<std::vector<float>>;

std::vector<int32_t> Prompt(const std::string& name, size_t length) {
  const StatusOr<GoldenPrompt> g = LoadGolden("q4", name);
  EXPECT_TRUE(g.ok()) << g.status();
  std::vector<int32_t> ids = g->ids;
  ids.resize(std::min(ids.size(), length));
  return ids;
}

std::unique_ptr<LocalEngine> MakeEngine(const LocalEngineOptions& options) {
  StatusOr<std::unique_ptr<LocalEngine>> engine = LocalEngine::Create(DemoModelPath(), options);
  EXPECT_TRUE(engine.ok()) << engine.status();
  return std::move(*engine);
}

std::unique_ptr<LocalEngine> MakeEngine(uint32_t threads = 1, const std::string& isa = "auto") {
  return MakeEngine({.threads = threads, .isa = isa, .slots = 2, .context = 768});
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void ExpectSameBits(const Logits& a, const Logits& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t t = 0; t < a.size(); ++t) ASSERT_TRUE(SameBits(a[t], b[t])) << "position " << t;
}

Logits RunChunks(LocalEngine& engine, const std::vector<int32_t>& ids, uint32_t chunk) {
  StatusOr<PromptRun> run = RunPrompt(engine, ids, chunk);
  EXPECT_TRUE(run.ok()) << run.status();
  return std::move(run->logits);
}

WindowOutcome RunRows(LocalEngine& engine, const std::vector<LocalRow>& rows,
                      ExpertLanes* lanes = nullptr) {
  StatusOr<WindowOutcome> outcome = engine.Run(rows, lanes);
  EXPECT_TRUE(outcome.ok()) << outcome.status();
  return *outcome;
}

std::vector<float> LogitsOf(LocalEngine& engine, uint32_t row) {
  return {engine.logits(row).begin(), engine.logits(row).end()};
}

// Folds what is accepted and hashes the slot.
uint64_t StateHash(LocalEngine& engine, uint32_t slot) {
  const StatusOr<WindowOutcome> outcome = engine.Flush(slot);
  EXPECT_TRUE(outcome.ok() && outcome->ok());
  return engine.state().Hash(slot);
}

TEST(Forward, WindowSizeDoesNotChangeABit) {
  const std::vector<int32_t> ids = Prompt("unicode", 73);
  const std::unique_ptr<LocalEngine> engine = MakeEngine();
  const Logits one = RunChunks(*engine, ids, 1);
  const uint64_t hash = StateHash(*engine, 0);
  for (uint32_t chunk : {3u, 8u}) {
    SCOPED_TRACE(chunk);
    ExpectSameBits(one, RunChunks(*engine, ids, chunk));
    EXPECT_EQ(StateHash(*engine, 0), hash);
  }
}

TEST(Forward, WindowSizeDoesNotChangeABitWhereAttentionSelects) {
  const std::vector<int32_t> ids = Prompt("long", 560);  // 512 tokens is the budget
  const std::unique_ptr<LocalEngine> engine = MakeEngine(2);
  const Logits eight = RunChunks(*engine, ids, 8);
  ExpectSameBits(eight, RunChunks(*engine, ids, 3));
}

TEST(Forward, WindowSizeDoesNotChangeABitForEveryCellType) {
  const std::vector<int32_t> ids = Prompt("chat", 20);
  Logits q8;
  for (KvType type : {KvType::kQ8, KvType::kF16, KvType::kF32}) {
    const std::unique_ptr<LocalEngine> engine = MakeEngine({.kv_type = type, .context = 256});
    const Logits one = RunChunks(*engine, ids, 1);
    ExpectSameBits(one, RunChunks(*engine, ids, 5));
    if (type == KvType::kQ8) q8 = one;
    if (type != KvType::kQ8) {
      EXPECT_FALSE(SameBits(q8.back(), one.back())) << "cell type has no effect";
    }
  }
}

TEST(Forward, RejectedDraftsLeaveNoTrace) {
  const std::vector<int32_t> ids = Prompt("unicode", 60);
  const std::unique_ptr<LocalEngine> plain = MakeEngine(), drafted = MakeEngine();
  const Logits expected = RunChunks(*plain, ids, 1);
  uint32_t position = 0;
  // Windows of one sure row and up to seven drafts, of which `right` are right; right ones are
  // accepted.
  for (uint32_t window = 0; position < ids.size(); ++window) {
    const uint32_t drafts = window % kWindowRowsMax, right = window % 3;
    std::vector<LocalRow> rows;
    for (uint32_t i = 0; i <= drafts && position + i < ids.size(); ++i) {
      rows.push_back({.slot = 0,
                      .position = position + i,
                      .token = i <= right ? ids[position + i] : 17 + static_cast<int32_t>(i)});
    }
    ASSERT_TRUE(RunRows(*drafted, rows).ok());
    const uint32_t accepted = std::min<uint32_t>(static_cast<uint32_t>(rows.size()), right + 1);
    for (uint32_t i = 0; i < accepted; ++i) {
      ASSERT_TRUE(SameBits(LogitsOf(*drafted, i), expected[position + i]))
          << "position " << position + i;
    }
    position += accepted;
    drafted->Commit(0, position);
  }
  EXPECT_EQ(StateHash(*plain, 0), StateHash(*drafted, 0));
}

TEST(Forward, FlushBetweenWindowsDoesNotChangeABit) {
  const std::vector<int32_t> ids = Prompt("code", 22);
  const std::unique_ptr<LocalEngine> engine = MakeEngine();
  const Logits expected = RunChunks(*engine, ids, 2);
  engine->Restart(0);
  for (uint32_t p = 0; p < ids.size(); ++p) {
    ASSERT_TRUE(RunRows(*engine, {{.slot = 0, .position = p, .token = ids[p]}}).ok());
    ASSERT_TRUE(SameBits(LogitsOf(*engine, 0), expected[p])) << p;
    engine->Commit(0, p + 1);
    StateHash(*engine, 0);
  }
}

// Fails or spoils one layer of one window.
class BrokenLanes final : public ExpertLanes {
 public:
  BrokenLanes(ExpertLanes& inner, uint32_t width)
      : inner_(inner), nan_(width, std::numeric_limits<float>::quiet_NaN()) {}
  WindowOutcome Start(uint32_t layer, const float* x, uint32_t n_rows,
                      const RoutedRow* routed) override {
    if (layer == abort_in_start)
      return {WindowStatus::kAborted, {.layer = layer, .row = 0, .worker = 0, .detail = 0}};
    return inner_.Start(layer, x, n_rows, routed);
  }
  WindowOutcome Finish(uint32_t layer) override {
    if (layer == abort_in_finish)
      return {WindowStatus::kAborted, {.layer = layer, .row = 0, .worker = 0, .detail = 0}};
    return inner_.Finish(layer);
  }
  const float* Result(uint32_t layer, uint32_t row, uint32_t order) const override {
    return layer == nan_layer && row == 1 ? nan_.data() : inner_.Result(layer, row, order);
  }
  uint32_t abort_in_start = kLayersMax, abort_in_finish = kLayersMax, nan_layer = kLayersMax;

 private:
  ExpertLanes& inner_;
  std::vector<float> nan_;
};

TEST(Forward, AbortedWindowRepeatsWithTheSameBits) {
  const std::vector<int32_t> ids = Prompt("unicode", 48);
  const std::unique_ptr<LocalEngine> engine = MakeEngine();
  const Logits expected = RunChunks(*engine, ids, 4);
  const uint64_t hash = StateHash(*engine, 0);
  engine->Restart(0);
  for (uint32_t begin = 0, window = 0; begin < ids.size(); begin += 4, ++window) {
    std::vector<LocalRow> rows;
    for (uint32_t p = begin; p < begin + 4; ++p)
      rows.push_back({.slot = 0, .position = p, .token = ids[p]});
    BrokenLanes broken(engine->lanes(), engine->config().hidden);
    (window % 2 ? broken.abort_in_start : broken.abort_in_finish) =
        window % engine->config().layers;
    // The aborted attempt even carries another draft: its rings must not matter.
    std::vector<LocalRow> attempt = rows;
    attempt.back().token = 99;
    EXPECT_EQ(RunRows(*engine, attempt, &broken).status, WindowStatus::kAborted);
    ASSERT_TRUE(RunRows(*engine, rows).ok());
    for (uint32_t i = 0; i < 4; ++i)
      ASSERT_TRUE(SameBits(LogitsOf(*engine, i), expected[begin + i])) << begin + i;
    engine->Commit(0, begin + 4);
  }
  EXPECT_EQ(StateHash(*engine, 0), hash);
}

TEST(Forward, AbortedRowsCannotBeCommitted) {
  const std::vector<int32_t> ids = Prompt("chat", 8);
  const std::unique_ptr<LocalEngine> engine = MakeEngine();
  BrokenLanes broken(engine->lanes(), engine->config().hidden);
  broken.abort_in_finish = 2;
  const std::vector<LocalRow> rows = {{.slot = 0, .position = 0, .token = ids[0]},
                                      {.slot = 0, .position = 1, .token = ids[1]}};
  EXPECT_EQ(RunRows(*engine, rows, &broken).status, WindowStatus::kAborted);
  engine->Commit(0, 2);
  EXPECT_EQ(engine->Flush(0).status().code(), StatusCode::kInvalidArgument);
}

TEST(Forward, NotANumberNamesLayerAndRow) {
  const std::vector<int32_t> ids = Prompt("chat", 8);
  for (bool float_reference : {false, true}) {
    const std::unique_ptr<LocalEngine> engine =
        MakeEngine({.float_reference = float_reference, .context = 256});
    const Logits expected = RunChunks(*engine, {ids[0], ids[1], ids[2]}, 3);
    engine->Restart(0);
    BrokenLanes broken(engine->lanes(), engine->config().hidden);
    broken.nan_layer = 4;
    const std::vector<LocalRow> rows = {{.slot = 0, .position = 0, .token = ids[0]},
                                        {.slot = 0, .position = 1, .token = ids[1]},
                                        {.slot = 0, .position = 2, .token = ids[2]}};
    const WindowOutcome outcome = RunRows(*engine, rows, &broken);
    EXPECT_EQ(outcome.status, WindowStatus::kNotFinite);
    EXPECT_EQ(outcome.error.layer, 5u);  // where the spoilt residual is read first
    EXPECT_EQ(outcome.error.row, 1u);
    // The sequence is not lost: the same rows without the fault give the right bits.
    ASSERT_TRUE(RunRows(*engine, rows).ok());
    EXPECT_TRUE(SameBits(LogitsOf(*engine, 2), expected[2]));
  }
}

TEST(Forward, NeighboursDoNotChangeABit) {
  const std::vector<int32_t> a = Prompt("unicode", 40), b = Prompt("english", 20);
  const std::unique_ptr<LocalEngine> engine = MakeEngine(2);
  const Logits alone_a = RunChunks(*engine, a, 2);
  const uint64_t hash_a = StateHash(*engine, 0);
  const Logits alone_b = RunChunks(*engine, b, 1);
  engine->Restart(0);
  engine->Restart(1);
  for (uint32_t step = 0; step < 20; ++step) {
    std::vector<LocalRow> rows = {{.slot = 0, .position = 2 * step, .token = a[2 * step]},
                                  {.slot = 0, .position = 2 * step + 1, .token = a[2 * step + 1]},
                                  {.slot = 1, .position = step, .token = b[step]}};
    const bool swap = step % 2 != 0;  // sequences change places in the window
    if (swap) std::rotate(rows.begin(), rows.begin() + 2, rows.end());
    ASSERT_TRUE(RunRows(*engine, rows).ok());
    ASSERT_TRUE(SameBits(LogitsOf(*engine, swap ? 1 : 0), alone_a[2 * step]));
    ASSERT_TRUE(SameBits(LogitsOf(*engine, swap ? 2 : 1), alone_a[2 * step + 1]));
    ASSERT_TRUE(SameBits(LogitsOf(*engine, swap ? 0 : 2), alone_b[step]));
    engine->Commit(0, 2 * step + 2);
    engine->Commit(1, step + 1);
  }
  EXPECT_EQ(StateHash(*engine, 0), hash_a);
}

TEST(Forward, ThreadsDoNotChangeABit) {
  const std::vector<int32_t> ids = Prompt("unicode", 73);
  const Logits one = RunChunks(*MakeEngine(1), ids, 8);
  const std::unique_ptr<LocalEngine> engine = MakeEngine(4);
  ExpectSameBits(one, RunChunks(*engine, ids, 8));
  engine->device().pool().SetActive(2);
  ExpectSameBits(one, RunChunks(*engine, ids, 8));
}

TEST(Forward, InstructionSetsDoNotChangeABit) {
  const std::vector<int32_t> ids = Prompt("code", 22);
  const Logits scalar = RunChunks(*MakeEngine(2, "scalar"), ids, 8);
  const std::unique_ptr<LocalEngine> engine = MakeEngine(2);
  const IsaChoice* choices;
  for (size_t i = 0, n = IsaChoices(&choices); i < n; ++i) {
    if (!choices[i].supported) {
      std::printf("not compared: %s (%s)\n", choices[i].table->name, choices[i].why_not);
      continue;
    }
    SCOPED_TRACE(choices[i].table->name);
    engine->device().SetKernels(choices[i].table);
    ExpectSameBits(scalar, RunChunks(*engine, ids, 8));
  }
}

TEST(Forward, NewEpochForgetsTheSlotsPast) {
  const std::vector<int32_t> ids = Prompt("chat", 26);
  const std::unique_ptr<LocalEngine> engine = MakeEngine();
  const Logits fresh = RunChunks(*engine, ids, 8);
  RunChunks(*engine, Prompt("unicode", 73), 8);
  ExpectSameBits(fresh, RunChunks(*engine, ids, 8));
}

TEST(Forward, RefusesPlansThatDoNotFitTheSlot) {
  const std::unique_ptr<LocalEngine> engine = MakeEngine();
  const auto code = [&](const std::vector<LocalRow>& rows) {
    return engine->Run(rows).status().code();
  };
  EXPECT_EQ(code({{.slot = 0, .position = 3, .token = 5}}), StatusCode::kInvalidArgument);  // gap
  EXPECT_EQ(code({{.slot = 0, .position = 0, .token = -1}}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({{.slot = 0, .position = 0, .token = 8192}}), StatusCode::kInvalidArgument);
  EXPECT_EQ(code({{.slot = 0, .position = 0, .token = 1},
                  {.slot = 1, .position = 0, .token = 1},
                  {.slot = 0, .position = 1, .token = 1}}),
            StatusCode::kInvalidArgument);  // not adjacent
  engine->Commit(0, 1);
  EXPECT_EQ(code({{.slot = 0, .position = 1, .token = 5}}),
            StatusCode::kInvalidArgument);  // never computed
  engine->Commit(0, 0);
  EXPECT_TRUE(RunRows(*engine, {{.slot = 0, .position = 0, .token = 5}}).ok());
}

}  // namespace
}  // namespace lode::testing
