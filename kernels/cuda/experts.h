// Routed experts on the cuda device: the list that a plan kernel writes in device memory and one
// launch function that works it off, whatever lane an entry belongs to. An entry names its weights
// by pointers that the device can read: into a VRAM slot (hit), or into a pinned host arena mapped
// into the device (pull). Where an expert's rows are spread over several arenas it has one entry
// per arena, each with its own range of rows. Plain C++, for both compilers; made by the lanes,
// called through CudaDevice::LaunchExperts. Formulas: docs/design/model.md, "Experts".
#pragma once

#include <cstdint>

#include "kernels/formats.h"
#include "shared/base/limits.h"

namespace lode::cuda {

// Weight rows [width_begin, width_end) of gate and up and [hidden_begin, hidden_end) of down of one
// expert. Pointers name the first of these rows; rows follow each other without gaps, and row 0 of
// the matrix (or of the arena's piece of it) is 16-byte aligned. Whole words are read: the two
// bytes behind a matrix must be readable.
struct ExpertEntry {
  const uint8_t* gate;
  const uint8_t* up;
  const uint8_t* down;
  uint32_t width_begin, width_end;
  uint32_t hidden_begin, hidden_end;
  RowMask rows;  // which rows of the window want this expert; bits below n_rows only
  uint8_t order[kWindowRowsMax];  // [row]: place in that row's routing order
};

// Entries of one expert may stand anywhere in the list; together they cover each of its rows once.
// Two phases run over the list (gate, up, swiglu; then down), so a hidden vector is complete before
// any down row reads it.
inline constexpr uint32_t kExpertEntriesMax = kJobExpertsMax * kCpuWorkersMax;
struct ExpertList {
  uint32_t n_entries;
  uint32_t n_slow;  // the first n_slow entries read host memory: some blocks start with them
  ExpertEntry entries[kExpertEntriesMax];
};

// Types of one layer's experts: constants of a captured graph.
struct ExpertFormats {
  Format gate, up, down;
};

}  // namespace lode::cuda
