// The text after "synth:" as numbers: sizes of the model and its pack, the types its tensors have. Every key, its
// default and its bounds are one row of LODE_SYNTH_KEYS. Pure functions. Keys for people: docs/design/synth.md.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "kernels/formats.h"
#include "shared/base/status.h"
#include "shared/model/model_config.h"
#include "shared/model/tensor_table.h"

namespace lode {

// X(key, default, least, largest). Defaults are the flagship's, but for few layers, experts and tokens. Bounds that
// depend on each other are ModelConfig::Validate's.
#define LODE_SYNTH_KEYS(X)                       \
  X(layers, 4, 1, 256)                           \
  X(experts, 32, 1, 1024)                        \
  X(experts_used, 10, 1, 32)                     \
  X(hidden, 2560, 32, 16384)                     \
  X(width, 640, 32, 16384)                       \
  X(shared_width, 640, 32, 16384)                \
  X(vocab, 4096, 261, 1 << 20)                   \
  X(context, 262144, 1, 1 << 20)                 \
  X(interval, 4, 1, 256) /* every n-th layer is sparse attention */ \
  X(heads, 24, 1, 256)                           \
  X(kv_heads, 2, 1, 256)                         \
  X(head_dim, 256, 2, 512)                       \
  X(rope_dims, 64, 2, 512)                       \
  X(index_heads, 4, 1, 256)                      \
  X(index_dim, 128, 2, 512)                      \
  X(index_top_k, 2048, 4, 65536)                 \
  X(ssm_key_heads, 16, 1, 256)                   \
  X(ssm_value_heads, 48, 1, 256)                 \
  X(ssm_head_dim, 128, 1, 512)                   \
  X(streams, 4, 1, 8)                            \
  X(hc_rank, 320, 32, 4096)                      \
  X(ple, 1, 0, 8)         /* n-gram layers: 1, 5, 9, ... */ \
  X(ple_heads, 8, 1, 32)  /* per n-gram size */  \
  X(ple_width, 160, 32, 4096)                    \
  X(ple_base, 4000, 2, 1 << 28) /* a head's rows: the primes from here on */ \
  X(mtp, 0, 0, 1)         /* draft block */      \
  X(seed, 1, 0, UINT32_MAX)

struct SynthPack;

struct SynthOptions {
#define LODE_X(key, value, least, largest) uint64_t key = value;
  LODE_SYNTH_KEYS(LODE_X)
#undef LODE_X
  const SynthPack* pack = nullptr;  // never null after parsing
  TensorType plain_type = TensorType::kQ8_0;  // pack = a type's name: of the experts
};

// `text` is what follows "synth:". Unknown keys, presets and packs are errors that list what is known.
StatusOr<SynthOptions> ParseSynthOptions(std::string_view text);

// Validated.
StatusOr<ModelConfig> SynthConfig(const SynthOptions& options);

// The type of one tensor in the options' pack; falls back to IQ4_NL or F16 where a row is no whole number of blocks.
TensorType SynthType(const SynthOptions& options, const TensorSpec& spec);

// All options in one order, so that two spellings of the same weights are the same text.
std::string CanonicalText(const SynthOptions& options);

}  // namespace lode
