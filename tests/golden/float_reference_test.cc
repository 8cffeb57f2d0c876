// Golden values: the float reference mode (same forward code, unquantised activations, f32 KV
// cells) against the public reference implementation's outputs for the same file. Tolerance: fp32
// sums in another order over 8 layers differ by a few 1e-5 in a logit (the reference itself
// by 2.8e-5 between its two implementations); 2e-4 leaves a factor of seven.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>

#include "tests/golden/golden_prompt.h"

namespace lode::testing {
namespace {

constexpr float kLogitTolerance = 2e-4f;
constexpr float kMarginMin =
    1e-3f;  // below it the reference's own next token is a matter of rounding

void ExpectGolden(LocalEngine& engine, const std::string& set, const std::string& name) {
  SCOPED_TRACE(set + "/" + name);
  const StatusOr<GoldenPrompt> loaded = LoadGolden(set, name);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  const GoldenPrompt& g = *loaded;
  const StatusOr<PromptRun> run = RunPrompt(engine, g.ids, kWindowRowsMax);
  ASSERT_TRUE(run.ok()) << run.status();
  float worst_last = 0, worst_top = 0;
  for (size_t v = 0; v < g.last_logits.size(); ++v) {
    worst_last = std::max(worst_last, std::fabs(run->logits.back()[v] - g.last_logits[v]));
  }
  for (size_t i = 0; i < g.top10_ids.size(); ++i) {
    const float own = run->logits[i / kGoldenTop][static_cast<size_t>(g.top10_ids[i])];
    worst_top = std::max(worst_top, std::fabs(own - g.top10_logits[i]));
  }
  size_t router_differs = 0;
  ASSERT_EQ(run->router.size(), g.router.size());
  for (size_t i = 0; i < g.router.size(); ++i) router_differs += run->router[i] != g.router[i];
  const StatusOr<std::vector<int64_t>> greedy =
      RunGreedy(engine, static_cast<uint32_t>(g.ids.size()), run->logits.back(), g.greedy);
  ASSERT_TRUE(greedy.ok()) << greedy.status();
  size_t equal = 0;
  for (size_t i = 0; i < g.greedy.size(); ++i) {
    equal += (*greedy)[i] == g.greedy[i];
    if (g.greedy_margin[i] > kMarginMin) {
      EXPECT_EQ((*greedy)[i], g.greedy[i]) << "greedy token " << i;
    }
  }
  std::printf(
      "figure: float reference %-6s %-8s %4zu tokens: last logits %.2e, top-10 logits %.2e, router ids differing %zu of "
      "%zu, greedy %zu/%zu\n",
      set.c_str(), name.c_str(), g.ids.size(), worst_last, worst_top, router_differs,
      g.router.size(), equal, g.greedy.size());
  EXPECT_LE(worst_last, kLogitTolerance);
  EXPECT_LE(worst_top, kLogitTolerance);
  EXPECT_EQ(router_differs, 0u);
}

LocalEngineOptions ReferenceOptions() {
  return {.threads = 2,
          .isa = "auto",
          .float_reference = true,
          .kv_type = KvType::kF32,
          .slots = 1,
          .context = 1024};
}

class FloatReference : public ::testing::TestWithParam<const char*> {};

TEST_P(FloatReference, MatchesGoldenOfQ4File) {
  StatusOr<std::unique_ptr<LocalEngine>> engine =
      LocalEngine::Create(DemoModelPath(), ReferenceOptions());
  ASSERT_TRUE(engine.ok()) << engine.status();
  ExpectGolden(**engine, "q4", GetParam());
}

TEST_P(FloatReference, MatchesGoldenOfMaster) {
  const std::string path = SharedModelPath("demo-q8_0.gguf");
  if (path.empty())
    GTEST_SKIP()
        << "demo-q8_0.gguf (43 MB) is not in the repository; set LODE_SHARED_MODELS to its folder";
  StatusOr<std::unique_ptr<LocalEngine>> engine = LocalEngine::Create(path, ReferenceOptions());
  ASSERT_TRUE(engine.ok()) << engine.status();
  ExpectGolden(**engine, "master", GetParam());
}

INSTANTIATE_TEST_SUITE_P(Prompts, FloatReference, ::testing::ValuesIn(kGoldenPrompts),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace lode::testing
