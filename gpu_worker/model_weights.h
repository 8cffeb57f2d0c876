// The dense weights of the trunk in device memory, by layer. Routed experts are not here: they live
// in the arenas of the CPU workers and in the VRAM tier. Names in comments are GGUF names;
// formulas: docs/design/model.md. Loaded once before "ready", constant afterwards; freed with the
// device.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels/formats.h"
#include "shared/base/status.h"
#include "shared/model/model_source.h"

namespace lode {

class Device;

// A weight matrix in GGUF block bytes; y[r] = row r . x. `data` is a device pointer.
struct WeightMatrix {
  const uint8_t* data = nullptr;
  Format format = Format::kCount;
  uint32_t rows = 0, cols = 0;
  size_t row_bytes = 0;
};

struct HcWeights {        // hc_attn_*, hc_ffn_*, output_hc_*
  const float* norm;      // [streams * hidden]
  WeightMatrix down, up;  // {streams * hidden, rank}, {rank, streams * hidden}
  const float* inject;    // [streams][streams * hidden]; null: the mixer has no write (output_hc_*)
};

struct DeltaWeights {
  WeightMatrix qkv, gate;    // attn_qkv, attn_gate
  WeightMatrix beta, alpha;  // ssm_beta, ssm_alpha
  const float *a, *dt;       // ssm_a, ssm_dt.bias [value heads]
  const float* conv;  // ssm_conv1d, turned to [tap][channel]; the last tap is the current row
  const float* norm;  // ssm_norm [head dim]
  WeightMatrix out;   // ssm_out
};

struct AttentionWeights {
  WeightMatrix q, k, v;           // attn_q holds query and gate per head: [heads][2 * head_dim]
  WeightMatrix index_q, index_k;  // indexer.q_proj, indexer.k_proj
  const float *q_norm, *k_norm, *index_q_norm, *index_k_norm;
  WeightMatrix out;  // attn_output
};

struct PleWeights {
  uint32_t index = 0;                              // into ModelConfig::ple
  WeightMatrix key, value;                         // ple_key, ple_value
  const float *norm_key, *norm_query, *norm_conv;  // [streams * hidden]
  const float* conv;                               // ple_conv1d, turned to [tap][channel]
};

struct MoeWeights {
  WeightMatrix router;                               // ffn_gate_inp
  WeightMatrix shared_gate, shared_up, shared_down;  // ffn_*_shexp
  const float* shared_inject;                        // ffn_gate_inp_shexp [hidden]
};

struct LayerWeights {
  bool attention = false;  // else DeltaNet
  bool has_ple = false;
  HcWeights hc_attn, hc_ffn;
  DeltaWeights delta;
  AttentionWeights attn;
  PleWeights ple;
  MoeWeights moe;
};

struct ModelWeights {
  WeightMatrix embed, output;  // token_embd, output
  HcWeights output_hc;
  std::vector<LayerWeights> layers;
  uint64_t bytes = 0;  // device memory of all of them

  // Reads every dense tensor of the trunk into `device`. `progress` (may be null) is called after
  // each tensor. Errors name the tensor: absent, type not computable, I/O.
  using Progress = std::function<void(uint64_t bytes_done, uint64_t bytes_total)>;
  static StatusOr<ModelWeights> Load(const ModelSource& source, Device& device,
                                     const Progress& progress);
};

// The draft (MTP) head: one layer like the sparse ones, its way in and its way out. Its routed
// experts are loaded by the drafter's own lanes.
struct DraftWeights {
  const float* embed_norm;     // nextn.enorm [hidden]
  const float* residual_norm;  // nextn.hnorm [streams * hidden]
  // True: residual_norm is one norm over all streams, as the model was trained; false: one per
  // stream.
  bool full_width_norm = true;
  WeightMatrix project;  // nextn.eh_proj {2 * hidden, hidden}: embedding first, then one stream
  LayerWeights layer;
  HcWeights head;       // nextn.hc_head_*
  WeightMatrix output;  // the trunk's, or the rows of it that a reduced draft vocabulary names
  std::vector<int32_t> vocabulary;  // [output.rows] token ids, ascending; empty: every token
  uint64_t bytes = 0;               // device memory beyond the trunk's

  // `head`: the trunk's own source when it holds the draft block, or a separate head. `trunk`: where
  // token_embd and output come from, with their source (rows of a reduced vocabulary are read from
  // there). `vocabulary`: ids inside the vocabulary, ascending, without repeats.
  static StatusOr<DraftWeights> Load(const ModelSource& head, const ModelSource& trunk_source,
                                     const ModelWeights& trunk, Device& device,
                                     std::vector<int32_t> vocabulary);
};

}  // namespace lode
