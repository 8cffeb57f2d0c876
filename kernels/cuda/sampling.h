// From a row's logits to what the host wants of them, at the end of a window's graph: the best
// token, the sum behind log probabilities, the logit of a target, and a pick, greedy or sampled,
// from logits that biases, a mask and penalties may have changed. Same bits as
// gpu_worker/sampler.cc. Every row needs 4 launches whatever it wants. Plain C++ header for both
// compilers; called by gpu_worker/cuda_engine.cc. Design: docs/design/cuda.md.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu_worker/row_pick.h"
#include "kernels/cuda/window.h"

struct CUstream_st;

namespace lode::cuda {

// Blocks that share a row's logits, at most.
inline constexpr uint32_t kPickPartsMax = 64;

// The best candidate of one part of the vocabulary in a draw.
struct DrawPart {
  uint64_t key;  // value with its Gumbel variate, then lower id (KeyOf); 0: no candidate
  float logit;   // of that token
  uint32_t unused;
};
// What one row leaves, pinned host memory.
struct PickReport {
  uint64_t best;       // KeyOf(highest logit), lowest id on ties
  uint64_t pick_best;  // the same of the changed logits; 0: the mask allows no token
  float max, sum;
  float target_logit;             // undefined without a target
  float pick_logit;               // the model's own logit of pick_best's token
  DrawPart draws[kPickPartsMax];  // of the parts of the vocabulary; undefined without a draw
};

struct PickArgs {
  const WindowBlock* window = nullptr;  // rows without needs_logits are passed over
  const RowWants* wants = nullptr;      // [row], pinned
  const uint8_t* changes = nullptr;     // device memory: the lists that wants name
  const float* logits = nullptr;        // [row][vocab]
  uint32_t vocab = 0;
  PickReport* reports = nullptr;  // [row], pinned
  // Scratch in device memory, [kWindowRowsMax] of PickScratchBytes(vocab).
  uint8_t* scratch = nullptr;
};
size_t PickScratchBytes(uint32_t vocab);
uint32_t PickParts(uint32_t vocab);

void LaunchPick(CUstream_st* stream, const PickArgs& args, uint32_t n_rows);

}  // namespace lode::cuda
