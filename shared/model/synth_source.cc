// ModelSource over generated weights: see synth_source.h. Immutable after Open; any thread reads.
#include "shared/model/synth_source.h"

#include <xxhash.h>

#include <unordered_map>

#include "shared/base/check.h"
#include "shared/model/synth_bytes.h"
#include "shared/model/synth_options.h"
#include "shared/model/tensor_table.h"

namespace lode {
namespace {

// Part of every identity: raise it when the bytes of an unchanged string change.
constexpr int kSynthVersion = 1;

// How a tensor's values are spread, by its name: the first row whose two parts match. kFan: standard deviation a /
// sqrt(row length), so that a product with unit activations has standard deviation a. kUnit: a. kRange: uniform a..b.
struct SpreadRule {
  std::string_view contains, ends;
  enum { kFan, kUnit, kRange } style;
  float a, b;
};
constexpr SpreadRule kSpreads[] = {
    {"norm", "", SpreadRule::kRange, 0.875f, 1.125f},
    {"", "ssm_a", SpreadRule::kRange, -8.f, -0.5f},      // -exp(A_log): decays from slow to fast
    {"", "ssm_dt.bias", SpreadRule::kRange, -6.f, -2.f}, // softplus: steps of 0.002 to 0.13
    {"token_embd", "", SpreadRule::kUnit, 1, 0},         // both embeddings: unit values
    {"output.weight", "", SpreadRule::kFan, 6, 0},       // logits with a clear maximum
    {"hc_", "_down.weight", SpreadRule::kFan, 4, 0},     // undoes the division by the streams inside silu
    {"hc_", "_up.weight", SpreadRule::kFan, 4, 0},       // gates that differ from one half
    {"ffn_gate_inp.", "", SpreadRule::kFan, 4, 0},       // routing that prefers, without collapsing
    {"exps.", "", SpreadRule::kFan, 2, 0},               // mixers hand over values of about one half
    {"attn_v.", "", SpreadRule::kFan, 2, 0},
    {"attn_output.", "", SpreadRule::kFan, 2, 0},
    {"", "", SpreadRule::kFan, 1, 0},
};

SynthSpread SpreadOf(const TensorSpec& spec) {
  constexpr float kSqrt3 = 1.7320508f;  // a uniform number in [-h, h] has standard deviation h / sqrt(3)
  for (const SpreadRule& rule : kSpreads) {
    if (spec.name.find(rule.contains) == spec.name.npos || !spec.name.ends_with(rule.ends)) continue;
    if (rule.style == SpreadRule::kRange) return {(rule.a + rule.b) / 2, (rule.b - rule.a) / 2, 0};
    float sigma = rule.a;
    if (rule.style == SpreadRule::kFan) {
      // The root as a fixed-point integer with 10 fraction bits: no libm, same on every machine.
      sigma = rule.a * 1024.f / static_cast<float>(IntegerSqrt(spec.ne[0] << 20));
    }
    return {0, sigma * kSqrt3, sigma};
  }
  return {};
}

// Our own template in the common chat mark-up: turns, a generation prompt, and an empty thought when thinking is off.
constexpr std::string_view kChatTemplate =
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}";

constexpr std::string_view kControlTokens[] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"};
constexpr uint32_t kByteTokens = 256, kEndOfText = 256, kEndOfTurn = 258;
constexpr uint64_t kNormal = 1, kControl = 3, kUnused = 5;  // tokenizer.ggml.token_type

// The printable stand-in of a byte in byte-level BPE vocabularies: itself for printable Latin-1, else the next free
// code point from U+0100 on, in byte order. As UTF-8.
std::string ByteTokenText(uint32_t byte, uint32_t* next_free) {
  const bool printable = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
  const uint32_t code = printable ? byte : (*next_free)++;
  if (code < 0x80) return std::string(1, static_cast<char>(code));
  return {static_cast<char>(0xc0 | code >> 6), static_cast<char>(0x80 | (code & 63))};
}

class SynthSource : public ModelSource {
 public:
  static StatusOr<std::unique_ptr<ModelSource>> Open(const std::string& model) {
    auto source = std::make_unique<SynthSource>();
    source->description_ = model;
    const std::string_view text = std::string_view(model).substr(kSynthPrefix.size());
    LODE_ASSIGN_OR_RETURN(const SynthOptions options, ParseSynthOptions(text));
    LODE_ASSIGN_OR_RETURN(source->config_, SynthConfig(options));
    for (const TensorSpec& spec : ModelTensors(source->config_)) LODE_RETURN_IF_ERROR(source->Add(spec, options));
    for (size_t i = 0; i < source->tensors_.size(); ++i) source->index_.emplace(source->tensors_[i].name, i);
    LODE_RETURN_IF_ERROR(CheckModelTensors(*source));
    source->MakeTokens();
    const std::string identity = fmt::format("lode synth {} {}", kSynthVersion, CanonicalText(options));
    const XXH128_hash_t hash = XXH3_128bits(identity.data(), identity.size());
    source->identity_ = fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
    return source;
  }

  const ModelConfig& config() const override { return config_; }
  const std::vector<TensorInfo>& tensors() const override { return tensors_; }
  const std::string& identity() const override { return identity_; }
  const std::string& description() const override { return description_; }

  const TensorInfo* Find(std::string_view name) const override {
    const auto it = index_.find(name);
    return it == index_.end() ? nullptr : &tensors_[it->second];
  }

  StatusOr<TokenizerData> tokenizer() const override {
    TokenizerData data;
    data.model = "gpt2";
    data.pre = "qwen35";
    data.tokens.assign(tokens_.begin(), tokens_.end());
    data.token_types.assign(config_.vocab, kUnused);
    std::fill_n(data.token_types.begin(), kByteTokens, kNormal);
    std::fill_n(data.token_types.begin() + kByteTokens, std::size(kControlTokens), kControl);
    data.eos = data.eot = kEndOfTurn;
    data.pad = kEndOfText;
    data.chat_template = kChatTemplate;
    return data;
  }

  Status ReadRows(const TensorInfo& tensor, uint64_t first_row, uint64_t n_rows, uint8_t* out) const override {
    const SynthTensor& maker = Maker(tensor);
    LODE_CHECK(first_row <= tensor.rows() && n_rows <= tensor.rows() - first_row, "rows {}+{} of tensor {} with {}",
               first_row, n_rows, tensor.name, tensor.rows());
    for (uint64_t r = 0; r < n_rows; ++r) maker.FillRow(first_row + r, out + r * maker.row_bytes());
    return OkStatus();
  }

  Status ReadScattered(const TensorInfo& tensor, std::span<const uint64_t> rows, uint8_t* out) const override {
    const SynthTensor& maker = Maker(tensor);
    for (size_t i = 0; i < rows.size(); ++i) {
      LODE_CHECK(rows[i] < tensor.rows(), "row {} of tensor {} with {}", rows[i], tensor.name, tensor.rows());
      maker.FillRow(rows[i], out + i * maker.row_bytes());
    }
    return OkStatus();
  }

 private:
  Status Add(const TensorSpec& spec, const SynthOptions& options) {
    const TensorType type = SynthType(options, spec);
    LODE_ASSIGN_OR_RETURN(SynthTensor maker,
                          SynthTensor::Make(options.seed, spec.name, type, spec.ne[0], SpreadOf(spec)));
    const uint64_t rows = spec.ne[1] * spec.ne[2] * spec.ne[3];
    tensors_.push_back({spec.name, type, {spec.ne[0], spec.ne[1], spec.ne[2], spec.ne[3]}, rows * maker.row_bytes()});
    makers_.push_back(std::move(maker));
    return OkStatus();
  }

  void MakeTokens() {
    uint32_t next_free = 0x100;
    for (uint32_t byte = 0; byte < kByteTokens; ++byte) tokens_.push_back(ByteTokenText(byte, &next_free));
    for (std::string_view control : kControlTokens) tokens_.emplace_back(control);
    while (tokens_.size() < config_.vocab) tokens_.push_back(fmt::format("<|unused_{}|>", tokens_.size()));
  }

  // How the tensor is generated. `tensor` must be one of tensors().
  const SynthTensor& Maker(const TensorInfo& tensor) const {
    const auto index = static_cast<size_t>(&tensor - tensors_.data());
    LODE_CHECK(index < tensors_.size(), "tensor {} is not of this source", tensor.name);
    return makers_[index];
  }

  std::string description_, identity_;
  ModelConfig config_;
  std::vector<TensorInfo> tensors_;
  std::vector<SynthTensor> makers_;  // same order as tensors_
  std::unordered_map<std::string_view, size_t> index_;
  std::vector<std::string> tokens_;
};

}  // namespace

StatusOr<std::unique_ptr<ModelSource>> OpenSynthSource(const std::string& model) { return SynthSource::Open(model); }

}  // namespace lode
