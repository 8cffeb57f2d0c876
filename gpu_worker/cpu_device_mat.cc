// The matrix product of the cpu device: y[row] = W x[row] for several matrices that see the same
// activations. Activations are quantised once per block length; then row chunks of all matrices are
// units of one parallel loop. Roofline: at one row the weights' bytes against memory bandwidth; a
// chunk is about what a core reads in 3 us.
#include <algorithm>

#include "gpu_worker/cpu_device_scratch.h"
#include "shared/base/check.h"

namespace lode {
namespace {

constexpr size_t kChunkBytes =
    32 * 1024;  // weights per unit: long enough to hide the claim, short enough to balance
constexpr uint32_t kRowGroup = 16;  // kernels treat up to 16 weight rows together
constexpr uint32_t kJobsMax = 8;

uint32_t ChunkRows(const WeightMatrix& w) {
  const size_t rows = std::max<size_t>(1, kChunkBytes / w.row_bytes);
  return static_cast<uint32_t>((rows + kRowGroup - 1) / kRowGroup * kRowGroup);
}

uint32_t KindOf(uint32_t block_len) {
  for (uint32_t kind = 0; kind < kActKinds; ++kind) {
    if (kActBlockLens[kind] == block_len) return kind;
  }
  LODE_CHECK(false, "no activation buffer for block length {}", block_len);
}

}  // namespace

void CpuDevice::QuantizeRows(std::span<const MatJob> jobs, const float* x, RowMask rows) {
  const uint32_t cols = jobs[0].w->cols;
  bool wanted[kActKinds] = {};
  for (const MatJob& job : jobs) {
    const uint32_t block_len = Info(job.w->format).act_block_len;
    if (block_len != 0 && !options_.float_reference) wanted[KindOf(block_len)] = true;
  }
  pool_.ParallelFor(params_.n_rows, 4ull * params_.n_rows * cols, [&](uint32_t row, uint32_t) {
    if ((rows >> row & 1) == 0) return;
    const float* xr = x + static_cast<size_t>(row) * cols;
    bool finite = true, checked = false;
    for (uint32_t kind = 0; kind < kActKinds; ++kind) {
      if (!wanted[kind]) continue;
      const ActLayout layout{cols, kActBlockLens[kind]};
      uint8_t* act = scratch_->act(kind, row);
      finite &= kernels_->quantize(xr, cols, layout.block_len, reinterpret_cast<int8_t*>(act),
                                   reinterpret_cast<float*>(act + layout.d_offset()),
                                   reinterpret_cast<int16_t*>(act + layout.sum16_offset()));
      checked = true;
    }
    if (!checked) finite = kernels_->all_finite(xr, cols);
    if (!finite) ReportNotFinite(row);
  });
}

void CpuDevice::Mat(std::span<const MatJob> jobs, const float* x, RowMask rows) {
  if (rows == 0) return;
  LODE_CHECK(jobs.size() <= kJobsMax, "{} matrices in one product", jobs.size());
  QuantizeRows(jobs, x, rows);
  const uint32_t cols = jobs[0].w->cols;
  ActRow acts[kJobsMax][kWindowRowsMax];
  uint32_t act_rows[kWindowRowsMax];
  uint32_t n_acts = 0, n_units = 0;
  uint32_t first_unit[kJobsMax];
  uint64_t operations = 0;
  for (uint32_t row = 0; row < params_.n_rows; ++row) {
    if (rows >> row & 1) act_rows[n_acts++] = row;
  }
  for (size_t j = 0; j < jobs.size(); ++j) {
    const WeightMatrix& w = *jobs[j].w;
    LODE_CHECK(w.cols == cols, "matrices of {} and {} columns share one input", w.cols, cols);
    const uint32_t block_len = options_.float_reference ? 0 : Info(w.format).act_block_len;
    for (uint32_t a = 0; a < n_acts; ++a) {
      if (block_len != 0)
        acts[j][a] = ActRowAt(scratch_->act(KindOf(block_len), act_rows[a]), {cols, block_len});
      acts[j][a].f = x + static_cast<size_t>(act_rows[a]) * cols;
    }
    first_unit[j] = n_units;
    n_units += (w.rows + ChunkRows(w) - 1) / ChunkRows(w);
    operations += static_cast<uint64_t>(w.rows) * cols * n_acts;
  }
  pool_.ParallelFor(n_units, operations, [&](uint32_t unit, uint32_t) {
    size_t j = jobs.size() - 1;
    while (first_unit[j] > unit) --j;
    const WeightMatrix& w = *jobs[j].w;
    const uint32_t chunk = ChunkRows(w), first = (unit - first_unit[j]) * chunk;
    float* out[kWindowRowsMax];
    for (uint32_t a = 0; a < n_acts; ++a)
      out[a] = jobs[j].y + static_cast<size_t>(act_rows[a]) * w.rows + first;
    const MatFn* table = options_.float_reference ? kernels_->mat_float : kernels_->mat;
    table[static_cast<uint32_t>(w.format)]({.w = w.data + first * w.row_bytes,
                                            .row_bytes = w.row_bytes,
                                            .n_rows = std::min(chunk, w.rows - first),
                                            .n_cols = cols,
                                            .acts = acts[j],
                                            .n_acts = n_acts,
                                            .out = out});
  });
}

}  // namespace lode
