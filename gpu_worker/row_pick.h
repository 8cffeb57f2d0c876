// What the host wants of a row's logits, and what it gets when the device looks at them itself:
// then logits need not travel and the vocabulary is not walked on the host. Plain data, for both
// compilers. Filled and read by the worker loop; made by kernels/cuda/sampling.cu. The change lists
// of a window are one run of bytes: masks (words as in PickInput::mask), TokenBias, TokenCount and
// draft ids, each list at a multiple of 8 bytes.
#pragma once

#include <cstdint>

namespace lode {

struct RowWants {
  uint32_t whole;     // 1: the logits themselves, in host memory
  uint32_t draw;      // 1: a sampled pick by the numbers below
  uint32_t position;  // of the picked token: counter of its random numbers
  int32_t target;     // >= 0: the logit of this token too
  // As in SamplingPlan; temperature > 0.
  uint64_t seed;
  float temperature, top_p, min_p;
  uint32_t top_k, stream;
  // What changes the logits before the pick (log probabilities are of the unchanged ones).
  uint32_t changed;  // 1: something does; else the rest is not looked at
  uint32_t mask, bias,
      counts;       // places in the window's change lists, bytes; mask: kNoChange = none
  uint32_t drafts;  // token ids, each counts once more
  uint32_t n_bias, n_counts, n_drafts;
  float repetition_penalty, presence_penalty, frequency_penalty;
  uint32_t unused;
};
inline constexpr uint32_t kNoChange = 0xffffffffu;

struct RowPick {
  int32_t argmax;  // highest logit, lowest id on ties
  int32_t token;   // of the draw; without one the best of the changed logits
  float max, sum;  // sum over tokens of exp(logit - max), canonical order
  float token_logit, target_logit;
};

}  // namespace lode
