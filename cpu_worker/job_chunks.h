// How a job is cut into pieces for the threads: one list, first the gate and up rows of every
// expert, then the down rows of every expert, in the order in which they are claimed. A piece is a
// share of the bytes that stand in the list from it on, so pieces become smaller towards the end
// and the threads end together, while far from the end each is large enough for its claim and for
// what a call prepares to cost little. An expert's down rows stand behind all gate rows: when they
// are claimed, its hidden vectors are complete or about to be, and no thread waits for a whole
// phase. The list is not written down: what is stored is where each matrix begins, two bytes each,
// since every line that the loop writes here is fetched by all threads at once while nothing else
// happens. Thread: written by the worker loop before it opens a phase, read by all inside it.
#pragma once

#include <cstdint>

#include "shared/base/limits.h"
#include "shared/wire/arena_layout.h"

namespace lode {

struct JobChunk {
  uint32_t entry;  // expert of the job
  bool down;       // rows of down, else of gate and of up
  RowRange rows;   // of this worker's own; whole groups of kRowGranule, but for a matrix's last
};

// What is cut: own rows and their bytes.
struct JobShape {
  uint32_t n_experts = 0;
  uint32_t width_rows = 0, hidden_rows = 0;
  uint32_t gate_up_row_bytes = 0;  // of a gate row and an up row together
  uint32_t down_row_bytes = 0;
  uint32_t threads = 1;
};
struct ChunkRule {
  uint32_t shares = 2;             // a piece is 1 / (shares x threads) of what is left
  uint32_t most_per_expert_4 = 1;  // and at most so many quarters of an expert's rows
  uint32_t bytes_min = 24u << 10;  // and at least about so many bytes: some 4 us of a thread
};

class JobChunks {
 public:
  // Pieces of one matrix at most, whatever the rule.
  static constexpr uint32_t kMatrixChunksMax = 127;

  // REQUIRES 1 <= n_experts <= kJobExpertsMax. Every expert has at least one chunk of either kind,
  // empty when the worker owns no such rows; each row stands in one chunk.
  void Cut(const JobShape& shape, const ChunkRule& rule);

  uint32_t size() const { return first_[2 * n_experts_]; }
  JobChunk operator[](uint32_t chunk) const;  // REQUIRES chunk < size()
  uint32_t GateUpPieces(uint32_t entry) const { return first_[entry + 1] - first_[entry]; }

 private:
  void CutKind(uint32_t first_matrix, uint32_t rows, uint32_t row_bytes, const ChunkRule& rule,
               uint64_t threads, uint64_t* left);

  uint32_t n_experts_ = 0, width_rows_ = 0, hidden_rows_ = 0;
  // [matrix] its first chunk; matrices: gate and up of expert 0, 1, ..., down of expert 0, 1, ...
  uint16_t first_[2 * kJobExpertsMax + 1] = {};
  static_assert(2 * kJobExpertsMax * kMatrixChunksMax <= UINT16_MAX);  // of the pool, too
};

}  // namespace lode
