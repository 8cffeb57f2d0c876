// Passes of the draft head that the host does not steer: what a pass picked becomes the parameters
// of the next one, and what the host wants to know of it lies in pinned memory. Plain C++, for both
// compilers; called by gpu_worker/cuda_drafter.cc. Protocol: docs/design/drafts.md.
#pragma once

#include <cstdint>

#include "kernels/cuda/guess.h"
#include "kernels/cuda/window.h"
#include "shared/base/limits.h"

struct CUstream_st;

namespace lode::cuda {

// What the host says of a run of passes: written once per run, copied with the first pass.
struct DraftRun {
  uint64_t sequence;  // of this run; never 0
  uint32_t n_chains;
  uint32_t
      row[kWindowRowsMax];  // [chain]: its row in the first pass; in later ones chain i is row i
};
// Device memory.
struct DraftRunState {
  DraftRun run;
  uint32_t pass;  // that the next LaunchDraftLink ends; zeroed when a run begins
};
// What a pass leaves for the host, pinned.
struct DraftPassReport {
  uint64_t done;                  // DraftRun::sequence once the rest is there
  uint64_t not_finite;            // WindowBlock::not_finite behind this pass
  int32_t token[kWindowRowsMax];  // [chain]
  float probability[kWindowRowsMax];
};
struct DraftLinkArgs {
  WindowBlock* window = nullptr;
  DraftRunState* state = nullptr;
  const GuessedToken* picked = nullptr;  // [row of the pass]
  DraftPassReport* reports = nullptr;    // pinned, [pass]
};
// Copies the run from pinned memory and zeroes the pass counter.
void LaunchDraftBegin(CUstream_st* stream, DraftRunState* state, const DraftRun* pinned);
// Ends a pass: chain i's guess goes to the report and, one position behind its row, becomes row i
// of the window block. Chains beyond those that the next pass computes do no harm there.
void LaunchDraftLink(CUstream_st* stream, const DraftLinkArgs& args);

// Ends a pass that the host picks from: logits of rows that need them, outcome, done word.
struct DraftEndArgs {
  const WindowBlock* window = nullptr;
  const float* logits = nullptr;  // device, [row][n]
  float* host_logits = nullptr;   // pinned, [row][n]
  uint32_t n = 0;
  DraftRunState* state = nullptr;
  DraftPassReport* report = nullptr;  // pinned; token and probability stay as they are
  uint32_t* arrived = nullptr;        // device, a zero: counts blocks, is zero again at the end
};
void LaunchDraftEnd(CUstream_st* stream, const DraftEndArgs& args, uint32_t n_rows);

}  // namespace lode::cuda
