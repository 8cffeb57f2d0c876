// Kernels of types with grids and signs: see format_kernels.h.
#include "kernels/cuda/decode_grid.h"
#include "kernels/cuda/format_kernels.h"

namespace lode::cuda {

LODE_CUDA_FORMAT(IQ2_XS)
LODE_CUDA_FORMAT(IQ3_XXS)
LODE_CUDA_FORMAT(IQ3_S)

}  // namespace lode::cuda
