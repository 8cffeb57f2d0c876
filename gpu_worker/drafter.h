// The draft (MTP) head: one more layer that guesses the token after next from a row's residual
// streams and the token that follows it. One call of Step is one pass over up to a window's rows:
// catching up with accepted rows, or one more link of the draft chains of several sequences. Its
// cells are addressed by position like the trunk's, so a wrong guess is overwritten by the row that
// takes its position. All its experts are on the device. Drafts decide nothing: a fault here costs
// guesses, never an answer. Behind step 9 of the life of a token. Formulas: docs/design/drafts.md.
// Thread: the worker loop's. Nothing is allocated after Create.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "gpu_worker/device.h"
#include "gpu_worker/draft_engine.h"
#include "gpu_worker/expert_lanes.h"
#include "gpu_worker/model_weights.h"
#include "gpu_worker/step_params.h"

namespace lode {

class Drafter final : public DraftEngine {
 public:
  // `trunk`: for its token_embd. `cells`: SequenceState::draft_attention(). `experts` computes layer
  // config.layers. All references outlive the object.
  static StatusOr<std::unique_ptr<Drafter>> Create(const ModelConfig& config,
                                                   const DraftWeights& weights,
                                                   const ModelWeights& trunk, Device& device,
                                                   const AttentionState& cells,
                                                   ExpertLanes& experts);

  // params.rows[r]: the sequence's slot, the position p of the residual, the token at p + 1, the row
  // of `residual` to start from, and whether logits (of the token at p + 2) are wanted. A row sees the
  // cells of its sequence at positions up to p, so rows of earlier positions of the same pass count.
  // `residual`: the trunk's Forward::wide() or the last step's wide().
  WindowOutcome Step(const StepParams& params, const float* residual) override;
  // Enqueues the stages of any pass of n_rows rows and waits for nothing; the window was begun. All
  // rows that need logits get them. Which of the two residuals it writes follows from `residual`.
  void Record(uint32_t n_rows, const float* residual);

  const float* residual(uint32_t i) const { return wide_[i]; }  // i < 2: where passes write in turn
  // Of the last step, or of the pass recorded last; device pointers.
  const float* wide() const override { return wide_[current_]; }
  const float* logits(uint32_t row) const override {  // [weights.output.rows]
    return logits_ + static_cast<size_t>(row) * weights_.output.rows;
  }
  std::span<const int32_t> vocabulary() const override { return weights_.vocabulary; }
  uint32_t logits_size() const override { return weights_.output.rows; }

 private:
  Drafter(const ModelConfig& config, const DraftWeights& weights, const ModelWeights& trunk,
          Device& device, const AttentionState& cells, ExpertLanes& experts)
      : config_(config),
        weights_(weights),
        trunk_(trunk),
        device_(device),
        cells_(cells),
        experts_(experts) {}
  WindowOutcome Pass(uint32_t n_rows, const float* residual, bool guesses);
  WindowOutcome Experts(uint32_t n_rows);
  // What the device has noticed so far; a recording learns it when it replays.
  WindowOutcome Noticed() { return recording_ ? WindowOutcome{} : device_.Outcome(); }

  const ModelConfig config_;
  const DraftWeights& weights_;
  const ModelWeights& trunk_;
  Device& device_;
  const AttentionState& cells_;
  ExpertLanes& experts_;

  // Device memory of a pass; names as in forward.h. Two residuals: a chain reads one, writes the
  // other.
  float* wide_[2] = {};
  uint32_t current_ = 0;
  bool recording_ = false;
  float *x_ = nullptr, *inject_ = nullptr, *y_ = nullptr, *shared_ = nullptr, *logits_ = nullptr;
  RoutedRow* routed_ = nullptr;
};

}  // namespace lode
