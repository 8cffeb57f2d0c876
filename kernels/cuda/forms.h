// Quantised activations in device memory. A row has up to three forms, one per block length that a
// weight type may ask for (32, 64, 256); each is ActLayout{columns, length}, so it can be sent to
// the CPU workers as it is, plus, for 64, a second copy of the codes in the order in which 2-bit
// weights come out of their bytes. Offsets are computed on the host and are constants of a captured
// graph. Plain C++, for both compilers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lode::cuda {

inline constexpr uint32_t kFormLens[] = {32, 64, 256};
inline constexpr uint32_t kForms = 3;

// One form of all rows. base null: not wanted.
struct ActForm {
  uint8_t* base = nullptr;
  uint32_t stride = 0;        // bytes from row to row
  uint32_t d_offset = 0;      // scales, floats
  uint32_t sum_offset = 0;    // sums of 16 codes, int16
  uint32_t crumb_offset = 0;  // codes arranged for 2-bit weights; length 64 only
};
struct ActForms {
  ActForm form[kForms];
};

// What a product reads: floats and the form of its weight type; row r at f + r * f_stride.
struct ActSource {
  const float* f = nullptr;
  uint32_t f_stride = 0;
  uint32_t columns = 0;
  ActForm form;
};

}  // namespace lode::cuda
