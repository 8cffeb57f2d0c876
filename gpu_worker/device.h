// The one interface between the model and the hardware. Two implementations: `cpu` (this folder)
// and `cuda`. The forward pass calls one operation per stage; an operation treats all rows of the
// window. Operations get device pointers and constants only; what changes from window to window
// they read from StepParams in device memory, so a cuda device may enqueue each call once into a
// captured graph per row count and replay it. Both devices give the same bits
// (docs/design/arithmetic.md). Rows that an operation leaves for the next one of the same layer
// (projections, gates, selections) stay inside the device. Thread: the worker loop's. Formulas
// behind every operation: docs/design/model.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "gpu_worker/expert_lanes.h"
#include "gpu_worker/model_weights.h"
#include "gpu_worker/sequence_layout.h"
#include "gpu_worker/step_params.h"
#include "shared/base/check.h"
#include "shared/base/status.h"

namespace lode {

struct DeviceAllocation {
  std::string what;
  size_t bytes;
};

class Device {
 public:
  virtual ~Device() = default;

  // ---- memory: before "ready" only; 64-byte aligned, zeroed, freed with the device
  virtual StatusOr<void*> Allocate(const std::string& what, size_t bytes) = 0;
  virtual const std::vector<DeviceAllocation>& allocations() const = 0;

  // ---- copies, ordered with the operations
  virtual void Upload(void* device, const void* host, size_t bytes) = 0;
  virtual void Download(void* host, const void* device, size_t bytes) = 0;
  virtual void Zero(void* device, size_t bytes) = 0;

  // ---- window
  // Takes the parameters of the next window. Its row count chooses the graph.
  virtual void BeginWindow(const StepParams& params) = 0;
  // Names the layer in errors; a constant of the graph. The head counts as layer config.layers.
  virtual void BeginLayer(uint32_t layer) = 0;
  // First non-finite activation so far (lowest layer, then row), or ok. Waits for what was called
  // before.
  virtual WindowOutcome Outcome() = 0;

  // ---- embedding and hyper-connections: wide = [row][streams * hidden]
  virtual void Embed(const WeightMatrix& table, float* wide) = 0;
  // x [row][hidden]; inject [row][streams], not written when the mixer has none.
  virtual void HcRead(const HcWeights& w, const float* wide, float* x, float* inject) = 0;
  virtual void HcWrite(const float* y, const float* inject, float* wide) = 0;

  // ---- n-gram layer: adds to wide. `rows`: raw table rows, [row][heads][row_bytes]
  virtual void Ple(const PleWeights& w, const PleState& state, const uint8_t* rows,
                   Format rows_format, float* wide) = 0;

  // ---- Gated DeltaNet
  virtual void DeltaInput(const DeltaWeights& w, const DeltaState& state, const float* x) = 0;
  // Folds accepted rows into the state of every sequence of the window, then steps the new rows on
  // a copy of it.
  virtual void DeltaRecurrence(const DeltaState& state) = 0;
  virtual void DeltaOutput(const DeltaWeights& w, float* y) = 0;

  // ---- sparse attention
  virtual void AttentionInput(const AttentionWeights& w, const AttentionState& state,
                              const float* x) = 0;
  virtual void AttentionSelect(const AttentionState& state) = 0;
  virtual void AttentionOutput(const AttentionWeights& w, const AttentionState& state,
                               float* y) = 0;

  // ---- experts
  virtual void Route(const MoeWeights& w, const float* x, RoutedRow* routed) = 0;
  // shared [row][hidden]: the shared expert's output; its gate stays inside the device.
  virtual void SharedExpert(const MoeWeights& w, const float* x, float* shared) = 0;
  virtual void Combine(uint32_t layer, const RoutedRow* routed, const ExpertLanes& lanes,
                       const float* shared, float* y) = 0;

  // ---- draft head: the way into its layer. wide[row][s] = project . (norm(embedding of the row's
  // token), norm(residual[row's source])[s]). `residual`: [row][streams * hidden], of the window
  // before; another buffer than `wide`. A device without it cannot draft.
  virtual void DraftInput(const DraftWeights&, const WeightMatrix&, const float* /*residual*/,
                          float* /*wide*/) {
    LODE_CHECK(false, "this device has no draft head");
  }

  // A hint, before SharedExpert: the next layer has this state. While the window waits for the CPU
  // workers, a device may fold the accepted rows that DeltaRecurrence would fold.
  virtual void FoldsNext(const DeltaState&) {}

  // ---- head: logits [row][output.rows], rows that need them only
  virtual void Head(const WeightMatrix& output, const float* x, float* logits) = 0;
};

}  // namespace lode
