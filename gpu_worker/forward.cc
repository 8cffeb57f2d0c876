// One window through the model: see forward.h. Each stage is one call; the comment above it says
// what it does to the residual streams R ("wide"), four copies of the hidden vector that every
// layer reads through a gated mix and writes back to.
#include "gpu_worker/forward.h"

#include <chrono>

#include "shared/base/check.h"
#include "shared/base/log.h"

namespace lode {

namespace {

// Adds the time since the last lap to a stage.
class StageClock final : public StageSink {
 public:
  explicit StageClock(uint64_t* stage_ns) : stage_ns_(stage_ns), last_(Clock::now()) {}
  void Lap(Stage stage) override {
    const Clock::time_point now = Clock::now();
    stage_ns_[static_cast<uint32_t>(stage)] += static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(now - last_).count());
    last_ = now;
  }

 private:
  using Clock = std::chrono::steady_clock;
  uint64_t* stage_ns_;
  Clock::time_point last_;
};

void Lap(StageSink* sink, Stage stage) {
  if (sink != nullptr) sink->Lap(stage);
}

}  // namespace

StatusOr<std::unique_ptr<Forward>> Forward::Create(const ModelConfig& config,
                                                   const ModelWeights& weights, Device& device,
                                                   SequenceState& state, PleReader* ple) {
  std::unique_ptr<Forward> f(new Forward(config, weights, device, state, ple));
  const auto allocate = [&](const char* what, size_t bytes_per_row, auto** out) -> Status {
    LODE_ASSIGN_OR_RETURN(void* memory, device.Allocate(what, bytes_per_row * kWindowRowsMax));
    *out = static_cast<std::remove_reference_t<decltype(**out)>*>(memory);
    return OkStatus();
  };
  LODE_RETURN_IF_ERROR(allocate("window residual", config.WideWidth() * sizeof(float), &f->wide_));
  LODE_RETURN_IF_ERROR(allocate("window mixer input", config.hidden * sizeof(float), &f->x_));
  LODE_RETURN_IF_ERROR(
      allocate("window inject gates", config.streams * sizeof(float), &f->inject_));
  LODE_RETURN_IF_ERROR(allocate("window mixer output", config.hidden * sizeof(float), &f->y_));
  LODE_RETURN_IF_ERROR(
      allocate("window shared expert", config.hidden * sizeof(float), &f->shared_));
  LODE_RETURN_IF_ERROR(
      allocate("window logits", size_t{config.vocab} * sizeof(float), &f->logits_));
  LODE_RETURN_IF_ERROR(allocate("window routing", config.layers * sizeof(RoutedRow), &f->routed_));
  if (ple != nullptr) {
    // Every layer's rows start on the boundary that Allocate gives.
    constexpr size_t kAlign = 64;
    f->ple_stride_ = (ple->layer_bytes(kWindowRowsMax) + kAlign - 1) / kAlign * kAlign;
    const size_t per_row = f->ple_stride_ / kWindowRowsMax * config.ple.size();
    LODE_RETURN_IF_ERROR(allocate("window n-gram rows", per_row, &f->ple_rows_));
    f->contexts_.resize(kWindowRowsMax * config.ngram_size);
  }
  return f;
}

WindowOutcome Forward::Run(const StepParams& params, ExpertLanes& lanes, uint64_t* stage_ns) {
  StageClock clock(stage_ns);
  device_.BeginWindow(params);
  const WindowOutcome outcome =
      Rows(params.n_rows, &params, lanes, stage_ns != nullptr ? &clock : nullptr);
  // After this line the next plan may accept the window's rows.
  if (outcome.ok()) state_.WindowDone(params);
  return outcome;
}

void Forward::Record(uint32_t n_rows, ExpertLanes& lanes, StageSink* sink) {
  recording_ = true;
  const WindowOutcome outcome = Rows(n_rows, nullptr, lanes, sink);
  recording_ = false;
  LODE_CHECK(outcome.ok(), "recording a window of {} rows ended with status {}", n_rows,
             static_cast<uint32_t>(outcome.status));
}

// A flush has no rows: accepted rows are folded into the recurrent states, and that is all.
void Forward::FoldAll() {
  for (uint32_t layer = 0; layer < config_.layers; ++layer) {
    if (!weights_.layers[layer].attention) device_.DeltaRecurrence(state_.delta(layer));
  }
}

WindowOutcome Forward::Rows(uint32_t n_rows, const StepParams* params, ExpertLanes& lanes,
                            StageSink* sink) {
  if (n_rows == 0) {
    FoldAll();
    Lap(sink, Stage::kDeltaNet);
    return Noticed();
  }

  // The host reads the rows' n-gram table entries while the first layer computes.
  if (params != nullptr) StartNgramRead(*params);

  // R[s] = embedding of the token, in all streams.
  device_.Embed(weights_.embed, wide_);
  Lap(sink, Stage::kEmbed);

  for (uint32_t layer = 0; layer < config_.layers; ++layer) {
    const WindowOutcome outcome = Layer(layer, n_rows, lanes, sink);
    if (!outcome.ok()) return outcome;
  }

  // logits = output . (gated mix of R); this mixer is the model's final norm.
  device_.BeginLayer(config_.layers);
  device_.HcRead(weights_.output_hc, wide_, x_, nullptr);
  Lap(sink, Stage::kHyper);
  device_.Head(weights_.output, x_, logits_);
  const WindowOutcome outcome = Noticed();
  Lap(sink, Stage::kHead);
  return outcome;
}

WindowOutcome Forward::Layer(uint32_t layer, uint32_t n_rows, ExpertLanes& lanes, StageSink* sink) {
  const LayerWeights& w = weights_.layers[layer];
  device_.BeginLayer(layer);

  // R += n-gram memory, on the few layers that have one.
  if (w.has_ple) {
    const WindowOutcome outcome = AddNgrams(layer, n_rows);
    Lap(sink, Stage::kPle);
    if (!outcome.ok()) return outcome;
  }

  // x = gated mix of R; y = mixer(x); R[s] += inject[s] * y.
  device_.HcRead(w.hc_attn, wide_, x_, inject_);
  Lap(sink, Stage::kHyper);
  Mix(layer, sink);
  device_.HcWrite(y_, inject_, wide_);

  // x = gated mix of R; y = experts(x); R[s] += inject[s] * y.
  device_.HcRead(w.hc_ffn, wide_, x_, inject_);
  Lap(sink, Stage::kHyper);
  const WindowOutcome outcome = Experts(layer, n_rows, lanes, sink);
  if (!outcome.ok()) return outcome;
  device_.HcWrite(y_, inject_, wide_);
  Lap(sink, Stage::kHyper);
  return outcome;
}

// The token mixer of the layer: y_ from x_.
void Forward::Mix(uint32_t layer, StageSink* sink) {
  const LayerWeights& w = weights_.layers[layer];
  if (w.attention) {
    // Queries, keys, values, index keys; cells of all rows are stored before any row attends.
    device_.AttentionInput(w.attn, state_.attention(layer), x_);
    // Per row: which blocks of the past to look at.
    device_.AttentionSelect(state_.attention(layer));
    // Softmax attention over the selected cells, output gate, projection.
    device_.AttentionOutput(w.attn, state_.attention(layer), y_);
    Lap(sink, Stage::kAttention);
    return;
  }
  // Projections, causal convolution, gates; the rows enter the rings.
  device_.DeltaInput(w.delta, state_.delta(layer), x_);
  // Replay of accepted rows into the state, then the new rows on a copy of it.
  device_.DeltaRecurrence(state_.delta(layer));
  // Norm, output gate, projection.
  device_.DeltaOutput(w.delta, y_);
  Lap(sink, Stage::kDeltaNet);
}

// The routed experts in their lanes, the shared expert meanwhile, combined in routing order: y_
// from x_.
WindowOutcome Forward::Experts(uint32_t layer, uint32_t n_rows, ExpertLanes& lanes,
                               StageSink* sink) {
  const MoeWeights& w = weights_.layers[layer].moe;
  RoutedRow* routed = routed_ + static_cast<size_t>(layer) * kWindowRowsMax;

  // Which experts each row wants, and how much of each.
  device_.Route(w, x_, routed);
  // Not a number anywhere so far: stop before the CPU workers see it.
  WindowOutcome outcome = Noticed();
  Lap(sink, Stage::kRouter);
  if (!outcome.ok()) return outcome;

  // Misses leave for the CPU workers; hits and pulls are computed here.
  outcome = lanes.Start(layer, x_, n_rows, routed);
  Lap(sink, Stage::kHit);
  if (!outcome.ok()) return outcome;

  // The expert that every row uses.
  if (layer + 1 < config_.layers && !weights_.layers[layer + 1].attention)
    device_.FoldsNext(state_.delta(layer + 1));
  device_.SharedExpert(w, x_, shared_);
  Lap(sink, Stage::kShared);

  // The CPU workers' rows are back, or the window is over.
  outcome = lanes.Finish(layer);
  Lap(sink, Stage::kCpuWait);
  if (!outcome.ok()) return outcome;

  // y = sum of weights[k] * expert k in routing order, then the gated shared expert.
  if (!lanes.Combine(layer, routed, shared_, y_))
    device_.Combine(layer, routed, lanes, shared_, y_);
  Lap(sink, Stage::kCombine);
  return outcome;
}

void Forward::StartNgramRead(const StepParams& params) {
  if (ple_ == nullptr) return;
  for (uint32_t row = 0; row < params.n_rows; ++row) {
    state_.TokenContext(params, row, config_.ngram_size,
                        contexts_.data() + row * config_.ngram_size);
  }
  ple_->Start(contexts_, params.n_rows);
}

Status Forward::LoadNgrams(const StepParams& params) {
  if (ple_ == nullptr || params.n_rows == 0) return OkStatus();
  StartNgramRead(params);
  LODE_RETURN_IF_ERROR(ple_->Await());
  for (uint32_t p = 0; p < config_.ple.size(); ++p)
    device_.Upload(NgramRows(p), ple_->rows(p), ple_->layer_bytes(params.n_rows));
  return OkStatus();
}

WindowOutcome Forward::AddNgrams(uint32_t layer, uint32_t n_rows) {
  const PleWeights& w = weights_.layers[layer].ple;
  if (!recording_) {
    const Status status = ple_->Await();
    if (!status.ok()) {
      spdlog::error("window aborted: {}", Message(status));
      return {
          WindowStatus::kAborted,
          {.layer = layer, .row = 0, .worker = 0, .detail = static_cast<uint32_t>(status.code())}};
    }
    device_.Upload(NgramRows(w.index), ple_->rows(w.index), ple_->layer_bytes(n_rows));
  }
  device_.Ple(w, state_.ple(w.index), NgramRows(w.index), ple_->format(), wide_);
  return {};
}

}  // namespace lode
