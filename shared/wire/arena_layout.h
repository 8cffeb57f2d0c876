// The arena of one NUMA node: its share of the rows of every expert, in GGUF block bytes, computed in place. Node n of N owns
// rows [R*n/N, R*(n+1)/N) of gate, up and down of every expert. Offsets are a pure function of model shape, types and split.
// Writer: the CPU worker that loads it (immutable once an expert's complete flag is set); readers: its pool, the GPU worker.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/formats.h"
#include "shared/base/limits.h"
#include "shared/base/status.h"
#include "shared/model/model_source.h"

namespace lode {

inline constexpr uint64_t kArenaMagic = 0x4c4f444541524e01ull;  // "LODEARN" 1
inline constexpr uint64_t kArenaAlign = 64;  // bytes: a cache line; every matrix of an expert starts on one

struct ArenaHeader {
  uint64_t magic;
  uint64_t layout_hash;
  char identity[40];             // ModelSource::identity(), zero-terminated
  uint32_t arithmetic_version;
  uint32_t node, n_nodes;
  uint32_t layers, experts;
  uint32_t reserved;
  uint64_t bytes;
  std::atomic<uint64_t> experts_complete;  // count, for progress
  // followed by ArenaExpert[layers * experts], then the data
};
struct ArenaExpert {
  std::atomic<uint32_t> complete;   // 1 (release) after the bytes and the hash are written
  uint32_t reserved;
  uint64_t hash;                    // XXH3-64 of this node's bytes of the expert
};

struct RowRange {
  uint32_t begin, end;
  uint32_t size() const { return end - begin; }
};
constexpr RowRange NodeRows(uint32_t rows, uint32_t node, uint32_t n_nodes) {
  return {static_cast<uint32_t>(static_cast<uint64_t>(rows) * node / n_nodes),
          static_cast<uint32_t>(static_cast<uint64_t>(rows) * (node + 1) / n_nodes)};
}

// One layer's experts: formats and where each piece of an expert lies inside a node's arena.
struct LayerExperts {
  Format gate, up, down;
  uint32_t gate_row_bytes, up_row_bytes, down_row_bytes;
  uint64_t base;                 // offset of expert 0 in the arena
  uint64_t stride;               // bytes of one expert in this arena, 64-byte aligned
  uint64_t up_offset, down_offset;  // inside an expert (gate is at 0), 64-byte aligned
};
struct ArenaLayout {
  uint32_t node, n_nodes, experts, hidden, width;
  std::vector<LayerExperts> layers;
  uint64_t bytes;
  RowRange width_rows() const { return NodeRows(width, node, n_nodes); }    // gate and up
  RowRange hidden_rows() const { return NodeRows(hidden, node, n_nodes); }  // down
  uint64_t offset(uint32_t layer, uint32_t expert) const { return layers[layer].base + expert * layers[layer].stride; }
};
// Fails naming the tensor when an expert type is not computable.
StatusOr<ArenaLayout> ComputeArenaLayout(const ModelSource& source, uint32_t node, uint32_t n_nodes);
// Bytes of one whole expert (all nodes) of a layer as a VRAM slot holds it: [gate | up | down], each 64-byte aligned.
uint64_t ExpertSlotBytes(const LayerExperts& layer, uint32_t hidden, uint32_t width);

}  // namespace lode
