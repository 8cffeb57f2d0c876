// See cuda_draft_lanes.h.
#include "gpu_worker/cuda_draft_lanes.h"

#include "kernels/cuda/draft.h"
#include "shared/base/check.h"

namespace lode {

StatusOr<std::unique_ptr<CudaDraftLanes>> CudaDraftLanes::Load(const ModelSource& source,
                                                               CudaDevice& device) {
  std::unique_ptr<CudaDraftLanes> lanes(new CudaDraftLanes(source.config(), device));
  LODE_RETURN_IF_ERROR(lanes->LoadMatrices(source));
  const ModelConfig& c = lanes->config_;
  LODE_ASSIGN_OR_RETURN(void* list, device.Allocate("draft expert list", sizeof(cuda::ExpertList)));
  lanes->list_ = static_cast<cuda::ExpertList*>(list);
  const size_t floats = size_t{kWindowRowsMax} * c.experts_used * c.hidden;
  LODE_ASSIGN_OR_RETURN(void* results,
                        device.Allocate("draft expert results", floats * sizeof(float)));
  lanes->results_ = static_cast<float*>(results);
  return lanes;
}

Status CudaDraftLanes::LoadMatrices(const ModelSource& source) {
  LODE_ASSIGN_OR_RETURN(const ExpertTensors t, FindExperts(source, config_.layers));
  for (const TensorInfo* matrix : {t.gate, t.up, t.down}) {
    if (FormatOf(matrix->type) == Format::kCount)
      return InvalidArgument("tensor {} has a type that this version cannot compute with",
                             matrix->name);
  }
  formats_ = {FormatOf(t.gate->type), FormatOf(t.up->type), FormatOf(t.down->type)};
  LODE_ASSIGN_OR_RETURN(gate_, LoadMatrix(source, *t.gate));
  if (t.fused) {
    up_ = gate_;
    up_.data += t.up_row(0, 0, config_.expert_width) * t.gate->row_bytes();
  } else {
    LODE_ASSIGN_OR_RETURN(up_, LoadMatrix(source, *t.up));
  }
  LODE_ASSIGN_OR_RETURN(down_, LoadMatrix(source, *t.down));
  return OkStatus();
}

// Expert by expert: one piece of host memory at a time, whatever the block's size.
StatusOr<CudaDraftLanes::Matrix> CudaDraftLanes::LoadMatrix(const ModelSource& source,
                                                            const TensorInfo& t) {
  const uint64_t rows = t.rows() / config_.experts;
  LODE_ASSIGN_OR_RETURN(void* memory, device_.Allocate("draft experts " + t.name, t.bytes));
  const Matrix matrix = {static_cast<const uint8_t*>(memory), rows * t.row_bytes()};
  std::vector<uint8_t> bytes(matrix.stride);
  for (uint64_t e = 0; e < config_.experts; ++e) {
    LODE_RETURN_IF_ERROR(source.ReadRows(t, e * rows, rows, bytes.data()));
    device_.Upload(static_cast<uint8_t*>(memory) + e * matrix.stride, bytes.data(), bytes.size());
  }
  bytes_ += t.bytes;
  return matrix;
}

WindowOutcome CudaDraftLanes::Start(uint32_t layer, const float* x, uint32_t n_rows,
                                    const RoutedRow* routed) {
  LODE_CHECK(layer == config_.layers, "layer {} is not the draft head's", layer);
  cuda::LaunchDraftList(device_.stream(),
                        {.routed = routed,
                         .gate = {gate_.data, gate_.stride},
                         .up = {up_.data, up_.stride},
                         .down = {down_.data, down_.stride},
                         .experts_used = config_.experts_used,
                         .width = config_.expert_width,
                         .hidden = config_.hidden,
                         .list = list_,
                         .window = device_.window_block()},
                        n_rows);
  device_.LaunchExperts(formats_, list_, x, results_);
  return {};
}

const float* CudaDraftLanes::Result(uint32_t, uint32_t row, uint32_t order) const {
  return results_ + (size_t{row} * config_.experts_used + order) * config_.hidden;
}

}  // namespace lode
