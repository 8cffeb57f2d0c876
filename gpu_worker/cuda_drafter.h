// The draft head on the cuda device: captured passes, and chains that the host does not steer. A
// pass of a chain is a graph that ends by picking on the device and writing the parameters of the
// next pass, so the host only launches one graph behind the other and reads what each has left in
// pinned memory. Where a chain may end early (min_p) it stays one launch ahead of what it has read;
// where not, all launches follow each other at once. Chains whose guesses are drawn need the host's
// sampler and run pass by pass (Step).
//
// Graphs: first[rows] and link[parity][rows] of chains; step[source][rows] of single passes. Which
// of two residuals a pass reads alternates, hence the parities. Protocol: docs/design/drafts.md.
// Owned by the worker; thread: the worker loop's.
#pragma once

#include <memory>

#include "gpu_worker/cuda_api.h"
#include "gpu_worker/cuda_device.h"
#include "gpu_worker/cuda_draft_lanes.h"
#include "gpu_worker/drafter.h"
#include "kernels/cuda/draft_run.h"

namespace lode {

class CudaDrafter final : public DraftEngine {
 public:
  // Takes its memory and captures all graphs; nothing of a window may be running. `trunk_residual`:
  // Forward::wide(). All references outlive the object.
  static StatusOr<std::unique_ptr<CudaDrafter>> Create(
      const ModelConfig& config, const DraftWeights& weights, const ModelWeights& trunk,
      CudaDevice& device, const AttentionState& cells, std::unique_ptr<CudaDraftLanes> lanes,
      const float* trunk_residual);
  ~CudaDrafter() override;

  WindowOutcome Step(const StepParams& params, const float* residual) override;
  const float* wide() const override { return wide_[last_]; }
  const float* logits(uint32_t row) const override {
    return host_logits_ + static_cast<size_t>(row) * drafter_->logits_size();
  }
  std::span<const int32_t> vocabulary() const override { return drafter_->vocabulary(); }
  uint32_t logits_size() const override { return drafter_->logits_size(); }

  bool runs_chains() const override { return true; }
  WindowOutcome RunChains(const StepParams& first, const float* residual,
                          std::span<const DraftChain> chains, DraftGuess (*guesses)[kDraftsMax],
                          uint32_t* n_guesses, uint32_t* n_passes) override;

  size_t nodes() const { return link_[0][1]->nodes(); }  // of one more draft of one chain

 private:
  // Where a pass starts: the trunk's residual, or either of the head's own.
  static constexpr uint32_t kTrunk = 2, kSources = 3;

  CudaDrafter(CudaDevice& device, std::unique_ptr<CudaDraftLanes> lanes,
              const float* trunk_residual)
      : device_(device), lanes_(std::move(lanes)), trunk_residual_(trunk_residual) {}
  Status Allocate();
  Status CaptureAll();
  const float* SourceOf(uint32_t source) const {
    return source == kTrunk ? trunk_residual_ : wide_[source];
  }
  void EnqueuePick(uint32_t n_rows);
  void EnqueueStep(uint32_t source, uint32_t n_rows);
  void EnqueueFirst(uint32_t n_rows);
  void EnqueueLink(uint32_t source, uint32_t n_rows);
  void Launch(cuda::Graph& graph);
  WindowOutcome Await(uint32_t pass);

  CudaDevice& device_;
  std::unique_ptr<CudaDraftLanes> lanes_;
  const float* const trunk_residual_;
  std::unique_ptr<Drafter> drafter_;
  const float* wide_[2] = {};
  uint32_t last_ = 0;  // which of them the last pass wrote

  std::unique_ptr<cuda::Graph> step_[kSources][kWindowRowsMax + 1];
  std::unique_ptr<cuda::Graph> first_[kWindowRowsMax + 1];
  std::unique_ptr<cuda::Graph> link_[2][kWindowRowsMax + 1];  // [residual read][chains]
  // Device.
  cuda::DraftRunState* state_ = nullptr;
  cuda::GuessedToken* picked_ = nullptr;
  uint64_t* parts_ = nullptr;
  float* exps_ = nullptr;
  uint32_t* arrived_ = nullptr;
  int32_t* ids_ = nullptr;  // null: every token
  // Pinned.
  cuda::DraftRun* run_ = nullptr;
  cuda::DraftPassReport* reports_ = nullptr;  // [pass]
  float* host_logits_ = nullptr;              // [row][logits_size]
  StepParams current_ = {};
  uint64_t sequence_ = 0;
};

}  // namespace lode
