// ModelSource over a GGUF file set: see gguf_source.h. Opened at start, then read by loading and gathering threads.
#include "shared/model/gguf_source.h"

#include <unordered_map>

#include "shared/base/check.h"
#include "shared/gguf/gguf.h"
#include "shared/gguf/printable.h"
#include "shared/model/gguf_config.h"
#include "shared/model/scattered_reader.h"
#include "shared/model/tensor_table.h"

namespace lode {
namespace {

class GgufSource : public ModelSource {
 public:
  static StatusOr<std::unique_ptr<ModelSource>> Open(const std::string& path) {
    auto source = std::make_unique<GgufSource>();
    source->description_ = path;
    LODE_ASSIGN_OR_RETURN(source->file_, GgufFile::Open(path));
    LODE_ASSIGN_OR_RETURN(source->config_, ReadModelConfig(*source->file_));
    source->Index();
    LODE_RETURN_IF_ERROR(CheckModelTensors(*source));
    source->tokenizer_ = ReadTokenizer(*source->file_, source->config_.vocab);
    // A file without a vocabulary is a model all the same (tests feed token ids); a broken vocabulary is a bad file.
    if (!source->tokenizer_.ok() && source->tokenizer_.status().code() != StatusCode::kNotFound) {
      return source->tokenizer_.status();
    }
    return source;
  }

  // The head's own numbers only have to agree with the trunk's: everything it computes has the trunk's shapes.
  static StatusOr<std::unique_ptr<ModelSource>> OpenDraftHead(const std::string& path, const ModelConfig& trunk) {
    auto source = std::make_unique<GgufSource>();
    source->description_ = path;
    LODE_ASSIGN_OR_RETURN(source->file_, GgufFile::Open(path));
    const GgufFile& file = *source->file_;
    LODE_ASSIGN_OR_RETURN(const std::string_view arch, file.GetString("general.architecture"));
    if (arch != trunk.arch) {
      return InvalidArgument("{}: a draft head of architecture '{}' does not fit a model of architecture {}", path,
                             Printable(arch), trunk.arch);
    }
    const auto agrees = [&](const char* key, uint64_t wanted) -> Status {
      const std::string full = trunk.arch + "." + key;
      if (file.FindValue(full) == nullptr) return OkStatus();
      LODE_ASSIGN_OR_RETURN(const uint64_t value, file.GetUint(full, UINT32_MAX));
      if (value == wanted) return OkStatus();
      return InvalidArgument("{}: key '{}' of the draft head is {}, the model needs {}; is it another model's head?",
                             path, full, value, wanted);
    };
    LODE_RETURN_IF_ERROR(agrees("block_count", trunk.layers + 1));
    LODE_RETURN_IF_ERROR(agrees("nextn_predict_layers", 1));
    LODE_RETURN_IF_ERROR(agrees("embedding_length", trunk.hidden));
    LODE_RETURN_IF_ERROR(agrees("expert_used_count", trunk.experts_used));
    source->config_ = trunk;
    source->config_.nextn_layers = 1;
    source->Index();
    LODE_RETURN_IF_ERROR(CheckDraftTensors(*source));
    LODE_RETURN_IF_ERROR(CheckComputable(*source));
    return source;
  }

  const ModelConfig& config() const override { return config_; }
  StatusOr<TokenizerData> tokenizer() const override { return tokenizer_; }
  const std::vector<TensorInfo>& tensors() const override { return tensors_; }
  const std::string& identity() const override { return file_->identity(); }
  const std::string& description() const override { return description_; }

  const TensorInfo* Find(std::string_view name) const override {
    const auto it = index_.find(name);
    return it == index_.end() ? nullptr : &tensors_[it->second];
  }

  Status ReadRows(const TensorInfo& tensor, uint64_t first_row, uint64_t n_rows, uint8_t* out) const override {
    const GgufTensor& place = Place(tensor);
    LODE_CHECK(first_row <= tensor.rows() && n_rows <= tensor.rows() - first_row, "rows {}+{} of tensor {} with {}",
               first_row, n_rows, tensor.name, tensor.rows());
    const uint64_t row_bytes = tensor.row_bytes();
    Status read = PreadExactly(file_->shard_fd(place.shard), file_->shard_paths()[place.shard],
                               place.offset + first_row * row_bytes, n_rows * row_bytes, out);
    return read.ok() ? read : Error(read.code(), "tensor '{}', rows {} to {}: {}", tensor.name, first_row,
                                    first_row + n_rows, Message(read));
  }

  Status ReadScattered(const TensorInfo& tensor, std::span<const uint64_t> rows, uint8_t* out) const override {
    const GgufTensor& place = Place(tensor);
    const uint64_t row_bytes = tensor.row_bytes();
    LODE_CHECK(row_bytes <= UINT32_MAX, "tensor {} has rows of {} bytes", tensor.name, row_bytes);
    std::vector<uint64_t> offsets(rows.size());
    for (size_t i = 0; i < rows.size(); ++i) {
      LODE_CHECK(rows[i] < tensor.rows(), "row {} of tensor {} with {}", rows[i], tensor.name, tensor.rows());
      offsets[i] = place.offset + rows[i] * row_bytes;
    }
    Status read = readers_[place.shard]->Read(offsets, static_cast<uint32_t>(row_bytes), out);
    return read.ok() ? read : Error(read.code(), "tensor '{}', {} scattered rows: {}", tensor.name, rows.size(),
                                    Message(read));
  }

 private:
  void Index() {
    for (const GgufTensor& tensor : file_->tensors()) {
      tensors_.push_back({tensor.name, tensor.type, {tensor.ne[0], tensor.ne[1], tensor.ne[2], tensor.ne[3]},
                          tensor.bytes});
    }
    for (size_t i = 0; i < tensors_.size(); ++i) index_.emplace(tensors_[i].name, i);
    // A ring only where scattered reads happen: the shard with the n-gram table. Others are ready with pread.
    const GgufTensor* table = file_->FindTensor("per_layer_token_embd.weight");
    for (uint32_t shard = 0; shard < file_->shard_paths().size(); ++shard) {
      readers_.push_back(std::make_unique<ScatteredReader>(file_->shard_fd(shard), file_->shard_paths()[shard],
                                                           table != nullptr && table->shard == shard));
    }
  }

  // Where the tensor's bytes are. `tensor` must be one of tensors().
  const GgufTensor& Place(const TensorInfo& tensor) const {
    const auto index = static_cast<size_t>(&tensor - tensors_.data());
    LODE_CHECK(index < tensors_.size(), "tensor {} is not of this source", tensor.name);
    return file_->tensors()[index];
  }

  std::string description_;
  std::unique_ptr<GgufFile> file_;
  ModelConfig config_;
  std::vector<TensorInfo> tensors_;  // same order as file_->tensors()
  std::unordered_map<std::string_view, size_t> index_;
  StatusOr<TokenizerData> tokenizer_ = NotFound("not read yet");
  std::vector<std::unique_ptr<ScatteredReader>> readers_;  // one per shard
};

}  // namespace

StatusOr<std::unique_ptr<ModelSource>> OpenGgufSource(const std::string& path) { return GgufSource::Open(path); }

StatusOr<std::unique_ptr<ModelSource>> OpenGgufDraftHead(const std::string& path, const ModelConfig& trunk) {
  return GgufSource::OpenDraftHead(path, trunk);
}

}  // namespace lode
