// How often the draft head agrees with the model, with the true text fed to both: share of positions
// where the head's best token at depth 1, 2, 3 is the model's best token for the same place. The
// reference figures were measured on 250,000 tokens of the same kinds of text
// (tests/models/README.md); here a sample of held-out documents must come within a point. Also
// which norm of the residual input agrees more often: that is the default.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include "tests/golden/golden_prompt.h"
#include "tests/support/npz.h"

namespace lode::testing {
namespace {

constexpr uint32_t kDepths = 3;

struct Kind {
  const char* name;
  double figures[kDepths];
};
constexpr Kind kKinds[] = {{"code", {.780, .760, .747}},
                           {"English", {.744, .719, .704}},
                           {"chat", {.778, .759, .746}}};

struct Counts {
  uint64_t hits[kDepths] = {}, all[kDepths] = {};
};

int32_t ArgmaxOf(std::span<const float> logits) { return Argmax(logits); }

// One document from a fresh state. The chain of every position starts from the model's own residual
// there and sees the head's first-depth cells of all earlier positions, as when serving.
void RunDocument(LocalEngine& engine, const std::vector<int32_t>& ids, Counts* counts) {
  const auto total = static_cast<uint32_t>(ids.size());
  engine.Restart(0);
  std::vector<int32_t> model(total), head(size_t{total} * kDepths, -1);
  for (uint32_t begin = 0; begin < total; begin += kWindowRowsMax) {
    const uint32_t n = std::min(kWindowRowsMax, total - begin);
    std::vector<LocalRow> rows;
    for (uint32_t r = 0; r < n; ++r) rows.push_back({0, begin + r, ids[begin + r]});
    engine.Commit(0, begin);
    ASSERT_TRUE(engine.Run(rows)->ok());
    for (uint32_t r = 0; r < n; ++r) model[begin + r] = ArgmaxOf(engine.logits(r));
    for (uint32_t r = 0; r < n; ++r) {
      for (uint32_t depth = 0; depth < kDepths && begin + r + depth + 1 < total; ++depth) {
        const uint32_t p = begin + r + depth;
        const LocalDraftRow row = {0, p, ids[p + 1], depth == 0 ? r : 0};
        ASSERT_TRUE(engine.Draft(std::span(&row, 1), depth > 0)->ok());
        head[(begin + r) * kDepths + depth] = ArgmaxOf(engine.draft_logits(0));
      }
    }
  }
  for (uint32_t p = 0; p < total; ++p) {
    for (uint32_t depth = 0; depth < kDepths && p + depth + 1 < total; ++depth) {
      ++counts->all[depth];
      counts->hits[depth] += head[p * kDepths + depth] == model[p + depth + 1];
    }
  }
}

double Share(const Counts& c, uint32_t depth) {
  return static_cast<double>(c.hits[depth]) / static_cast<double>(std::max<uint64_t>(1, c.all[depth]));
}

// LODE_TRACE: the whole trace instead of the sample in the repository.
StatusOr<std::map<std::string, NpyArray>> LoadTrace() {
  const char* whole = std::getenv("LODE_TRACE");
  return ReadNpz(whole != nullptr ? whole
                                  : std::string(LODE_SOURCE_DIR) + "/tests/data/drafts/text.npz");
}

void Measure(bool full_width_norm, Counts (&counts)[3]) {
  LocalEngineOptions options;
  options.threads = 2;
  options.context = 2048 + kWindowRowsMax;
  options.drafts = true;
  options.mtp_full_width_norm = full_width_norm;
  const char* model = std::getenv("LODE_AGREEMENT_MODEL");
  const char* mtp = std::getenv("LODE_AGREEMENT_MTP");
  if (mtp != nullptr) options.mtp = mtp;
  auto engine = LocalEngine::Create(model != nullptr ? model : DemoModelPath(), options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  auto trace = LoadTrace();
  ASSERT_TRUE(trace.ok()) << trace.status();
  const std::vector<int64_t> tokens = (*trace)["tokens"].Ints(), starts = (*trace)["doc_start"].Ints(),
                             kinds = (*trace)["doc_kind"].Ints();
  for (size_t d = 0; d < kinds.size(); ++d) {
    const std::vector<int32_t> ids(tokens.begin() + starts[d], tokens.begin() + starts[d + 1]);
    RunDocument(**engine, ids, &counts[kinds[d]]);
  }
}

TEST(Agreement, HeadAgreesWithTheModelAsOftenAsInTheReference) {
  Counts full[3];
  Measure(true, full);
  for (uint32_t k = 0; k < std::size(kKinds); ++k) {
    const Kind& kind = kKinds[k];
    for (uint32_t depth = 0; depth < kDepths; ++depth) {
      std::printf("figure: teacher-forced agreement %-8s depth %u: %.3f (reference %.3f, %llu tokens)\n",
                  kind.name, depth + 1, Share(full[k], depth), kind.figures[depth],
                  static_cast<unsigned long long>(full[k].all[depth]));
      EXPECT_NEAR(Share(full[k], depth), kind.figures[depth], 0.01) << kind.name;
    }
  }
}

}  // namespace
}  // namespace lode::testing
