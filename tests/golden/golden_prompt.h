// One golden prompt and how to run an engine over it. Shared by the golden tests. Fields:
// tests/models/README.md.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gpu_worker/local_engine.h"
#include "shared/base/status.h"

namespace lode::testing {

inline constexpr const char* kGoldenPrompts[] = {"single",  "chat",    "code",
                                                 "english", "unicode", "long"};
inline constexpr uint32_t kGoldenTop = 10;

struct GoldenPrompt {
  std::string name;
  std::vector<int32_t> ids;          // [T]
  std::vector<float> last_logits;    // [vocab]
  std::vector<int64_t> top10_ids;    // [T][10]
  std::vector<float> top10_logits;   // [T][10]
  std::vector<int64_t> greedy;       // [64]
  std::vector<float> greedy_margin;  // [64] best minus second logit of the reference
  std::vector<int64_t> router;       // [layers][T][used]
};
// `set`: "q4" or "master".
StatusOr<GoldenPrompt> LoadGolden(const std::string& set, const std::string& name);

// What an engine made of a prompt: logits of every row, routed ids in the golden file's order.
struct PromptRun {
  std::vector<std::vector<float>> logits;  // [T][vocab]
  std::vector<int64_t> router;             // [layers][T][used]
};
// Feeds the prompt in windows of `chunk` rows to slot 0 from an empty state.
StatusOr<PromptRun> RunPrompt(LocalEngine& engine, const std::vector<int32_t>& ids, uint32_t chunk);
// Continues slot 0, whose first `position` tokens are computed, greedily. `forced`: tokens to feed
// instead of the own picks (so that one near-tie does not make the rest incomparable); the own
// picks are returned.
StatusOr<std::vector<int64_t>> RunGreedy(LocalEngine& engine, uint32_t position,
                                         const std::vector<float>& last_logits,
                                         const std::vector<int64_t>& forced);

int32_t Argmax(std::span<const float> logits);  // lowest id on ties

// tests/models/demo-q4-with-mtp.gguf
std::string DemoModelPath();
// A demo file that is too large for the repository: in the folder named by LODE_SHARED_MODELS.
// Empty when it is not there.
std::string SharedModelPath(const std::string& file);

}  // namespace lode::testing
