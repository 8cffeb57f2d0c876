// The numbers of a model, read from GGUF metadata (or a synth: string) and validated once. Plain data; every count is
// inside shared/base/limits.h and every divisor is non-zero after Validate.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "shared/base/status.h"

namespace lode {

// Shape bounds beside those of shared/base/limits.h: they size tables of kernels and workers. Published models use at
// most half of each.
inline constexpr uint32_t kPleHeadsMax = 32;
inline constexpr uint32_t kNgramMax = 4;
inline constexpr uint32_t kPleLayersMax = 8;
inline constexpr uint32_t kPleRowWidthMax = 4096;        // weights
inline constexpr uint64_t kPleRowsMax = uint64_t{1} << 36;
inline constexpr uint32_t kHeadsMax = 256;               // attention, index and DeltaNet heads alike
inline constexpr uint32_t kHeadDimMax = 512;
inline constexpr uint32_t kIndexTopKMax = 1u << 16;      // tokens
inline constexpr uint32_t kIndexBlockMax = 64;           // tokens
inline constexpr uint32_t kStreamsMax = 8;
inline constexpr uint32_t kHcRankMax = 4096;

struct PleConfig {                 // one hashed n-gram layer (spec: docs/design/model.md)
  uint32_t layer = 0;              // 0-based
  std::vector<uint64_t> multipliers;   // [ngram_size]; [0] meets the current token
  std::vector<uint64_t> head_offsets;  // [heads] rows of the table
  std::vector<uint64_t> head_sizes;    // [heads] moduli
};

struct ModelConfig {
  std::string arch;                // "qwen4exp" (others are refused today)
  std::string name;
  uint32_t layers = 0;             // trunk layers, MTP block not counted
  uint32_t nextn_layers = 0;       // 0 or 1
  uint32_t vocab = 0;
  uint32_t hidden = 0;             // one stream
  uint32_t context = 0;            // trained context, tokens
  float rms_eps = 0;
  // attention (QSA layers)
  uint32_t heads = 0, kv_heads = 0, head_dim = 0;
  uint32_t rope_dims = 0;
  double rope_theta = 0;
  uint32_t index_heads = 0, index_dim = 0, index_top_k = 0 /* tokens */, index_block = 0 /* tokens, 4 */;
  std::vector<uint8_t> is_attention;   // [layers]: 1 = QSA, 0 = Gated DeltaNet
  // Gated DeltaNet
  uint32_t ssm_conv = 0, ssm_key_heads = 0, ssm_value_heads = 0, ssm_head_dim = 0;
  // experts
  uint32_t experts = 0, experts_used = 0, expert_width = 0, shared_width = 0;
  // hyper-connections
  uint32_t streams = 0, hc_rank = 0;
  // n-gram layers
  std::vector<PleConfig> ple;
  uint32_t ngram_size = 0, heads_per_ngram = 0, ple_conv = 0, ple_row_width = 0;
  uint32_t ple_eos = 0;
  uint64_t ple_rows = 0;

  // derived
  uint32_t SsmKeyWidth() const { return ssm_key_heads * ssm_head_dim; }
  uint32_t SsmValueWidth() const { return ssm_value_heads * ssm_head_dim; }
  uint32_t SsmConvWidth() const { return 2 * SsmKeyWidth() + SsmValueWidth(); }
  uint32_t IndexBlocksMax() const { return index_top_k / index_block; }
  uint32_t WideWidth() const { return streams * hidden; }  // all streams of the residual
  uint32_t PleHeads() const { return (ngram_size - 1) * heads_per_ngram; }
  uint32_t PleWidth() const { return ple_row_width * (ngram_size - 1) * heads_per_ngram; }

  // One sentence naming the first number that is out of range or does not fit the others.
  Status Validate() const;
};

}  // namespace lode
