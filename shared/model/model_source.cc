// Chooses the source behind a model string: see model_source.h.
#include "shared/model/model_source.h"

#include "shared/model/gguf_source.h"
#include "shared/model/synth_source.h"

namespace lode {

StatusOr<std::unique_ptr<ModelSource>> ModelSource::Open(const std::string& model) {
  return model.starts_with(kSynthPrefix) ? OpenSynthSource(model) : OpenGgufSource(model);
}

StatusOr<std::unique_ptr<ModelSource>> ModelSource::OpenDraftHead(const std::string& path, const ModelConfig& trunk) {
  return OpenGgufDraftHead(path, trunk);
}

}  // namespace lode
