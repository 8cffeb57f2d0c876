// Bounds and divisibility of a model's numbers, checked once when a model is opened (see model_config.h). Everything
// later sizes arrays and divides by these numbers without asking again.
#include "shared/model/model_config.h"

#include <cmath>

#include "shared/base/limits.h"

namespace lode {
namespace {

struct Range {
  const char* what;
  uint64_t value, min, max;
};

Status CheckRanges(std::initializer_list<Range> ranges) {
  for (const Range& range : ranges) {
    if (range.value < range.min || range.value > range.max) {
      return InvalidArgument("the model's {} is {}, allowed are {} to {}", range.what, range.value, range.min,
                             range.max);
    }
  }
  return OkStatus();
}

struct Divides {
  const char* what;
  uint64_t value;
  const char* by_what;
  uint64_t by;  // non-zero
};

Status CheckMultiples(std::initializer_list<Divides> rules) {
  for (const Divides& rule : rules) {
    if (rule.value % rule.by != 0) {
      return InvalidArgument("the model's {} ({}) is not a multiple of its {} ({})", rule.what, rule.value,
                             rule.by_what, rule.by);
    }
  }
  return OkStatus();
}

Status CheckPleLayer(const ModelConfig& c, size_t i) {
  const PleConfig& ple = c.ple[i];
  const uint32_t heads = c.PleHeads();
  if (ple.layer >= c.layers || (i > 0 && ple.layer <= c.ple[i - 1].layer)) {
    return InvalidArgument("n-gram layer {} of the model is at layer {}: they must ascend and lie below {}", i,
                           ple.layer, c.layers);
  }
  if (ple.multipliers.size() != c.ngram_size || ple.head_offsets.size() != heads || ple.head_sizes.size() != heads) {
    return InvalidArgument("n-gram layer {} has {} multipliers, {} offsets and {} sizes; {}, {} and {} are needed", i,
                           ple.multipliers.size(), ple.head_offsets.size(), ple.head_sizes.size(), c.ngram_size, heads,
                           heads);
  }
  for (uint64_t multiplier : ple.multipliers) {
    // The reference hashes in signed 64-bit: a product beyond 2^63 would give other rows there than here.
    if (multiplier == 0 || multiplier > INT64_MAX / c.vocab) {
      return InvalidArgument("n-gram layer {} has multiplier {}: it must be 1 to 2^63 / vocabulary", i, multiplier);
    }
  }
  for (uint32_t h = 0; h < heads; ++h) {
    if (ple.head_sizes[h] == 0 || ple.head_sizes[h] > c.ple_rows ||
        ple.head_offsets[h] > c.ple_rows - ple.head_sizes[h]) {
      return InvalidArgument("n-gram layer {}: head {} takes {} rows from {}, the table has {}", i, h,
                             ple.head_sizes[h], ple.head_offsets[h], c.ple_rows);
    }
  }
  return OkStatus();
}

Status CheckPle(const ModelConfig& c) {
  if (c.ple.empty()) return OkStatus();
  LODE_RETURN_IF_ERROR(CheckRanges({{"number of n-gram layers", c.ple.size(), 1, kPleLayersMax},
                                    {"n-gram size", c.ngram_size, 2, kNgramMax},
                                    {"n-gram heads per size", c.heads_per_ngram, 1, kPleHeadsMax},
                                    {"n-gram row width", c.ple_row_width, 1, kPleRowWidthMax},
                                    {"n-gram table rows", c.ple_rows, 1, kPleRowsMax},
                                    {"n-gram end token", c.ple_eos, 0, c.vocab - 1}}));
  // Rows reach (conv - 1) * dilation back, dilation = n-gram size; the device's ring must hold that and a window.
  const uint32_t back_max = kPleRing - kWindowRowsMax;
  LODE_RETURN_IF_ERROR(CheckRanges({{"number of n-gram heads", c.PleHeads(), 1, kPleHeadsMax},
                                    {"n-gram convolution length", c.ple_conv, 1, back_max / c.ngram_size + 1}}));
  for (size_t i = 0; i < c.ple.size(); ++i) LODE_RETURN_IF_ERROR(CheckPleLayer(c, i));
  return OkStatus();
}

}  // namespace

Status ModelConfig::Validate() const {
  LODE_RETURN_IF_ERROR(CheckRanges({
      {"layer count", layers, 1, kLayersMax},
      {"draft (nextn) layer count", nextn_layers, 0, 1},
      {"vocabulary size", vocab, 1, kVocabMax},
      {"embedding length", hidden, 1, kHiddenMax},
      {"context length", context, 1, kContextMax},
      {"attention head count", heads, 1, kHeadsMax},
      {"KV head count", kv_heads, 1, kHeadsMax},
      {"attention head size", head_dim, 1, kHeadDimMax},
      {"rotary dimension count", rope_dims, 2, head_dim},
      {"index head count", index_heads, 1, kHeadsMax},
      {"index head size", index_dim, 1, kHeadDimMax},
      {"index block", index_block, 1, kIndexBlockMax},
      {"index top_k", index_top_k, 1, kIndexTopKMax},
      {"DeltaNet convolution length", ssm_conv, 2, kConvRing - kWindowRowsMax + 1},
      {"DeltaNet key head count", ssm_key_heads, 1, kHeadsMax},
      {"DeltaNet value head count", ssm_value_heads, 1, kHeadsMax},
      {"DeltaNet head size", ssm_head_dim, 1, kHeadDimMax},
      {"expert count", experts, 1, kExpertsMax},
      {"experts used per token", experts_used, 1, kExpertsUsedMax},
      {"expert width", expert_width, 1, kExpertWidthMax},
      {"shared expert width", shared_width, 1, kExpertWidthMax},
      {"stream count", streams, 1, kStreamsMax},
      {"hyper-connection rank", hc_rank, 1, kHcRankMax},
      {"number of layer kinds", is_attention.size(), layers, layers},
  }));
  LODE_RETURN_IF_ERROR(CheckRanges({{"experts used per token", experts_used, 1, experts},
                                    {"rotary dimension count (for the index)", rope_dims, 2, index_dim}}));
  LODE_RETURN_IF_ERROR(CheckMultiples({{"attention head count", heads, "KV head count", kv_heads},
                                       {"rotary dimension count", rope_dims, "pair size", 2},
                                       {"index top_k", index_top_k, "index block", index_block},
                                       {"DeltaNet value head count", ssm_value_heads, "key head count", ssm_key_heads}}));
  if (!(rms_eps > 0 && rms_eps < 1)) return InvalidArgument("the model's norm epsilon is {}, not in (0, 1)", rms_eps);
  if (!(rope_theta > 1 && std::isfinite(rope_theta))) {
    return InvalidArgument("the model's rotary base is {}, it must be finite and above 1", rope_theta);
  }
  return CheckPle(*this);
}

}  // namespace lode
