// Weights and activations to measure with, for any format of the list, without knowing one: random
// bytes, kept where the format's own definition makes ordinary numbers of them, and the answers
// that every kernel must give, from the reference. A format that joins kFormats is measured and
// checked without a line here. Any thread, no state.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/kernel_table.h"

namespace lode::bench {

// `n_rows` rows of `n_cols` weights: blocks whose values are all zero or within 2^-60..2^20. The
// same seed gives the same bytes on every machine. REQUIRES n_cols to be whole blocks.
std::vector<uint8_t> OrdinaryRows(Format format, uint32_t n_rows, uint32_t n_cols, uint32_t seed);

// `n_acts` activation rows in the form the format wants, quantised by `table`.
class Activations {
 public:
  Activations(Format format, uint32_t n_acts, uint32_t n_cols, uint32_t seed);
  // Quantises again with another table: it must give the same bits, or the check fails.
  void QuantizeWith(const KernelTable& table);
  const ActRow* rows() const { return rows_.data(); }
  const std::vector<float>& x(uint32_t act) const { return x_[act]; }

 private:
  uint32_t block_len_;  // 0: float format
  std::vector<std::vector<float>> x_;
  std::vector<std::vector<int8_t>> q_;
  std::vector<std::vector<float>> d_;
  std::vector<std::vector<int16_t>> sum16_;
  std::vector<ActRow> rows_;
};

// [act][row]: what the definition gives.
std::vector<std::vector<float>> ReferenceResults(Format format, const std::vector<uint8_t>& w,
                                                 uint32_t n_rows, uint32_t n_cols,
                                                 const Activations& acts, uint32_t n_acts);

}  // namespace lode::bench
