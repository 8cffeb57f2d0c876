// Working memory of the cpu device: what one operation leaves for the next, by row of the window.
// Allocated once. Private to cpu_device*.cc.
#pragma once

#include <vector>

#include "gpu_worker/cpu_device.h"

namespace lode {

// [row][width] floats for every row a window may have.
class RowBuffer {
 public:
  void Resize(size_t width) {
    width_ = width;
    values_.assign(width * kWindowRowsMax, 0.0f);
  }
  float* data() { return values_.data(); }
  float* row(uint32_t r) { return values_.data() + r * width_; }

 private:
  size_t width_ = 0;
  std::vector<float> values_;
};

// Activation block lengths of the computed formats.
inline constexpr uint32_t kActBlockLens[] = {32, 64, 256};
inline constexpr uint32_t kActKinds = 3;

struct CpuDevice::Scratch {
  // quantised activations of the current Mat: [kind][row]
  size_t act_stride = 0;
  std::vector<uint8_t> acts;
  uint8_t* act(uint32_t kind, uint32_t row) {
    return acts.data() + (kind * kWindowRowsMax + row) * act_stride;
  }

  RowBuffer normed, low, up;                    // hyper-connection read
  RowBuffer qkv, z, beta, alpha, query, mixed;  // DeltaNet; mixed: output of the recurrence
  std::vector<float> columns;                   // [thread][key dim][kDeltaColumns]
  size_t columns_per_thread = 0;

  std::vector<float> rope_inv_freq;               // [pairs]
  RowBuffer sin, cos;                             // [row][pairs]
  RowBuffer q, k, v, index_q, index_k, attended;  // q: [head][query | gate]
  RowBuffer block_scores;                         // [row][blocks of the longest context]
  std::vector<uint32_t> selected_blocks, cells;   // [row][...]
  size_t blocks_max = 0, cells_max = 0;
  uint32_t n_cells[kWindowRowsMax] = {};
  std::vector<float> attend_scores;  // [thread][cells_max]

  RowBuffer router_logits, router_scratch, shared_gate, shared_up;
  float shared_inject[kWindowRowsMax] = {};

  RowBuffer draft_embed, draft_residual, draft_in, draft_out;  // draft_in: one stream's pair

  RowBuffer ple_embed, ple_key, ple_query, ple_value, ple_gated, ple_z;
};

}  // namespace lode
