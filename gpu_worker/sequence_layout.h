// Where the state of sequences lies in device memory: plain structs of device pointers and strides,
// constant after start, so that a captured graph may hold them. Filled by SequenceState, read and
// written by the device's operations. Everything that drafts may touch is a ring addressed by
// position: a rejected row is overwritten by the row that takes its position, and no operation
// looks at a position at or above the sequence's own rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/ops.h"
#include "shared/base/limits.h"
#include "shared/model/model_config.h"

namespace lode {

// One DeltaNet layer, all slots. `s` holds rows below folded[slot] only. The rings hold what the
// rows from folded[slot] on (at most one window of accepted rows and the rows of this window: 2 *
// kWindowRowsMax <= kConvRing) did to it.
struct DeltaState {
  float* s;          // [slot][value head][key dim][value dim]
  uint32_t* folded;  // [slot]
  float* conv;       // [slot][kConvRing][conv width], the projection before the convolution
  float* key;        // [slot][kConvRing][key width], normalised
  float* value;      // [slot][kConvRing][value width]
  float* beta;       // [slot][kConvRing][value heads]
  float* decay;      // [slot][kConvRing][value heads]
};
static_assert(kConvRing >= 2 * kWindowRowsMax);

// One KV block of one layer in bytes, all parts 64-byte aligned:
// [k: kv_heads x 256 cells | v: the same | k scales: kv_heads x 256 floats | v scales | pooled
// index keys: floats]
struct KvBlockLayout {
  KvType type = KvType::kQ8;
  size_t cell_bytes = 0;  // one head of one cell
  size_t v = 0, k_scales = 0, v_scales = 0, index = 0, bytes = 0;

  static KvBlockLayout Of(const ModelConfig& config, KvType type) {
    const auto aligned = [](size_t n) { return (n + 63) / 64 * 64; };
    KvBlockLayout l;
    l.type = type;
    l.cell_bytes = config.head_dim * KvValueBytes(type);
    const size_t values = aligned(l.cell_bytes * kKvBlockCells * config.kv_heads);
    const size_t scales = aligned(sizeof(float) * kKvBlockCells * config.kv_heads);
    l.v = values;
    l.k_scales = 2 * values;
    l.v_scales = l.k_scales + scales;
    l.index = l.v_scales + scales;
    l.bytes =
        l.index + aligned(sizeof(float) * kKvBlockCells / config.index_block * config.index_dim);
    return l;
  }
};

// One attention layer, all slots.
struct AttentionState {
  KvBlockLayout layout;
  uint8_t* pool;                 // [block] of this layer, layout.bytes each
  float* raw_index;              // [slot][kConvRing][index dim]: index keys before pooling
  const uint32_t* block_tables;  // [slot][blocks_per_sequence], shared by all layers
  uint32_t blocks_per_sequence;
};

// One n-gram layer, all slots.
struct PleState {
  float* conv;  // [slot][kPleRing][streams * hidden]: normed gated values
};

}  // namespace lode
