// Memory, window parameters and the operations around the mixers: embedding, hyper-connections,
// router, shared expert, head. The matrix product is in cpu_device_mat.cc, the mixers in
// cpu_device_delta.cc, _attention.cc and _ple.cc. See cpu_device.h.
#include "gpu_worker/cpu_device.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "gpu_worker/cpu_device_scratch.h"
#include "kernels/canonical_trig.h"
#include "shared/base/check.h"
#include "shared/base/log.h"
#include "shared/shm/memory_lock.h"

namespace lode {
namespace {

constexpr size_t kAlignment = 64;       // bytes: a cache line, and the widest register
constexpr uint32_t kColumnChunk = 512;  // columns per unit of an elementwise operation

uint32_t Chunks(uint32_t n) { return (n + kColumnChunk - 1) / kColumnChunk; }

}  // namespace

StatusOr<std::unique_ptr<CpuDevice>> CpuDevice::Create(const ModelConfig& config,
                                                       const CpuDeviceOptions& options) {
  const char* why_not = "";
  const KernelTable* kernels = FindKernelTable(options.isa.c_str(), &why_not);
  if (kernels == nullptr)
    return InvalidArgument("instruction set '{}' cannot be used here: {}", options.isa, why_not);
  if (config.head_dim > kAttendHeadDimMax || config.ssm_head_dim % kDeltaColumns != 0 ||
      kKvBlockCells % config.index_block != 0 ||
      (config.ssm_conv - 1) + kWindowRowsMax > kConvRing ||
      config.index_block - 1 + kWindowRowsMax > kConvRing ||
      (!config.ple.empty() &&
       (config.ple_conv - 1) * config.ngram_size + kWindowRowsMax > kPleRing)) {
    return InvalidArgument(
        "the model's head sizes ({}, {}), index block {} or convolutions ({}, {}) exceed what the "
        "cpu "
        "device's rings and registers hold",
        config.head_dim, config.ssm_head_dim, config.index_block, config.ssm_conv, config.ple_conv);
  }
  return std::unique_ptr<CpuDevice>(new CpuDevice(config, options, kernels));
}

CpuDevice::CpuDevice(const ModelConfig& config, const CpuDeviceOptions& options,
                     const KernelTable* kernels)
    : config_(config),
      options_(options),
      kernels_(kernels),
      pool_(options.threads, options.spin_ns, options.cpus),
      scratch_(std::make_unique<Scratch>()) {
  const ModelConfig& c = config_;
  Scratch& s = *scratch_;
  const uint32_t widest =
      std::max({c.WideWidth(), c.hc_rank, c.SsmValueWidth(), c.heads * c.head_dim, c.shared_width,
                c.PleWidth(), 2 * c.hidden, c.expert_width});
  for (uint32_t len : kActBlockLens) {
    s.act_stride = std::max(s.act_stride, ActLayout{(widest + len - 1) / len * len, len}.bytes());
  }
  s.acts.resize(s.act_stride * kActKinds * kWindowRowsMax);
  s.normed.Resize(c.WideWidth());
  s.low.Resize(c.hc_rank);
  s.up.Resize(c.WideWidth());

  s.qkv.Resize(c.SsmConvWidth());
  s.z.Resize(c.SsmValueWidth());
  s.beta.Resize(c.ssm_value_heads);
  s.alpha.Resize(c.ssm_value_heads);
  s.query.Resize(c.SsmKeyWidth());
  s.mixed.Resize(c.SsmValueWidth());
  s.columns_per_thread = static_cast<size_t>(c.ssm_head_dim) * kDeltaColumns;
  s.columns.resize(s.columns_per_thread * pool_.threads());

  const uint32_t pairs = c.rope_dims / 2;
  for (uint32_t i = 0; i < pairs; ++i)
    s.rope_inv_freq.push_back(canonical::RopeInvFreq(c.rope_theta, i, c.rope_dims));
  s.sin.Resize(pairs);
  s.cos.Resize(pairs);
  s.q.Resize(2 * c.heads * c.head_dim);
  s.k.Resize(c.kv_heads * c.head_dim);
  s.v.Resize(c.kv_heads * c.head_dim);
  s.index_q.Resize(c.index_heads * c.index_dim);
  s.index_k.Resize(c.index_dim);
  s.attended.Resize(c.heads * c.head_dim);
  s.blocks_max = options.context / c.index_block + 1;
  s.block_scores.Resize(s.blocks_max);
  s.cells_max = static_cast<size_t>(c.IndexBlocksMax() + 1) * c.index_block;
  s.selected_blocks.resize(s.blocks_max * kWindowRowsMax);
  s.cells.resize(s.cells_max * kWindowRowsMax);
  s.attend_scores.resize(s.cells_max * pool_.threads());

  s.router_logits.Resize(c.experts);
  s.router_scratch.Resize(c.experts);
  s.shared_gate.Resize(c.shared_width);
  s.shared_up.Resize(c.shared_width);
  if (options.drafts) {
    s.draft_embed.Resize(c.hidden);
    s.draft_residual.Resize(c.WideWidth());
    s.draft_in.Resize(2 * c.hidden);
    s.draft_out.Resize(c.hidden);
  }
  if (c.ple.empty()) return;
  s.ple_embed.Resize(c.PleWidth());
  s.ple_key.Resize(c.WideWidth());
  s.ple_query.Resize(c.WideWidth());
  s.ple_value.Resize(c.hidden);
  s.ple_gated.Resize(c.WideWidth());
  s.ple_z.Resize(c.WideWidth());
}

CpuDevice::~CpuDevice() = default;

// ---- memory

StatusOr<void*> CpuDevice::Allocate(const std::string& what, size_t bytes) {
  const size_t rounded = (std::max<size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  uint8_t* memory = static_cast<uint8_t*>(std::aligned_alloc(kAlignment, rounded));
  if (memory == nullptr) return ResourceExhausted("no memory for {} ({} bytes)", what, bytes);
  std::memset(memory, 0, rounded);
  if (options_.lock_memory && !lock_failed_) {
    const int error = LockPages(memory, rounded);
    lock_failed_ = error != 0;  // said once: the next ones would fail alike
    if (lock_failed_) spdlog::warn("device: {}", LockWarning(what, rounded, error));
  }
  memory_.emplace_back(memory, &std::free);
  allocations_.push_back({what, bytes});
  return memory;
}

void CpuDevice::Upload(void* device, const void* host, size_t bytes) {
  std::memcpy(device, host, bytes);
}
void CpuDevice::Download(void* host, const void* device, size_t bytes) {
  std::memcpy(host, device, bytes);
}
void CpuDevice::Zero(void* device, size_t bytes) { std::memset(device, 0, bytes); }

// ---- window

void CpuDevice::BeginWindow(const StepParams& params) {
  LODE_CHECK(params.n_rows <= kWindowRowsMax && params.n_seqs <= kWindowRowsMax,
             "window of {} rows, {} sequences", params.n_rows, params.n_seqs);
  params_ = params;
  layer_ = 0;
  not_finite_.store(~uint64_t{0}, std::memory_order_relaxed);
}

void CpuDevice::ReportNotFinite(uint32_t row) {
  const uint64_t mine = static_cast<uint64_t>(layer_) << 32 | row;
  uint64_t seen = not_finite_.load(std::memory_order_relaxed);
  while (mine < seen && !not_finite_.compare_exchange_weak(seen, mine, std::memory_order_relaxed)) {
  }
}

WindowOutcome CpuDevice::Outcome() {
  const uint64_t first = not_finite_.load(std::memory_order_relaxed);
  if (first == ~uint64_t{0}) return {};
  return {WindowStatus::kNotFinite,
          {.layer = static_cast<uint32_t>(first >> 32),
           .row = static_cast<uint32_t>(first),
           .worker = 0,
           .detail = 0}};
}

// ---- embedding and hyper-connections

void CpuDevice::Embed(const WeightMatrix& table, float* wide) {
  const auto dequant = kernels_->dequant[static_cast<uint32_t>(table.format)];
  pool_.ParallelFor(params_.n_rows, 0, [&](uint32_t row, uint32_t) {
    const StepRow& r = params_.rows[row];
    float* stream0 = wide + static_cast<size_t>(row) * config_.WideWidth();
    dequant(table.data + static_cast<size_t>(r.token) * table.row_bytes, config_.hidden, stream0);
    for (uint32_t s = 1; s < config_.streams; ++s) {
      std::memcpy(stream0 + static_cast<size_t>(s) * config_.hidden, stream0,
                  config_.hidden * sizeof(float));
    }
    // The rotary table of a row serves every attention layer of the window.
    kernels_->rope_table(r.position, scratch_->rope_inv_freq.data(), config_.rope_dims / 2,
                         scratch_->sin.row(row), scratch_->cos.row(row));
  });
}

void CpuDevice::HcRead(const HcWeights& w, const float* wide, float* x, float* inject) {
  Scratch& s = *scratch_;
  const uint32_t streams = config_.streams, hidden = config_.hidden, width = config_.WideWidth();
  const float inv_streams = canonical::Div(1.0f, static_cast<float>(streams));
  const uint64_t per_row = 4ull * width;
  pool_.ParallelFor(params_.n_rows * streams, params_.n_rows * per_row,
                    [&](uint32_t unit, uint32_t) {
                      const uint32_t row = unit / streams;
                      const size_t at = static_cast<size_t>(unit % streams) * hidden;
                      kernels_->rms_norm(wide + row * width + at, w.norm + at, hidden,
                                         config_.rms_eps, s.normed.row(row) + at);
                    });
  Mat(std::initializer_list<MatJob>{{&w.down, s.low.data()}}, s.normed.data());
  pool_.ParallelFor(params_.n_rows, params_.n_rows * per_row, [&](uint32_t row, uint32_t) {
    kernels_->hc_gate(s.low.row(row), config_.hc_rank, inv_streams, s.low.row(row));
    for (uint32_t t = 0; w.inject != nullptr && t < streams; ++t) {
      inject[row * streams + t] =
          kernels_->hc_inject(s.normed.row(row), w.inject + t * width, width, inv_streams);
    }
  });
  Mat(std::initializer_list<MatJob>{{&w.up, s.up.data()}}, s.low.data());
  const uint32_t chunks = Chunks(hidden);
  pool_.ParallelFor(params_.n_rows * chunks, params_.n_rows * 8 * per_row,
                    [&](uint32_t unit, uint32_t) {
                      const uint32_t row = unit / chunks, at = unit % chunks * kColumnChunk;
                      kernels_->hc_mix(s.up.row(row) + at, s.normed.row(row) + at, streams, hidden,
                                       std::min(kColumnChunk, hidden - at), inv_streams,
                                       x + static_cast<size_t>(row) * hidden + at);
                    });
}

void CpuDevice::HcWrite(const float* y, const float* inject, float* wide) {
  const uint32_t streams = config_.streams, hidden = config_.hidden;
  pool_.ParallelFor(params_.n_rows * streams, params_.n_rows * config_.WideWidth(),
                    [&](uint32_t unit, uint32_t) {
                      const size_t row = unit / streams;
                      kernels_->hc_write(y + row * hidden, inject[unit], hidden,
                                         wide + static_cast<size_t>(unit) * hidden);
                    });
}

// ---- experts

void CpuDevice::Route(const MoeWeights& w, const float* x, RoutedRow* routed) {
  Scratch& s = *scratch_;
  Mat(std::initializer_list<MatJob>{{&w.router, s.router_logits.data()}}, x);
  pool_.ParallelFor(
      params_.n_rows, params_.n_rows * 30ull * config_.experts, [&](uint32_t row, uint32_t) {
        kernels_->route(s.router_logits.row(row), config_.experts, config_.experts_used,
                        s.router_scratch.row(row), routed[row].ids, routed[row].weights);
      });
}

void CpuDevice::SharedExpert(const MoeWeights& w, const float* x, float* shared) {
  Scratch& s = *scratch_;
  Mat(std::initializer_list<MatJob>{{&w.shared_gate, s.shared_gate.data()},
                                    {&w.shared_up, s.shared_up.data()}},
      x);
  pool_.ParallelFor(
      params_.n_rows, params_.n_rows * 30ull * config_.shared_width, [&](uint32_t row, uint32_t) {
        float* h = s.shared_gate.row(row);
        kernels_->swiglu(h, s.shared_up.row(row), config_.shared_width, h);
        s.shared_inject[row] = kernels_->sigmoid_dot(x + static_cast<size_t>(row) * config_.hidden,
                                                     w.shared_inject, config_.hidden);
      });
  Mat(std::initializer_list<MatJob>{{&w.shared_down, shared}}, s.shared_gate.data());
}

void CpuDevice::Combine(uint32_t layer, const RoutedRow* routed, const ExpertLanes& lanes,
                        const float* shared, float* y) {
  const uint32_t hidden = config_.hidden, used = config_.experts_used, chunks = Chunks(hidden);
  pool_.ParallelFor(params_.n_rows * chunks, static_cast<uint64_t>(params_.n_rows) * hidden * used,
                    [&](uint32_t unit, uint32_t) {
                      const uint32_t row = unit / chunks, at = unit % chunks * kColumnChunk;
                      const float* experts[kExpertsUsedMax];
                      for (uint32_t r = 0; r < used; ++r)
                        experts[r] = lanes.Result(layer, row, r) + at;
                      const size_t offset = static_cast<size_t>(row) * hidden + at;
                      kernels_->combine(experts, routed[row].weights, used, shared + offset,
                                        scratch_->shared_inject[row],
                                        std::min(kColumnChunk, hidden - at), y + offset);
                    });
}

// ---- head

void CpuDevice::Head(const WeightMatrix& output, const float* x, float* logits) {
  RowMask rows = 0;
  for (uint32_t row = 0; row < params_.n_rows; ++row) rows |= params_.rows[row].needs_logits << row;
  Mat(std::initializer_list<MatJob>{{&output, logits}}, x, rows);
}

}  // namespace lode
