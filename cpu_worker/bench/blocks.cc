// See blocks.h.
#include "cpu_worker/bench/blocks.h"

#include <cmath>
#include <cstring>
#include <random>

#include "kernels/reference/reference.h"
#include "shared/base/check.h"

namespace lode::bench {
namespace {

// Far from the denormals of float, which cost some CPUs a hundred cycles each and which no weight
// of a model holds; far from overflow over any row.
constexpr float kSmallest = 0x1p-60f, kLargest = 0x1p20f;
// A format of which this many random blocks in a row hold nothing ordinary does not exist: the
// worst one so far (a scale that is any power of two) accepts a third.
constexpr int kTriesMax = 10000;

bool Ordinary(Format format, const uint8_t* block, uint32_t block_len) {
  for (const float w : reference::Dequant(format, block, block_len)) {
    const float size = std::fabs(w);
    if (!(w == 0 || (size >= kSmallest && size <= kLargest))) return false;  // a NaN too
  }
  return true;
}

}  // namespace

std::vector<uint8_t> OrdinaryRows(Format format, uint32_t n_rows, uint32_t n_cols, uint32_t seed) {
  const FormatInfo& info = Info(format);
  LODE_CHECK(n_cols % info.block_len == 0, "{} columns of {}", n_cols, info.name);
  std::mt19937 rng(seed);
  std::vector<uint8_t> rows(size_t{n_rows} * RowBytes(format, n_cols));
  for (size_t at = 0; at < rows.size(); at += info.block_bytes) {
    int tries = 0;
    do {
      LODE_CHECK(++tries < kTriesMax, "random blocks of {} hold no ordinary numbers", info.name);
      for (uint32_t i = 0; i < info.block_bytes; ++i) rows[at + i] = static_cast<uint8_t>(rng());
    } while (!Ordinary(format, &rows[at], info.block_len));
  }
  return rows;
}

Activations::Activations(Format format, uint32_t n_acts, uint32_t n_cols, uint32_t seed)
    : block_len_(Info(format).act_block_len), rows_(n_acts) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  for (uint32_t a = 0; a < n_acts; ++a) {
    std::vector<float>& x = x_.emplace_back(n_cols);
    for (float& v : x) v = normal(rng);
    rows_[a].f = x.data();
    if (block_len_ == 0) continue;
    q_.emplace_back(n_cols);
    d_.emplace_back(n_cols / block_len_);
    sum16_.emplace_back(n_cols / 16);
  }
  for (uint32_t a = 0; a < n_acts && block_len_ > 0; ++a) {
    rows_[a].q = q_[a].data();
    rows_[a].d = d_[a].data();
    rows_[a].sum16 = sum16_[a].data();
  }
}

void Activations::QuantizeWith(const KernelTable& table) {
  for (size_t a = 0; a < x_.size() && block_len_ > 0; ++a) {
    const bool finite = table.quantize(x_[a].data(), x_[a].size(), block_len_, q_[a].data(),
                                       d_[a].data(), sum16_[a].data());
    LODE_CHECK(finite, "table {}: Gaussian activations are not finite", table.name);
  }
}

std::vector<std::vector<float>> ReferenceResults(Format format, const std::vector<uint8_t>& w,
                                                 uint32_t n_rows, uint32_t n_cols,
                                                 const Activations& acts, uint32_t n_acts) {
  const size_t row_bytes = RowBytes(format, n_cols);
  const uint32_t block_len = Info(format).act_block_len;
  std::vector<reference::QuantizedRow> quantized;
  for (uint32_t a = 0; a < n_acts && block_len > 0; ++a)
    quantized.push_back(reference::Quantize(acts.x(a), block_len));
  std::vector<std::vector<float>> results(n_acts, std::vector<float>(n_rows));
  for (uint32_t r = 0; r < n_rows; ++r) {
    const uint8_t* row = &w[r * row_bytes];
    std::vector<float> weights;
    if (block_len == 0) weights = reference::Dequant(format, row, n_cols);
    for (uint32_t a = 0; a < n_acts; ++a) {
      results[a][r] = block_len == 0 ? reference::FloatDot(weights.data(), acts.x(a).data(), n_cols)
                                     : reference::QuantizedDot(format, row, quantized[a], n_cols);
    }
  }
  return results;
}

}  // namespace lode::bench
