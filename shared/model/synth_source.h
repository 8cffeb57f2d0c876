// A model made of a seed behind the ModelSource interface: flagship-sized matrices without a download, for tests and
// benchmarks. No weights are held; rows are generated when they are read (synth_bytes.h). docs/design/synth.md.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "shared/model/model_source.h"

namespace lode {

inline constexpr std::string_view kSynthPrefix = "synth:";

// `model` with its prefix: "synth:layers=4,experts=32,pack=q2_0".
StatusOr<std::unique_ptr<ModelSource>> OpenSynthSource(const std::string& model);

}  // namespace lode
