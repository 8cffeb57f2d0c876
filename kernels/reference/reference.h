// The definition of the arithmetic in obvious, slow code: what the kernel tables are compared with,
// bit for bit. Written weight by weight from the format's formulas, sharing no code with
// kernels/cpu. Used by tests (any thread, no state).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/formats.h"

namespace lode::reference {

// A weight of a quantised block is scale * code + offset, `code` an integer. Its share in the
// block's integer sums:
//   isum += group_scale * code * y,  msum += group_min * y
struct Weight {
  int code;         // offset or table applied: Q2_0 -1..2, IQ4_NL table entry, ...
  int group_scale;  // 1 without group scales
  int group_min;    // 1 for block minima, 0 without minima
};
// Weight `i` of the block at `block`.
Weight WeightAt(Format format, const uint8_t* block, uint32_t i);

// The block's factors in the product: d_w and m_w (0 without minima).
struct BlockFactors {
  float d, m;
};
BlockFactors FactorsOf(Format format, const uint8_t* block);

// n weights (whole blocks) as floats.
std::vector<float> Dequant(Format format, const uint8_t* w, size_t n);

struct QuantizedRow {
  std::vector<int8_t> q;
  std::vector<float> d;
  std::vector<int16_t> sum16;
  bool finite = true;
};
QuantizedRow Quantize(const std::vector<float>& x, uint32_t block_len);

// One row of quantised weights times one quantised activation row, terms in ascending block order.
float QuantizedDot(Format format, const uint8_t* w, const QuantizedRow& act, size_t n);
// 32 interleaved fma partials, tree join.
float FloatDot(const float* a, const float* b, size_t n);

float FromF16(uint16_t h);

}  // namespace lode::reference
