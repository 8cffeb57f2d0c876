// What a build without LODE_CUDA links in place of the cuda device.
#include "gpu_worker/cuda_stack.h"

namespace lode {
namespace {

Status Absent() {
  return InvalidArgument(
      "the cuda device is not in this build (configure with -DLODE_CUDA=ON); set device = \"cpu\"");
}

}  // namespace

StatusOr<std::unique_ptr<CudaStack>> MakeCudaStack(const ModelSource&, const LoadPlan&, uint32_t) {
  return Absent();
}
StatusOr<std::string> ProbeCuda(uint32_t) { return Absent(); }

}  // namespace lode
