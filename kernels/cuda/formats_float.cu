// Kernels of the plain float types: see format_kernels.h.
#include "kernels/cuda/format_kernels.h"

namespace lode::cuda {

LODE_CUDA_FORMAT(F32)
LODE_CUDA_FORMAT(F16)
LODE_CUDA_FORMAT(BF16)

}  // namespace lode::cuda
