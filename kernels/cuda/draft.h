// The draft head's own kernels on the device: the way into its layer and the list of its experts,
// all of which lie in device memory. Plain C++, for both compilers; called by
// gpu_worker/cuda_device_draft.cc and cuda_draft_lanes.cc. Formulas: docs/design/drafts.md. The
// links of chains: draft_run.h.
#pragma once

#include <cstdint>

#include "kernels/cuda/launch.h"

namespace lode::cuda {

// ---- way in
// embed = rms_norm(embed) * embed_weight in place; normed[row] = rms_norm(residual[source of row])
// * residual_weight, in `parts` pieces of equal width with a norm each.
struct DraftNormArgs {
  float* embed = nullptr;           // [row][hidden]
  const float* residual = nullptr;  // [source][streams * hidden]
  float* normed = nullptr;          // [row][streams * hidden]
  const float *embed_weight = nullptr, *residual_weight = nullptr;
  uint32_t streams = 0, hidden = 0, parts = 1;
  float eps = 0;
  const WindowBlock* window = nullptr;
};
void LaunchDraftNorm(CUstream_st* stream, const DraftNormArgs& args, uint32_t n_rows);

// joined[row * streams + s] = (embed[row], stream s of normed[row]): one input of the projection
// for every stream, with its forms; checks name the row.
struct DraftJoinArgs {
  const float *embed = nullptr, *normed = nullptr;
  float* joined = nullptr;  // [row][stream][2 * hidden]
  uint32_t streams = 0, hidden = 0;
  ActForms forms;  // by row * streams + s
  CheckArgs check;
};
void LaunchDraftJoin(CUstream_st* stream, const DraftJoinArgs& args, uint32_t n_rows);

// ---- experts
// Where the experts lie: expert e of a matrix at data + e * stride, 16-byte aligned.
struct DraftMatrix {
  const uint8_t* data = nullptr;
  uint64_t stride = 0;
};
struct DraftListArgs {
  const RoutedRow* routed = nullptr;
  DraftMatrix gate, up, down;
  uint32_t experts_used = 0, width = 0, hidden = 0;
  ExpertList* list = nullptr;
  const WindowBlock* window = nullptr;  // a window with a value that is not finite lists nothing
};
void LaunchDraftList(CUstream_st* stream, const DraftListArgs& args, uint32_t n_rows);

}  // namespace lode::cuda
