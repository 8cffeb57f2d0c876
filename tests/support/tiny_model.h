// GGUF files of complete small models for tests: any ModelSource written out, and a tiny one that tests then break in
// one place. Test-only.
#pragma once

#include "shared/model/model_source.h"
#include "tests/support/gguf_writer.h"

namespace lode::test {

// All keys, tokens and tensors of `source` as a GGUF file of architecture qwen4exp.
GgufWriter GgufFromSource(const ModelSource& source);

// A valid four-layer model of about 400 KB: layer 3 sparse, n-gram layer 1, 300 tokens, 4 experts.
extern const char kTinySynth[];
GgufWriter TinyModel();

}  // namespace lode::test
