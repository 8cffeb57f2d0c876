// What a row picks from its logits: a function of (logits, lists, sampling numbers, seed,
// position), of nothing else. Order: bias, mask, penalties, then greedy, or temperature, top-k,
// top-p, min-p and a Gumbel-max draw. Selections are total orders (value, then lower token id);
// probability sums are 64-bit fixed point, so no sum depends on an order. Step 9. Called by the
// worker loop, one row per call, any thread; no allocation after the scratch exists. Formulas and
// reasons: docs/design/sampling.md.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "gpu_worker/sampler_math.h"
#include "shared/wire/window_plan.h"
#include "shared/wire/window_result.h"

namespace lode {

// Everything a pick reads beside the logits. Lists are already checked: ids inside the vocabulary.
struct PickInput {
  std::span<const float> logits;   // [vocab]
  const uint32_t* mask = nullptr;  // ceil(vocab/32) words, bit set = allowed; nullptr: all are
  std::span<const TokenBias> bias;
  std::span<const TokenCount> counts;     // tokens that penalties count, as the plan lists them
  std::span<const int32_t> draft_tokens;  // drafts of this sequence in this window up to and
                                          // including this row: counted too
  uint32_t position = 0;                  // of the picked token
  const SamplingPlan* sampling = nullptr;
};

// Working memory of one row; sized once.
class SamplerScratch {
 public:
  explicit SamplerScratch(uint32_t vocab);

 private:
  friend int32_t PickToken(const PickInput& input, SamplerScratch* scratch);
  friend void TopTokens(std::span<const float> logits, uint32_t n, SamplerScratch* scratch,
                        TopLogprob* top);
  std::vector<float> logits_;                 // [vocab] after bias, mask and penalties
  std::vector<uint32_t> counts_;              // [vocab] all zero between calls
  std::vector<SamplerCandidate> candidates_;  // [vocab]
};

// The pick. Always an id in [0, vocab): NaN counts as -inf; with nothing finite left, the lowest
// allowed id (0 when none is).
int32_t PickToken(const PickInput& input, SamplerScratch* scratch);

// ---- what else a row reports, all of the model's own logits: before bias, mask, penalties,
// temperature and filters --------
int32_t ArgmaxLogit(std::span<const float> logits);  // lower id on ties
// log softmax: l - max - Log(sum). `max` exact, sum in canonical order.
struct LogNormalizer {
  float max;
  float log_sum;
  float LogProb(float logit) const;
};
LogNormalizer Normalize(std::span<const float> logits);
// From the sum itself: of exp(logit - max) in canonical order.
LogNormalizer NormalizerOf(float max, float sum);
// The same when ArgmaxLogit is known.
LogNormalizer Normalize(std::span<const float> logits, int32_t argmax);
// The n <= kLogprobsMax best tokens; `logprob` holds their log probability.
void TopTokens(std::span<const float> logits, uint32_t n, SamplerScratch* scratch, TopLogprob* top);
uint64_t HashLogits(std::span<const float> logits);  // XXH3-64 of the floats' bytes

}  // namespace lode
