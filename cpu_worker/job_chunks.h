// How a job is cut into pieces for the threads: one list, first the gate and up rows of every
// expert, then the down rows of every expert, in the order in which they are claimed. A piece is a
// share of the bytes that stand in the list from it on, so pieces become smaller towards the end and
// the threads end together, while far from the end each is large enough for its claim and for what a
// call prepares to cost nothing. An expert's down rows stand behind all gate rows: when they are
// claimed, its hidden vectors are complete or about to be, and no thread waits for a whole phase.
// A pure function of its arguments. Thread: the worker loop's, before it opens a phase.
#pragma once

#include <cstdint>
#include <vector>

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
  uint32_t shares = 3;               // a piece is 1 / (shares x threads) of what is left
  uint32_t most_per_expert_4 = 1;    // and at most so many quarters of an expert's rows
  uint32_t bytes_min = 12u << 10;    // and at least so many bytes: some 2 us of a thread
};

// Pieces of one matrix at most, whatever the rule: bounds the list.
inline constexpr uint32_t kMatrixChunksMax = 256;

// Replaces *chunks; every expert has at least one chunk of either kind, empty when the worker owns
// no such rows. Each row stands in one chunk.
void CutJob(const JobShape& shape, const ChunkRule& rule, std::vector<JobChunk>* chunks);

}  // namespace lode
