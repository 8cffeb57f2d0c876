// See job_chunks.h. All threads wait while this runs: a handful of divisions per expert, none per
// piece.
#include "cpu_worker/job_chunks.h"

#include <algorithm>

#include "kernels/kernel_table.h"

namespace lode {
namespace {

constexpr uint32_t kQuarters = 4;

constexpr uint32_t DivUp(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

// The matrices of one kind: alike for every expert.
struct Kind {
  bool down;
  uint32_t rows, row_bytes;
  uint32_t units, unit_bytes;        // groups of rows that are not cut
  uint32_t least_units, most_units;  // of a piece

  Kind(bool is_down, uint32_t n_rows, uint32_t bytes, const ChunkRule& rule)
      : down(is_down), rows(n_rows), row_bytes(bytes) {
    units = DivUp(rows, kRowGranule);
    unit_bytes = std::max(1u, kRowGranule * row_bytes);
    most_units = std::max(1u, units * rule.most_per_expert_4 / kQuarters);
    least_units = std::max({1u, DivUp(rule.bytes_min, unit_bytes), DivUp(units, kMatrixChunksMax)});
  }
  uint64_t bytes() const { return uint64_t{rows} * row_bytes; }
};

void CutRows(uint32_t entry, const Kind& kind, uint64_t wanted_bytes,
             std::vector<JobChunk>* chunks) {
  const uint64_t wanted = std::min<uint64_t>(wanted_bytes / kind.unit_bytes, kind.most_units);
  const uint32_t size = std::max(static_cast<uint32_t>(wanted), kind.least_units);
  const uint32_t pieces = std::max(1u, DivUp(kind.units, size));
  const uint32_t each = kind.units / pieces, longer = kind.units % pieces;
  uint32_t row = 0;
  for (uint32_t i = 0; i < pieces; ++i) {
    const uint32_t end = std::min(kind.rows, row + (each + (i < longer ? 1 : 0)) * kRowGranule);
    chunks->push_back({entry, kind.down, {row, end}});
    row = end;
  }
}

}  // namespace

void CutJob(const JobShape& shape, const ChunkRule& rule, std::vector<JobChunk>* chunks) {
  chunks->clear();
  const Kind kinds[] = {{false, shape.width_rows, shape.gate_up_row_bytes, rule},
                        {true, shape.hidden_rows, shape.down_row_bytes, rule}};
  uint64_t left = shape.n_experts * (kinds[0].bytes() + kinds[1].bytes());
  const uint64_t share = uint64_t{rule.shares} * std::max(1u, shape.threads);
  for (const Kind& kind : kinds) {
    for (uint32_t j = 0; j < shape.n_experts; ++j) {
      // What is left in the middle of this matrix.
      CutRows(j, kind, (left - kind.bytes() / 2) / share, chunks);
      left -= kind.bytes();
    }
  }
}

}  // namespace lode
