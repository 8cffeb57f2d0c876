// The likeliest token of a row on the device, with the bits of the host's sampler (ArgmaxLogit,
// Normalize and LogProb of gpu_worker/sampler.h): a maximum over total-order keys, which no order
// of comparison changes, and the sum of exponentials in the canonical 32 partials. For chains of
// the draft head, whose next pass waits for it: nothing read from the host. Plain C++, for both
// compilers; called by gpu_worker/cuda_drafter.cc and tests.
#pragma once

#include <cstdint>

#include "kernels/cuda/window.h"

struct CUstream_st;

namespace lode::cuda {

struct GuessedToken {
  int32_t token;      // largest logit, lower index on ties; ids[index] where ids are given
  float max;          // that logit; NaN counts as -inf
  float log_sum;      // log of the sum of exp(logit - max): LogNormalizer's numbers
  float probability;  // of the token under the softmax of the row
};

inline constexpr uint32_t kGuessParts =
    32;  // pieces of a row that look for the maximum side by side

struct GuessArgs {
  const float* logits = nullptr;  // row r at r * stride floats
  uint32_t stride = 0, n = 0;     // n >= 1 logits of each row
  const int32_t* ids =
      nullptr;  // device, [n]: the tokens of a reduced vocabulary, ascending; or null
  const WindowBlock* logits_only =
      nullptr;  // not null: only rows with needs_logits, others are left
  // Scratch; needs no values before.
  uint64_t* parts = nullptr;       // [row][kGuessParts]
  float* exps = nullptr;           // [row][n]
  GuessedToken* picked = nullptr;  // device, [row]
};
// Three kernels: the maximum, the exponentials, their sum (one block a row).
void LaunchGuess(CUstream_st* stream, const GuessArgs& args, uint32_t n_rows);

}  // namespace lode::cuda
