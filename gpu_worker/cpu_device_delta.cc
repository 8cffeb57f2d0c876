// Gated DeltaNet on the cpu device. Projections of the new rows go to rings addressed by position;
// the recurrence folds accepted rows into the state, then steps the new rows on a copy, so the
// state never sees a row that may still be rejected. Repeating an aborted window finds folded ==
// committed and computes the same bits. Formulas: docs/design/model.md.
#include <algorithm>
#include <cstring>

#include "gpu_worker/cpu_device_scratch.h"

namespace lode {
namespace {

// Where position `position` of slot `slot` lies in a ring of `width` values per position.
size_t ConvRingAt(uint32_t slot, uint32_t position, size_t width) {
  return (static_cast<size_t>(slot) * kConvRing + position % kConvRing) * width;
}

constexpr float kL2Eps = 1e-6f;  // inside the root, added to the sum

}  // namespace

void CpuDevice::DeltaInput(const DeltaWeights& w, const DeltaState& state, const float* x) {
  Scratch& s = *scratch_;
  Mat(std::initializer_list<MatJob>{{&w.qkv, s.qkv.data()},
                                    {&w.gate, s.z.data()},
                                    {&w.beta, s.beta.data()},
                                    {&w.alpha, s.alpha.data()}},
      x);
  // The convolution of a row reads the rows before it, so all rows enter the ring first.
  const size_t width = config_.SsmConvWidth();
  for (uint32_t row = 0; row < params_.n_rows; ++row) {
    const StepRow& r = params_.rows[row];
    std::memcpy(state.conv + ConvRingAt(params_.seqs[r.seq].slot, r.position, width),
                s.qkv.row(row), width * sizeof(float));
  }
  const uint32_t heads = 2 * config_.ssm_key_heads + config_.ssm_value_heads;
  pool_.ParallelFor(
      params_.n_rows * heads, params_.n_rows * 30ull * width,
      [&](uint32_t unit, uint32_t) { DeltaConvHead(w, state, unit / heads, unit % heads); });
}

// Convolution, silu and, for queries and keys, the L2 norm of one head of one row; head 0 also
// makes the row's gates.
void CpuDevice::DeltaConvHead(const DeltaWeights& w, const DeltaState& state, uint32_t row,
                              uint32_t head) {
  Scratch& s = *scratch_;
  const StepRow& r = params_.rows[row];
  const uint32_t slot = params_.seqs[r.seq].slot, dim = config_.ssm_head_dim,
                 key_heads = config_.ssm_key_heads;
  const size_t width = config_.SsmConvWidth(), channel = static_cast<size_t>(head) * dim;
  const float* taps[kConvRing];
  for (uint32_t t = 0; t < config_.ssm_conv; ++t) {
    const uint32_t back = config_.ssm_conv - 1 - t;
    taps[t] = r.position < back ? nullptr
                                : state.conv + ConvRingAt(slot, r.position - back, width) + channel;
  }
  float* key = state.key + ConvRingAt(slot, r.position, config_.SsmKeyWidth());
  float* value = state.value + ConvRingAt(slot, r.position, config_.SsmValueWidth());
  float* out = head < key_heads       ? s.query.row(row) + channel
               : head < 2 * key_heads ? key + channel - config_.SsmKeyWidth()
                                      : value + channel - 2 * config_.SsmKeyWidth();
  kernels_->conv_silu(taps, config_.ssm_conv, w.conv + channel, width, dim, out);
  if (head < 2 * key_heads) {
    const float scale = head < key_heads ? canonical::InvSqrt(static_cast<float>(dim)) : 1.0f;
    kernels_->l2_norm(out, dim, kL2Eps, scale, out);
  }
  if (head == 0) {
    const size_t at = ConvRingAt(slot, r.position, config_.ssm_value_heads);
    kernels_->delta_gates(s.beta.row(row), s.alpha.row(row), w.a, w.dt, config_.ssm_value_heads,
                          state.beta + at, state.decay + at);
  }
}

void CpuDevice::DeltaRecurrence(const DeltaState& state) {
  const uint32_t heads = config_.ssm_value_heads, blocks = config_.ssm_head_dim / kDeltaColumns;
  const uint32_t per_seq = heads * blocks;
  const uint64_t operations =
      4ull * params_.n_rows * heads * config_.ssm_head_dim * config_.ssm_head_dim;
  pool_.ParallelFor(params_.n_seqs * per_seq, operations, [&](uint32_t unit, uint32_t thread) {
    DeltaColumnBlock(state, unit / per_seq, unit % per_seq / blocks, unit % blocks, thread);
  });
  for (uint32_t i = 0; i < params_.n_seqs; ++i)
    state.folded[params_.seqs[i].slot] = params_.seqs[i].committed;
}

void CpuDevice::DeltaColumnBlock(const DeltaState& state, uint32_t seq, uint32_t head,
                                 uint32_t block, uint32_t thread) {
  const StepSequence& q = params_.seqs[seq];
  const uint32_t dim = config_.ssm_head_dim, heads = config_.ssm_value_heads,
                 first = block * kDeltaColumns;
  const uint32_t folded = state.folded[q.slot];
  if (folded == q.committed && q.n_rows == 0) return;
  const size_t key_head_at = static_cast<size_t>(head % config_.ssm_key_heads) * dim;
  const size_t value_at = static_cast<size_t>(head) * dim + first;
  float* s = state.s + (static_cast<size_t>(q.slot) * heads + head) * dim * dim + first;
  float* columns = scratch_->columns.data() + thread * scratch_->columns_per_thread;
  for (uint32_t k = 0; k < dim; ++k) {
    std::memcpy(columns + static_cast<size_t>(k) * kDeltaColumns, s + static_cast<size_t>(k) * dim,
                kDeltaColumns * sizeof(float));
  }
  const auto step = [&](uint32_t position, const float* query, float* out) {
    const size_t gate_at = ConvRingAt(q.slot, position, heads) + head;
    kernels_->delta_step(
        columns, dim, state.key + ConvRingAt(q.slot, position, config_.SsmKeyWidth()) + key_head_at,
        query, state.value + ConvRingAt(q.slot, position, config_.SsmValueWidth()) + value_at,
        state.beta[gate_at], state.decay[gate_at], out);
  };
  for (uint32_t position = folded; position < q.committed; ++position)
    step(position, nullptr, nullptr);
  if (folded != q.committed) {
    for (uint32_t k = 0; k < dim; ++k) {
      std::memcpy(s + static_cast<size_t>(k) * dim,
                  columns + static_cast<size_t>(k) * kDeltaColumns, kDeltaColumns * sizeof(float));
    }
  }
  for (uint32_t row = q.first_row; row < q.first_row + q.n_rows; ++row) {
    step(params_.rows[row].position, scratch_->query.row(row) + key_head_at,
         scratch_->mixed.row(row) + value_at);
  }
}

void CpuDevice::DeltaOutput(const DeltaWeights& w, float* y) {
  Scratch& s = *scratch_;
  const uint32_t heads = config_.ssm_value_heads, dim = config_.ssm_head_dim;
  pool_.ParallelFor(
      params_.n_rows * heads, 20ull * params_.n_rows * heads * dim, [&](uint32_t unit, uint32_t) {
        const size_t at = static_cast<size_t>(unit % heads) * dim;
        float* o = s.mixed.row(unit / heads) + at;
        kernels_->rms_norm_gate(o, w.norm, s.z.row(unit / heads) + at, dim, config_.rms_eps, o);
      });
  Mat(std::initializer_list<MatJob>{{&w.out, y}}, s.mixed.data());
}

}  // namespace lode
