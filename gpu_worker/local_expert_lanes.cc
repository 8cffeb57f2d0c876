// Experts of a layer in three parallel loops: gate and up with their product, quantisation, down.
// See local_expert_lanes.h.
#include "gpu_worker/local_expert_lanes.h"

#include <algorithm>
#include <atomic>

namespace lode {
namespace {

constexpr uint32_t kRowsPerUnit = 64;  // weight rows of one expert per unit: four kernel groups

uint32_t Units(uint32_t rows) { return (rows + kRowsPerUnit - 1) / kRowsPerUnit; }

}  // namespace

StatusOr<std::unique_ptr<LocalExpertLanes>> LocalExpertLanes::Load(const ModelSource& source,
                                                                   CpuDevice& device) {
  return LoadLayers(source, device, 0, source.config().layers);
}

StatusOr<std::unique_ptr<LocalExpertLanes>> LocalExpertLanes::LoadDraft(const ModelSource& source,
                                                                        CpuDevice& device) {
  return LoadLayers(source, device, source.config().layers, 1);
}

uint64_t LocalExpertLanes::bytes() const {
  uint64_t bytes = 0;
  for (const Layer& layer : layers_)
    bytes += layer.gate.bytes.size() + layer.up.bytes.size() + layer.down.bytes.size();
  return bytes;
}

StatusOr<std::unique_ptr<LocalExpertLanes>> LocalExpertLanes::LoadLayers(const ModelSource& source,
                                                                         CpuDevice& device,
                                                                         uint32_t first_layer,
                                                                         uint32_t n_layers) {
  std::unique_ptr<LocalExpertLanes> lanes(
      new LocalExpertLanes(source.config(), device, first_layer, n_layers));
  const auto read = [&](const TensorInfo& t, Pieces* out) -> Status {
    out->format = FormatOf(t.type);
    if (out->format == Format::kCount)
      return InvalidArgument("tensor {} has a type that this version cannot compute with", t.name);
    out->row_bytes = t.row_bytes();
    out->bytes.resize(t.bytes);
    return source.ReadRows(t, 0, t.rows(), out->bytes.data());
  };
  for (uint32_t l = 0; l < n_layers; ++l) {
    Layer& layer = lanes->layers_[l];
    LODE_ASSIGN_OR_RETURN(layer.tensors, FindExperts(source, first_layer + l));
    LODE_RETURN_IF_ERROR(read(*layer.tensors.gate, &layer.gate));
    if (!layer.tensors.fused) LODE_RETURN_IF_ERROR(read(*layer.tensors.up, &layer.up));
    LODE_RETURN_IF_ERROR(read(*layer.tensors.down, &layer.down));
  }
  return lanes;
}

LocalExpertLanes::LocalExpertLanes(const ModelConfig& config, CpuDevice& device,
                                   uint32_t first_layer, uint32_t n_layers)
    : config_(config),
      device_(device),
      first_layer_(first_layer),
      layers_(n_layers),
      wanted_(kWindowRowsMax * config.experts_used) {
  const uint32_t widest = (std::max(config.hidden, config.expert_width) + 255) / 256 * 256;
  for (uint32_t block_len : {32u, 64u, 256u})
    act_stride_ = std::max(act_stride_, ActLayout{widest, block_len}.bytes());
  const size_t pairs = size_t{kWindowRowsMax} * config.experts_used;
  x_gate_.resize(act_stride_ * kWindowRowsMax);
  x_up_.resize(act_stride_ * kWindowRowsMax);
  h_acts_.resize(act_stride_ * pairs);
  h_.resize(pairs * config.expert_width);
  up_.resize(pairs * config.expert_width);
  for (std::vector<float>& r : results_) r.resize(pairs * config.hidden);
}

// Distinct experts in order of first appearance.
void LocalExpertLanes::Group(uint32_t n_rows, const RoutedRow* routed) {
  n_wanted_ = 0;
  for (uint32_t row = 0; row < n_rows; ++row) {
    for (uint32_t order = 0; order < config_.experts_used; ++order) {
      const uint16_t expert = routed[row].ids[order];
      Wanted* w = std::find_if(wanted_.data(), wanted_.data() + n_wanted_,
                               [&](const Wanted& e) { return e.expert == expert; });
      if (w == wanted_.data() + n_wanted_) {
        *w = {.expert = expert, .n = 0, .rows = {}, .pairs = {}};
        ++n_wanted_;
      }
      w->rows[w->n] = row;
      w->pairs[w->n++] = row * config_.experts_used + order;
    }
  }
}

bool LocalExpertLanes::Quantise(Format format, const float* x, uint32_t cols, uint8_t* out) const {
  const uint32_t block_len = device_.float_reference() ? 0 : Info(format).act_block_len;
  if (block_len == 0) return device_.kernels().all_finite(x, cols);
  const ActLayout layout{cols, block_len};
  return device_.kernels().quantize(x, cols, block_len, reinterpret_cast<int8_t*>(out),
                                    reinterpret_cast<float*>(out + layout.d_offset()),
                                    reinterpret_cast<int16_t*>(out + layout.sum16_offset()));
}

ActRow LocalExpertLanes::Activation(Format format, const float* x, const uint8_t* quantised,
                                    uint32_t cols) const {
  const uint32_t block_len = Info(format).act_block_len;
  ActRow act = block_len == 0 ? ActRow{} : ActRowAt(quantised, {cols, block_len});
  act.f = x;
  return act;
}

void LocalExpertLanes::GateUp(const Layer& layer, const Wanted& w, const float* x, uint32_t first,
                              uint32_t n) {
  const uint32_t width = config_.expert_width, hidden = config_.hidden;
  const Pieces& up = layer.tensors.fused ? layer.gate : layer.up;
  const auto product = [&](const Pieces& p, uint64_t row, const std::vector<uint8_t>& acts_of,
                           std::vector<float>& to) {
    ActRow acts[kWindowRowsMax];
    float* out[kWindowRowsMax];
    for (uint32_t i = 0; i < w.n; ++i) {
      acts[i] = Activation(p.format, x + size_t{w.rows[i]} * hidden,
                           acts_of.data() + w.rows[i] * act_stride_, hidden);
      out[i] = to.data() + size_t{w.pairs[i]} * width + first;
    }
    const MatFn* table =
        device_.float_reference() ? device_.kernels().mat_float : device_.kernels().mat;
    table[static_cast<uint32_t>(p.format)]({.w = p.bytes.data() + row * p.row_bytes,
                                            .row_bytes = p.row_bytes,
                                            .n_rows = n,
                                            .n_cols = hidden,
                                            .acts = acts,
                                            .n_acts = w.n,
                                            .out = out});
  };
  product(layer.gate, layer.tensors.gate_row(w.expert, first, width), x_gate_, h_);
  product(up, layer.tensors.up_row(w.expert, first, width), x_up_, up_);
  for (uint32_t i = 0; i < w.n; ++i) {
    const size_t at = size_t{w.pairs[i]} * width + first;
    device_.kernels().swiglu(h_.data() + at, up_.data() + at, n, h_.data() + at);
  }
}

void LocalExpertLanes::Down(const Layer& layer, const Wanted& w, uint32_t first, uint32_t n,
                            float* results) {
  const uint32_t width = config_.expert_width;
  ActRow acts[kWindowRowsMax];
  float* out[kWindowRowsMax];
  for (uint32_t i = 0; i < w.n; ++i) {
    acts[i] = Activation(layer.down.format, h_.data() + size_t{w.pairs[i]} * width,
                         h_acts_.data() + w.pairs[i] * act_stride_, width);
    out[i] = results + size_t{w.pairs[i]} * config_.hidden + first;
  }
  const MatFn* table =
      device_.float_reference() ? device_.kernels().mat_float : device_.kernels().mat;
  table[static_cast<uint32_t>(layer.down.format)](
      {.w = layer.down.bytes.data() +
            (uint64_t{w.expert} * config_.hidden + first) * layer.down.row_bytes,
       .row_bytes = layer.down.row_bytes,
       .n_rows = n,
       .n_cols = width,
       .acts = acts,
       .n_acts = w.n,
       .out = out});
}

WindowOutcome LocalExpertLanes::Start(uint32_t layer, const float* x, uint32_t n_rows,
                                      const RoutedRow* routed) {
  const Layer& l = layers_[layer - first_layer_];
  const uint32_t width = config_.expert_width, hidden = config_.hidden, used = config_.experts_used;
  ThreadPool& pool = device_.pool();
  std::atomic<uint32_t> bad_row{kWindowRowsMax};  // lowest row with a value that is not finite
  const auto report = [&](uint32_t row) {
    uint32_t seen = bad_row.load();
    while (row < seen && !bad_row.compare_exchange_weak(seen, row)) {
    }
  };
  const auto outcome = [&]() -> WindowOutcome {
    if (bad_row.load() == kWindowRowsMax) return {};
    return {WindowStatus::kNotFinite,
            {.layer = layer, .row = bad_row.load(), .worker = 0, .detail = 0}};
  };
  Group(n_rows, routed);
  pool.ParallelFor(n_rows, uint64_t{4} * n_rows * hidden, [&](uint32_t row, uint32_t) {
    const float* xr = x + size_t{row} * hidden;
    const Format up = l.tensors.fused ? l.gate.format : l.up.format;
    if (!Quantise(l.gate.format, xr, hidden, x_gate_.data() + row * act_stride_) ||
        !Quantise(up, xr, hidden, x_up_.data() + row * act_stride_)) {
      report(row);
    }
  });
  if (bad_row.load() != kWindowRowsMax) return outcome();
  const uint64_t operations = uint64_t{n_rows} * used * width * hidden;
  pool.ParallelFor(n_wanted_ * Units(width), 2 * operations, [&](uint32_t unit, uint32_t) {
    const uint32_t first = unit % Units(width) * kRowsPerUnit;
    GateUp(l, wanted_[unit / Units(width)], x, first, std::min(kRowsPerUnit, width - first));
  });
  pool.ParallelFor(n_rows * used, uint64_t{4} * n_rows * used * width,
                   [&](uint32_t pair, uint32_t) {
                     if (!Quantise(l.down.format, h_.data() + size_t{pair} * width, width,
                                   h_acts_.data() + pair * act_stride_)) {
                       report(pair / used);
                     }
                   });
  if (bad_row.load() != kWindowRowsMax) return outcome();
  pool.ParallelFor(n_wanted_ * Units(hidden), operations, [&](uint32_t unit, uint32_t) {
    const uint32_t first = unit % Units(hidden) * kRowsPerUnit;
    Down(l, wanted_[unit / Units(hidden)], first, std::min(kRowsPerUnit, hidden - first),
         results_[layer & 1].data());
  });
  return {};
}

const float* LocalExpertLanes::Result(uint32_t layer, uint32_t row, uint32_t order) const {
  return results_[layer & 1].data() + (size_t{row} * config_.experts_used + order) * config_.hidden;
}

}  // namespace lode
