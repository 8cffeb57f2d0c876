// Products of the cuda device: forms of activations, dense matrices, routed experts, the shared
// expert and the router. See cuda_device_impl.h.
#include <algorithm>

#include "gpu_worker/cuda_device_impl.h"
#include "kernels/kernel_table.h"
#include "shared/base/check.h"

namespace lode {
namespace {

// Blocks of threads of an expert launch per multiprocessor, and how many of them start with entries
// that read host memory: enough reads in flight to fill the link.
constexpr uint32_t kExpertBlocks = 8;
constexpr uint32_t kSlowBlocks = 48;
constexpr uint32_t kWeightAlignment = 16;  // bytes, of a matrix's first row

}  // namespace

// ---- forms

uint32_t CudaDevice::Impl::FormOf(Format format) {
  for (uint32_t f = 0; f < cuda::kForms; ++f) {
    if (cuda::kFormLens[f] == Info(format).act_block_len) return f;
  }
  LODE_CHECK(Info(format).act_block_len == 0, "no form for blocks of {}",
             Info(format).act_block_len);
  return cuda::kForms;
}

uint32_t CudaDevice::Impl::FormsOf(std::initializer_list<const WeightMatrix*> matrices) const {
  uint32_t wanted = 0;
  for (const WeightMatrix* w : matrices) {
    if (const uint32_t f = FormOf(w->format); f < cuda::kForms) wanted |= 1u << f;
  }
  return wanted;
}

// `wanted` may name forms that the columns do not allow: those are left out.
cuda::ActForms CudaDevice::Impl::Forms(const FormBuffer& buffer, uint32_t columns,
                                       uint32_t wanted) const {
  cuda::ActForms forms;
  for (uint32_t f = 0; f < cuda::kForms; ++f) {
    const uint32_t len = cuda::kFormLens[f];
    if ((wanted >> f & 1u) == 0 || columns % len != 0) continue;
    const ActLayout layout = {columns, len};
    forms.form[f] = {.base = buffer.memory + f * buffer.stride * buffer.rows,
                     .stride = static_cast<uint32_t>(buffer.stride),
                     .d_offset = static_cast<uint32_t>(layout.d_offset()),
                     .sum_offset = static_cast<uint32_t>(layout.sum16_offset()),
                     .crumb_offset = len == 64 ? static_cast<uint32_t>(layout.bytes()) : 0};
  }
  return forms;
}

cuda::CheckArgs CudaDevice::Impl::Check(cuda::LayerPart part, bool logits_only) const {
  return {.window = block, .layer = layer, .part = part, .logits_only = logits_only};
}

CudaDevice::Impl::Input CudaDevice::Impl::InputOf(const float* x, uint32_t columns,
                                                  cuda::LayerPart part, uint32_t wanted,
                                                  bool logits_only) {
  if (x == x_source) {
    const uint32_t missing = wanted & ~x_made;
    if (missing != 0)
      cuda::LaunchQuantize(s(),
                           {.x = x,
                            .stride = columns,
                            .n = columns,
                            .forms = Forms(scratch.x_forms, columns, missing),
                            .check = Check(part, logits_only)},
                           rows());
    x_made |= missing;
    return {.x = x,
            .columns = columns,
            .forms = Forms(scratch.x_forms, columns, x_made),
            .checked = true};
  }
  const Input input = {
      .x = x, .columns = columns, .forms = Forms(scratch.forms, columns, wanted), .checked = true};
  cuda::LaunchQuantize(s(),
                       {.x = x,
                        .stride = columns,
                        .n = columns,
                        .forms = input.forms,
                        .check = Check(part, logits_only)},
                       rows());
  return input;
}

// ---- dense matrices

void CudaDevice::Impl::Mat(std::initializer_list<CudaMatJob> jobs, const Input& input,
                           bool logits_only) {
  uint32_t wanted = 0;
  for (const CudaMatJob& job : jobs) {
    LODE_CHECK(job.w->cols == input.columns, "a matrix of {} columns meets vectors of {}",
               job.w->cols, input.columns);
    LODE_CHECK(reinterpret_cast<uintptr_t>(job.w->data) % kWeightAlignment == 0,
               "a matrix in device memory is not aligned");
    Wrote(job.y);
    const uint32_t f = FormOf(job.w->format);
    if (f < cuda::kForms && input.forms.form[f].base == nullptr) wanted |= 1u << f;
  }
  Input in = input;
  if (wanted != 0 || !in.checked) {
    in.forms = Forms(scratch.forms, input.columns, wanted);
    cuda::LaunchQuantize(s(),
                         {.x = in.x,
                          .stride = in.columns,
                          .n = in.columns,
                          .forms = in.forms,
                          .check = Check(cuda::LayerPart::kMixer, logits_only)},
                         rows());
  }
  // One launch per quantised format; float matrices ride in the first one.
  std::vector<const CudaMatJob*> left;
  for (const CudaMatJob& job : jobs) left.push_back(&job);
  while (!left.empty()) left = LaunchFormat(left, input, in, logits_only);
}

cuda::MatBatch CudaDevice::Impl::BatchOf(Format format, const Input& input,
                                         const cuda::ActForms& made) const {
  cuda::MatBatch batch;
  batch.n_rows = rows();
  batch.source = {.f = input.x, .f_stride = input.columns, .columns = input.columns, .form = {}};
  if (const uint32_t f = FormOf(format); f < cuda::kForms)
    batch.source.form = input.forms.form[f].base != nullptr ? input.forms.form[f] : made.form[f];
  return batch;
}

// The matrices of the first quantised format and all float ones; returns the others.
std::vector<const CudaMatJob*> CudaDevice::Impl::LaunchFormat(
    const std::vector<const CudaMatJob*>& jobs, const Input& input, const Input& made,
    bool logits_only) {
  Format format = jobs[0]->w->format;
  for (const CudaMatJob* job : jobs) {
    if (FormOf(job->w->format) < cuda::kForms) {
      format = job->w->format;
      break;
    }
  }
  cuda::MatBatch batch = BatchOf(format, input, made.forms);
  batch.logits_only = logits_only ? block : nullptr;
  uint32_t all_rows = 0;
  std::vector<const CudaMatJob*> rest;
  for (const CudaMatJob* job : jobs) {
    const WeightMatrix& w = *job->w;
    if (w.format != format && FormOf(w.format) < cuda::kForms) {
      rest.push_back(job);
      continue;
    }
    LODE_CHECK(batch.n_tasks < cuda::kMatTasksMax, "too many matrices in one product");
    batch.tasks[batch.n_tasks++] = {w.data, w.row_bytes, job->y, w.rows, w.format, 0};
    if (w.format == format) all_rows += w.rows;
  }
  if (!logits_only && TakeGates(&batch)) due_gates = {};
  cuda::KernelsOf(format).mat(
      s(), batch, cuda::ChooseShape(format, all_rows, input.columns, rows(), card.multiprocessors));
  return rest;
}

// ---- experts

void CudaDevice::Route(const MoeWeights& w, const float* x, RoutedRow* routed) {
  Impl& d = *impl_;
  const ModelConfig& c = d.config;
  // Forms of x that the experts may want ride in the router's launch.
  const bool own = x == d.x_source;
  const uint32_t missing = own ? ~d.x_made : 0;
  if (cuda::LaunchRouter(d.s(),
                         {.w = w.router.data,
                          .row_bytes = w.router.row_bytes,
                          .format = w.router.format,
                          .x = x,
                          .columns = c.hidden,
                          .experts = c.experts,
                          .logits = d.scratch.router_logits,
                          .forms = d.Forms(d.scratch.x_forms, c.hidden, missing),
                          .check = d.Check(cuda::LayerPart::kMixer)},
                         d.rows())) {
    if (own) d.x_made = ~0u;
  } else {
    d.Mat({{&w.router, d.scratch.router_logits}},
          d.InputOf(x, c.hidden, cuda::LayerPart::kMixer, d.FormsOf({&w.router})));
  }
  cuda::LaunchRoute(d.s(),
                    {.logits = d.scratch.router_logits,
                     .experts = c.experts,
                     .used = c.experts_used,
                     .routed = routed},
                    d.rows());
  cuda::CheckLaunches("router");
}

// h = silu(gate x) * up x and the gate's dot, in one launch; false: not for these types.
bool CudaDevice::Impl::SwigluOfShared(const MoeWeights& w, const Input& input) {
  const WeightMatrix &gate = w.shared_gate, &up = w.shared_up;
  if (gate.format != up.format) return false;
  cuda::MatBatch batch = BatchOf(gate.format, input, {});
  batch.tasks[0] = {gate.data, gate.row_bytes, scratch.shared_gate, gate.rows, gate.format, 0};
  batch.tasks[1] = {up.data, up.row_bytes, scratch.shared_up, up.rows, up.format, 0};
  batch.tasks[2] = {reinterpret_cast<const uint8_t*>(w.shared_inject),
                    config.hidden * sizeof(float),
                    scratch.shared_inject,
                    1,
                    Format::kF32,
                    0};
  batch.n_tasks = 3;
  return cuda::KernelsOf(gate.format)
      .swiglu(s(), batch,
              cuda::ChooseShape(gate.format, 2 * gate.rows, input.columns, rows(),
                                card.multiprocessors));
}

void CudaDevice::SharedExpert(const MoeWeights& w, const float* x, float* shared) {
  Impl& d = *impl_;
  const ModelConfig& c = d.config;
  Impl::Scratch& s = d.scratch;
  const Impl::Input in =
      d.InputOf(x, c.hidden, cuda::LayerPart::kShared, d.FormsOf({&w.shared_gate, &w.shared_up}));
  const bool hidden_done = d.SwigluOfShared(w, in);
  d.Wrote(shared);
  cuda::NarrowProduct down = {.w = w.shared_down.data,
                              .row_bytes = w.shared_down.row_bytes,
                              .rows = c.hidden,
                              .columns = c.shared_width,
                              .n_rows = d.rows(),
                              .x = s.shared_gate,
                              .y = shared,
                              .check = d.Check(cuda::LayerPart::kShared),
                              .gates = s.shared_inject};
  if (hidden_done && cuda::KernelsOf(w.shared_down.format).narrow(d.s(), down)) {
    cuda::CheckLaunches("shared expert");
    return;
  }
  const WeightMatrix inject = {reinterpret_cast<const uint8_t*>(w.shared_inject), Format::kF32, 1,
                               c.hidden, c.hidden * sizeof(float)};
  if (!hidden_done)
    d.Mat(
        {{&w.shared_gate, s.shared_gate}, {&w.shared_up, s.shared_up}, {&inject, s.shared_inject}},
        in);
  const Impl::Input h = {.x = s.shared_gate,
                         .columns = c.shared_width,
                         .forms = d.Forms(s.forms, c.shared_width, d.FormsOf({&w.shared_down})),
                         .checked = true};
  cuda::LaunchSharedHidden(d.s(),
                           {.gate = s.shared_gate,
                            .up = hidden_done ? nullptr : s.shared_up,
                            .width = c.shared_width,
                            .inject = s.shared_inject,
                            .forms = h.forms,
                            .check = d.Check(cuda::LayerPart::kShared)},
                           d.rows());
  d.Mat({{&w.shared_down, shared}}, h);
  cuda::CheckLaunches("shared expert");
}

namespace {

cuda::CombineArgs CombineOf(const ModelConfig& c, const RoutedRow* routed, const float* shared,
                            const float* gate, float* y) {
  cuda::CombineArgs args;
  args.routed = routed;
  args.used = c.experts_used;
  args.hidden = c.hidden;
  args.shared = shared;
  args.shared_gate = gate;
  args.y = y;
  return args;
}

}  // namespace

void CudaDevice::Combine(uint32_t layer, const RoutedRow* routed, const ExpertLanes& lanes,
                         const float* shared, float* y) {
  Impl& d = *impl_;
  d.Wrote(y);
  cuda::CombineArgs args = CombineOf(d.config, routed, shared, d.scratch.shared_inject, y);
  for (uint32_t row = 0; row < d.rows(); ++row) {
    for (uint32_t order = 0; order < args.used; ++order)
      args.direct[row * args.used + order] = lanes.Result(layer, row, order);
  }
  cuda::LaunchCombine(d.s(), args, d.rows());
  cuda::CheckLaunches("combination");
}

void CudaDevice::CombineFrom(const RoutedRow* routed, const float* const* table,
                             const float* shared, float* y) {
  Impl& d = *impl_;
  d.Wrote(y);
  cuda::CombineArgs args = CombineOf(d.config, routed, shared, d.scratch.shared_inject, y);
  args.table = table;
  cuda::LaunchCombine(d.s(), args, d.rows());
  cuda::CheckLaunches("combination");
}

const float* CudaDevice::shared_gate() const { return impl_->scratch.shared_inject; }
void CudaDevice::WillWrite(const float* y) { impl_->Wrote(y); }

void CudaDevice::LaunchExperts(const cuda::ExpertFormats& formats, const cuda::ExpertList* list,
                               const float* x, float* results, CUstream_st* stream,
                               const std::function<void()>& before_down) {
  Impl& d = *impl_;
  CUstream_st* const on = stream != nullptr ? stream : d.s();
  const ModelConfig& c = d.config;
  Impl::Scratch& s = d.scratch;
  const uint32_t entries = d.rows() * c.experts_used;
  const auto form_bit = [](Format f) {
    const uint32_t form = Impl::FormOf(f);
    return form < cuda::kForms ? 1u << form : 0u;
  };
  const auto product = [&](Format format, cuda::ExpertMatrix matrix, const cuda::ActSource& source,
                           float* out, uint32_t out_rows) {
    cuda::ExpertProduct p;
    p.list = list;
    p.experts_used = c.experts_used;
    p.width = c.expert_width;
    p.hidden = c.hidden;
    p.n_rows = d.rows();
    p.source = source;
    if (const uint32_t f = Impl::FormOf(format); f >= cuda::kForms) p.source.form = {};
    p.out = out;
    p.row_bytes = RowBytes(format, source.columns);
    p.matrix = matrix;
    const cuda::ProductShape shape = cuda::ChooseShape(format, entries * out_rows, source.columns,
                                                       d.rows(), d.card.multiprocessors);
    p.blocks = std::min(kExpertBlocks * d.card.multiprocessors,
                        entries * ((out_rows + shape.tile_rows - 1) / shape.tile_rows));
    p.slow_blocks = std::min(kSlowBlocks, p.blocks / 2);
    return std::pair(p, shape);
  };
  const Impl::Input in = d.InputOf(x, c.hidden, cuda::LayerPart::kExperts,
                                   form_bit(formats.gate) | form_bit(formats.up));
  const auto source_of = [](const float* f, uint32_t columns, const cuda::ActForms& forms,
                            Format format) {
    cuda::ActSource source = {.f = f, .f_stride = columns, .columns = columns, .form = {}};
    if (const uint32_t form = Impl::FormOf(format); form < cuda::kForms)
      source.form = forms.form[form];
    return source;
  };
  const bool together = formats.gate == formats.up;
  const cuda::ActSource gate_source = source_of(x, c.hidden, in.forms, formats.gate);
  if (together) {
    const auto [p, shape] = product(formats.gate, cuda::ExpertMatrix::kGate, gate_source,
                                    s.expert_hidden, 2 * c.expert_width);
    cuda::KernelsOf(formats.gate).gate_up(on, p, shape);
  } else {
    const auto [g, gate_shape] = product(formats.gate, cuda::ExpertMatrix::kGate, gate_source,
                                         s.expert_hidden, c.expert_width);
    cuda::KernelsOf(formats.gate).expert(on, g, gate_shape);
    const auto [u, up_shape] =
        product(formats.up, cuda::ExpertMatrix::kUp, source_of(x, c.hidden, in.forms, formats.up),
                s.expert_up, c.expert_width);
    cuda::KernelsOf(formats.up).expert(on, u, up_shape);
  }
  const cuda::ActForms h = d.Forms(s.pair_forms, c.expert_width, form_bit(formats.down));
  cuda::LaunchHidden(on,
                     {.list = list,
                      .experts_used = c.experts_used,
                      .width = c.expert_width,
                      .h = s.expert_hidden,
                      .up = together ? nullptr : s.expert_up,
                      .forms = h,
                      .check = d.Check(cuda::LayerPart::kExperts)},
                     d.rows());
  if (before_down) before_down();
  const auto [p, shape] =
      product(formats.down, cuda::ExpertMatrix::kDown,
              source_of(s.expert_hidden, c.expert_width, h, formats.down), results, c.hidden);
  cuda::KernelsOf(formats.down).expert(on, p, shape);
  cuda::CheckLaunches("routed experts");
}

const uint8_t* CudaDevice::QuantisedInput(Format format, const float* x, size_t* row_stride) {
  Impl& d = *impl_;
  const uint32_t form = Impl::FormOf(format);
  if (form >= cuda::kForms) return nullptr;
  const Impl::Input in = d.InputOf(x, d.config.hidden, cuda::LayerPart::kMixer, 1u << form);
  *row_stride = in.forms.form[form].stride;
  return in.forms.form[form].base;
}

}  // namespace lode
