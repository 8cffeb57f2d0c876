// The only memory that changes between two windows with the same row count: what a captured graph
// reads instead of arguments. A POD in device memory, written once per window before the first
// operation. Made by SequenceState::Stage.
#pragma once

#include <cstdint>
#include <type_traits>

#include "shared/base/limits.h"

namespace lode {

// A row that computes (flush rows do not).
struct StepRow {
  uint32_t seq;  // into StepParams::seqs
  uint32_t position;
  int32_t token;          // 0 <= token < vocab
  uint32_t needs_logits;  // 0 or 1
  uint32_t source;        // draft windows: row of the residual this row starts from (DraftInput)
};

// A sequence of the window. Its rows are adjacent and stand at positions committed, committed + 1,
// ...
struct StepSequence {
  uint32_t slot;
  uint32_t committed;  // accepted rows up to here are folded into the recurrent state before the
                       // new rows
  uint32_t first_row, n_rows;
};

struct StepParams {
  uint32_t n_rows, n_seqs;
  StepRow rows[kWindowRowsMax];
  StepSequence seqs[kWindowRowsMax];
};
static_assert(std::is_trivially_copyable_v<StepParams>);

}  // namespace lode
