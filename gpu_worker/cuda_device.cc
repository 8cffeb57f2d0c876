// Start, memory, window parameters and the operations around the mixers. The matrix product and the
// forms of activations are in cuda_device_mat.cc, the mixers in cuda_device_mixers.cc. See
// cuda_device.h.
#include "gpu_worker/cuda_device.h"

#include <algorithm>
#include <cstring>

#include "gpu_worker/cuda_device_impl.h"
#include "kernels/canonical_trig.h"
#include "kernels/kernel_table.h"
#include "shared/base/check.h"

namespace lode {
namespace {

constexpr uint32_t kOldestCapability = 75;                        // Turing
constexpr uint32_t kSharedFloatsMax = 48 * 1024 / sizeof(float);  // a block gets them on every card
constexpr size_t kAlignment = 256;                                // bytes

size_t Aligned(size_t n) { return (n + kAlignment - 1) / kAlignment * kAlignment; }

// The first reason why the kernels cannot compute this model.
Status CheckShape(const ModelConfig& c) {
  const cuda::DeltaShape delta = {c.ssm_key_heads, c.ssm_value_heads, c.ssm_head_dim, c.ssm_conv};
  if (!cuda::DeltaShapeIsKnown(delta))
    return InvalidArgument("the cuda device has no DeltaNet kernel for heads of {} values",
                           c.ssm_head_dim);
  if (c.head_dim > kAttendHeadDimMax || c.head_dim % 8 != 0 || c.index_dim > kAttendHeadDimMax)
    return InvalidArgument("the cuda device has no attention kernel for heads of {} and {} values",
                           c.head_dim, c.index_dim);
  if (2 * c.hidden > kSharedFloatsMax)
    return InvalidArgument("hidden vectors of {} values exceed a block's shared memory", c.hidden);
  if (kKvBlockCells % c.index_block != 0 || (c.ssm_conv - 1) + kWindowRowsMax > kConvRing ||
      c.index_block - 1 + kWindowRowsMax > kConvRing ||
      (!c.ple.empty() && (c.ple_conv - 1) * c.ngram_size + kWindowRowsMax > kPleRing)) {
    return InvalidArgument(
        "index block {} or convolutions ({}, {}) exceed what the device's rings hold",
        c.index_block, c.ssm_conv, c.ple_conv);
  }
  return OkStatus();
}

CudaCard CardOf(const cuda::CardFacts& facts) {
  return {facts.name, facts.capability, facts.multiprocessors, facts.total_bytes, facts.free_bytes};
}

}  // namespace

StatusOr<CudaCard> CudaDevice::Describe(int ordinal) {
  LODE_ASSIGN_OR_RETURN(const cuda::CardFacts facts, cuda::OpenCard(ordinal));
  return CardOf(facts);
}

StatusOr<std::unique_ptr<CudaDevice>> CudaDevice::Create(const ModelConfig& config,
                                                         const CudaDeviceOptions& options) {
  LODE_RETURN_IF_ERROR(CheckShape(config));
  auto impl = std::make_unique<Impl>(config, options);
  LODE_RETURN_IF_ERROR(impl->Start());
  return std::unique_ptr<CudaDevice>(new CudaDevice(std::move(impl)));
}

CudaDevice::CudaDevice(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
CudaDevice::~CudaDevice() = default;

Status CudaDevice::Impl::Start() {
  LODE_ASSIGN_OR_RETURN(const cuda::CardFacts facts, cuda::OpenCard(options.ordinal));
  card = CardOf(facts);
  if (card.capability < kOldestCapability) {
    return Unavailable("{} has compute capability {}.{}; the cuda device needs {}.{} or newer",
                       card.name, card.capability / 10, card.capability % 10,
                       kOldestCapability / 10, kOldestCapability % 10);
  }
  LODE_ASSIGN_OR_RETURN(stream, cuda::OpenStream());
  LODE_ASSIGN_OR_RETURN(void* pinned,
                        cuda::AllocatePinned(Aligned(sizeof(cuda::WindowBlock)) + 64));
  staged = new (pinned) cuda::WindowBlock{{}, cuda::kAllFinite};
  outcome_word = reinterpret_cast<uint64_t*>(static_cast<uint8_t*>(pinned) +
                                             Aligned(sizeof(cuda::WindowBlock)));
  const ModelConfig& c = config;
  blocks_max = options.context / c.index_block + 1;
  cells_max = static_cast<size_t>(c.IndexBlocksMax() + 1) * c.index_block;
  const size_t bytes = Carve(nullptr);
  LODE_ASSIGN_OR_RETURN(void* memory_of_scratch, cuda::AllocateDevice(bytes));
  memory.push_back(memory_of_scratch);
  allocations.push_back({"scratch of a window", bytes});
  cuda::ZeroAsync(memory_of_scratch, bytes, stream);
  Carve(static_cast<uint8_t*>(memory_of_scratch));
  std::vector<float> frequencies;
  for (uint32_t i = 0; i < c.rope_dims / 2; ++i)
    frequencies.push_back(canonical::RopeInvFreq(c.rope_theta, i, c.rope_dims));
  cuda::CopyAsync(scratch.inv_freq, frequencies.data(), frequencies.size() * sizeof(float), stream);
  cuda::CopyAsync(block, staged, sizeof(*block), stream);
  cuda::Synchronize(stream);
  return OkStatus();
}

CudaDevice::Impl::~Impl() {
  if (stream != nullptr) cuda::Synchronize(stream);
  for (void* m : memory) cuda::FreeDevice(m);
  if (staged != nullptr) cuda::FreePinned(staged);
  cuda::CloseStream(stream);
}

size_t CudaDevice::Impl::Carve(uint8_t* base) {
  const ModelConfig& c = config;
  size_t used = 0;
  const auto bytes = [&](size_t n) {
    uint8_t* p = base == nullptr ? nullptr : base + used;
    used += Aligned(n);
    return p;
  };
  const auto floats = [&](size_t n) { return reinterpret_cast<float*>(bytes(n * sizeof(float))); };
  const auto rows_of = [&](size_t width) { return floats(width * kWindowRowsMax); };
  const auto words = [&](size_t n) { return reinterpret_cast<uint32_t*>(bytes(n * 4)); };
  const auto forms = [&](uint32_t columns, uint32_t rows) {
    size_t stride = 0;
    for (uint32_t len : cuda::kFormLens) {
      const uint32_t n = (columns + len - 1) / len * len;
      stride =
          std::max(stride, ActLayout{n, len}.bytes() + n);  // n: codes arranged for 2-bit weights
    }
    FormBuffer b = {nullptr, rows, Aligned(stride)};
    b.memory = bytes(b.stride * rows * cuda::kForms);
    return b;
  };
  Scratch& s = scratch;
  const uint32_t widest =
      std::max({c.WideWidth(), c.hc_rank, c.SsmValueWidth(), c.heads * c.head_dim, c.shared_width,
                c.PleWidth(), 2 * c.hidden});
  const uint32_t pairs = kWindowRowsMax * c.experts_used,
                 chunks = static_cast<uint32_t>((cells_max + kAttendChunk - 1) / kAttendChunk);
  block = reinterpret_cast<cuda::WindowBlock*>(bytes(sizeof(cuda::WindowBlock)));
  s.x_forms = forms(c.hidden, kWindowRowsMax);
  s.forms = forms(widest, kWindowRowsMax);
  s.pair_forms = forms(c.expert_width, pairs);
  s.normed = rows_of(c.WideWidth()), s.low = rows_of(c.hc_rank), s.up = rows_of(c.WideWidth());
  s.qkv = rows_of(c.SsmConvWidth()), s.z = rows_of(c.SsmValueWidth());
  s.beta = rows_of(c.ssm_value_heads), s.alpha = rows_of(c.ssm_value_heads);
  s.query = rows_of(c.SsmKeyWidth()), s.mixed = rows_of(c.SsmValueWidth());
  s.finished = words(1);
  s.inv_freq = floats(c.rope_dims / 2), s.sin = rows_of(c.rope_dims / 2),
  s.cos = rows_of(c.rope_dims / 2);
  s.q = rows_of(2 * c.heads * c.head_dim);
  s.k = rows_of(c.kv_heads * c.head_dim), s.v = rows_of(c.kv_heads * c.head_dim);
  s.index_q = rows_of(c.index_heads * c.index_dim), s.index_k = rows_of(c.index_dim);
  s.attended = rows_of(c.heads * c.head_dim);
  s.block_scores = rows_of(blocks_max);
  s.cells = words(cells_max * kWindowRowsMax), s.n_cells = words(kWindowRowsMax);
  s.arrived = words(kWindowRowsMax);
  s.scores = rows_of(cells_max * c.heads);
  s.chunk_total = rows_of(size_t{chunks} * c.heads);
  s.chunk_sum = rows_of(size_t{chunks} * c.heads * c.head_dim);
  s.router_logits = rows_of(c.experts);
  s.shared_gate = rows_of(c.shared_width), s.shared_up = rows_of(c.shared_width);
  s.shared_inject = rows_of(1);
  s.expert_hidden = floats(size_t{pairs} * c.expert_width);
  s.expert_up = floats(size_t{pairs} * c.expert_width);
  if (!c.ple.empty()) {
    s.ple_embed = rows_of(c.PleWidth()), s.ple_key = rows_of(c.WideWidth());
    s.ple_value = rows_of(c.hidden), s.ple_gated = rows_of(c.WideWidth());
  }
  return used;
}

CUstream_st* CudaDevice::stream() const { return impl_->stream; }
const CudaCard& CudaDevice::card() const { return impl_->card; }

// ---- memory

StatusOr<void*> CudaDevice::Allocate(const std::string& what, size_t bytes) {
  const size_t rounded = Aligned(std::max<size_t>(bytes, 1));
  StatusOr<void*> memory = cuda::AllocateDevice(rounded);
  if (!memory.ok()) return ResourceExhausted("{} does not fit: {}", what, Message(memory.status()));
  impl_->memory.push_back(*memory);
  impl_->allocations.push_back({what, bytes});
  cuda::ZeroAsync(*memory, rounded, impl_->stream);
  return *memory;
}
const std::vector<DeviceAllocation>& CudaDevice::allocations() const { return impl_->allocations; }

void CudaDevice::Upload(void* device, const void* host, size_t bytes) {
  impl_->FlushGates();
  impl_->FlushWrite();
  impl_->x_source = nullptr;  // it may be what is overwritten
  cuda::CopyAsync(device, host, bytes, impl_->stream);
  if (!cuda::IsCapturing(impl_->stream)) cuda::Synchronize(impl_->stream);
}
void CudaDevice::Download(void* host, const void* device, size_t bytes) {
  impl_->FlushGates();
  impl_->FlushWrite();
  cuda::CopyAsync(host, device, bytes, impl_->stream);
  if (!cuda::IsCapturing(impl_->stream)) cuda::Synchronize(impl_->stream);
}
void CudaDevice::Zero(void* device, size_t bytes) {
  impl_->FlushGates();
  impl_->FlushWrite();
  impl_->x_source = nullptr;
  cuda::ZeroAsync(device, bytes, impl_->stream);
}

// ---- window

void CudaDevice::StageWindow(const StepParams& params) {
  LODE_CHECK(params.n_rows <= kWindowRowsMax && params.n_seqs <= kWindowRowsMax,
             "window of {} rows, {} sequences", params.n_rows, params.n_seqs);
  impl_->staged->params = params;
  impl_->staged->not_finite = cuda::kAllFinite;
}
void CudaDevice::BeginWindow(const StepParams& params) {
  impl_->pending = {};  // of an aborted window
  impl_->due_gates = {};
  impl_->mixing = nullptr;
  StageWindow(params);
  impl_->layer = 0;
  impl_->x_source = nullptr;
  cuda::CopyAsync(impl_->block, impl_->staged, sizeof(cuda::WindowBlock), impl_->stream);
}
void CudaDevice::BeginLayer(uint32_t layer) {
  impl_->layer = layer;
  impl_->reads = 0;
}

void CudaDevice::EnqueueOutcome(uint64_t* pinned_word) {
  cuda::CopyAsync(pinned_word, &impl_->block->not_finite, sizeof(uint64_t), impl_->stream);
}
WindowOutcome CudaDevice::FromWord(uint64_t key) {
  if (key == cuda::kAllFinite) return {};
  return {WindowStatus::kNotFinite,
          {.layer = cuda::NotFiniteLayer(key),
           .row = cuda::NotFiniteRow(key),
           .worker = 0,
           .detail = 0}};
}
WindowOutcome CudaDevice::Outcome() {
  impl_->FlushWrite();
  EnqueueOutcome(impl_->outcome_word);
  cuda::Synchronize(impl_->stream);
  return FromWord(*impl_->outcome_word);
}
cuda::WindowBlock* CudaDevice::window_block() const { return impl_->block; }

// ---- embedding and hyper-connections

void CudaDevice::Embed(const WeightMatrix& table, float* wide) {
  Impl& d = *impl_;
  const ModelConfig& c = d.config;
  d.pending = {};  // overwritten
  d.Wrote(wide);
  cuda::KernelsOf(table.format)
      .dequant(d.s(),
               {.table = table.data,
                .row_bytes = table.row_bytes,
                .n = c.hidden,
                .out = wide,
                .out_stride = c.WideWidth(),
                .copies = c.streams,
                .tokens = d.block},
               d.rows());
  // The rotary table of a row serves every attention layer of the window.
  cuda::LaunchRopeTables(d.s(), d.Rope(), d.block, d.rows());
  cuda::CheckLaunches("embedding");
}

void CudaDevice::HcRead(const HcWeights& w, const float* wide, float* x, float* inject) {
  Impl& d = *impl_;
  d.FlushGates();
  d.Wrote(x);
  const Impl::Input normed = d.HcNorm(w, wide);
  // The gates of the first read of a DeltaNet layer ride in its projections, a long launch; all others
  // beside the down matrix.
  const Impl::DueGates gates = {w.inject, inject};
  const bool delta = d.layer < d.config.layers && d.config.is_attention[d.layer] == 0;
  const bool before_mixer = d.reads++ == 0 && delta;
  if (!before_mixer) d.due_gates = gates;
  d.Mat({{&w.down, d.scratch.low}}, normed);
  if (before_mixer) d.due_gates = gates;
  d.HcMix(w, x);
  d.x_source = x;
  cuda::CheckLaunches("hyper-connection read");
}

// The write gates of the last read, inject = 2 sigmoid(weight . normed / streams). Nobody needs
// them before the write.
bool CudaDevice::Impl::TakeGates(cuda::MatBatch* batch) {
  if (due_gates.weight == nullptr || batch->n_tasks == cuda::kMatTasksMax) return false;
  const uint32_t width = config.WideWidth();
  batch->tasks[batch->n_tasks++] = {
      .w = reinterpret_cast<const uint8_t*>(due_gates.weight),
      .row_bytes = width * sizeof(float),
      .y = due_gates.inject,
      .rows = config.streams,
      .format = Format::kF32,
      .own_x = scratch.normed,
      .own_columns = width,
      .gate_factor = canonical::Div(1.0f, static_cast<float>(config.streams))};
  return true;
}

void CudaDevice::Impl::FlushGates() {
  cuda::MatBatch batch;
  batch.n_rows = rows();
  batch.source = {.f = scratch.normed,
                  .f_stride = config.WideWidth(),
                  .columns = config.WideWidth(),
                  .form = {}};
  if (!TakeGates(&batch)) return;
  due_gates = {};
  cuda::KernelsOf(Format::kF32)
      .mat(s(), batch,
           cuda::ChooseShape(Format::kF32, config.streams, config.WideWidth(), rows(),
                             card.multiprocessors));
}

void CudaDevice::Impl::HcMix(const HcWeights& w, float* x) {
  const ModelConfig& c = config;
  constexpr uint32_t kForm = 0;  // blocks of 32: what the fused kernel makes
  const cuda::CheckArgs check = Check(cuda::LayerPart::kMixer);
  // The last mixer's rows matter only where logits are wanted.
  const bool fused =
      w.up.rows == c.streams * c.hidden &&
      cuda::KernelsOf(w.up.format)
          .narrow(s(), {.w = w.up.data,
                        .row_bytes = w.up.row_bytes,
                        .rows = c.hidden,
                        .columns = c.hc_rank,
                        .n_rows = rows(),
                        .x = scratch.low,
                        .y = x,
                        .check = check,
                        .streams = c.streams,
                        .normed = scratch.normed,
                        .form = Forms(scratch.x_forms, c.hidden, 1u << kForm).form[kForm],
                        .y_check = Check(cuda::LayerPart::kMixer, w.inject == nullptr)});
  x_made = fused ? 1u << kForm : ~0u;
  if (!fused) HcMixApart(w, x);
}

void CudaDevice::Impl::HcMixApart(const HcWeights& w, float* x) {
  const ModelConfig& c = config;
  const Input low = {.x = scratch.low,
                     .columns = c.hc_rank,
                     .forms = Forms(scratch.forms, c.hc_rank, FormsOf({&w.up})),
                     .checked = true};
  cuda::LaunchHcGate(s(),
                     {.low = scratch.low,
                      .rank = c.hc_rank,
                      .streams = c.streams,
                      .forms = low.forms,
                      .check = Check(cuda::LayerPart::kMixer)},
                     rows());
  Mat({{&w.up, scratch.up}}, low);
  cuda::LaunchHcMix(s(),
                    {.up = scratch.up,
                     .normed = scratch.normed,
                     .x = x,
                     .streams = c.streams,
                     .hidden = c.hidden,
                     .forms = Forms(scratch.x_forms, c.hidden, ~0u),
                     .check = Check(cuda::LayerPart::kMixer, w.inject == nullptr)},
                    rows());
}

// The norm of every stream, after a write to them that is still due.
CudaDevice::Impl::Input CudaDevice::Impl::HcNorm(const HcWeights& w, const float* wide) {
  const ModelConfig& c = config;
  PendingWrite due;
  if (pending.wide == wide) {
    due = pending;
    pending = {};
  }
  // A stream's blocks are whole only when the block length divides it.
  const uint32_t wanted = FormsOf({&w.down});
  const bool whole = wanted == 0 || c.hidden % Info(w.down.format).act_block_len == 0;
  Input normed = {.x = scratch.normed, .columns = c.WideWidth(), .forms = {}, .checked = true};
  if (whole) normed.forms = Forms(scratch.forms, c.WideWidth(), wanted);
  cuda::LaunchHcNorm(s(),
                     {.wide = const_cast<float*>(wide),
                      .y = due.y,
                      .inject = due.inject,
                      .weight = w.norm,
                      .normed = scratch.normed,
                      .streams = c.streams,
                      .hidden = c.hidden,
                      .eps = c.rms_eps,
                      .forms = normed.forms,
                      .check = Check(cuda::LayerPart::kMixer)},
                     rows());
  return normed;
}

void CudaDevice::HcWrite(const float* y, const float* inject, float* wide) {
  impl_->FlushGates();
  impl_->FlushWrite();
  impl_->Wrote(wide);
  impl_->pending = {y, inject, wide};
}

void CudaDevice::Impl::FlushWrite() {
  if (pending.wide == nullptr) return;
  cuda::LaunchHcWrite(s(),
                      {.y = pending.y,
                       .inject = pending.inject,
                       .wide = pending.wide,
                       .streams = config.streams,
                       .hidden = config.hidden},
                      rows());
  pending = {};
  cuda::CheckLaunches("hyper-connection write");
}

// ---- head

void CudaDevice::Head(const WeightMatrix& output, const float* x, float* logits) {
  Impl& d = *impl_;
  d.Mat({{&output, logits}},
        d.InputOf(x, output.cols, cuda::LayerPart::kMixer, d.FormsOf({&output}), true), true);
  cuda::CheckLaunches("head");
}

}  // namespace lode
