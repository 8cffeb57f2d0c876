// The experts of the draft head on the cuda device: all of them lie in device memory, so there is
// nothing to plan, to pull or to wait for. One kernel turns the router's choice into the list that
// CudaDevice::LaunchExperts works off. Start only enqueues: it serves a pass that runs now as well
// as one that is recorded. Layer config.layers only. Thread: the worker loop's.
#pragma once

#include <memory>

#include "gpu_worker/cuda_device.h"
#include "gpu_worker/expert_lanes.h"
#include "shared/model/model_source.h"

namespace lode {

class CudaDraftLanes final : public ExpertLanes {
 public:
  // Reads every routed expert of the draft block into device memory. `device` outlives the lanes.
  static StatusOr<std::unique_ptr<CudaDraftLanes>> Load(const ModelSource& source,
                                                        CudaDevice& device);
  uint64_t bytes() const { return bytes_; }  // of all experts

  WindowOutcome Start(uint32_t layer, const float* x, uint32_t n_rows,
                      const RoutedRow* routed) override;
  WindowOutcome Finish(uint32_t) override { return {}; }
  const float* Result(uint32_t layer, uint32_t row, uint32_t order) const override;

 private:
  CudaDraftLanes(const ModelConfig& config, CudaDevice& device)
      : config_(config), device_(device) {}
  // Expert e of a matrix lies at data + e * stride.
  struct Matrix {
    const uint8_t* data = nullptr;
    uint64_t stride = 0;  // bytes
  };
  Status LoadMatrices(const ModelSource& source);
  StatusOr<Matrix> LoadMatrix(const ModelSource& source, const TensorInfo& t);

  const ModelConfig config_;
  CudaDevice& device_;
  Matrix gate_, up_, down_;
  cuda::ExpertFormats formats_ = {};
  cuda::ExpertList* list_ = nullptr;  // device
  float* results_ = nullptr;          // device, [row * experts_used + order][hidden]
  uint64_t bytes_ = 0;
};

}  // namespace lode
