// GGUF metadata -> ModelConfig and TokenizerData. The keys are untrusted: each is type- and range-checked here, the
// numbers against each other by ModelConfig::Validate. Pure functions of an opened file. Internal to shared/model.
#pragma once

#include "shared/base/status.h"
#include "shared/gguf/gguf.h"
#include "shared/model/model_source.h"

namespace lode {

// Only architecture qwen4exp today; other names are refused with a sentence. The result is validated.
StatusOr<ModelConfig> ReadModelConfig(const GgufFile& file);

// NotFound when the file carries no vocabulary (tokenizer.ggml.model absent or "no_vocab").
StatusOr<TokenizerData> ReadTokenizer(const GgufFile& file, uint32_t vocab);

}  // namespace lode
