// The way into the draft head on the cuda device. The streams of a row are so many vectors that
// meet the same matrix, and their outputs are the row's new streams as they lie: so rows * streams
// vectors go through the products of up to kWindowRowsMax vectors that every other matrix uses.
// Formulas: docs/design/drafts.md. See cuda_device_impl.h.
#include <algorithm>

#include "gpu_worker/cuda_buffers.h"
#include "gpu_worker/cuda_device_impl.h"
#include "kernels/cuda/draft.h"
#include "kernels/kernel_table.h"
#include "shared/base/check.h"

namespace lode {

Status CudaDevice::EnableDrafts() {
  Impl& d = *impl_;
  const ModelConfig& c = d.config;
  const uint32_t columns = 2 * c.hidden, vectors = kWindowRowsMax * c.streams;
  for (const uint32_t len : cuda::kFormLens) {
    if (columns % len != 0) continue;
    const size_t bytes = ActLayout{columns, len}.bytes() + columns;  // see Impl::Carve
    d.draft.forms.stride = std::max(d.draft.forms.stride, (bytes + 255) / 256 * 256);
  }
  d.draft.forms.rows = vectors;
  const DeviceBuffers allocate{*this};
  const size_t wide = size_t{c.WideWidth()} * kWindowRowsMax * sizeof(float);
  LODE_RETURN_IF_ERROR(allocate("draft embedding",
                                size_t{c.hidden} * kWindowRowsMax * sizeof(float), &d.draft.embed));
  LODE_RETURN_IF_ERROR(allocate("draft normed residual", wide, &d.draft.normed));
  LODE_RETURN_IF_ERROR(allocate("draft projection input", 2 * wide, &d.draft.joined));
  return allocate("draft projection input, quantised",
                  d.draft.forms.stride * vectors * cuda::kForms, &d.draft.forms.memory);
}

void CudaDevice::DraftInput(const DraftWeights& w, const WeightMatrix& embed, const float* residual,
                            float* wide) {
  Impl& d = *impl_;
  const ModelConfig& c = d.config;
  LODE_CHECK(d.draft.joined != nullptr, "this device was not told to draft");
  LODE_CHECK(w.project.cols == 2 * c.hidden && w.project.rows == c.hidden,
             "the draft head's projection is {} x {}", w.project.rows, w.project.cols);
  d.FlushWrite();
  d.Wrote(wide);
  cuda::KernelsOf(embed.format)
      .dequant(d.s(),
               {.table = embed.data,
                .row_bytes = embed.row_bytes,
                .n = c.hidden,
                .out = d.draft.embed,
                .out_stride = c.hidden,
                .copies = 1,
                .tokens = d.block},
               d.rows());
  cuda::LaunchRopeTables(d.s(), d.Rope(), d.block, d.rows());
  cuda::LaunchDraftNorm(d.s(),
                        {.embed = d.draft.embed,
                         .residual = residual,
                         .normed = d.draft.normed,
                         .embed_weight = w.embed_norm,
                         .residual_weight = w.residual_norm,
                         .streams = c.streams,
                         .hidden = c.hidden,
                         .parts = w.full_width_norm ? 1 : c.streams,
                         .eps = c.rms_eps,
                         .window = d.block},
                        d.rows());
  const uint32_t columns = 2 * c.hidden, form = Impl::FormOf(w.project.format);
  const cuda::ActForms forms = d.Forms(d.draft.forms, columns, d.FormsOf({&w.project}));
  cuda::LaunchDraftJoin(d.s(),
                        {.embed = d.draft.embed,
                         .normed = d.draft.normed,
                         .joined = d.draft.joined,
                         .streams = c.streams,
                         .hidden = c.hidden,
                         .forms = forms,
                         .check = d.Check(cuda::LayerPart::kMixer)},
                        d.rows());
  const uint32_t vectors = d.rows() * c.streams;
  for (uint32_t first = 0; first < vectors; first += kWindowRowsMax) {
    cuda::MatBatch batch;
    batch.n_rows = std::min(kWindowRowsMax, vectors - first);
    batch.source = {.f = d.draft.joined + size_t{first} * columns,
                    .f_stride = columns,
                    .columns = columns,
                    .form = {}};
    if (form < cuda::kForms) {
      batch.source.form = forms.form[form];
      batch.source.form.base += size_t{first} * batch.source.form.stride;
    }
    batch.n_tasks = 1;
    batch.tasks[0] = {w.project.data, w.project.row_bytes, wide + size_t{first} * c.hidden,
                      w.project.rows, w.project.format,    0};
    cuda::KernelsOf(w.project.format)
        .mat(d.s(), batch,
             cuda::ChooseShape(w.project.format, w.project.rows, columns, batch.n_rows,
                               d.card.multiprocessors));
  }
  cuda::CheckLaunches("draft head input");
}

void CudaDevice::ContinueWindow(uint32_t n_rows) {
  impl_->pending = {};
  impl_->due_gates = {};
  impl_->staged->params.n_rows = n_rows;  // of the launches that follow; not copied
  impl_->layer = 0;
  impl_->x_source = nullptr;
}

}  // namespace lode
