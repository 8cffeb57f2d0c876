// Slots of sequence state: allocation, window borders, state hash. See sequence_state.h.
#include "gpu_worker/sequence_state.h"

#include <xxhash.h>

#include <algorithm>

#include "shared/base/check.h"

namespace lode {

StatusOr<std::unique_ptr<SequenceState>> SequenceState::Create(const ModelConfig& config,
                                                               Device& device,
                                                               const StateOptions& options) {
  if (options.slots == 0 || options.slots > kSequenceSlotsMax || options.kv_blocks == 0 ||
      options.context == 0 || options.context > kContextMax) {
    return InvalidArgument(
        "{} sequence slots, {} KV blocks and a context of {} tokens cannot be served (1..{} slots, "
        "up to {} "
        "tokens)",
        options.slots, options.kv_blocks, options.context, kSequenceSlotsMax, kContextMax);
  }
  std::unique_ptr<SequenceState> state(new SequenceState(config, device, options));
  LODE_RETURN_IF_ERROR(state->AllocateAll());
  return state;
}

SequenceState::SequenceState(const ModelConfig& config, Device& device, const StateOptions& options)
    : config_(config),
      device_(device),
      options_(options),
      blocks_per_sequence_((options.context + kKvBlockCells - 1) / kKvBlockCells),
      delta_(config.layers),
      attention_(config.layers),
      ple_(config.ple.size()),
      slots_(options.slots) {}

uint64_t SequenceState::Bytes(const ModelConfig& c, const StateOptions& options) {
  const uint64_t delta =
      sizeof(float) * (uint64_t{c.ssm_value_heads} * c.ssm_head_dim * c.ssm_head_dim +
                       kConvRing * (uint64_t{c.SsmConvWidth()} + c.SsmKeyWidth() +
                                    c.SsmValueWidth() + 2 * c.ssm_value_heads));
  uint64_t bytes = sizeof(float) * options.slots * c.ple.size() * kPleRing * c.WideWidth();
  const uint32_t layers = c.layers + (options.drafts ? 1 : 0);
  for (uint32_t l = 0; l < layers; ++l) {
    bytes += l == c.layers || c.is_attention[l] ? options.kv_blocks * KvBlockLayout::Of(c, options.kv_type).bytes +
                                     sizeof(float) * options.slots * kConvRing * c.index_dim
                               : options.slots * delta;
  }
  return bytes;
}

Status SequenceState::AllocateFloats(const char* what, uint32_t layer, size_t count, float** out) {
  StatusOr<void*> memory =
      device_.Allocate(fmt::format("layer {} {}", layer, what), count * sizeof(float));
  if (!memory.ok()) return memory.status();
  *out = static_cast<float*>(*memory);
  return OkStatus();
}

Status SequenceState::AllocateAttention(uint32_t layer, AttentionState* a) {
  a->layout = KvBlockLayout::Of(config_, options_.kv_type);
  LODE_ASSIGN_OR_RETURN(void* pool, device_.Allocate(fmt::format("layer {} KV blocks", layer),
                                                     options_.kv_blocks * a->layout.bytes));
  a->pool = static_cast<uint8_t*>(pool);
  a->block_tables = block_tables_;
  a->blocks_per_sequence = blocks_per_sequence_;
  const size_t ring = static_cast<size_t>(options_.slots) * kConvRing;
  return AllocateFloats("index keys", layer, ring * config_.index_dim, &a->raw_index);
}

Status SequenceState::AllocateAll() {
  const size_t slots = options_.slots, ring = slots * kConvRing, dim = config_.ssm_head_dim;
  LODE_ASSIGN_OR_RETURN(
      void* tables,
      device_.Allocate("KV block tables", slots * blocks_per_sequence_ * sizeof(uint32_t)));
  block_tables_ = static_cast<uint32_t*>(tables);
  for (uint32_t l = 0; l < config_.layers; ++l) {
    if (config_.is_attention[l]) {
      LODE_RETURN_IF_ERROR(AllocateAttention(l, &attention_[l]));
      continue;
    }
    DeltaState& d = delta_[l];
    LODE_RETURN_IF_ERROR(
        AllocateFloats("state", l, slots * config_.ssm_value_heads * dim * dim, &d.s));
    LODE_RETURN_IF_ERROR(
        AllocateFloats("convolution ring", l, ring * config_.SsmConvWidth(), &d.conv));
    LODE_RETURN_IF_ERROR(AllocateFloats("key ring", l, ring * config_.SsmKeyWidth(), &d.key));
    LODE_RETURN_IF_ERROR(AllocateFloats("value ring", l, ring * config_.SsmValueWidth(), &d.value));
    LODE_RETURN_IF_ERROR(AllocateFloats("beta ring", l, ring * config_.ssm_value_heads, &d.beta));
    LODE_RETURN_IF_ERROR(AllocateFloats("decay ring", l, ring * config_.ssm_value_heads, &d.decay));
    LODE_ASSIGN_OR_RETURN(void* folded, device_.Allocate(fmt::format("layer {} folded rows", l),
                                                         slots * sizeof(uint32_t)));
    d.folded = static_cast<uint32_t*>(folded);
  }
  if (options_.drafts) LODE_RETURN_IF_ERROR(AllocateAttention(config_.layers, &draft_attention_));
  for (uint32_t p = 0; p < ple_.size(); ++p) {
    LODE_RETURN_IF_ERROR(AllocateFloats("n-gram ring", config_.ple[p].layer,
                                        slots * kPleRing * config_.WideWidth(), &ple_[p].conv));
  }
  return OkStatus();
}

// ---- window border

Status SequenceState::CheckSequence(const WindowPlan& plan, uint32_t seq,
                                    const uint32_t* kv_blocks) const {
  const SequencePlan& q = plan.seqs[seq];
  if (q.slot >= options_.slots)
    return InvalidArgument("plan: slot {} of {}", q.slot, options_.slots);
  for (uint32_t i = 0; i < seq; ++i) {
    if (plan.seqs[i].slot == q.slot)
      return InvalidArgument("plan: slot {} twice in one window", q.slot);
  }
  const Slot& slot = slots_[q.slot];
  const bool same = slot.used && slot.epoch == q.epoch;
  const uint32_t low = same ? slot.committed : 0, high = same ? slot.end : 0;
  if (q.committed < low || q.committed > high) {
    return InvalidArgument("plan: slot {} commits {} tokens, but only {} to {} are possible",
                           q.slot, q.committed, low, high);
  }
  uint32_t next = q.committed;
  for (uint32_t r = 0; r < plan.n_rows; ++r) {
    const RowPlan& row = plan.rows[r];
    if (row.seq_index != seq || row.kind == RowKind::kFlush) continue;
    const bool gap = next != q.committed && (plan.rows[r - 1].seq_index != seq ||
                                             plan.rows[r - 1].kind == RowKind::kFlush);
    if (row.position != next++ || gap)
      return InvalidArgument("plan: row {} stands at position {}, expected {}", r, row.position,
                             next - 1);
    if (row.token < 0 || static_cast<uint32_t>(row.token) >= config_.vocab)
      return InvalidArgument("plan: row {} has token {}", r, row.token);
  }
  if (next > options_.context || q.block_count > blocks_per_sequence_ ||
      uint64_t{q.block_count} * kKvBlockCells < next) {
    return InvalidArgument(
        "plan: slot {} has {} KV blocks and a context of {} tokens, not enough for {} tokens",
        q.slot, q.block_count, options_.context, next);
  }
  for (uint32_t b = 0; b < q.block_count; ++b) {
    if (kv_blocks[b] >= options_.kv_blocks)
      return InvalidArgument("plan: slot {} names KV block {} of {}", q.slot, kv_blocks[b],
                             options_.kv_blocks);
  }
  return OkStatus();
}

void SequenceState::ResetSlot(uint32_t slot) {
  const size_t s_floats =
      static_cast<size_t>(config_.ssm_value_heads) * config_.ssm_head_dim * config_.ssm_head_dim;
  for (const DeltaState& d : delta_) {
    if (d.s == nullptr) continue;
    device_.Zero(d.s + slot * s_floats, s_floats * sizeof(float));
    device_.Zero(d.folded + slot, sizeof(uint32_t));
  }
  // Rings and cells need no clearing: nothing reads a position that the sequence has not written.
  slots_[slot].committed = slots_[slot].end = 0;
}

// Blocks rarely change between windows: only entries that differ from the host's copy travel.
void SequenceState::UpdateBlocks(uint32_t slot, const uint32_t* kv_blocks, uint32_t count) {
  std::vector<uint32_t>& mine = slots_[slot].blocks;
  const uint32_t known = std::min<uint32_t>(count, static_cast<uint32_t>(mine.size()));
  const uint32_t first = static_cast<uint32_t>(
      std::mismatch(mine.begin(), mine.begin() + known, kv_blocks).first - mine.begin());
  if (first < count) {
    device_.Upload(block_tables_ + static_cast<size_t>(slot) * blocks_per_sequence_ + first,
                   kv_blocks + first, (count - first) * sizeof(uint32_t));
  }
  mine.assign(kv_blocks, kv_blocks + count);
}

Status SequenceState::Stage(const WindowPlan& plan, const uint32_t* const* kv_blocks,
                            StepParams* params, uint32_t* row_of) {
  if (plan.n_rows > kWindowRowsMax || plan.n_seqs > kWindowRowsMax) {
    return InvalidArgument("plan: {} rows of {} sequences", plan.n_rows, plan.n_seqs);
  }
  for (uint32_t r = 0; r < plan.n_rows; ++r) {
    if (plan.rows[r].seq_index >= plan.n_seqs)
      return InvalidArgument("plan: row {} names sequence {}", r, plan.rows[r].seq_index);
  }
  for (uint32_t i = 0; i < plan.n_seqs; ++i)
    LODE_RETURN_IF_ERROR(CheckSequence(plan, i, kv_blocks[i]));
  // After this line the plan fits the slots; state changes below cannot fail.
  *params = {};
  params->n_seqs = plan.n_seqs;
  for (uint32_t i = 0; i < plan.n_seqs; ++i) {
    const SequencePlan& q = plan.seqs[i];
    Slot& slot = slots_[q.slot];
    if (!slot.used || slot.epoch != q.epoch) ResetSlot(q.slot);
    slot.used = true;
    slot.epoch = q.epoch;
    slot.committed = q.committed;
    slot.end = q.committed;  // rows beyond are rejected from here on
    UpdateBlocks(q.slot, kv_blocks[i], q.block_count);
    params->seqs[i] = {
        .slot = q.slot, .committed = q.committed, .first_row = params->n_rows, .n_rows = 0};
  }
  for (uint32_t r = 0; r < plan.n_rows; ++r) {
    const RowPlan& row = plan.rows[r];
    if (row.kind == RowKind::kFlush) continue;
    StepSequence& q = params->seqs[row.seq_index];
    if (q.n_rows++ == 0) q.first_row = params->n_rows;
    slots_[q.slot].tokens[row.position % kTokenRing] = row.token;
    row_of[params->n_rows] = r;
    params->rows[params->n_rows++] = {row.seq_index, row.position, row.token,
                                      row.needs_logits != 0u, /*source=*/0};
  }
  return OkStatus();
}

void SequenceState::WindowDone(const StepParams& params) {
  for (uint32_t i = 0; i < params.n_seqs; ++i) {
    slots_[params.seqs[i].slot].end = params.seqs[i].committed + params.seqs[i].n_rows;
  }
}

void SequenceState::TokenContext(const StepParams& params, uint32_t row, uint32_t n,
                                 int32_t* out) const {
  const StepRow& r = params.rows[row];
  const Slot& slot = slots_[params.seqs[r.seq].slot];
  for (uint32_t i = 0; i < n; ++i)
    out[i] = i <= r.position ? slot.tokens[(r.position - i) % kTokenRing] : -1;
}

// ---- hash

namespace {

// Adds the live positions [begin, end) of a ring.
void HashRing(XXH3_state_t* hash, Device& device, const float* ring, uint32_t slot,
              uint32_t ring_size, size_t width, uint32_t begin, uint32_t end) {
  std::vector<float> row(width);
  for (uint32_t p = begin; p < end; ++p) {
    device.Download(row.data(),
                    ring + (static_cast<size_t>(slot) * ring_size + p % ring_size) * width,
                    width * sizeof(float));
    XXH3_64bits_update(hash, row.data(), width * sizeof(float));
  }
}

uint32_t Back(uint32_t position, uint32_t n) { return position < n ? 0 : position - n; }

}  // namespace

void SequenceState::HashDelta(uint32_t slot, void* hash) const {
  XXH3_state_t* h = static_cast<XXH3_state_t*>(hash);
  const uint32_t end = slots_[slot].committed;
  std::vector<float> s(static_cast<size_t>(config_.ssm_value_heads) * config_.ssm_head_dim *
                       config_.ssm_head_dim);
  for (const DeltaState& d : delta_) {
    if (d.s == nullptr) continue;
    uint32_t folded = 0;
    device_.Download(&folded, d.folded + slot, sizeof(folded));
    device_.Download(s.data(), d.s + slot * s.size(), s.size() * sizeof(float));
    XXH3_64bits_update(h, &folded, sizeof(folded));
    XXH3_64bits_update(h, s.data(), s.size() * sizeof(float));
    HashRing(h, device_, d.key, slot, kConvRing, config_.SsmKeyWidth(), folded, end);
    HashRing(h, device_, d.value, slot, kConvRing, config_.SsmValueWidth(), folded, end);
    HashRing(h, device_, d.beta, slot, kConvRing, config_.ssm_value_heads, folded, end);
    HashRing(h, device_, d.decay, slot, kConvRing, config_.ssm_value_heads, folded, end);
    HashRing(h, device_, d.conv, slot, kConvRing, config_.SsmConvWidth(),
             Back(end, config_.ssm_conv - 1), end);
  }
}

void SequenceState::HashAttention(uint32_t slot, void* hash) const {
  XXH3_state_t* h = static_cast<XXH3_state_t*>(hash);
  const uint32_t end = slots_[slot].committed, dim = config_.index_dim;
  for (const AttentionState& a : attention_) {
    if (a.pool == nullptr) continue;
    std::vector<uint8_t> block(a.layout.bytes);
    for (uint32_t position = 0; position < end; ++position) {
      const uint32_t cell = position % kKvBlockCells;
      if (cell == 0)
        device_.Download(block.data(),
                         a.pool + a.layout.bytes * slots_[slot].blocks[position / kKvBlockCells],
                         block.size());
      for (uint32_t head = 0; head < config_.kv_heads; ++head) {
        const size_t c = static_cast<size_t>(head) * kKvBlockCells + cell;
        XXH3_64bits_update(h, block.data() + c * a.layout.cell_bytes, a.layout.cell_bytes);
        XXH3_64bits_update(h, block.data() + a.layout.v + c * a.layout.cell_bytes,
                           a.layout.cell_bytes);
        XXH3_64bits_update(h, block.data() + a.layout.k_scales + c * sizeof(float), sizeof(float));
        XXH3_64bits_update(h, block.data() + a.layout.v_scales + c * sizeof(float), sizeof(float));
      }
      if ((position + 1) % config_.index_block == 0) {
        XXH3_64bits_update(
            h, block.data() + a.layout.index + cell / config_.index_block * dim * sizeof(float),
            dim * sizeof(float));
      }
    }
    HashRing(h, device_, a.raw_index, slot, kConvRing, dim,
             end / config_.index_block * config_.index_block, end);
  }
}

uint64_t SequenceState::Hash(uint32_t slot) const {
  LODE_CHECK(slot < options_.slots, "slot {}", slot);
  const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> hash(XXH3_createState(),
                                                                             &XXH3_freeState);
  XXH3_64bits_reset(hash.get());
  const uint32_t end = slots_[slot].committed;
  XXH3_64bits_update(hash.get(), &end, sizeof(end));
  HashDelta(slot, hash.get());
  HashAttention(slot, hash.get());
  for (const PleState& p : ple_) {
    HashRing(hash.get(), device_, p.conv, slot, kPleRing, config_.WideWidth(),
             Back(end, (config_.ple_conv - 1) * config_.ngram_size), end);
  }
  for (uint32_t p = Back(end, config_.ngram_size); p < end; ++p) {
    XXH3_64bits_update(hash.get(), &slots_[slot].tokens[p % kTokenRing], sizeof(int32_t));
  }
  return XXH3_64bits_digest(hash.get());
}

}  // namespace lode
