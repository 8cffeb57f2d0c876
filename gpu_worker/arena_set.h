// The expert weights as the GPU worker sees them: read-only maps of every node's arena. An expert's
// matrix is one piece per node (its rows); the pull lane computes straight on the pieces, the VRAM
// tier copies them into one contiguous slot [gate | up | down]. Immutable after construction, any
// thread. Used by expert_tier and cpu_lanes.
#pragma once

#include <cstdint>
#include <vector>

#include "shared/base/status.h"
#include "shared/wire/arena_layout.h"

namespace lode {

enum class Matrix : uint32_t { kGate = 0, kUp = 1, kDown = 2 };
inline constexpr uint32_t kMatrices = 3;

// One matrix of the experts of a layer.
struct MatrixShape {
  Format format;
  uint32_t rows, columns;
  uint32_t row_bytes;
  uint64_t slot_offset;  // inside a VRAM slot, 64-byte aligned
};

class ArenaSet {
 public:
  // layouts[n] describes the arena at data[n] (its first byte, header included); data outlives this
  // object.
  ArenaSet(std::vector<ArenaLayout> layouts, std::vector<const uint8_t*> data);

  uint32_t layers() const { return static_cast<uint32_t>(layouts_[0].layers.size()); }
  uint32_t experts() const { return layouts_[0].experts; }
  uint32_t hidden() const { return layouts_[0].hidden; }
  uint32_t width() const { return layouts_[0].width; }
  uint32_t nodes() const { return static_cast<uint32_t>(layouts_.size()); }

  const MatrixShape& shape(uint32_t layer, Matrix matrix) const {
    return shapes_[layer * kMatrices + static_cast<uint32_t>(matrix)];
  }
  uint64_t slot_bytes(uint32_t layer) const { return slot_bytes_[layer]; }
  const std::vector<uint64_t>& all_slot_bytes() const { return slot_bytes_; }  // [layer]
  uint64_t weight_bytes(
      uint32_t layer) const;  // of one expert, without alignment: what a lane reads

  // Rows of the matrix that node n holds, and where its first one lies.
  RowRange rows(uint32_t node, Matrix matrix) const {
    return matrix == Matrix::kDown ? layouts_[node].hidden_rows() : layouts_[node].width_rows();
  }
  const uint8_t* piece(uint32_t node, uint32_t layer, uint32_t expert, Matrix matrix) const;

  // Assembles an expert in `slot` (slot_bytes(layer) bytes); alignment gaps are left alone.
  void CopyExpert(uint32_t layer, uint32_t expert, uint8_t* slot) const;

  // Experts whose bytes every node has finished: the smallest count over the nodes, and the number
  // that means all.
  uint64_t complete() const;
  uint64_t complete_all() const { return static_cast<uint64_t>(layers()) * experts(); }

 private:
  std::vector<ArenaLayout> layouts_;  // [node]
  std::vector<const uint8_t*> data_;  // [node]
  std::vector<MatrixShape> shapes_;   // [layer][matrix]
  std::vector<uint64_t> slot_bytes_;  // [layer]
};

}  // namespace lode
