// The hashed n-gram layer on the cpu device: table rows meet the residual stream, gated per stream,
// plus a dilated causal convolution over the normed gated values of earlier positions. Formulas:
// docs/design/model.md.
#include "gpu_worker/cpu_device_scratch.h"

namespace lode {
namespace {

size_t PleRingAt(uint32_t slot, uint32_t position, size_t width) {
  return (static_cast<size_t>(slot) * kPleRing + position % kPleRing) * width;
}

}  // namespace

void CpuDevice::Ple(const PleWeights& w, const PleState& state, const uint8_t* rows,
                    Format rows_format, float* wide) {
  Scratch& s = *scratch_;
  const uint32_t streams = config_.streams, hidden = config_.hidden, heads = config_.PleHeads();
  const size_t width = config_.WideWidth(),
               row_bytes = RowBytes(rows_format, config_.ple_row_width);
  pool_.ParallelFor(
      params_.n_rows, 4ull * params_.n_rows * config_.PleWidth(), [&](uint32_t row, uint32_t) {
        for (uint32_t h = 0; h < heads; ++h) {
          kernels_->dequant[static_cast<uint32_t>(rows_format)](
              rows + (static_cast<size_t>(row) * heads + h) * row_bytes, config_.ple_row_width,
              s.ple_embed.row(row) + h * config_.ple_row_width);
        }
      });
  Mat(std::initializer_list<MatJob>{{&w.key, s.ple_key.data()}, {&w.value, s.ple_value.data()}},
      s.ple_embed.data());
  // Per row and stream: key meets query, the gate scales the value; its norm enters the ring.
  pool_.ParallelFor(params_.n_rows * streams, 12ull * params_.n_rows * width,
                    [&](uint32_t unit, uint32_t) {
                      const uint32_t row = unit / streams;
                      const size_t at = static_cast<size_t>(unit % streams) * hidden;
                      const StepRow& r = params_.rows[row];
                      float* key = s.ple_key.row(row) + at;
                      float* query = s.ple_query.row(row) + at;
                      float* gated = s.ple_gated.row(row) + at;
                      kernels_->rms_norm(key, w.norm_key + at, hidden, config_.rms_eps, key);
                      kernels_->rms_norm(wide + row * width + at, w.norm_query + at, hidden,
                                         config_.rms_eps, query);
                      kernels_->ple_gate(key, query, s.ple_value.row(row), hidden, gated);
                      kernels_->rms_norm(
                          gated, w.norm_conv + at, hidden, config_.rms_eps,
                          state.conv + PleRingAt(params_.seqs[r.seq].slot, r.position, width) + at);
                    });
  pool_.ParallelFor(
      params_.n_rows * streams, 30ull * params_.n_rows * width, [&](uint32_t unit, uint32_t) {
        const uint32_t row = unit / streams;
        const size_t at = static_cast<size_t>(unit % streams) * hidden;
        const StepRow& r = params_.rows[row];
        const float* taps[kPleRing];
        for (uint32_t t = 0; t < config_.ple_conv; ++t) {
          const uint32_t back =
              (config_.ple_conv - 1 - t) * config_.ngram_size;  // dilation = n-gram size
          taps[t] =
              r.position < back
                  ? nullptr
                  : state.conv + PleRingAt(params_.seqs[r.seq].slot, r.position - back, width) + at;
        }
        kernels_->conv_silu(taps, config_.ple_conv, w.conv + at, width, hidden,
                            s.ple_z.row(row) + at);
        kernels_->ple_add(s.ple_gated.row(row) + at, s.ple_z.row(row) + at, hidden,
                          wide + row * width + at);
      });
}

}  // namespace lode
