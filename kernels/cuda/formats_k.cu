// Kernels of types with blocks of 256 weights in scaled groups: see format_kernels.h.
#include "kernels/cuda/format_kernels.h"

namespace lode::cuda {

LODE_CUDA_FORMAT(Q4_K)

}  // namespace lode::cuda
