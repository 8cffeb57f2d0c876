// What the host wants of a row's logits, and what it gets when the device looks at them itself:
// then logits need not travel and the vocabulary is not walked on the host. Plain data, for both
// compilers. Filled and read by the worker loop; made by kernels/cuda/sampling.cu.
#pragma once

#include <cstdint>

namespace lode {

struct RowWants {
  uint32_t whole;     // 1: the logits themselves, in host memory
  uint32_t draw;      // 1: a sampled pick by the numbers below, from unchanged logits
  uint32_t position;  // of the picked token: counter of its random numbers
  int32_t target;     // >= 0: the logit of this token too
  // As in SamplingPlan; temperature > 0.
  uint64_t seed;
  float temperature, top_p, min_p;
  uint32_t top_k, stream;
  uint32_t unused;
};

struct RowPick {
  int32_t argmax;  // highest logit, lowest id on ties
  int32_t token;   // of the draw; the argmax without one
  float max, sum;  // sum over tokens of exp(logit - max), canonical order
  float token_logit, target_logit;
};

}  // namespace lode
