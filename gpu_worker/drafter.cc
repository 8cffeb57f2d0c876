// One pass of the draft head: see drafter.h. The order of stages is that of a trunk layer
// (forward.cc) between the head's own way in and way out.
#include "gpu_worker/drafter.h"

#include <algorithm>

namespace lode {

StatusOr<std::unique_ptr<Drafter>> Drafter::Create(const ModelConfig& config,
                                                   const DraftWeights& weights,
                                                   const ModelWeights& trunk, Device& device,
                                                   const AttentionState& cells,
                                                   ExpertLanes& experts) {
  std::unique_ptr<Drafter> d(new Drafter(config, weights, trunk, device, cells, experts));
  const auto allocate = [&](const char* what, size_t bytes_per_row, auto** out) -> Status {
    LODE_ASSIGN_OR_RETURN(void* memory, device.Allocate(what, bytes_per_row * kWindowRowsMax));
    *out = static_cast<std::remove_reference_t<decltype(**out)>*>(memory);
    return OkStatus();
  };
  const size_t hidden = config.hidden * sizeof(float), wide = config.WideWidth() * sizeof(float);
  for (float*& buffer : d->wide_) LODE_RETURN_IF_ERROR(allocate("draft residual", wide, &buffer));
  LODE_RETURN_IF_ERROR(allocate("draft mixer input", hidden, &d->x_));
  LODE_RETURN_IF_ERROR(
      allocate("draft inject gates", config.streams * sizeof(float), &d->inject_));
  LODE_RETURN_IF_ERROR(allocate("draft mixer output", hidden, &d->y_));
  LODE_RETURN_IF_ERROR(allocate("draft shared expert", hidden, &d->shared_));
  LODE_RETURN_IF_ERROR(
      allocate("draft logits", weights.output.rows * sizeof(float), &d->logits_));
  LODE_RETURN_IF_ERROR(allocate("draft routing", sizeof(RoutedRow), &d->routed_));
  return d;
}

WindowOutcome Drafter::Step(const StepParams& params, const float* residual) {
  device_.BeginWindow(params);
  const bool guesses = std::any_of(params.rows, params.rows + params.n_rows,
                                   [](const StepRow& row) { return row.needs_logits != 0; });
  return Pass(params.n_rows, residual, guesses);
}

void Drafter::Record(uint32_t n_rows, const float* residual) {
  recording_ = true;
  Pass(n_rows, residual, true);
  recording_ = false;
}

WindowOutcome Drafter::Pass(uint32_t n_rows, const float* residual, bool guesses) {
  const LayerWeights& w = weights_.layer;
  current_ = residual == wide_[0] ? 1 : 0;
  float* wide = wide_[current_];
  // Layers of the trunk, then its head, then this one.
  device_.BeginLayer(config_.layers + 1);

  // R[s] = projection of (next token's embedding, stream s of the row before).
  device_.DraftInput(weights_, trunk_.embed, residual, wide);

  // x = gated mix of R; y = attention(x); R[s] += inject[s] * y.
  device_.HcRead(w.hc_attn, wide, x_, inject_);
  device_.AttentionInput(w.attn, cells_, x_);
  device_.AttentionSelect(cells_);
  device_.AttentionOutput(w.attn, cells_, y_);
  device_.HcWrite(y_, inject_, wide);

  // x = gated mix of R; y = experts(x); R[s] += inject[s] * y.
  device_.HcRead(w.hc_ffn, wide, x_, inject_);
  WindowOutcome outcome = Experts(n_rows);
  if (!outcome.ok()) return outcome;
  device_.HcWrite(y_, inject_, wide);

  // logits = output . (gated mix of R), for rows that guess.
  if (guesses) {
    device_.HcRead(weights_.head, wide, x_, nullptr);
    device_.Head(weights_.output, x_, logits_);
  }
  return Noticed();
}

WindowOutcome Drafter::Experts(uint32_t n_rows) {
  const uint32_t layer = config_.layers;
  device_.Route(weights_.layer.moe, x_, routed_);
  WindowOutcome outcome = Noticed();
  if (!outcome.ok()) return outcome;
  outcome = experts_.Start(layer, x_, n_rows, routed_);
  if (!outcome.ok()) return outcome;
  device_.SharedExpert(weights_.layer.moe, x_, shared_);
  outcome = experts_.Finish(layer);
  if (!outcome.ok()) return outcome;
  device_.Combine(layer, routed_, experts_, shared_, y_);
  return outcome;
}

}  // namespace lode
