// Kernels of types with blocks of 256 weights in scaled groups: see format_kernels.h.
#include "kernels/cuda/decode_k.h"
#include "kernels/cuda/format_kernels.h"

namespace lode::cuda {

LODE_CUDA_FORMAT(Q4_K)
LODE_CUDA_FORMAT(Q5_K)
LODE_CUDA_FORMAT(Q6_K)
LODE_CUDA_FORMAT(IQ4_XS)

}  // namespace lode::cuda
