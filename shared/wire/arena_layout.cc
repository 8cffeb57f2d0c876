// Where every expert lies in a node's arena: [header | ArenaExpert table | layer 0: expert 0,
// expert 1, ... | layer 1 ...]. An expert is [gate rows | up rows | down rows] of this node, each
// part on a 64-byte border, so that vector loads of a row's start never share a cache line with
// another expert and the GPU pulls whole lines. Layers start on 4 KiB pages.
#include "shared/wire/arena_layout.h"

namespace lode {
namespace {

constexpr uint64_t kPageBytes = 4096;

constexpr uint64_t AlignUp(uint64_t n, uint64_t align) { return (n + align - 1) / align * align; }

// Format and row bytes of one expert matrix; the name says which in the error.
Status TakeMatrix(const TensorInfo& tensor, uint64_t columns, Format* format, uint32_t* row_bytes) {
  *format = FormatOf(tensor.type);
  if (*format == Format::kCount) {
    const TensorTypeInfo* info = FindTensorType(static_cast<uint32_t>(tensor.type));
    return InvalidArgument(
        "tensor {} has type {}, which the expert kernels do not compute; use another pack of the "
        "model",
        tensor.name, info != nullptr ? info->name : "unknown");
  }
  const size_t bytes = RowBytes(*format, columns);
  if (bytes == 0 || bytes > UINT32_MAX || tensor.ne[0] != columns || tensor.row_bytes() != bytes) {
    return InvalidArgument("tensor {} has rows of {} weights, expected {} in whole blocks of {}",
                           tensor.name, tensor.ne[0], columns, Info(*format).block_len);
  }
  *row_bytes = static_cast<uint32_t>(bytes);
  return OkStatus();
}

}  // namespace

StatusOr<ArenaLayout> ComputeArenaLayout(const ModelSource& source, uint32_t node,
                                         uint32_t n_nodes) {
  const ModelConfig& config = source.config();
  if (n_nodes == 0 || n_nodes > kCpuWorkersMax || node >= n_nodes) {
    return InvalidArgument("node {} of {} is no valid split (at most {} nodes)", node, n_nodes,
                           kCpuWorkersMax);
  }
  ArenaLayout layout = {node, n_nodes, config.experts, config.hidden, config.expert_width, {}, 0};
  uint64_t at = AlignUp(sizeof(ArenaHeader) + sizeof(ArenaExpert) * config.layers * config.experts,
                        kPageBytes);
  for (uint32_t layer = 0; layer < config.layers; ++layer) {
    LODE_ASSIGN_OR_RETURN(const ExpertTensors tensors, FindExperts(source, layer));
    LayerExperts e = {};
    LODE_RETURN_IF_ERROR(TakeMatrix(*tensors.gate, config.hidden, &e.gate, &e.gate_row_bytes));
    LODE_RETURN_IF_ERROR(TakeMatrix(*tensors.up, config.hidden, &e.up, &e.up_row_bytes));
    LODE_RETURN_IF_ERROR(
        TakeMatrix(*tensors.down, config.expert_width, &e.down, &e.down_row_bytes));
    const uint64_t width_rows = layout.width_rows().size(),
                   hidden_rows = layout.hidden_rows().size();
    e.up_offset = AlignUp(width_rows * e.gate_row_bytes, kArenaAlign);
    e.down_offset = e.up_offset + AlignUp(width_rows * e.up_row_bytes, kArenaAlign);
    e.stride = e.down_offset + AlignUp(hidden_rows * e.down_row_bytes, kArenaAlign);
    e.base = at;
    at = AlignUp(at + e.stride * config.experts, kPageBytes);
    layout.layers.push_back(e);
  }
  layout.bytes = at;
  return layout;
}

uint64_t ExpertSlotBytes(const LayerExperts& layer, uint32_t hidden, uint32_t width) {
  return AlignUp(uint64_t{width} * layer.gate_row_bytes, kArenaAlign) +
         AlignUp(uint64_t{width} * layer.up_row_bytes, kArenaAlign) +
         AlignUp(uint64_t{hidden} * layer.down_row_bytes, kArenaAlign);
}

}  // namespace lode
