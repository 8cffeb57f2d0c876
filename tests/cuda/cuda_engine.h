// A whole engine on the cuda device inside one process: the twin of LocalEngine, for comparing
// bits. All experts lie in device memory; a layer's list is made on the host from the router's
// choice, so lanes wait for the device in the middle of a layer (the product's lanes do not).
// Thread: one caller. Works on a card and on the emulated device alike.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gpu_worker/cuda_device.h"
#include "gpu_worker/cuda_draft_lanes.h"
#include "gpu_worker/drafter.h"
#include "gpu_worker/forward.h"
#include "gpu_worker/local_engine.h"
#include "gpu_worker/sequence_state.h"

namespace lode::testing {

// Every routed expert as one entry, or cut into `pieces` entries with a share of the rows each, as
// arenas of several NUMA nodes would give them.
class CudaListLanes final : public ExpertLanes {
 public:
  static StatusOr<std::unique_ptr<CudaListLanes>> Load(const ModelSource& source,
                                                       CudaDevice& device);
  WindowOutcome Start(uint32_t layer, const float* x, uint32_t n_rows,
                      const RoutedRow* routed) override;
  WindowOutcome Finish(uint32_t) override { return device_.Outcome(); }
  const float* Result(uint32_t layer, uint32_t row, uint32_t order) const override;
  // A layer's types, and a list of its own in which each of `rows` wants other experts: for
  // measurements.
  const cuda::ExpertFormats& formats(uint32_t layer) const { return layers_[layer].formats; }
  const cuda::ExpertList* SpreadList(uint32_t layer, uint32_t rows);
  float* results(uint32_t layer) const { return results_[layer & 1]; }
  uint32_t pieces = 1;
  uint32_t slow = 0;  // how many entries are said to be slow
  const RoutedRow& routed(uint32_t layer, uint32_t row) const {
    return routed_[layer * kWindowRowsMax + row];
  }

 private:
  struct Layer {
    ExpertTensors tensors;
    cuda::ExpertFormats formats;
    const uint8_t *gate, *up, *down;
    size_t gate_row_bytes, up_row_bytes, down_row_bytes;
  };
  void AddEntries(const Layer& layer, uint32_t expert, cuda::ExpertEntry entry);
  CudaListLanes(const ModelConfig& config, CudaDevice& device) : config_(config), device_(device) {}

  const ModelConfig config_;
  CudaDevice& device_;
  std::vector<Layer> layers_;
  std::vector<RoutedRow> routed_;  // host copies, [layer][row]
  cuda::ExpertList host_list_ = {};
  cuda::ExpertList* list_ = nullptr;
  float* results_[2] = {nullptr, nullptr};
};

class CudaEngine {
 public:
  static StatusOr<std::unique_ptr<CudaEngine>> Create(const std::string& model,
                                                      const LocalEngineOptions& options);
  void Restart(uint32_t slot) { slots_.Restart(slot); }
  void Commit(uint32_t slot, uint32_t position) { slots_.Commit(slot, position); }
  StatusOr<WindowOutcome> Run(std::span<const LocalRow> rows);
  StatusOr<WindowOutcome> Flush(uint32_t slot);
  // One pass of the draft head, as LocalEngine::Draft.
  StatusOr<WindowOutcome> Draft(std::span<const LocalDraftRow> rows, bool chained);
  std::vector<float> draft_logits(uint32_t row);
  std::vector<float> draft_residual();
  const DraftWeights& draft_weights() const { return draft_weights_; }
  const ModelSource& draft_source() const { return head_ != nullptr ? *head_ : *source_; }
  const Forward& forward() const { return *forward_; }

  std::vector<float> logits(uint32_t row);
  SequenceState& state() { return *state_; }
  CudaDevice& device() { return *device_; }
  CudaListLanes& lanes() { return *lanes_; }
  const ModelConfig& config() const { return source_->config(); }
  const ModelWeights& weights() const { return weights_; }

 private:
  Status LoadDrafter(const LocalEngineOptions& options);

  std::unique_ptr<ModelSource> source_;
  std::unique_ptr<CudaDevice> device_;
  ModelWeights weights_;
  std::unique_ptr<SequenceState> state_;
  std::unique_ptr<PleReader> ple_;
  std::unique_ptr<CudaListLanes> lanes_;
  std::unique_ptr<Forward> forward_;
  std::unique_ptr<ModelSource> head_;  // separate draft head
  DraftWeights draft_weights_ = {};
  std::unique_ptr<CudaDraftLanes> draft_lanes_;
  std::unique_ptr<Drafter> drafter_;
  LocalSlots slots_;
};

}  // namespace lode::testing
