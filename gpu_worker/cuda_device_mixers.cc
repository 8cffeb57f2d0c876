// The mixers of the cuda device: Gated DeltaNet, sparse attention, n-gram layer. Products come from
// cuda_device_mat.cc, everything between them is one kernel per stage (kernels/cuda).
#include <utility>

#include "gpu_worker/cuda_device_impl.h"
#include "kernels/cuda/delta_mix.h"

namespace lode {

cuda::RopeTables CudaDevice::Impl::Rope() const {
  return {.inv_freq = scratch.inv_freq,
          .sin = scratch.sin,
          .cos = scratch.cos,
          .pairs = config.rope_dims / 2};
}
cuda::DeltaShape CudaDevice::Impl::Delta() const {
  return {.key_heads = config.ssm_key_heads,
          .value_heads = config.ssm_value_heads,
          .dim = config.ssm_head_dim,
          .taps = config.ssm_conv};
}
cuda::AttentionShape CudaDevice::Impl::Attention() const {
  const ModelConfig& c = config;
  return {.heads = c.heads,
          .kv_heads = c.kv_heads,
          .dim = c.head_dim,
          .index_heads = c.index_heads,
          .index_dim = c.index_dim,
          .pairs = c.rope_dims / 2,
          .index_block = c.index_block,
          .blocks_best = c.IndexBlocksMax(),
          .eps = c.rms_eps};
}
cuda::KvCache CudaDevice::Impl::Cache(const AttentionState& state) {
  const KvBlockLayout& l = state.layout;
  return {.type = l.type,
          .cell_bytes = l.cell_bytes,
          .v = l.v,
          .k_scales = l.k_scales,
          .v_scales = l.v_scales,
          .index = l.index,
          .block_bytes = l.bytes,
          .pool = state.pool,
          .block_tables = state.block_tables,
          .blocks_per_sequence = state.blocks_per_sequence,
          .raw_index = state.raw_index};
}

// ---- n-gram layer

void CudaDevice::Ple(const PleWeights& w, const PleState& state, const uint8_t* rows,
                     Format rows_format, float* wide) {
  Impl& d = *impl_;
  const ModelConfig& c = d.config;
  Impl::Scratch& s = d.scratch;
  d.FlushWrite();
  d.Wrote(wide);
  // The heads' rows lie side by side: [row][heads] short rows become one long one.
  cuda::KernelsOf(rows_format)
      .dequant(d.s(),
               {.table = rows,
                .row_bytes = RowBytes(rows_format, c.ple_row_width),
                .n = c.ple_row_width,
                .out = s.ple_embed,
                .out_stride = c.ple_row_width},
               d.rows() * c.PleHeads());
  d.Mat(
      {{&w.key, s.ple_key}, {&w.value, s.ple_value}},
      d.InputOf(s.ple_embed, c.PleWidth(), cuda::LayerPart::kMixer, d.FormsOf({&w.key, &w.value})));
  cuda::LaunchPle(d.s(),
                  {.key = s.ple_key,
                   .value = s.ple_value,
                   .norm_key = w.norm_key,
                   .norm_query = w.norm_query,
                   .norm_conv = w.norm_conv,
                   .conv_weight = w.conv,
                   .ring = state.conv,
                   .gated = s.ple_gated,
                   .wide = wide,
                   .streams = c.streams,
                   .hidden = c.hidden,
                   .taps = c.ple_conv,
                   .dilation = c.ngram_size,
                   .eps = c.rms_eps,
                   .window = d.block},
                  d.rows());
  cuda::CheckLaunches("n-gram layer");
}

// ---- Gated DeltaNet

// Convolution and gates wait for the recurrence: mostly one launch does both.
void CudaDevice::DeltaInput(const DeltaWeights& w, const DeltaState&, const float* x) {
  Impl& d = *impl_;
  Impl::Scratch& s = d.scratch;
  d.Mat({{&w.qkv, s.qkv}, {&w.gate, s.z}, {&w.beta, s.beta}, {&w.alpha, s.alpha}},
        d.InputOf(x, d.config.hidden, cuda::LayerPart::kMixer,
                  d.FormsOf({&w.qkv, &w.gate, &w.beta, &w.alpha})));
  d.mixing = &w;
  d.gated = false;
  cuda::CheckLaunches("DeltaNet input");
}

cuda::DeltaConvArgs CudaDevice::Impl::DeltaConv(const DeltaWeights& w,
                                                const DeltaState& state) const {
  return {.shape = Delta(),
          .qkv = scratch.qkv,
          .beta_in = scratch.beta,
          .alpha_in = scratch.alpha,
          .conv_weight = w.conv,
          .a = w.a,
          .dt = w.dt,
          .query = scratch.query,
          .conv = state.conv,
          .key = state.key,
          .value = state.value,
          .beta = state.beta,
          .decay = state.decay,
          .window = block};
}
cuda::DeltaStepArgs CudaDevice::Impl::DeltaSteps(const DeltaState& state) const {
  return {.shape = Delta(),
          .s = state.s,
          .folded = state.folded,
          .key = state.key,
          .value = state.value,
          .beta = state.beta,
          .decay = state.decay,
          .query = scratch.query,
          .out = scratch.mixed,
          .finished = scratch.finished,
          .window = block};
}
cuda::DeltaGateArgs CudaDevice::Impl::DeltaGate(const DeltaWeights& w) const {
  return {.o = scratch.mixed,
          .z = scratch.z,
          .norm = w.norm,
          .heads = config.ssm_value_heads,
          .dim = config.ssm_head_dim,
          .eps = config.rms_eps,
          .forms = Forms(scratch.forms, config.SsmValueWidth(), FormsOf({&w.out})),
          .check = Check(cuda::LayerPart::kMixer)};
}

void CudaDevice::FoldsNext(const DeltaState& state) {
  Impl& d = *impl_;
  cuda::LaunchDeltaFold(d.s(), d.DeltaSteps(state), d.staged->params.n_seqs);
  cuda::CheckLaunches("folding of accepted rows");
}

void CudaDevice::DeltaRecurrence(const DeltaState& state) {
  Impl& d = *impl_;
  const uint32_t n_seqs = d.staged->params.n_seqs;
  const DeltaWeights* const w = std::exchange(d.mixing, nullptr);
  if (w != nullptr) {
    d.gated = cuda::LaunchDeltaMix(
        d.s(), {d.DeltaConv(*w, state), d.DeltaSteps(state), d.DeltaGate(*w)}, n_seqs);
    if (!d.gated) cuda::LaunchDeltaConv(d.s(), d.DeltaConv(*w, state), d.rows());
  }
  if (w == nullptr || !d.gated) cuda::LaunchDeltaSteps(d.s(), d.DeltaSteps(state), n_seqs);
  cuda::CheckLaunches("DeltaNet recurrence");
}

void CudaDevice::DeltaOutput(const DeltaWeights& w, float* y) {
  Impl& d = *impl_;
  const cuda::DeltaGateArgs gate = d.DeltaGate(w);
  if (!std::exchange(d.gated, false)) cuda::LaunchDeltaGate(d.s(), gate, d.rows());
  d.Mat({{&w.out, y}}, {.x = d.scratch.mixed,
                        .columns = d.config.SsmValueWidth(),
                        .forms = gate.forms,
                        .checked = true});
  cuda::CheckLaunches("DeltaNet output");
}

// ---- attention

void CudaDevice::AttentionInput(const AttentionWeights& w, const AttentionState& state,
                                const float* x) {
  Impl& d = *impl_;
  Impl::Scratch& s = d.scratch;
  d.Mat({{&w.q, s.q}, {&w.k, s.k}, {&w.v, s.v}, {&w.index_q, s.index_q}, {&w.index_k, s.index_k}},
        d.InputOf(x, d.config.hidden, cuda::LayerPart::kMixer,
                  d.FormsOf({&w.q, &w.k, &w.v, &w.index_q, &w.index_k})));
  cuda::LaunchAttentionStore(d.s(),
                             {.shape = d.Attention(),
                              .cache = Impl::Cache(state),
                              .rope = d.Rope(),
                              .q = s.q,
                              .k = s.k,
                              .v = s.v,
                              .index_q = s.index_q,
                              .index_k = s.index_k,
                              .q_norm = w.q_norm,
                              .k_norm = w.k_norm,
                              .index_q_norm = w.index_q_norm,
                              .index_k_norm = w.index_k_norm,
                              .check = d.Check(cuda::LayerPart::kMixer)},
                             d.rows());
  cuda::CheckLaunches("attention input");
}

void CudaDevice::AttentionSelect(const AttentionState& state) {
  Impl& d = *impl_;
  Impl::Scratch& s = d.scratch;
  cuda::LaunchAttentionSelect(d.s(),
                              {.shape = d.Attention(),
                               .cache = Impl::Cache(state),
                               .index_q = s.index_q,
                               .scores = s.block_scores,
                               .blocks_max = static_cast<uint32_t>(d.blocks_max),
                               .cells = s.cells,
                               .cells_max = static_cast<uint32_t>(d.cells_max),
                               .n_cells = s.n_cells,
                               .arrived = s.arrived,
                               .window = d.block},
                              d.rows(), d.card.multiprocessors);
  cuda::CheckLaunches("attention selection");
}

void CudaDevice::AttentionOutput(const AttentionWeights& w, const AttentionState& state, float* y) {
  Impl& d = *impl_;
  const ModelConfig& c = d.config;
  Impl::Scratch& s = d.scratch;
  const uint32_t width = c.heads * c.head_dim;
  const Impl::Input attended = {.x = s.attended,
                                .columns = width,
                                .forms = d.Forms(s.forms, width, d.FormsOf({&w.out})),
                                .checked = true};
  cuda::LaunchAttend(d.s(),
                     {.shape = d.Attention(),
                      .cache = Impl::Cache(state),
                      .q = s.q,
                      .cells = s.cells,
                      .cells_max = static_cast<uint32_t>(d.cells_max),
                      .n_cells = s.n_cells,
                      .scores = s.scores,
                      .chunk_total = s.chunk_total,
                      .chunk_sum = s.chunk_sum,
                      .out = s.attended,
                      .forms = attended.forms,
                      .check = d.Check(cuda::LayerPart::kMixer)},
                     d.rows());
  d.Mat({{&w.out, y}}, attended);
  cuda::CheckLaunches("attention output");
}

}  // namespace lode
