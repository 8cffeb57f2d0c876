// See golden_prompt.h.
#include "tests/golden/golden_prompt.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "tests/support/npz.h"
#include "tests/support/places.h"

namespace lode::testing {
namespace {

Status Check(const StatusOr<WindowOutcome>& outcome) {
  if (!outcome.ok()) return outcome.status();
  if (!outcome->ok())
    return Internal("window ended with status {} in layer {}", static_cast<int>(outcome->status),
                    outcome->error.layer);
  return OkStatus();
}

}  // namespace

StatusOr<GoldenPrompt> LoadGolden(const std::string& set, const std::string& name) {
  LODE_ASSIGN_OR_RETURN(auto arrays, ReadNpz(TestSources() +
                                             "/tests/models/golden/" + set + "/" + name + ".npz"));
  GoldenPrompt g;
  g.name = name;
  for (int64_t id : arrays["ids"].Ints()) g.ids.push_back(static_cast<int32_t>(id));
  g.last_logits = arrays["last_logits"].Floats();
  g.top10_ids = arrays["top10_ids"].Ints();
  g.top10_logits = arrays["top10_logits"].Floats();
  g.greedy = arrays["greedy"].Ints();
  g.greedy_margin = arrays["greedy_margin"].Floats();
  g.router = arrays["router"].Ints();
  return g;
}

int32_t Argmax(std::span<const float> logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

StatusOr<PromptRun> RunPrompt(LocalEngine& engine, const std::vector<int32_t>& ids,
                              uint32_t chunk) {
  const ModelConfig& c = engine.config();
  const uint32_t total = static_cast<uint32_t>(ids.size());
  PromptRun run;
  run.router.resize(static_cast<size_t>(c.layers) * total * c.experts_used);
  engine.Restart(0);
  for (uint32_t begin = 0; begin < total; begin += chunk) {
    std::vector<LocalRow> rows;
    for (uint32_t p = begin; p < std::min(begin + chunk, total); ++p)
      rows.push_back({.slot = 0, .position = p, .token = ids[p]});
    LODE_RETURN_IF_ERROR(Check(engine.Run(rows)));
    for (uint32_t r = 0; r < rows.size(); ++r) {
      const std::span<const float> logits = engine.logits(r);
      run.logits.emplace_back(logits.begin(), logits.end());
      for (uint32_t l = 0; l < c.layers; ++l) {
        std::copy_n(
            engine.routed(l, r).ids, c.experts_used,
            run.router.begin() + (static_cast<size_t>(l) * total + begin + r) * c.experts_used);
      }
    }
    engine.Commit(0, begin + static_cast<uint32_t>(rows.size()));
  }
  return run;
}

StatusOr<std::vector<int64_t>> RunGreedy(LocalEngine& engine, uint32_t position,
                                         const std::vector<float>& last_logits,
                                         const std::vector<int64_t>& forced) {
  std::vector<int64_t> picks = {Argmax(last_logits)};
  for (size_t i = 0; i + 1 < forced.size(); ++i) {
    const LocalRow row = {
        .slot = 0, .position = position, .token = static_cast<int32_t>(forced[i])};
    LODE_RETURN_IF_ERROR(Check(engine.Run({&row, 1})));
    engine.Commit(0, ++position);
    picks.push_back(Argmax(engine.logits(0)));
  }
  return picks;
}

std::string DemoModelPath() {
  return TestSources() + "/tests/models/demo-q4-with-mtp.gguf";
}

std::string SharedModelPath(const std::string& file) {
  const char* folder = std::getenv("LODE_SHARED_MODELS");
  if (folder == nullptr) return "";
  const std::string path = std::string(folder) + "/" + file;
  return std::filesystem::exists(path) ? path : "";
}

}  // namespace lode::testing
