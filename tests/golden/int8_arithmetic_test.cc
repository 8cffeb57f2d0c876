// The engine's own arithmetic (int8 activations, 8-bit KV cells) against the float reference mode
// and the golden files of the same model file. It differs by rounding, so this is a statistical
// comparison; every figure is printed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "tests/golden/golden_prompt.h"

namespace lode::testing {
namespace {

constexpr double kRouterSetsEqualMin =
    0.93;  // of (layer, row) decisions; engines of the field are near 0.955 on this model
constexpr double kNatsTolerance = 0.02;  // per token, over all prompts
constexpr double kTopEqualMin = 0.95;    // of positions
constexpr double kNmseMax = 2e-3;        // of the last logits against the golden
constexpr float kSureMargin = 0.1f;      // greedy text must agree up to the first margin below it

struct Totals {
  size_t positions = 0, top_equal = 0, decisions = 0, sets_equal = 0;
  double float_nats = 0, int8_nats = 0;
  size_t predicted = 0;
};

double Nats(const std::vector<float>& logits, int32_t token) {
  const double top = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (float l : logits) sum += std::exp(l - top);
  return top + std::log(sum) - logits[static_cast<size_t>(token)];
}

// Best minus second logit.
float Margin(const std::vector<float>& logits) {
  float best = logits[0], second = logits[1];
  if (second > best) std::swap(best, second);
  for (size_t i = 2; i < logits.size(); ++i) {
    second = std::max(second, std::min(best, logits[i]));
    best = std::max(best, logits[i]);
  }
  return best - second;
}

size_t EqualSets(const std::vector<int64_t>& a, const std::vector<int64_t>& b, size_t used) {
  size_t equal = 0;
  for (size_t i = 0; i < a.size(); i += used) {
    std::vector<int64_t> x(a.begin() + i, a.begin() + i + used),
        y(b.begin() + i, b.begin() + i + used);
    std::sort(x.begin(), x.end());
    std::sort(y.begin(), y.end());
    equal += x == y;
  }
  return equal;
}

void ComparePrompt(LocalEngine& reference, LocalEngine& int8, const std::string& name,
                   Totals* totals) {
  SCOPED_TRACE(name);
  const StatusOr<GoldenPrompt> g = LoadGolden("q4", name);
  ASSERT_TRUE(g.ok()) << g.status();
  const StatusOr<PromptRun> f = RunPrompt(reference, g->ids, kWindowRowsMax);
  const StatusOr<PromptRun> q = RunPrompt(int8, g->ids, kWindowRowsMax);
  ASSERT_TRUE(f.ok() && q.ok()) << f.status() << q.status();
  float largest = 0;
  for (size_t t = 0; t < g->ids.size(); ++t) {
    for (size_t v = 0; v < f->logits[t].size(); ++v)
      largest = std::max(largest, std::fabs(f->logits[t][v] - q->logits[t][v]));
  }
  size_t sure = 0, top_equal = 0;
  for (size_t t = 0; t < g->ids.size(); ++t) {
    const bool same = Argmax(f->logits[t]) == Argmax(q->logits[t]);
    top_equal += same;
    if (Margin(f->logits[t]) > 2 * largest) {
      ++sure;
      EXPECT_TRUE(same) << "position " << t;
    }
    if (t + 1 < g->ids.size()) {
      totals->float_nats += Nats(f->logits[t], g->ids[t + 1]);
      totals->int8_nats += Nats(q->logits[t], g->ids[t + 1]);
      ++totals->predicted;
    }
  }
  double error = 0, power = 0;
  for (size_t v = 0; v < g->last_logits.size(); ++v) {
    error += std::pow(double{q->logits.back()[v]} - g->last_logits[v], 2);
    power += std::pow(double{g->last_logits[v]}, 2);
  }
  EXPECT_LE(error / power, kNmseMax);
  const StatusOr<std::vector<int64_t>> greedy =
      RunGreedy(int8, static_cast<uint32_t>(g->ids.size()), q->logits.back(), g->greedy);
  ASSERT_TRUE(greedy.ok()) << greedy.status();
  size_t greedy_equal = 0;
  for (size_t i = 0; i < g->greedy.size(); ++i) {
    greedy_equal += (*greedy)[i] == g->greedy[i];
    // Tokens are forced to the golden text, so every position with a sure margin must agree, not
    // only the first ones.
    if (g->greedy_margin[i] >= kSureMargin) {
      EXPECT_EQ((*greedy)[i], g->greedy[i]) << "greedy token " << i;
    }
  }
  const size_t used = int8.config().experts_used, decisions = f->router.size() / used;
  const size_t sets = EqualSets(f->router, q->router, used);
  std::printf(
      "figure: int8 arithmetic %-8s largest logit difference %.3f, NMSE of last logits %.1e, top-1 equal %zu/%zu (%zu "
      "sure), router sets equal "
      "%zu/%zu, greedy %zu/%zu\n",
      name.c_str(), largest, error / power, top_equal, g->ids.size(), sure, sets, decisions,
      greedy_equal, g->greedy.size());
  totals->positions += g->ids.size();
  totals->top_equal += top_equal;
  totals->decisions += decisions;
  totals->sets_equal += sets;
}

TEST(Int8Arithmetic, StaysCloseToTheFloatReference) {
  StatusOr<std::unique_ptr<LocalEngine>> reference = LocalEngine::Create(
      DemoModelPath(),
      {.threads = 2, .float_reference = true, .kv_type = KvType::kF32, .context = 1024});
  StatusOr<std::unique_ptr<LocalEngine>> int8 =
      LocalEngine::Create(DemoModelPath(), {.threads = 2, .context = 1024});
  ASSERT_TRUE(reference.ok() && int8.ok()) << reference.status() << int8.status();
  Totals t;
  for (const char* name : kGoldenPrompts) ComparePrompt(**reference, **int8, name, &t);
  const double sets = static_cast<double>(t.sets_equal) / static_cast<double>(t.decisions);
  const double top = static_cast<double>(t.top_equal) / static_cast<double>(t.positions);
  const double f = t.float_nats / static_cast<double>(t.predicted),
               q = t.int8_nats / static_cast<double>(t.predicted);
  std::printf(
      "figure: int8 arithmetic all      router sets equal %.4f, top-1 equal %.4f, nats per token: float %.5f, int8 %.5f\n",
      sets, top, f, q);
  EXPECT_GE(sets, kRouterSetsEqualMin);
  EXPECT_GE(top, kTopEqualMin);
  EXPECT_NEAR(f, q, kNatsTolerance);
}

}  // namespace
}  // namespace lode::testing
