// Chooses the source behind a model string: see model_source.h.
#include "shared/model/model_source.h"

#include "shared/model/gguf_source.h"

namespace lode {

StatusOr<std::unique_ptr<ModelSource>> ModelSource::Open(const std::string& model) {
  return OpenGgufSource(model);
}

}  // namespace lode
