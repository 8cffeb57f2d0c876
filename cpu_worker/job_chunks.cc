// See job_chunks.h. All threads wait while Cut runs: a handful of divisions per matrix.
#include "cpu_worker/job_chunks.h"

#include <algorithm>

#include "kernels/kernel_table.h"

namespace lode {
namespace {

constexpr uint32_t kQuarters = 4;
constexpr uint32_t kPiecesPerThread = 3;  // of either kind at least, also when the job is small

constexpr uint32_t DivUp(uint32_t a, uint32_t b) { return (a + b - 1) / b; }
// A chunk that ends inside a kernel's group of rows pays for all of it.
constexpr uint32_t Units(uint32_t rows) { return DivUp(rows, kRowGranule); }

}  // namespace

void JobChunks::Cut(const JobShape& shape, const ChunkRule& rule) {
  n_experts_ = shape.n_experts;
  width_rows_ = shape.width_rows;
  hidden_rows_ = shape.hidden_rows;
  const uint64_t threads = std::max(1u, shape.threads);
  uint64_t left = shape.n_experts * (uint64_t{shape.width_rows} * shape.gate_up_row_bytes +
                                     uint64_t{shape.hidden_rows} * shape.down_row_bytes);
  first_[0] = 0;
  CutKind(0, shape.width_rows, shape.gate_up_row_bytes, rule, threads, &left);
  CutKind(n_experts_, shape.hidden_rows, shape.down_row_bytes, rule, threads, &left);
}

void JobChunks::CutKind(uint32_t first_matrix, uint32_t rows, uint32_t row_bytes,
                        const ChunkRule& rule, uint64_t threads, uint64_t* left) {
  const uint64_t bytes = uint64_t{rows} * row_bytes;
  const uint32_t units = Units(rows), unit_bytes = std::max(1u, kRowGranule * row_bytes);
  const uint32_t most = std::max(1u, units * rule.most_per_expert_4 / kQuarters);
  const uint64_t bytes_min =
      std::min<uint64_t>(rule.bytes_min, n_experts_ * bytes / (kPiecesPerThread * threads));
  const uint32_t least =
      std::max({1u, static_cast<uint32_t>(bytes_min / unit_bytes), DivUp(units, kMatrixChunksMax)});
  for (uint32_t m = first_matrix; m < first_matrix + n_experts_; ++m) {
    // By what is left in the middle of this matrix.
    const uint64_t wanted = (*left - bytes / 2) / (rule.shares * threads) / unit_bytes;
    const uint32_t size = std::max(static_cast<uint32_t>(std::min<uint64_t>(wanted, most)), least);
    first_[m + 1] = static_cast<uint16_t>(first_[m] + std::max(1u, DivUp(units, size)));
    *left -= bytes;
  }
}

JobChunk JobChunks::operator[](uint32_t chunk) const {
  const uint16_t* const end = first_ + 2 * n_experts_;
  const uint16_t* const after = std::upper_bound(first_ + 1, end, chunk);
  const uint32_t matrix = static_cast<uint32_t>(after - first_) - 1;
  const bool down = matrix >= n_experts_;
  const uint32_t rows = down ? hidden_rows_ : width_rows_;
  const RowRange units =
      NodeRows(Units(rows), chunk - first_[matrix], first_[matrix + 1] - first_[matrix]);
  return {down ? matrix - n_experts_ : matrix,
          down,
          {units.begin * kRowGranule, std::min(rows, units.end * kRowGranule)}};
}

}  // namespace lode
