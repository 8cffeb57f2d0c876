// Reads the numbers and tokenizer facts of a qwen4exp GGUF file: see gguf_config.h; keys: docs/design/formats.md.
#include "shared/model/gguf_config.h"

#include <algorithm>

#include "shared/base/limits.h"
#include "shared/gguf/printable.h"

namespace lode {
namespace {

constexpr uint64_t kMergesMax = 4 * uint64_t{kVocabMax};
constexpr uint64_t kTokenTypeMax = 6;  // 6 = byte; larger numbers are undefined
constexpr uint32_t kIndexBlockDefault = 4;

// Reads "<arch>.<key>" into plain fields, stopping at the first error: Take...; then one look at status().
class KeyReader {
 public:
  KeyReader(const GgufFile& file, std::string arch) : file_(file), prefix_(std::move(arch) + ".") {}

  bool Has(const char* key) const { return file_.FindValue(prefix_ + key) != nullptr; }
  const Status& status() const { return status_; }

  void Take(const char* key, uint32_t* out) {
    uint64_t value = 0;
    if (Keep(file_.GetUint(prefix_ + key, UINT32_MAX), &value)) *out = static_cast<uint32_t>(value);
  }
  void TakeOptional(const char* key, uint32_t* out) {
    if (Has(key)) Take(key, out);
  }
  void TakeFloat(const char* key, double* out) { Keep(file_.GetFloat(prefix_ + key), out); }
  void TakeArray(const char* key, uint64_t max_count, std::vector<uint64_t>* out) {
    Keep(file_.GetUintArray(prefix_ + key, max_count), out);
  }
  // A number, or an array with one equal number per layer.
  void TakeUniform(const char* key, uint32_t* out) {
    const GgufValue* value = file_.FindValue(prefix_ + key);
    if (value == nullptr || value->type != GgufValueType::kArray) return Take(key, out);
    std::vector<uint64_t> numbers;
    TakeArray(key, kLayersMax + 1, &numbers);
    if (!status_.ok()) return;
    const bool uniform = !numbers.empty() && numbers[0] <= UINT32_MAX &&
                         std::all_of(numbers.begin(), numbers.end(), [&](uint64_t n) { return n == numbers[0]; });
    if (!uniform) {
      status_ = InvalidArgument("{}: key '{}{}' differs between layers, which Lode does not support",
                                file_.shard_paths()[0], prefix_, key);
      return;
    }
    *out = static_cast<uint32_t>(numbers[0]);
  }

 private:
  template <typename T>
  bool Keep(StatusOr<T> value, T* out) {
    if (!status_.ok()) return false;
    status_ = value.status();
    if (status_.ok()) *out = *std::move(value);
    return status_.ok();
  }

  const GgufFile& file_;
  const std::string prefix_;
  Status status_;
};

Status CheckArchitecture(const std::string& path, std::string_view arch) {
  if (arch == "qwen4exp") return OkStatus();
  for (std::string_view later : {"qwen3next", "qwen35moe", "qwen3moe"}) {
    if (arch == later) {
      return InvalidArgument("{}: architecture {} is not supported yet; Lode runs qwen4exp", path, later);
    }
  }
  if (arch == "qwen4_exp") {
    return InvalidArgument("{}: architecture qwen4_exp is another writer's name with keys of its own; use a file of "
                           "architecture qwen4exp", path);
  }
  return InvalidArgument("{}: architecture '{}' is unknown; Lode runs qwen4exp", path, Printable(arch));
}

// 1 for QSA, 0 for DeltaNet. An explicit list of recurrent layers wins over the interval rule.
Status ReadLayerKinds(const std::string& path, uint32_t blocks, KeyReader* keys, ModelConfig* config) {
  config->is_attention.assign(config->layers, 0);
  if (keys->Has("attention.recurrent_layers")) {
    std::vector<uint64_t> recurrent;
    keys->TakeArray("attention.recurrent_layers", kLayersMax + 1, &recurrent);
    LODE_RETURN_IF_ERROR(keys->status());
    if (recurrent.size() != blocks && recurrent.size() != config->layers) {
      return InvalidArgument("{}: key 'qwen4exp.attention.recurrent_layers' has {} elements for {} layers", path,
                             recurrent.size(), blocks);
    }
    for (uint32_t l = 0; l < config->layers; ++l) config->is_attention[l] = recurrent[l] == 0;
    return OkStatus();
  }
  uint32_t interval = 0;
  keys->Take("full_attention_interval", &interval);
  LODE_RETURN_IF_ERROR(keys->status());
  if (interval == 0) return InvalidArgument("{}: key 'qwen4exp.full_attention_interval' is 0", path);
  for (uint32_t l = 0; l < config->layers; ++l) config->is_attention[l] = (l + 1) % interval == 0;
  return OkStatus();
}

// compress_ratios is the index block length on QSA layers and 0 elsewhere (the draft block may say either).
Status ReadIndexBlock(const std::string& path, uint32_t blocks, KeyReader* keys, ModelConfig* config) {
  config->index_block = kIndexBlockDefault;
  if (!keys->Has("attention.compress_ratios")) return OkStatus();
  std::vector<uint64_t> ratios;
  keys->TakeArray("attention.compress_ratios", kLayersMax + 1, &ratios);
  LODE_RETURN_IF_ERROR(keys->status());
  if (ratios.size() != blocks && ratios.size() != config->layers) {
    return InvalidArgument("{}: key 'qwen4exp.attention.compress_ratios' has {} elements for {} layers", path,
                           ratios.size(), blocks);
  }
  uint64_t block = 0;
  for (uint32_t l = 0; l < config->layers; ++l) {
    const bool attention = config->is_attention[l] != 0;
    if (block == 0 && attention) block = ratios[l];
    if (ratios[l] != (attention ? block : 0) || (attention && (block == 0 || block > kIndexBlockMax))) {
      return InvalidArgument("{}: key 'qwen4exp.attention.compress_ratios' says {} for layer {}, which is {} layer; "
                             "one number from 1 to {} on all sparse layers and 0 elsewhere is supported",
                             path, ratios[l], l, attention ? "a sparse attention" : "a DeltaNet", kIndexBlockMax);
    }
  }
  if (block != 0) config->index_block = static_cast<uint32_t>(block);
  return OkStatus();
}

Status ReadPle(const GgufFile& file, KeyReader* keys, ModelConfig* config) {
  std::vector<uint64_t> layers, multipliers, offsets, sizes;
  if (!keys->Has("ple.layers")) return OkStatus();
  keys->TakeArray("ple.layers", kPleLayersMax, &layers);
  if (keys->status().ok() && layers.empty()) return OkStatus();
  keys->Take("ple.ngram_size", &config->ngram_size);
  keys->Take("ple.heads_per_ngram", &config->heads_per_ngram);
  keys->Take("ple.conv_kernel", &config->ple_conv);
  keys->Take("ple.eos_token_id", &config->ple_eos);
  keys->Take("embedding_length_per_layer_input", &config->ple_row_width);
  keys->TakeArray("ple.layer_multipliers", kPleLayersMax * kNgramMax, &multipliers);
  keys->TakeArray("ple.head_offsets", kPleLayersMax * kPleHeadsMax, &offsets);
  keys->TakeArray("ple.head_vocab_sizes", kPleLayersMax * kPleHeadsMax, &sizes);
  LODE_RETURN_IF_ERROR(keys->status());
  const std::string& path = file.shard_paths()[0];
  const GgufTensor* table = file.FindTensor("per_layer_token_embd.weight");
  if (table == nullptr) return InvalidArgument("{}: tensor 'per_layer_token_embd.weight' is missing", path);
  config->ple_rows = table->ne[1];
  if (config->ngram_size < 2 || config->ngram_size > kNgramMax || config->heads_per_ngram > kPleHeadsMax) {
    return InvalidArgument("{}: n-gram size {} with {} heads each is out of range", path, config->ngram_size,
                           config->heads_per_ngram);
  }
  const size_t n = layers.size(), heads = config->PleHeads();
  if (multipliers.size() != n * config->ngram_size || offsets.size() != n * heads || sizes.size() != n * heads) {
    return InvalidArgument("{}: {} n-gram layers need {} 'ple.layer_multipliers' and {} 'ple.head_offsets' and "
                           "'ple.head_vocab_sizes'; the file has {}, {} and {}",
                           path, n, n * config->ngram_size, n * heads, multipliers.size(), offsets.size(),
                           sizes.size());
  }
  for (size_t i = 0; i < n; ++i) {
    if (layers[i] >= config->layers) {
      return InvalidArgument("{}: key 'qwen4exp.ple.layers' names layer {} of {}", path, layers[i], config->layers);
    }
    const auto part = [i](const std::vector<uint64_t>& all, size_t each) {
      return std::vector<uint64_t>(all.begin() + i * each, all.begin() + (i + 1) * each);
    };
    config->ple.push_back({static_cast<uint32_t>(layers[i]), part(multipliers, config->ngram_size),
                           part(offsets, heads), part(sizes, heads)});
  }
  return OkStatus();
}

// vocab_size and the token list must agree; either may be absent.
Status ReadVocab(const GgufFile& file, KeyReader* keys, ModelConfig* config) {
  keys->TakeOptional("vocab_size", &config->vocab);
  LODE_RETURN_IF_ERROR(keys->status());
  const GgufValue* tokens = file.FindValue("tokenizer.ggml.tokens");
  if (tokens == nullptr && config->vocab == 0) return keys->Take("vocab_size", &config->vocab), keys->status();
  if (tokens == nullptr) return OkStatus();
  if (config->vocab == 0 && tokens->count <= kVocabMax) config->vocab = static_cast<uint32_t>(tokens->count);
  if (tokens->count != config->vocab) {
    return InvalidArgument("{}: key 'tokenizer.ggml.tokens' has {} tokens, the vocabulary size is {}",
                           file.shard_paths()[0], tokens->count, config->vocab);
  }
  return OkStatus();
}

Status ReadSsm(const std::string& path, KeyReader* keys, ModelConfig* config) {
  uint32_t inner = 0;
  keys->Take("ssm.conv_kernel", &config->ssm_conv);
  keys->Take("ssm.state_size", &config->ssm_head_dim);
  keys->Take("ssm.group_count", &config->ssm_key_heads);
  keys->Take("ssm.time_step_rank", &config->ssm_value_heads);
  keys->Take("ssm.inner_size", &inner);
  LODE_RETURN_IF_ERROR(keys->status());
  if (inner != uint64_t{config->ssm_value_heads} * config->ssm_head_dim) {
    return InvalidArgument("{}: key 'qwen4exp.ssm.inner_size' is {}, but {} value heads of {} are {}", path, inner,
                           config->ssm_value_heads, config->ssm_head_dim,
                           uint64_t{config->ssm_value_heads} * config->ssm_head_dim);
  }
  return OkStatus();
}

Status ReadNumbers(const std::string& path, KeyReader* keys, ModelConfig* config) {
  uint32_t value_length = 0;
  double eps = 0;
  keys->Take("context_length", &config->context);
  keys->Take("embedding_length", &config->hidden);
  keys->TakeUniform("attention.head_count", &config->heads);
  keys->TakeUniform("attention.head_count_kv", &config->kv_heads);
  keys->Take("attention.key_length", &config->head_dim);
  value_length = config->head_dim;
  keys->TakeOptional("attention.value_length", &value_length);
  keys->TakeFloat("attention.layer_norm_rms_epsilon", &eps);
  keys->Take("rope.dimension_count", &config->rope_dims);
  keys->TakeFloat("rope.freq_base", &config->rope_theta);
  keys->Take("attention.indexer.head_count", &config->index_heads);
  keys->Take("attention.indexer.key_length", &config->index_dim);
  keys->Take("attention.indexer.top_k", &config->index_top_k);
  keys->Take("expert_count", &config->experts);
  keys->Take("expert_used_count", &config->experts_used);
  keys->TakeUniform("expert_feed_forward_length", &config->expert_width);
  config->shared_width = config->expert_width;
  if (keys->Has("expert_shared_feed_forward_length")) {
    keys->TakeUniform("expert_shared_feed_forward_length", &config->shared_width);
  }
  keys->Take("hyper_connection.count", &config->streams);
  keys->Take("hyper_connection.low_rank", &config->hc_rank);
  LODE_RETURN_IF_ERROR(keys->status());
  config->rms_eps = static_cast<float>(eps);
  if (value_length != config->head_dim) {
    return InvalidArgument("{}: value heads of {} beside key heads of {} are not supported", path, value_length,
                           config->head_dim);
  }
  return OkStatus();
}

// Sections split the rotary pairs between position axes, which are equal for text; only their sum matters here.
Status CheckSections(const std::string& path, KeyReader* keys, const ModelConfig& config) {
  if (!keys->Has("rope.dimension_sections")) return OkStatus();
  std::vector<uint64_t> sections;
  keys->TakeArray("rope.dimension_sections", 4, &sections);
  LODE_RETURN_IF_ERROR(keys->status());
  uint64_t pairs = 0;
  for (uint64_t section : sections) pairs += std::min<uint64_t>(section, kHeadDimMax);
  if (sections.size() < 3 || pairs != config.rope_dims / 2) {
    return InvalidArgument("{}: key 'qwen4exp.rope.dimension_sections' has {} entries with sum {}; 3 or 4 with sum {} "
                           "are needed", path, sections.size(), pairs, config.rope_dims / 2);
  }
  return OkStatus();
}

// A special token id; -1 when the key is absent.
Status TakeToken(const GgufFile& file, const char* key, uint32_t vocab, int64_t* id) {
  if (file.FindValue(key) == nullptr) return OkStatus();
  LODE_ASSIGN_OR_RETURN(const uint64_t value, file.GetUint(key, vocab - 1));
  *id = static_cast<int64_t>(value);
  return OkStatus();
}

// Sampling defaults are hints: written as f32 or as an integer, and ignored outside of their range.
Status TakeHint(const GgufFile& file, const char* key, double max, double* out) {
  const GgufValue* value = file.FindValue(key);
  if (value == nullptr) return OkStatus();
  double number = 0;
  if (value->type == GgufValueType::kF32 || value->type == GgufValueType::kF64) {
    LODE_ASSIGN_OR_RETURN(number, file.GetFloat(key));
  } else {
    LODE_ASSIGN_OR_RETURN(const uint64_t integer, file.GetUint(key, UINT32_MAX));
    number = static_cast<double>(integer);
  }
  if (number >= 0 && number <= max) *out = number;  // false for NaN
  return OkStatus();
}

Status ReadSampling(const GgufFile& file, TokenizerData* data) {
  constexpr double kTemperatureMax = 100;  // nothing sensible is near; guards the sampler's division
  double top_k = -1;
  LODE_RETURN_IF_ERROR(TakeHint(file, "general.sampling.temp", kTemperatureMax, &data->temperature));
  LODE_RETURN_IF_ERROR(TakeHint(file, "general.sampling.top_p", 1, &data->top_p));
  LODE_RETURN_IF_ERROR(TakeHint(file, "general.sampling.min_p", 1, &data->min_p));
  LODE_RETURN_IF_ERROR(TakeHint(file, "general.sampling.top_k", kVocabMax, &top_k));
  data->top_k = static_cast<int64_t>(top_k);
  return OkStatus();
}

Status ReadTokenLists(const GgufFile& file, uint32_t vocab, TokenizerData* data) {
  LODE_ASSIGN_OR_RETURN(data->tokens, file.GetStringArray("tokenizer.ggml.tokens", kVocabMax));
  if (data->tokens.size() != vocab) {
    return InvalidArgument("{}: key 'tokenizer.ggml.tokens' has {} tokens, the vocabulary size is {}",
                           file.shard_paths()[0], data->tokens.size(), vocab);
  }
  LODE_ASSIGN_OR_RETURN(data->merges, file.GetStringArray("tokenizer.ggml.merges", kMergesMax));
  data->token_types.assign(vocab, 1);
  if (file.FindValue("tokenizer.ggml.token_type") == nullptr) return OkStatus();
  LODE_ASSIGN_OR_RETURN(data->token_types, file.GetUintArray("tokenizer.ggml.token_type", kVocabMax));
  if (data->token_types.size() != vocab) {
    return InvalidArgument("{}: key 'tokenizer.ggml.token_type' has {} elements for {} tokens", file.shard_paths()[0],
                           data->token_types.size(), vocab);
  }
  for (uint64_t type : data->token_types) {
    if (type > kTokenTypeMax) {
      return InvalidArgument("{}: key 'tokenizer.ggml.token_type' holds type {}, the largest is {}",
                             file.shard_paths()[0], type, kTokenTypeMax);
    }
  }
  return OkStatus();
}

}  // namespace

StatusOr<ModelConfig> ReadModelConfig(const GgufFile& file) {
  const std::string& path = file.shard_paths()[0];
  LODE_ASSIGN_OR_RETURN(const std::string_view arch, file.GetString("general.architecture"));
  LODE_RETURN_IF_ERROR(CheckArchitecture(path, arch));
  ModelConfig config;
  config.arch = arch;
  if (file.FindValue("general.name") != nullptr) {
    LODE_ASSIGN_OR_RETURN(const std::string_view name, file.GetString("general.name"));
    config.name = Printable(name);
  }
  KeyReader keys(file, config.arch);
  uint32_t blocks = 0;
  keys.Take("block_count", &blocks);
  keys.TakeOptional("nextn_predict_layers", &config.nextn_layers);
  LODE_RETURN_IF_ERROR(keys.status());
  if (blocks > kLayersMax + 1 || config.nextn_layers > 1 || config.nextn_layers >= blocks) {
    return InvalidArgument("{}: {} blocks of which {} are draft layers; 1 to {} blocks and at most one draft layer are "
                           "supported", path, blocks, config.nextn_layers, kLayersMax);
  }
  config.layers = blocks - config.nextn_layers;
  LODE_RETURN_IF_ERROR(ReadNumbers(path, &keys, &config));
  LODE_RETURN_IF_ERROR(ReadLayerKinds(path, blocks, &keys, &config));
  LODE_RETURN_IF_ERROR(ReadIndexBlock(path, blocks, &keys, &config));
  LODE_RETURN_IF_ERROR(ReadSsm(path, &keys, &config));
  LODE_RETURN_IF_ERROR(ReadVocab(file, &keys, &config));
  LODE_RETURN_IF_ERROR(ReadPle(file, &keys, &config));
  LODE_RETURN_IF_ERROR(CheckSections(path, &keys, config));
  if (Status valid = config.Validate(); !valid.ok()) return InvalidArgument("{}: {}", path, Message(valid));
  return config;
}

StatusOr<TokenizerData> ReadTokenizer(const GgufFile& file, uint32_t vocab) {
  const std::string& path = file.shard_paths()[0];
  TokenizerData data;
  if (file.FindValue("tokenizer.ggml.model") != nullptr) {
    LODE_ASSIGN_OR_RETURN(data.model, file.GetString("tokenizer.ggml.model"));
  }
  if (data.model.empty() || data.model == "no_vocab") return NotFound("{}: the file holds no tokenizer", path);
  if (data.model != "gpt2") {
    return InvalidArgument("{}: tokenizer model '{}' is not supported, only byte-level BPE ('gpt2') is", path,
                           Printable(data.model));
  }
  LODE_ASSIGN_OR_RETURN(data.pre, file.GetString("tokenizer.ggml.pre"));
  if (data.pre != "qwen2" && data.pre != "qwen35") {
    return InvalidArgument("{}: pre-tokenizer '{}' is not supported, only qwen2 and qwen35 are", path,
                           Printable(data.pre));
  }
  LODE_RETURN_IF_ERROR(ReadTokenLists(file, vocab, &data));
  LODE_RETURN_IF_ERROR(TakeToken(file, "tokenizer.ggml.bos_token_id", vocab, &data.bos));
  LODE_RETURN_IF_ERROR(TakeToken(file, "tokenizer.ggml.eos_token_id", vocab, &data.eos));
  LODE_RETURN_IF_ERROR(TakeToken(file, "tokenizer.ggml.eot_token_id", vocab, &data.eot));
  LODE_RETURN_IF_ERROR(TakeToken(file, "tokenizer.ggml.padding_token_id", vocab, &data.pad));
  if (file.FindValue("tokenizer.ggml.add_bos_token") != nullptr) {
    LODE_ASSIGN_OR_RETURN(data.add_bos, file.GetBool("tokenizer.ggml.add_bos_token"));
  }
  if (file.FindValue("tokenizer.chat_template") != nullptr) {
    LODE_ASSIGN_OR_RETURN(data.chat_template, file.GetString("tokenizer.chat_template"));
  }
  LODE_RETURN_IF_ERROR(ReadSampling(file, &data));
  return data;
}

}  // namespace lode
