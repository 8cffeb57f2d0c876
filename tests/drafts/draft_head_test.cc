// The draft head's values in the float reference mode against the golden logits of the public
// formulas, for every form a head comes in; and what its files must not be. The tolerance is that of
// the trunk's golden test (tests/golden/float_reference_test.cc).
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>

#include "tests/drafts/head_files.h"
#include "tests/golden/golden_prompt.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/npz.h"

namespace lode::testing {
namespace {

constexpr float kLogitTolerance = 2e-4f;

struct GoldenDrafts {
  std::vector<int32_t> ids;
  int32_t next = 0;
  std::vector<int64_t> depth1_ids, chain, chain_ids;
  std::vector<float> depth1_logits, chain_logits;
};

GoldenDrafts Load(const std::string& set) {
  const auto file =
      ReadNpz(std::string(LODE_SOURCE_DIR) + "/tests/models/golden/" + set + "/mtp_chat.npz");
  EXPECT_TRUE(file.ok()) << file.status();
  auto arrays = *file;
  GoldenDrafts g;
  for (int64_t id : arrays["ids"].Ints()) g.ids.push_back(static_cast<int32_t>(id));
  g.next = static_cast<int32_t>(arrays["next_token"].Ints()[0]);
  g.depth1_ids = arrays["depth1_top10_ids"].Ints();
  g.depth1_logits = arrays["depth1_top10_logits"].Floats();
  g.chain = arrays["chain_drafts"].Ints();
  g.chain_ids = arrays["chain_top10_ids"].Ints();
  g.chain_logits = arrays["chain_top10_logits"].Floats();
  return g;
}

LocalEngineOptions Reference(const std::string& mtp = "") {
  LocalEngineOptions options;
  options.threads = 2;
  options.float_reference = true;
  options.kv_type = KvType::kF32;
  options.context = 256;
  options.drafts = true;
  options.mtp = mtp;
  return options;
}

// Largest difference of a top-10 logit over all slots and the chain; drafts must be the golden ones.
struct Worst {
  float depth1 = 0, chain = 0;
  uint32_t drafts_equal = 0;
};

Worst Compare(LocalEngine& engine, const GoldenDrafts& g) {
  Worst worst;
  const auto row_difference = [&](uint32_t row, const int64_t* ids, const float* logits) {
    float difference = 0;
    for (uint32_t i = 0; i < kGoldenTop; ++i) {
      const float own = engine.draft_logits(row)[static_cast<size_t>(ids[i])];
      difference = std::max(difference, std::fabs(own - logits[i]));
    }
    return difference;
  };
  engine.Restart(0);
  const uint32_t total = static_cast<uint32_t>(g.ids.size());
  int32_t draft = -1;
  uint32_t last_row = 0;
  // Windows of 5: the head's rows of a window come behind the window, as when serving.
  for (uint32_t begin = 0; begin < total; begin += 5) {
    std::vector<LocalRow> rows;
    std::vector<LocalDraftRow> draft_rows;
    for (uint32_t p = begin; p < std::min(begin + 5, total); ++p) {
      rows.push_back({0, p, g.ids[p]});
      draft_rows.push_back({0, p, p + 1 < total ? g.ids[p + 1] : g.next, p - begin});
    }
    engine.Commit(0, begin);
    EXPECT_TRUE(engine.Run(rows)->ok());
    EXPECT_TRUE(engine.Draft(draft_rows, false)->ok());
    for (uint32_t r = 0; r < rows.size(); ++r) {
      const size_t at = (begin + r) * kGoldenTop;
      worst.depth1 =
          std::max(worst.depth1, row_difference(r, &g.depth1_ids[at], &g.depth1_logits[at]));
    }
    last_row = static_cast<uint32_t>(rows.size()) - 1;
    draft = Argmax(engine.draft_logits(last_row));
  }
  for (uint32_t depth = 0; depth < g.chain.size(); ++depth) {
    if (depth > 0) {
      const LocalDraftRow row = {0, total - 1 + depth, static_cast<int32_t>(g.chain[depth - 1]),
                                 depth == 1 ? last_row : 0};
      EXPECT_TRUE(engine.Draft(std::span(&row, 1), true)->ok());
      draft = Argmax(engine.draft_logits(0));
    }
    worst.drafts_equal += draft == g.chain[depth];
    const size_t at = depth * kGoldenTop;
    const uint32_t row = depth == 0 ? last_row : 0;
    worst.chain = std::max(worst.chain, row_difference(row, &g.chain_ids[at], &g.chain_logits[at]));
  }
  return worst;
}

void ExpectGolden(const std::string& model, const std::string& mtp, const std::string& set,
                  float tolerance, const char* what) {
  SCOPED_TRACE(what);
  auto engine = LocalEngine::Create(model, Reference(mtp));
  ASSERT_TRUE(engine.ok()) << engine.status();
  const GoldenDrafts g = Load(set);
  const Worst worst = Compare(**engine, g);
  std::printf("figure: draft head %-30s depth-1 logits %.2e, chain %.2e, drafts %u of %zu\n", what,
              worst.depth1, worst.chain, worst.drafts_equal, g.chain.size());
  EXPECT_LE(worst.depth1, tolerance);
  EXPECT_LE(worst.chain, tolerance);
  EXPECT_EQ(worst.drafts_equal, g.chain.size());
}

TEST(DraftHead, BlockOfTheTrunkFileMatchesGolden) {
  ExpectGolden(DemoModelPath(), "", "q4", kLogitTolerance, "block of the trunk file");
}

TEST(DraftHead, SeparateHeadsMatchGolden) {
  const test::TempFolder folder;
  WriteDraftHead({.own_embedding = false, .q8_inject = false}, folder.File("32.gguf"));
  WriteDraftHead({.own_embedding = true, .q8_inject = false}, folder.File("34.gguf"));
  WriteDraftHead({.own_embedding = false, .q8_inject = true}, folder.File("q8.gguf"));
  ExpectGolden(DemoModelPath(), folder.File("32.gguf"), "q4", kLogitTolerance, "32 tensors");
  ExpectGolden(DemoModelPath(), folder.File("34.gguf"), "q4", kLogitTolerance, "34 tensors");
  // The demo's inject gates are 8-bit values that its file stores as F32: nothing is lost.
  ExpectGolden(DemoModelPath(), folder.File("q8.gguf"), "q4", kLogitTolerance,
               "32 tensors, Q8_0 inject");
}

TEST(DraftHead, PublishedHeadMatchesGoldenOfMaster) {
  const std::string model = SharedModelPath("demo-q8_0.gguf"),
                    head = SharedModelPath("demo-mtp-q8_0.gguf");
  if (model.empty() || head.empty())
    GTEST_SKIP() << "demo-q8_0.gguf and demo-mtp-q8_0.gguf are not in the repository; set "
                    "LODE_SHARED_MODELS to their folder";
  ExpectGolden(model, head, "master", kLogitTolerance, "demo-mtp-q8_0.gguf");
}

TEST(DraftHead, NormPerStreamIsAnotherModel) {
  LocalEngineOptions options = Reference();
  options.mtp_full_width_norm = false;
  auto engine = LocalEngine::Create(DemoModelPath(), options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  EXPECT_GT(Compare(**engine, Load("q4")).depth1, 0.5f);
}

TEST(DraftHead, ReducedVocabularyGivesTheSameLogits) {
  LocalEngineOptions options = Reference();
  const GoldenDrafts g = Load("q4");
  for (int32_t id = 0; id < 8192; id += 3) options.draft_vocabulary.push_back(id);
  auto all = LocalEngine::Create(DemoModelPath(), Reference()),
       some = LocalEngine::Create(DemoModelPath(), options);
  ASSERT_TRUE(all.ok() && some.ok()) << some.status();
  for (LocalEngine* engine : {all->get(), some->get()}) {
    const LocalRow row = {0, 0, g.ids[0]};
    const LocalDraftRow draft = {0, 0, g.ids[1], 0};
    ASSERT_TRUE(engine->Run(std::span(&row, 1))->ok());
    ASSERT_TRUE(engine->Draft(std::span(&draft, 1), false)->ok());
  }
  ASSERT_EQ((*some)->draft_logits(0).size(), options.draft_vocabulary.size());
  for (size_t i = 0; i < options.draft_vocabulary.size(); ++i) {
    ASSERT_EQ((*some)->draft_logits(0)[i],
              (*all)->draft_logits(0)[static_cast<size_t>(options.draft_vocabulary[i])]);
  }
}

TEST(DraftHead, AWholeModelIsNoHead) {
  const std::string refusal =
      Message(LocalEngine::Create(DemoModelPath(), Reference(DemoModelPath())).status());
  EXPECT_NE(refusal.find("is a whole model, not a separate draft head"), std::string::npos)
      << refusal;
}

TEST(DraftHead, WrongHeadsAreRefusedByName) {
  const test::TempFolder folder;
  WriteDraftHead({}, folder.File("head.gguf"));
  const auto file = GgufFile::Open(folder.File("head.gguf"));
  ASSERT_TRUE(file.ok()) << file.status();
  const auto refusal = [&](const std::function<void(test::GgufWriter*)>& spoil) {
    test::GgufWriter writer = test::GgufWriter::From(**file);
    for (test::WrittenTensor& t : writer.tensors()) t.offset = -1;
    spoil(&writer);
    writer.Write(folder.File("bad.gguf"));
    return Message(LocalEngine::Create(DemoModelPath(), Reference(folder.File("bad.gguf"))).status());
  };
  EXPECT_EQ(refusal([](test::GgufWriter*) {}), "");
  EXPECT_NE(refusal([](test::GgufWriter* w) {
              std::erase_if(w->tensors(), [](const auto& t) {
                return t.name == "blk.8.nextn.hnorm.weight";
              });
            }).find("blk.8.nextn.hnorm.weight"),
            std::string::npos);
  EXPECT_NE(refusal([](test::GgufWriter* w) {
              w->Find("blk.8.attn_k.weight")->name = "blk.8.attn_kk.weight";
            }).find("blk.8.attn_k.weight"),
            std::string::npos);
  EXPECT_NE(refusal([](test::GgufWriter* w) { w->SetUint("qwen4exp.block_count", 12); })
                .find("block_count"),
            std::string::npos);
  EXPECT_NE(refusal([](test::GgufWriter* w) { w->SetString("general.architecture", "qwen3moe"); })
                .find("architecture"),
            std::string::npos);
  auto no_block = LocalEngine::Create("synth:layers=4,experts=16,hidden=256,width=64,vocab=512",
                                      Reference());
  EXPECT_NE(Message(no_block.status()).find("no draft block"), std::string::npos);
}

}  // namespace
}  // namespace lode::testing
