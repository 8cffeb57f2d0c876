// ExpertLanes without processes, arenas or a VRAM tier: all experts in this process's memory, each
// computed when it is routed. The same arithmetic as every lane, so it is the yardstick for them,
// and what offline tools use. Thread: the worker loop's; uses the cpu device's pool and kernels.
#pragma once

#include <memory>
#include <vector>

#include "gpu_worker/cpu_device.h"
#include "gpu_worker/expert_lanes.h"
#include "shared/model/model_source.h"

namespace lode {

class LocalExpertLanes final : public ExpertLanes {
 public:
  // Reads every routed expert of the trunk. `device` outlives the object.
  static StatusOr<std::unique_ptr<LocalExpertLanes>> Load(const ModelSource& source,
                                                          CpuDevice& device);
  // The same for the draft block, layer config().layers: all its experts are on the device.
  static StatusOr<std::unique_ptr<LocalExpertLanes>> LoadDraft(const ModelSource& source,
                                                               CpuDevice& device);
  uint64_t bytes() const;  // of all experts

  WindowOutcome Start(uint32_t layer, const float* x, uint32_t n_rows,
                      const RoutedRow* routed) override;
  WindowOutcome Finish(uint32_t) override { return {}; }
  const float* Result(uint32_t layer, uint32_t row, uint32_t order) const override;

 private:
  struct Pieces {  // one matrix of all experts of a layer
    std::vector<uint8_t> bytes;
    Format format = Format::kCount;
    size_t row_bytes = 0;
  };
  struct Layer {
    Pieces gate, up, down;  // fused files: gate holds both, up is empty
    ExpertTensors tensors;
  };
  // An expert and the (row, order) pairs that want it, as places row * experts_used + order.
  struct Wanted {
    uint16_t expert;
    uint32_t n;
    uint32_t rows[kWindowRowsMax], pairs[kWindowRowsMax];
  };

  LocalExpertLanes(const ModelConfig& config, CpuDevice& device, uint32_t first_layer,
                   uint32_t n_layers);
  static StatusOr<std::unique_ptr<LocalExpertLanes>> LoadLayers(const ModelSource& source,
                                                                CpuDevice& device,
                                                                uint32_t first_layer,
                                                                uint32_t n_layers);
  void Group(uint32_t n_rows, const RoutedRow* routed);
  ActRow Activation(Format format, const float* x, const uint8_t* quantised, uint32_t cols) const;
  bool Quantise(Format format, const float* x, uint32_t cols, uint8_t* out) const;
  void GateUp(const Layer& layer, const Wanted& w, const float* x, uint32_t first, uint32_t n);
  void Down(const Layer& layer, const Wanted& w, uint32_t first, uint32_t n, float* results);

  const ModelConfig config_;
  CpuDevice& device_;
  const uint32_t first_layer_;
  std::vector<Layer> layers_;  // from first_layer_ on
  std::vector<Wanted> wanted_;  // of the current layer
  uint32_t n_wanted_ = 0;
  size_t act_stride_ = 0;  // bytes of one quantised activation row
  std::vector<uint8_t> x_gate_,
      x_up_;  // [row]: inputs as the gate's and the up matrix's formats want them
  std::vector<uint8_t> h_acts_;    // [pair]: hidden vectors as the down matrix wants them
  std::vector<float> h_, up_;      // [pair][width]
  std::vector<float> results_[2];  // by layer parity: [row * experts_used + order][hidden]
};

}  // namespace lode
