// See job_chunks.h.
#include "cpu_worker/job_chunks.h"

#include <algorithm>

#include "kernels/kernel_table.h"

namespace lode {
namespace {

constexpr uint32_t kQuarters = 4;

constexpr uint32_t DivUp(uint64_t a, uint64_t b) { return static_cast<uint32_t>((a + b - 1) / b); }

// One matrix (or gate and up, which go together) of one expert. *left: bytes of the list from here on.
void CutRows(uint32_t entry, bool down, uint32_t rows, uint32_t row_bytes, uint32_t threads,
             const ChunkRule& rule, uint64_t* left, std::vector<JobChunk>* chunks) {
  const uint32_t units = DivUp(rows, kRowGranule);
  const uint64_t unit_bytes = uint64_t{kRowGranule} * std::max(1u, row_bytes);
  const uint32_t most = std::max(1u, units * rule.most_per_expert_4 / kQuarters);
  const uint32_t least =
      std::clamp(std::max(DivUp(rule.bytes_min, unit_bytes), DivUp(units, kMatrixChunksMax)), 1u,
                 std::max(1u, units));
  uint32_t done = 0;
  do {
    const uint64_t wanted = *left / (uint64_t{rule.shares} * threads) / unit_bytes;
    const uint32_t size = std::max(static_cast<uint32_t>(std::min<uint64_t>(wanted, most)), least);
    // As many pieces as that makes of the rest, but equal ones.
    const uint32_t pieces = std::max(1u, DivUp(units - done, size));
    const uint32_t n = DivUp(units - done, pieces);
    const RowRange range = {done * kRowGranule, std::min(rows, (done + n) * kRowGranule)};
    chunks->push_back({entry, down, range});
    done += n;
    *left -= uint64_t{range.size()} * row_bytes;
  } while (done < units);
}

}  // namespace

void CutJob(const JobShape& shape, const ChunkRule& rule, std::vector<JobChunk>* chunks) {
  chunks->clear();
  uint64_t left = shape.n_experts * (uint64_t{shape.width_rows} * shape.gate_up_row_bytes +
                                     uint64_t{shape.hidden_rows} * shape.down_row_bytes);
  for (const bool down : {false, true}) {
    for (uint32_t j = 0; j < shape.n_experts; ++j) {
      CutRows(j, down, down ? shape.hidden_rows : shape.width_rows,
              down ? shape.down_row_bytes : shape.gate_up_row_bytes, shape.threads, rule, &left,
              chunks);
    }
  }
}

}  // namespace lode
