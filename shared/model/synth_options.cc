// Parses synth: strings, derives the model's numbers and each tensor's type: see synth_options.h. Runs once at start.
#include "shared/model/synth_options.h"

#include <algorithm>
#include <charconv>
#include <set>

#include "shared/gguf/printable.h"
#include "shared/model/synth_bytes.h"

namespace lode {

// One published pack: types by role, with the layers that differ.
struct SynthPack {
  std::string_view name;
  TensorType gate_up, down, dense, output, table;
  TensorType gate_up_layer2;   // published K-type packs give layer 2 more bits
  bool down_q8_exceptions;     // Q8_0 down experts on kDownQ8Layers
  bool down_mixed;             // two layers of five have IQ4_NL down experts
  bool plain;                  // every matrix has the dense type, and so has the table
};

namespace {

using enum TensorType;

constexpr int32_t kDownQ8Layers[] = {2, 4, 30, 46, 47};
constexpr SynthPack kPacks[] = {
    // name          gate,up   down     dense  output table    layer 2   q8     mixed  plain
    {"q2_0",         kQ2_0,    kQ2_0,   kQ8_0, kQ8_0, kIQ4_NL, kQ2_0,    false, false, false},
    {"iq2_xs",       kIQ2_XS,  kQ2_0,   kQ8_0, kQ8_0, kIQ4_NL, kIQ2_XS,  false, false, false},
    {"iq3_xxs",      kIQ3_XXS, kQ2_0,   kQ8_0, kQ8_0, kIQ4_NL, kIQ3_XXS, false, false, false},
    {"iq3_s",        kIQ3_S,   kQ2_0,   kQ8_0, kQ8_0, kIQ4_NL, kIQ3_S,   false, true,  false},
    {"ud_q3_k_xl",   kIQ3_XXS, kIQ4_NL, kQ8_0, kQ6_K, kIQ4_NL, kIQ4_XS,  true,  false, false},
    {"ud_iq4_xs",    kIQ3_S,   kIQ4_NL, kQ8_0, kQ8_0, kIQ4_NL, kIQ3_S,   true,  false, false},
    {"ud_q4_k_xl",   kQ4_K,    kQ5_1,   kQ8_0, kQ8_0, kIQ4_NL, kQ5_K,    true,  false, false},
    {"q8_0",         kQ8_0,    kQ8_0,   kQ8_0, kQ8_0, kQ8_0,   kQ8_0,    false, false, false},
    {"f32",          kF32,     kF32,    kF32,  kF32,  kF32,    kF32,     false, false, true},
    {"f16",          kF16,     kF16,    kF16,  kF16,  kF16,    kF16,     false, false, true},
    {"bf16",         kBF16,    kBF16,   kBF16, kBF16, kBF16,   kBF16,    false, false, true},
};
// Any other type's name: experts of that type, the rest as in q2_0.
constexpr SynthPack kPlainPack = {"type", kQ8_0, kQ8_0, kQ8_0, kQ8_0, kIQ4_NL, kQ8_0, false, false, false};
constexpr std::string_view kPackAliases[][2] = {{"q4", "ud_q4_k_xl"}, {"iq3", "iq3_s"}};

// Sizes of the published flagship; "synth:qwen3.8-flash-next,pack=...".
constexpr std::string_view kFlagship = "qwen3.8-flash-next";
constexpr std::string_view kFlagshipKeys = "layers=48,experts=512,vocab=248320,ple_base=20000000";

std::string LowerName(const char* name) {
  std::string lower = name;
  for (char& c : lower) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
  return lower;
}

Status SetPack(std::string_view value, SynthOptions* options) {
  for (const auto& [alias, name] : kPackAliases) {
    if (value == alias) value = name;
  }
  for (const SynthPack& pack : kPacks) {
    if (value == pack.name) {
      options->pack = &pack;
      return OkStatus();
    }
  }
  for (const TensorTypeInfo& info : kTensorTypes) {
    if (value != LowerName(info.name)) continue;
    options->pack = &kPlainPack;
    options->plain_type = info.type;
    return SynthTensor::Make(0, "", info.type, info.block_len, {}).status();
  }
  std::string known;
  for (const SynthPack& pack : kPacks) known += std::string(" ") + std::string(pack.name);
  return InvalidArgument("synth: pack '{}' is unknown; known are{} and names of tensor types", Printable(value), known);
}

Status SetKey(std::string_view key, std::string_view value, SynthOptions* options) {
  if (key == "pack") return SetPack(value, options);
  struct Key {
    std::string_view name;
    uint64_t SynthOptions::*member;
    uint64_t least, largest;
  };
  static constexpr Key kKeys[] = {
#define LODE_X(key, value, least, largest) {#key, &SynthOptions::key, least, largest},
      LODE_SYNTH_KEYS(LODE_X)
#undef LODE_X
  };
  for (const Key& known : kKeys) {
    if (key != known.name) continue;
    uint64_t number = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
    if (error != std::errc() || end != value.data() + value.size() || number < known.least || number > known.largest) {
      return InvalidArgument("synth: {}={} is not a whole number from {} to {}", key, Printable(value), known.least,
                             known.largest);
    }
    options->*known.member = number;
    return OkStatus();
  }
  std::string names = "pack";
  for (const Key& known : kKeys) names += ", " + std::string(known.name);
  return InvalidArgument("synth: key '{}' is unknown; known are {}", Printable(key), names);
}

// Splits at commas and applies "key=value" parts; the first part may be a preset's name.
Status ApplyText(std::string_view text, bool preset_allowed, bool* used_given, SynthOptions* options) {
  std::set<std::string_view> given;  // a preset's keys may be given again, once
  while (!text.empty()) {
    const size_t comma = text.find(',');
    const std::string_view part = text.substr(0, comma);
    text = comma == text.npos ? std::string_view() : text.substr(comma + 1);
    const size_t equals = part.find('=');
    if (equals == part.npos && preset_allowed && part == kFlagship) {
      LODE_RETURN_IF_ERROR(ApplyText(kFlagshipKeys, false, used_given, options));
    } else if (equals == part.npos) {
      return InvalidArgument("synth: '{}' is neither key=value nor the preset {} in first place", Printable(part),
                             kFlagship);
    } else {
      if (!given.insert(part.substr(0, equals)).second)
        return InvalidArgument("synth: key '{}' is given twice", Printable(part.substr(0, equals)));
      *used_given |= part.substr(0, equals) == "experts_used";
      LODE_RETURN_IF_ERROR(SetKey(part.substr(0, equals), part.substr(equals + 1), options));
    }
    preset_allowed = false;
  }
  return OkStatus();
}

bool IsPrime(uint64_t n) {
  if (n < 2) return false;
  for (uint64_t d = 2; d * d <= n; ++d) {
    if (n % d == 0) return false;
  }
  return true;
}

// Constants of one n-gram layer, derived the way the published model's were: multipliers from splitmix64 of seed 1234,
// heads with consecutive primes of rows, each layer's table padded to a multiple of 128 rows.
PleConfig MakePle(const SynthOptions& o, const ModelConfig& config, uint64_t index, uint64_t* table_rows) {
  constexpr uint64_t kHashSeed = 1234, kLayerStep = 10007, kRowPadding = 128, kLayerSpacing = 4;
  PleConfig ple;
  ple.layer = static_cast<uint32_t>(std::min<uint64_t>(1, config.layers - 1) + kLayerSpacing * index);
  const uint64_t half = static_cast<uint64_t>(INT64_MAX) / config.vocab / 2;
  for (uint64_t i = 0; i < config.ngram_size; ++i) {
    // splitmix64 of x adds the increment once; the recipe has (i + 1) increments in x already.
    const uint64_t x = kHashSeed + kLayerStep * index + kGoldenGamma * (i + 1);
    ple.multipliers.push_back(2 * (Mix64(x + kGoldenGamma) % half) + 1);
  }
  uint64_t prime = o.ple_base;
  for (uint32_t h = 0; h < config.PleHeads(); ++h, ++prime) {
    while (!IsPrime(prime)) ++prime;
    ple.head_offsets.push_back(*table_rows);
    ple.head_sizes.push_back(prime);
    *table_rows += prime;
  }
  *table_rows = (*table_rows + kRowPadding - 1) / kRowPadding * kRowPadding;
  return ple;
}

bool Contains(std::string_view text, std::string_view part) { return text.find(part) != text.npos; }

TensorType WantedType(const SynthOptions& o, const TensorSpec& spec) {
  const SynthPack& pack = *o.pack;
  const std::string_view name = spec.name;
  if (spec.kind == TensorKind::kFloat || spec.kind == TensorKind::kWidened) return kF32;
  if (pack.plain) return pack.dense;
  if (spec.kind == TensorKind::kTable) return pack.table;
  if (name == "output.weight") return pack.output;
  if (Contains(name, "indexer.")) return kBF16;
  if (Contains(name, "ffn_gate_inp.") || Contains(name, "ssm_alpha") || Contains(name, "ssm_beta")) return kF32;
  if (spec.kind != TensorKind::kExperts) return pack.dense;
  const bool draft = spec.layer >= static_cast<int32_t>(o.layers);
  if (draft && &pack != &kPlainPack) return kQ8_0;  // published draft heads are Q8_0 throughout
  if (&pack == &kPlainPack) return o.plain_type;
  if (!Contains(name, "ffn_down_exps")) {
    // A layer-2 type the engine cannot compute yet would make the whole pack unusable: the other layers' type then.
    const bool special = spec.layer == 2 && FormatOf(pack.gate_up_layer2) != Format::kCount;
    return special ? pack.gate_up_layer2 : pack.gate_up;
  }
  const bool q8 = pack.down_q8_exceptions && std::count(std::begin(kDownQ8Layers), std::end(kDownQ8Layers), spec.layer);
  if (q8) return kQ8_0;
  return pack.down_mixed && spec.layer % 5 % 2 == 1 ? kIQ4_NL : pack.down;
}

}  // namespace

StatusOr<SynthOptions> ParseSynthOptions(std::string_view text) {
  SynthOptions options;
  options.pack = &kPacks[0];
  bool used_given = false;
  LODE_RETURN_IF_ERROR(ApplyText(text, true, &used_given, &options));
  if (!used_given) options.experts_used = std::min(options.experts_used, options.experts);
  return options;
}

StatusOr<ModelConfig> SynthConfig(const SynthOptions& o) {
  constexpr uint32_t kIndexBlock = 4, kConvLength = 4, kNgramSize = 3, kEndOfText = 256;
  const auto n = [](uint64_t value) { return static_cast<uint32_t>(value); };  // bounded by LODE_SYNTH_KEYS
  ModelConfig c;
  c.arch = "qwen4exp";
  c.name = "synthetic";
  c.layers = n(o.layers), c.nextn_layers = n(o.mtp), c.vocab = n(o.vocab), c.hidden = n(o.hidden);
  c.context = n(o.context), c.rms_eps = 1e-6f;
  c.heads = n(o.heads), c.kv_heads = n(o.kv_heads), c.head_dim = n(o.head_dim);
  c.rope_dims = n(o.rope_dims), c.rope_theta = 1e7;
  c.index_heads = n(o.index_heads), c.index_dim = n(o.index_dim), c.index_top_k = n(o.index_top_k);
  c.index_block = kIndexBlock;
  for (uint32_t l = 0; l < c.layers; ++l) c.is_attention.push_back((l + 1) % o.interval == 0);
  c.ssm_conv = kConvLength, c.ssm_key_heads = n(o.ssm_key_heads), c.ssm_value_heads = n(o.ssm_value_heads);
  c.ssm_head_dim = n(o.ssm_head_dim);
  c.experts = n(o.experts), c.experts_used = n(o.experts_used), c.expert_width = n(o.width);
  c.shared_width = n(o.shared_width), c.streams = n(o.streams), c.hc_rank = n(o.hc_rank);
  if (o.ple > 0) {
    c.ngram_size = kNgramSize, c.heads_per_ngram = n(o.ple_heads), c.ple_conv = kConvLength;
    c.ple_row_width = n(o.ple_width), c.ple_eos = kEndOfText;
    for (uint64_t i = 0; i < o.ple; ++i) c.ple.push_back(MakePle(o, c, i, &c.ple_rows));
  }
  if (Status valid = c.Validate(); !valid.ok()) return InvalidArgument("synth: {}", Message(valid));
  return c;
}

TensorType SynthType(const SynthOptions& options, const TensorSpec& spec) {
  const TensorType wanted = WantedType(options, spec);
  for (TensorType type : {wanted, kIQ4_NL}) {
    if (spec.ne[0] % FindTensorType(static_cast<uint32_t>(type))->block_len == 0) return type;
  }
  return kF16;
}

std::string CanonicalText(const SynthOptions& options) {
  std::string text = fmt::format("pack={}", options.pack->name);
  if (options.pack == &kPlainPack) {
    text += fmt::format("={}", FindTensorType(static_cast<uint32_t>(options.plain_type))->name);
  }
#define LODE_X(key, value, least, largest) text += fmt::format(",{}={}", #key, options.key);
  LODE_SYNTH_KEYS(LODE_X)
#undef LODE_X
  return text;
}

}  // namespace lode
