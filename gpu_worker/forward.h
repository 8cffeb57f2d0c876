// The model, top to bottom: one window through all layers, one device operation per stage. Steps 5
// to 9 of the life of a token, without sampling. The file forward.cc is meant to be read beside
// docs/design/model.md. Two ways through the same stages: Run computes a window now, layer by layer
// (cpu device); Record only enqueues, for a device that replays a captured graph (cuda). Thread: the
// worker loop's. Nothing is allocated after Create.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "gpu_worker/device.h"
#include "gpu_worker/expert_lanes.h"
#include "gpu_worker/model_weights.h"
#include "gpu_worker/ple_rows.h"
#include "gpu_worker/sequence_state.h"
#include "gpu_worker/step_params.h"

namespace lode {

// Told when a stage has been computed, or enqueued.
class StageSink {
 public:
  virtual ~StageSink() = default;
  virtual void Lap(Stage stage) = 0;
};

class Forward {
 public:
  // All references outlive the object. `ple` is null for models without n-gram layers.
  static StatusOr<std::unique_ptr<Forward>> Create(const ModelConfig& config,
                                                   const ModelWeights& weights, Device& device,
                                                   SequenceState& state, PleReader* ple);

  // Computes the window that SequenceState::Stage described. On success the state counts its rows
  // as computed (not accepted: the next plan says how many are). On failure nothing is committed
  // and the same window may be run again, with the same bits. stage_ns, when not null, holds
  // kStages counters to which each stage's time is added.
  WindowOutcome Run(const StepParams& params, ExpertLanes& lanes, uint64_t* stage_ns);

  // Enqueues the stages of any window of n_rows rows and waits for nothing; whatever fails is found
  // by the device itself. A window must be staged with BeginWindow and LoadNgrams before it replays.
  // n_rows 0: a flush. `sink` may be null.
  void Record(uint32_t n_rows, ExpertLanes& lanes, StageSink* sink);
  // Reads the n-gram rows of a window and uploads them: before a recorded window, which has no host
  // to wait for the disk.
  Status LoadNgrams(const StepParams& params);
  // The window of `params` ended well: the next plan may accept its rows. Run does this itself.
  void WindowDone(const StepParams& params) { state_.WindowDone(params); }

  // Of the last window, device pointers. Rows without needs_logits are not written.
  const float* logits(uint32_t row) const {
    return logits_ + static_cast<size_t>(row) * config_.vocab;
  }
  const RoutedRow& routed(uint32_t layer, uint32_t row) const {
    return routed_[layer * kWindowRowsMax + row];
  }
  // The residual streams behind the last layer, [row][streams * hidden]: what the drafter starts
  // from.
  const float* wide() const { return wide_; }
  // [layers][kWindowRowsMax], contiguous.
  const RoutedRow* routed_all() const { return routed_; }

 private:
  Forward(const ModelConfig& config, const ModelWeights& weights, Device& device,
          SequenceState& state, PleReader* ple)
      : config_(config), weights_(weights), device_(device), state_(state), ple_(ple) {}
  // A null params: recording.
  WindowOutcome Rows(uint32_t n_rows, const StepParams* params, ExpertLanes& lanes,
                     StageSink* sink);
  WindowOutcome Layer(uint32_t layer, uint32_t n_rows, ExpertLanes& lanes, StageSink* sink);
  WindowOutcome AddNgrams(uint32_t layer, uint32_t n_rows);
  void Mix(uint32_t layer, StageSink* sink);
  WindowOutcome Experts(uint32_t layer, uint32_t n_rows, ExpertLanes& lanes, StageSink* sink);
  void FoldAll();
  void StartNgramRead(const StepParams& params);
  // What the device has noticed so far; a recording learns it when it replays.
  WindowOutcome Noticed() { return recording_ ? WindowOutcome{} : device_.Outcome(); }
  uint8_t* NgramRows(uint32_t index) const { return ple_rows_ + index * ple_stride_; }

  const ModelConfig config_;
  const ModelWeights& weights_;
  Device& device_;
  SequenceState& state_;
  PleReader* const ple_;

  // Device memory of the window.
  float* wide_ = nullptr;    // [row][streams * hidden]: the residual streams
  float* x_ = nullptr;       // [row][hidden]: what a mixer reads
  float* inject_ = nullptr;  // [row][streams]: how strongly each stream takes the mixer's output
  float* y_ = nullptr;       // [row][hidden]: what a mixer writes
  float* shared_ = nullptr;  // [row][hidden]: the shared expert
  float* logits_ = nullptr;  // [row][vocab]
  RoutedRow* routed_ = nullptr;    // [layer][kWindowRowsMax]
  uint8_t* ple_rows_ = nullptr;    // [n-gram layer][row][heads][row bytes]
  size_t ple_stride_ = 0;          // bytes of one n-gram layer's rows
  std::vector<int32_t> contexts_;  // host, [row][ngram_size]
  bool recording_ = false;
};

}  // namespace lode
