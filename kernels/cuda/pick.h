// The likeliest token of a row on the device, with the bits of the host's sampler (ArgmaxLogit,
// Normalize and LogProb of gpu_worker/sampler.h): a maximum over total-order keys, which no order of
// comparison changes, and the sum of exponentials in the canonical 32 partials. Who does not draw needs
// nothing else of a row's logits, so they need not travel. Plain C++, for both compilers; called by
// gpu_worker/cuda_drafter.cc and tests.
#pragma once

#include <cstdint>

#include "kernels/cuda/window.h"

struct CUstream_st;

namespace lode::cuda {

struct PickedToken {
  int32_t token;      // largest logit, lower index on ties; ids[index] where ids are given
  float max;          // that logit; NaN counts as -inf
  float log_sum;      // log of the sum of exp(logit - max): LogNormalizer's numbers
  float probability;  // of the token under the softmax of the row
};

inline constexpr uint32_t kPickParts = 32;  // pieces of a row that look for the maximum side by side

struct PickArgs {
  const float* logits = nullptr;  // row r at r * stride floats
  uint32_t stride = 0, n = 0;     // n >= 1 logits of each row
  const int32_t* ids = nullptr;   // device, [n]: the tokens of a reduced vocabulary, ascending; or null
  const WindowBlock* logits_only = nullptr;  // not null: only rows with needs_logits, others are left
  uint64_t* parts = nullptr;      // scratch, [row][kPickParts]; needs no value before
  PickedToken* picked = nullptr;  // device, [row]
};
// Two kernels: the maximum (kPickParts blocks a row), then the sum (one block a row).
void LaunchPick(CUstream_st* stream, const PickArgs& args, uint32_t n_rows);

}  // namespace lode::cuda
