// A GGUF model behind the ModelSource interface: numbers and tokenizer read once, weights by pread and io_uring, so that
// no page fault of a map and no shrinking file can stop or kill a process. Internal to shared/model.
#pragma once

#include <memory>
#include <string>

#include "shared/model/model_source.h"

namespace lode {

StatusOr<std::unique_ptr<ModelSource>> OpenGgufSource(const std::string& path);
// See ModelSource::OpenDraftHead.
StatusOr<std::unique_ptr<ModelSource>> OpenGgufDraftHead(const std::string& path, const ModelConfig& trunk);

}  // namespace lode
