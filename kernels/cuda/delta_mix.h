// Everything between the two products of a Gated DeltaNet layer in one launch. See delta_mix.cu.
// Host code and device code; called by gpu_worker/cuda_device_mixers.cc.
#pragma once

#include "kernels/cuda/launch.h"

namespace lode::cuda {

struct DeltaMixArgs {
  DeltaConvArgs conv;  // `query` is not used: queries stay in the block
  DeltaStepArgs step;  // likewise; `out` is not used
  DeltaGateArgs gate;  // o: where the result goes
};
// False, and nothing is launched: heads of another length, more taps, or a form longer than a head.
bool LaunchDeltaMix(CUstream_st* stream, const DeltaMixArgs& args, uint32_t n_seqs);

// Only the accepted rows of earlier windows, ahead of the layer's own launch, which then finds
// nothing to fold. False: heads of another length; the layer's own launch folds them.
bool LaunchDeltaFold(CUstream_st* stream, const DeltaStepArgs& args, uint32_t n_seqs);

}  // namespace lode::cuda
