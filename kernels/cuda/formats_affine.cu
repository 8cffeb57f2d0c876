// Kernels of types whose weight is an integer code times a scale, plus possibly a minimum, without
// group scales: see format_kernels.h.
#include "kernels/cuda/format_kernels.h"

namespace lode::cuda {

LODE_CUDA_FORMAT(Q8_0)
LODE_CUDA_FORMAT(Q4_0)
LODE_CUDA_FORMAT(Q5_1)
LODE_CUDA_FORMAT(Q2_0)
LODE_CUDA_FORMAT(IQ4_NL)

}  // namespace lode::cuda
