// The draft head on the cuda device, pass by pass: logits, residual streams and cells are those of
// the cpu device, bit for bit. Catching up with prompts, rejected drafts, chains of every depth,
// several sequences; heads in the trunk's file and in files of their own, both norms, a reduced
// vocabulary. Runs on a card (cuda_kernels_test) and on the emulated device (cuda_emulated_test).
#include <gtest/gtest.h>

#include <cstring>

#include "tests/cuda/cuda_engine.h"
#include "tests/cuda/test_card.h"
#include "tests/drafts/head_files.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/places.h"

namespace lode::testing {
namespace {

std::string DemoModel() { return TestSources() + "/tests/models/demo-q4-with-mtp.gguf"; }

int32_t TokenAt(uint32_t slot, uint32_t position) {
  return static_cast<int32_t>(60 + (position * 37 + slot * 11 + position * position) % 3000);
}

// Both engines over one script of windows and passes of the head.
class DraftTwins {
 public:
  static std::unique_ptr<DraftTwins> Create(LocalEngineOptions options) {
    options.threads = 2;
    options.drafts = true;
    auto twins = std::make_unique<DraftTwins>();
    auto cpu = LocalEngine::Create(DemoModel(), options);
    auto gpu = CudaEngine::Create(DemoModel(), options);
    EXPECT_TRUE(cpu.ok()) << cpu.status();
    EXPECT_TRUE(gpu.ok()) << gpu.status();
    if (!cpu.ok() || !gpu.ok()) return nullptr;
    twins->cpu = std::move(*cpu);
    twins->gpu = std::move(*gpu);
    return twins;
  }

  void Window(const std::vector<LocalRow>& rows) {
    const auto a = cpu->Run(rows), b = gpu->Run(rows);
    ASSERT_TRUE(a.ok() && b.ok() && a->ok() && b->ok());
  }
  void Pass(const std::vector<LocalDraftRow>& rows, bool chained) {
    const auto a = cpu->Draft(rows, chained), b = gpu->Draft(rows, chained);
    ASSERT_TRUE(a.ok() && b.ok() && a->ok() && b->ok());
    const size_t wide = rows.size() * cpu->config().WideWidth();
    const std::vector<float> residual = gpu->draft_residual();
    EXPECT_EQ(std::memcmp(residual.data(), cpu->draft_residual(), wide * sizeof(float)), 0)
        << "residual of a pass of " << rows.size() << " rows, chained " << chained;
    for (uint32_t r = 0; r < rows.size(); ++r) {
      if (!rows[r].needs_logits) continue;
      const std::span<const float> want = cpu->draft_logits(r);
      const std::vector<float> got = gpu->draft_logits(r);
      ASSERT_EQ(got.size(), want.size());
      EXPECT_EQ(std::memcmp(got.data(), want.data(), want.size_bytes()), 0)
          << "logits of row " << r << " of " << rows.size() << ", chained " << chained;
      values += want.size();
    }
  }
  // A window of each slot's next tokens; all rows but the last `wrong` hold, and the head follows
  // those. Then chains of `depth` guesses behind every slot's last row that holds.
  struct Part {
    uint32_t slot, rows, wrong;
  };
  void Step(const std::vector<Part>& parts, uint32_t depth) {
    std::vector<LocalRow> rows;
    std::vector<LocalDraftRow> follow;
    std::vector<uint32_t> ends;
    for (const Part& p : parts) {
      cpu->Commit(p.slot, at[p.slot]);
      gpu->Commit(p.slot, at[p.slot]);
      for (uint32_t i = 0; i < p.rows; ++i) {
        const uint32_t position = at[p.slot] + i, row = static_cast<uint32_t>(rows.size());
        const bool holds = i + p.wrong < p.rows;
        rows.push_back({p.slot, position, TokenAt(p.slot, position) + (holds ? 0 : 1), true});
        if (holds)
          follow.push_back({p.slot, position, TokenAt(p.slot, position + 1), row, i % 2 == 0});
      }
      follow.back().needs_logits = true;
      ends.push_back(static_cast<uint32_t>(follow.size()) - 1);
      at[p.slot] += p.rows - p.wrong;
    }
    Window(rows);
    if (::testing::Test::HasFatalFailure()) return;
    Pass(follow, false);
    std::vector<uint32_t> sources = ends;
    for (uint32_t d = 1; d < depth; ++d) {
      std::vector<LocalDraftRow> chain;
      for (uint32_t i = 0; i < parts.size(); ++i) {
        const std::span<const float> logits = cpu->draft_logits(sources[i]);
        const auto best = std::max_element(logits.begin(), logits.end()) - logits.begin();
        chain.push_back({parts[i].slot, at[parts[i].slot] - 1 + d, static_cast<int32_t>(best),
                         sources[i], true});
        sources[i] = i;
      }
      Pass(chain, true);
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
  // Every byte of the head's cells and every sequence's state.
  void ExpectSameState() {
    const AttentionState &a = cpu->state().draft_attention(), &b = gpu->state().draft_attention();
    const size_t bytes = a.layout.bytes * blocks;
    std::vector<uint8_t> got(bytes);
    gpu->device().Download(got.data(), b.pool, bytes);
    EXPECT_EQ(std::memcmp(got.data(), a.pool, bytes), 0) << "the head's cells";
    for (const auto& [slot, position] : at) {
      cpu->Commit(slot, position);
      gpu->Commit(slot, position);
      ASSERT_TRUE(cpu->Flush(slot)->ok() && gpu->Flush(slot)->ok());
      EXPECT_EQ(cpu->state().Hash(slot), gpu->state().Hash(slot)) << "slot " << slot;
    }
  }

  std::unique_ptr<LocalEngine> cpu;
  std::unique_ptr<CudaEngine> gpu;
  std::map<uint32_t, uint32_t> at;  // [slot] accepted rows
  uint32_t blocks = 1;
  uint64_t values = 0;
};

class CudaDraftTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!card_.ok()) GTEST_SKIP() << card_.why_not();
  }
  void Report(const char* what, const DraftTwins& twins) {
    std::printf("figure: draft head on %s, %s: %llu logits equal\n", card_.facts().name.c_str(),
                what, static_cast<unsigned long long>(twins.values));
  }
  TestCard card_;
};

TEST_F(CudaDraftTest, FollowsAPromptAndChainsEveryDepth) {
  const auto twins = DraftTwins::Create({.slots = 1, .context = 512});
  ASSERT_NE(twins, nullptr);
  twins->blocks = 2;
  twins->Step({{0, 5, 0}}, 0);
  twins->Step({{0, 8, 0}}, 7);
  // Windows with drafts: none, some or all of them are rejected; chains of every depth behind them.
  for (uint32_t depth = 1; depth <= (card_.real() ? 7u : 3u); ++depth)
    twins->Step({{0, depth + 1, depth % 3 == 0 ? depth : depth % 3}}, depth);
  if (card_.real()) {  // beyond a block of cells; fibers are slow
    while (twins->at[0] < 270) twins->Step({{0, 8, twins->at[0] % 3}}, twins->at[0] % 2 * 4);
  }
  twins->ExpectSameState();
  Report("one sequence", *twins);
}

TEST_F(CudaDraftTest, SeveralSequencesInOnePass) {
  const auto twins = DraftTwins::Create({.slots = 4, .context = 256});
  ASSERT_NE(twins, nullptr);
  twins->blocks = 4;
  twins->Step({{2, 1, 0}, {0, 3, 0}, {1, 2, 1}, {3, 2, 0}}, 3);
  twins->Step({{0, 2, 1}, {3, 1, 0}, {1, 4, 2}}, card_.real() ? 7 : 2);
  if (card_.real()) twins->Step({{1, 2, 1}, {2, 2, 0}, {0, 2, 1}, {3, 2, 0}}, 5);
  twins->ExpectSameState();
  Report("four sequences", *twins);
}

TEST_F(CudaDraftTest, EveryFormOfAHead) {
  const test::TempFolder folder;
  WriteDraftHead({.own_embedding = false, .q8_inject = true}, folder.File("32.gguf"));
  WriteDraftHead({.own_embedding = true, .q8_inject = false}, folder.File("34.gguf"));
  std::vector<int32_t> some;
  for (int32_t id = 1; id < 8192; id += 3) some.push_back(id);
  const auto run = [&](const char* what, LocalEngineOptions options) {
    SCOPED_TRACE(what);
    options.context = 256;
    const auto twins = DraftTwins::Create(options);
    ASSERT_NE(twins, nullptr);
    twins->Step({{0, 4, 0}}, 2);
    if (card_.real()) twins->Step({{0, 3, 1}}, 4);
    twins->ExpectSameState();
    Report(what, *twins);
  };
  run("32 tensors, Q8_0 inject", {.mtp = folder.File("32.gguf")});
  run("34 tensors", {.mtp = folder.File("34.gguf")});
  run("norm per stream", {.mtp_full_width_norm = false});
  run("reduced vocabulary", {.draft_vocabulary = some});
  if (card_.real()) run("f32 cells", {.kv_type = KvType::kF32});
}

// Time of a pass at flagship shape without a graph; LODE_DRAFT_PASSES=1 leaves one pass per row
// count, for a profiler's list of kernels.
TEST_F(CudaDraftTest, Cost) {
  if (!card_.real()) GTEST_SKIP() << "time is a card's: " << card_.facts().name;
  const char* text = std::getenv("LODE_DRAFT_PASSES");
  const int passes = text != nullptr ? std::atoi(text) : 20;
  LocalEngineOptions options;
  options.context = 512;
  options.drafts = true;
  const auto engine =
      CudaEngine::Create("synth:qwen3.8-flash-next,pack=q2_0,layers=4,mtp=1", options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  std::vector<LocalRow> rows;
  for (uint32_t i = 0; i < kWindowRowsMax; ++i)
    rows.push_back({0, i, static_cast<int32_t>(100 + 77 * i), false});
  ASSERT_TRUE((*engine)->Run(rows)->ok());
  cuda::Timer* const timer = cuda::NewTimer();
  for (const uint32_t n_rows : {4u, 1u}) {
    std::vector<LocalDraftRow> follow;
    for (uint32_t i = 0; i < n_rows; ++i)
      follow.push_back({0, i, static_cast<int32_t>(100 + 77 * (i + 1)), i, i + 1 == n_rows});
    double best = 1e9;
    for (int pass = 0; pass < passes; ++pass) {
      cuda::StartTimer(timer, (*engine)->device().stream());
      ASSERT_TRUE((*engine)->Draft(follow, false)->ok());
      best = std::min(best, cuda::StopTimer(timer, (*engine)->device().stream()));
    }
    std::printf("figure: pass of %u rows of the draft head without a graph: %.3f ms\n", n_rows,
                best);
  }
  cuda::DeleteTimer(timer);
}

}  // namespace
}  // namespace lode::testing
