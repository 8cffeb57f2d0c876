// The way into the draft head on the cpu device: embedding of the next token beside the residual
// streams of the row before, each normed, projected to new streams. One product per stream, because
// all streams share one matrix. Formulas: docs/design/drafts.md.
#include <cstring>

#include "gpu_worker/cpu_device_scratch.h"
#include "shared/base/check.h"

namespace lode {

void CpuDevice::DraftInput(const DraftWeights& w, const WeightMatrix& embed, const float* residual,
                           float* wide) {
  LODE_CHECK(options_.drafts, "this device was made without drafts");
  Scratch& s = *scratch_;
  const uint32_t hidden = config_.hidden, streams = config_.streams, width = config_.WideWidth();
  const auto dequant = kernels_->dequant[static_cast<uint32_t>(embed.format)];
  pool_.ParallelFor(params_.n_rows, 8ull * params_.n_rows * width, [&](uint32_t row, uint32_t) {
    const StepRow& r = params_.rows[row];
    float* e = s.draft_embed.row(row);
    dequant(embed.data + static_cast<size_t>(r.token) * embed.row_bytes, hidden, e);
    kernels_->rms_norm(e, w.embed_norm, hidden, config_.rms_eps, e);
    const float* from = residual + static_cast<size_t>(r.source) * width;
    const uint32_t parts = w.full_width_norm ? 1 : streams, part = width / parts;
    for (uint32_t p = 0; p < parts; ++p) {
      const size_t at = static_cast<size_t>(p) * part;
      kernels_->rms_norm(from + at, w.residual_norm + at, part, config_.rms_eps,
                         s.draft_residual.row(row) + at);
    }
    kernels_->rope_table(r.position, s.rope_inv_freq.data(), config_.rope_dims / 2, s.sin.row(row),
                         s.cos.row(row));
  });
  for (uint32_t stream = 0; stream < streams; ++stream) {
    const size_t at = static_cast<size_t>(stream) * hidden;
    for (uint32_t row = 0; row < params_.n_rows; ++row) {
      std::memcpy(s.draft_in.row(row), s.draft_embed.row(row), hidden * sizeof(float));
      std::memcpy(s.draft_in.row(row) + hidden, s.draft_residual.row(row) + at,
                  hidden * sizeof(float));
    }
    Mat(std::initializer_list<MatJob>{{&w.project, s.draft_out.data()}}, s.draft_in.data());
    for (uint32_t row = 0; row < params_.n_rows; ++row) {
      std::memcpy(wide + static_cast<size_t>(row) * width + at, s.draft_out.row(row),
                  hidden * sizeof(float));
    }
  }
}

}  // namespace lode
