// Offsets of expert matrices in arenas and slots; the assembly of a slot.
#include "gpu_worker/arena_set.h"

#include <algorithm>
#include <cstring>

#include "shared/base/check.h"

namespace lode {
namespace {

constexpr uint64_t kSlotAlign =
    64;  // as ExpertSlotBytes counts; a cache line, and what vector loads of a row's start like
constexpr uint64_t AlignUp(uint64_t n) { return (n + kSlotAlign - 1) / kSlotAlign * kSlotAlign; }

}  // namespace

ArenaSet::ArenaSet(std::vector<ArenaLayout> layouts, std::vector<const uint8_t*> data)
    : layouts_(std::move(layouts)), data_(std::move(data)) {
  LODE_CHECK(!layouts_.empty() && layouts_.size() == data_.size(), "{} layouts, {} arenas",
             layouts_.size(), data_.size());
  for (uint32_t node = 0; node < nodes(); ++node) {
    LODE_CHECK(layouts_[node].node == node && layouts_[node].n_nodes == nodes(),
               "arena {} of {} stands at place {} of {}", layouts_[node].node,
               layouts_[node].n_nodes, node, nodes());
  }
  for (const LayerExperts& e : layouts_[0].layers) {
    MatrixShape gate = {e.gate, width(), hidden(), e.gate_row_bytes, 0};
    MatrixShape up = {e.up, width(), hidden(), e.up_row_bytes,
                      AlignUp(uint64_t{width()} * e.gate_row_bytes)};
    MatrixShape down = {e.down, hidden(), width(), e.down_row_bytes,
                        up.slot_offset + AlignUp(uint64_t{width()} * e.up_row_bytes)};
    shapes_.insert(shapes_.end(), {gate, up, down});
    slot_bytes_.push_back(ExpertSlotBytes(e, hidden(), width()));
    LODE_CHECK(down.slot_offset + uint64_t{hidden()} * e.down_row_bytes <= slot_bytes_.back(),
               "slot of {} bytes is too small", slot_bytes_.back());
  }
}

uint64_t ArenaSet::weight_bytes(uint32_t layer) const {
  uint64_t bytes = 0;
  for (uint32_t m = 0; m < kMatrices; ++m) {
    const MatrixShape& s = shapes_[layer * kMatrices + m];
    bytes += uint64_t{s.rows} * s.row_bytes;
  }
  return bytes;
}

const uint8_t* ArenaSet::piece(uint32_t node, uint32_t layer, uint32_t expert,
                               Matrix matrix) const {
  const ArenaLayout& layout = layouts_[node];
  const LayerExperts& e = layout.layers[layer];
  const uint64_t inside =
      matrix == Matrix::kGate ? 0 : (matrix == Matrix::kUp ? e.up_offset : e.down_offset);
  return data_[node] + layout.offset(layer, expert) + inside;
}

void ArenaSet::CopyExpert(uint32_t layer, uint32_t expert, uint8_t* slot) const {
  for (uint32_t m = 0; m < kMatrices; ++m) {
    const Matrix matrix = static_cast<Matrix>(m);
    const MatrixShape& s = shape(layer, matrix);
    for (uint32_t node = 0; node < nodes(); ++node) {
      const RowRange r = rows(node, matrix);
      std::memcpy(slot + s.slot_offset + uint64_t{r.begin} * s.row_bytes,
                  piece(node, layer, expert, matrix), uint64_t{r.size()} * s.row_bytes);
    }
  }
}

uint64_t ArenaSet::complete() const {
  uint64_t least = complete_all();
  for (const uint8_t* data : data_) {
    // Acquire: pairs with the CPU worker's release after it wrote an expert's bytes, hash and flag.
    least = std::min(least, reinterpret_cast<const ArenaHeader*>(data)->experts_complete.load(
                                std::memory_order_acquire));
  }
  return least;
}

}  // namespace lode
