// From a row's logits to what the host wants of them, at the end of a window's graph: the best
// token, the sum behind log probabilities, the logit of a target, and a sampled pick. Same bits as
// gpu_worker/sampler.cc for rows whose logits nothing changes before the draw (no bias, mask or
// penalty; the host picks those rows from the logits). Every row needs 4 launches whatever it
// wants. Plain C++ header for both compilers; called by gpu_worker/cuda_engine.cc. Design:
// docs/design/cuda.md.
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
  uint64_t best;  // KeyOf(highest logit), lowest id on ties
  float max, sum;
  float target_logit;  // undefined without a target
  uint32_t unused;
  DrawPart draws[kPickPartsMax];  // of the parts of the vocabulary; undefined without a draw
};

struct PickArgs {
  const WindowBlock* window = nullptr;  // rows without needs_logits are passed over
  const RowWants* wants = nullptr;      // [row], pinned
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
