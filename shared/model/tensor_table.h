// The one list of tensors a qwen4exp model has: name, shape, kind, on which layers. The GGUF check, the computability
// check and the synthetic source all derive from its rows (in tensor_table.cc). Pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shared/base/status.h"
#include "shared/model/model_source.h"

namespace lode {

enum class TensorKind {
  kFloat,    // vectors, convolutions: used as floats, so F32, F16 or BF16
  kWidened,  // inject: used as floats, in any computed format (published draft heads have Q8_0), widened at load
  kMatrix,   // {in, out}: any computed format
  kExperts,  // {in, out, experts}
  kTable,    // n-gram rows, gathered by ReadScattered
};

struct TensorSpec {
  std::string name;
  TensorKind kind;
  uint64_t ne[4];
  int32_t layer;  // -1: not of a layer; config.layers: the draft block
};

// Every tensor of a model with these numbers, experts in the unfused form. `config` must be valid.
std::vector<TensorSpec> ModelTensors(const ModelConfig& config);

// Presence, shape and weight type of every tensor of `source`; unknown tensors are errors, vision towers are passed over.
Status CheckModelTensors(const ModelSource& source);

// The same for a separate draft head: every tensor of the draft block must be there. Embedding, output and final mixer,
// which self-contained heads carry as well, are passed over: the drafter uses the trunk's.
Status CheckDraftTensors(const ModelSource& head);

std::string ShapeText(const uint64_t (&ne)[4]);

}  // namespace lode
