// Writes models for tests: see tiny_model.h.
#include "tests/support/tiny_model.h"

#include "shared/base/check.h"

namespace lode::test {

const char kTinySynth[] =
    "synth:layers=4,experts=4,experts_used=2,hidden=64,width=32,shared_width=32,vocab=300,context=512,heads=2,"
    "kv_heads=1,head_dim=32,rope_dims=16,index_heads=1,index_dim=32,index_top_k=16,ssm_key_heads=1,ssm_value_heads=2,"
    "ssm_head_dim=32,hc_rank=32,ple_heads=2,ple_width=32,ple_base=11,pack=q8_0";

namespace {

void SetNumbers(const ModelConfig& c, GgufWriter* writer) {
  const auto set = [&](const char* key, uint32_t value) { writer->SetUint(std::string("qwen4exp.") + key, value); };
  writer->SetString("general.architecture", c.arch);
  writer->SetString("general.name", c.name);
  set("block_count", c.layers + c.nextn_layers);
  set("context_length", c.context);
  set("embedding_length", c.hidden);
  set("vocab_size", c.vocab);
  set("attention.head_count", c.heads);
  set("attention.head_count_kv", c.kv_heads);
  set("attention.key_length", c.head_dim);
  set("attention.value_length", c.head_dim);
  writer->SetFloat("qwen4exp.attention.layer_norm_rms_epsilon", c.rms_eps);
  writer->SetFloat("qwen4exp.rope.freq_base", static_cast<float>(c.rope_theta));
  set("rope.dimension_count", c.rope_dims);
  set("expert_count", c.experts);
  set("expert_used_count", c.experts_used);
  set("expert_feed_forward_length", c.expert_width);
  set("expert_shared_feed_forward_length", c.shared_width);
  set("ssm.conv_kernel", c.ssm_conv);
  set("ssm.state_size", c.ssm_head_dim);
  set("ssm.group_count", c.ssm_key_heads);
  set("ssm.time_step_rank", c.ssm_value_heads);
  set("ssm.inner_size", c.SsmValueWidth());
  set("hyper_connection.count", c.streams);
  set("hyper_connection.low_rank", c.hc_rank);
  set("attention.indexer.head_count", c.index_heads);
  set("attention.indexer.key_length", c.index_dim);
  set("attention.indexer.top_k", c.index_top_k);
  if (c.nextn_layers > 0) set("nextn_predict_layers", c.nextn_layers);
}

void SetLayers(const ModelConfig& c, GgufWriter* writer) {
  std::vector<uint32_t> recurrent, ratios, ple_layers;
  for (uint8_t attention : c.is_attention) {
    recurrent.push_back(attention == 0);
    ratios.push_back(attention ? c.index_block : 0);
  }
  ratios.resize(c.layers + c.nextn_layers, 0);
  recurrent.resize(c.layers + c.nextn_layers, 0);
  writer->SetUints("qwen4exp.attention.recurrent_layers", recurrent);
  writer->SetUints("qwen4exp.attention.compress_ratios", ratios);
  // numpy readers of the format know the interval rule only.
  for (uint32_t l = 0; l < c.layers; ++l) {
    if (c.is_attention[l]) {
      writer->SetUint("qwen4exp.full_attention_interval", l + 1);
      break;
    }
  }
  std::vector<uint64_t> multipliers, offsets, sizes;
  for (const PleConfig& ple : c.ple) {
    ple_layers.push_back(ple.layer);
    multipliers.insert(multipliers.end(), ple.multipliers.begin(), ple.multipliers.end());
    offsets.insert(offsets.end(), ple.head_offsets.begin(), ple.head_offsets.end());
    sizes.insert(sizes.end(), ple.head_sizes.begin(), ple.head_sizes.end());
  }
  if (c.ple.empty()) return;
  writer->SetUints("qwen4exp.ple.layers", ple_layers);
  writer->SetUint("qwen4exp.ple.ngram_size", c.ngram_size);
  writer->SetUint("qwen4exp.ple.heads_per_ngram", c.heads_per_ngram);
  writer->SetUint("qwen4exp.ple.conv_kernel", c.ple_conv);
  writer->SetUint("qwen4exp.ple.eos_token_id", c.ple_eos);
  writer->SetU64s("qwen4exp.ple.layer_multipliers", multipliers);
  writer->SetU64s("qwen4exp.ple.head_offsets", offsets);
  writer->SetU64s("qwen4exp.ple.head_vocab_sizes", sizes);
  writer->SetUint("qwen4exp.embedding_length_per_layer_input", c.ple_row_width);
}

void SetTokenizer(const TokenizerData& data, GgufWriter* writer) {
  writer->SetString("tokenizer.ggml.model", data.model);
  writer->SetString("tokenizer.ggml.pre", data.pre);
  writer->SetStrings("tokenizer.ggml.tokens", {data.tokens.begin(), data.tokens.end()});
  writer->SetUints("tokenizer.ggml.token_type", {data.token_types.begin(), data.token_types.end()});
  writer->SetStrings("tokenizer.ggml.merges", {data.merges.begin(), data.merges.end()});
  if (data.eos >= 0) writer->SetUint("tokenizer.ggml.eos_token_id", static_cast<uint32_t>(data.eos));
  if (data.pad >= 0) writer->SetUint("tokenizer.ggml.padding_token_id", static_cast<uint32_t>(data.pad));
  writer->SetString("tokenizer.chat_template", data.chat_template);
}

}  // namespace

GgufWriter GgufFromSource(const ModelSource& source) {
  GgufWriter writer;
  SetNumbers(source.config(), &writer);
  SetLayers(source.config(), &writer);
  if (StatusOr<TokenizerData> data = source.tokenizer(); data.ok()) SetTokenizer(*data, &writer);
  for (const TensorInfo& tensor : source.tensors()) {
    WrittenTensor written{tensor.name, static_cast<uint32_t>(tensor.type), {}, std::vector<uint8_t>(tensor.bytes), -1};
    int dims = 4;
    while (dims > 1 && tensor.ne[dims - 1] == 1) --dims;
    written.ne.assign(tensor.ne, tensor.ne + dims);
    const Status read = source.ReadRows(tensor, 0, tensor.rows(), written.data.data());
    LODE_CHECK(read.ok(), "{}", Message(read));
    writer.tensors().push_back(std::move(written));
  }
  return writer;
}

GgufWriter TinyModel() {
  StatusOr<std::unique_ptr<ModelSource>> source = ModelSource::Open(kTinySynth);
  LODE_CHECK(source.ok(), "{}", Message(source.status()));
  return GgufFromSource(**source);
}

}  // namespace lode::test
