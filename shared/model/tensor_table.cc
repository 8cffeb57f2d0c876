// The tensor list of qwen4exp and the checks derived from it: see tensor_table.h.
#include "shared/model/tensor_table.h"

#include <algorithm>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "shared/gguf/printable.h"

namespace lode {
namespace {

enum class Where {
  kGlobal,   // once
  kPleOnce,  // once, if the model has n-gram layers
  kEvery,    // all trunk layers and the draft block
  kDelta,    // Gated DeltaNet layers
  kSparse,   // QSA layers and the draft block
  kPle,      // n-gram layers
  kDraft,    // the draft block
};

using Dim = uint64_t (*)(const ModelConfig&);

uint64_t Hidden(const ModelConfig& c) { return c.hidden; }
uint64_t TwoHidden(const ModelConfig& c) { return 2 * uint64_t{c.hidden}; }
uint64_t Wide(const ModelConfig& c) { return c.WideWidth(); }
uint64_t Vocab(const ModelConfig& c) { return c.vocab; }
uint64_t Rank(const ModelConfig& c) { return c.hc_rank; }
uint64_t Streams(const ModelConfig& c) { return c.streams; }
uint64_t Experts(const ModelConfig& c) { return c.experts; }
uint64_t Width(const ModelConfig& c) { return c.expert_width; }
uint64_t Shared(const ModelConfig& c) { return c.shared_width; }
uint64_t Conv(const ModelConfig& c) { return c.ssm_conv; }
uint64_t ConvWidth(const ModelConfig& c) { return c.SsmConvWidth(); }
uint64_t ValueWidth(const ModelConfig& c) { return c.SsmValueWidth(); }
uint64_t ValueHeads(const ModelConfig& c) { return c.ssm_value_heads; }
uint64_t SsmDim(const ModelConfig& c) { return c.ssm_head_dim; }
uint64_t QueryAndGate(const ModelConfig& c) { return 2 * uint64_t{c.heads} * c.head_dim; }
uint64_t Query(const ModelConfig& c) { return uint64_t{c.heads} * c.head_dim; }
uint64_t KeyValue(const ModelConfig& c) { return uint64_t{c.kv_heads} * c.head_dim; }
uint64_t HeadDim(const ModelConfig& c) { return c.head_dim; }
uint64_t IndexQuery(const ModelConfig& c) { return uint64_t{c.index_heads} * c.index_dim; }
uint64_t IndexDim(const ModelConfig& c) { return c.index_dim; }
uint64_t PleRow(const ModelConfig& c) { return c.ple_row_width; }
uint64_t PleRows(const ModelConfig& c) { return c.ple_rows; }
uint64_t PleIn(const ModelConfig& c) { return c.PleWidth(); }
uint64_t PleConv(const ModelConfig& c) { return c.ple_conv; }

struct Row {
  Where where;
  const char* name;  // after "blk.N." unless the row is global
  TensorKind kind;
  Dim dims[3];       // nullptr: 1
};

constexpr TensorKind kFloat = TensorKind::kFloat, kWidened = TensorKind::kWidened, kMatrix = TensorKind::kMatrix,
                     kExperts = TensorKind::kExperts;

constexpr Row kRows[] = {
    {Where::kGlobal, "token_embd.weight", kMatrix, {Hidden, Vocab}},
    {Where::kGlobal, "output.weight", kMatrix, {Hidden, Vocab}},
    {Where::kGlobal, "output_hc_norm.weight", kFloat, {Wide}},
    {Where::kGlobal, "output_hc_down.weight", kMatrix, {Wide, Rank}},
    {Where::kGlobal, "output_hc_up.weight", kMatrix, {Rank, Wide}},
    {Where::kPleOnce, "per_layer_token_embd.weight", TensorKind::kTable, {PleRow, PleRows}},

    {Where::kEvery, "hc_attn_norm.weight", kFloat, {Wide}},
    {Where::kEvery, "hc_attn_down.weight", kMatrix, {Wide, Rank}},
    {Where::kEvery, "hc_attn_up.weight", kMatrix, {Rank, Wide}},
    {Where::kEvery, "hc_attn_inject.weight", kWidened, {Wide, Streams}},
    {Where::kEvery, "hc_ffn_norm.weight", kFloat, {Wide}},
    {Where::kEvery, "hc_ffn_down.weight", kMatrix, {Wide, Rank}},
    {Where::kEvery, "hc_ffn_up.weight", kMatrix, {Rank, Wide}},
    {Where::kEvery, "hc_ffn_inject.weight", kWidened, {Wide, Streams}},
    {Where::kEvery, "ffn_gate_inp.weight", kMatrix, {Hidden, Experts}},
    {Where::kEvery, "ffn_gate_exps.weight", kExperts, {Hidden, Width, Experts}},
    {Where::kEvery, "ffn_up_exps.weight", kExperts, {Hidden, Width, Experts}},
    {Where::kEvery, "ffn_down_exps.weight", kExperts, {Width, Hidden, Experts}},
    {Where::kEvery, "ffn_gate_inp_shexp.weight", kFloat, {Hidden}},
    {Where::kEvery, "ffn_gate_shexp.weight", kMatrix, {Hidden, Shared}},
    {Where::kEvery, "ffn_up_shexp.weight", kMatrix, {Hidden, Shared}},
    {Where::kEvery, "ffn_down_shexp.weight", kMatrix, {Shared, Hidden}},

    {Where::kDelta, "attn_qkv.weight", kMatrix, {Hidden, ConvWidth}},
    {Where::kDelta, "attn_gate.weight", kMatrix, {Hidden, ValueWidth}},
    {Where::kDelta, "ssm_beta.weight", kMatrix, {Hidden, ValueHeads}},
    {Where::kDelta, "ssm_alpha.weight", kMatrix, {Hidden, ValueHeads}},
    {Where::kDelta, "ssm_a", kFloat, {ValueHeads}},
    {Where::kDelta, "ssm_dt.bias", kFloat, {ValueHeads}},
    {Where::kDelta, "ssm_conv1d.weight", kFloat, {Conv, ConvWidth}},
    {Where::kDelta, "ssm_norm.weight", kFloat, {SsmDim}},
    {Where::kDelta, "ssm_out.weight", kMatrix, {ValueWidth, Hidden}},

    {Where::kSparse, "attn_q.weight", kMatrix, {Hidden, QueryAndGate}},
    {Where::kSparse, "attn_k.weight", kMatrix, {Hidden, KeyValue}},
    {Where::kSparse, "attn_v.weight", kMatrix, {Hidden, KeyValue}},
    {Where::kSparse, "attn_output.weight", kMatrix, {Query, Hidden}},
    {Where::kSparse, "attn_q_norm.weight", kFloat, {HeadDim}},
    {Where::kSparse, "attn_k_norm.weight", kFloat, {HeadDim}},
    {Where::kSparse, "indexer.q_proj.weight", kMatrix, {Hidden, IndexQuery}},
    {Where::kSparse, "indexer.k_proj.weight", kMatrix, {Hidden, IndexDim}},
    {Where::kSparse, "indexer.q_norm.weight", kFloat, {IndexDim}},
    {Where::kSparse, "indexer.k_norm.weight", kFloat, {IndexDim}},

    {Where::kPle, "ple_key.weight", kMatrix, {PleIn, Wide}},
    {Where::kPle, "ple_value.weight", kMatrix, {PleIn, Hidden}},
    {Where::kPle, "ple_norm_key.weight", kFloat, {Wide}},
    {Where::kPle, "ple_norm_query.weight", kFloat, {Wide}},
    {Where::kPle, "ple_norm_conv.weight", kFloat, {Wide}},
    {Where::kPle, "ple_conv1d.weight", kFloat, {PleConv, Wide}},

    {Where::kDraft, "nextn.eh_proj.weight", kMatrix, {TwoHidden, Hidden}},
    {Where::kDraft, "nextn.enorm.weight", kFloat, {Hidden}},
    {Where::kDraft, "nextn.hnorm.weight", kFloat, {Wide}},
    {Where::kDraft, "nextn.hc_head_norm.weight", kFloat, {Wide}},
    {Where::kDraft, "nextn.hc_head_down.weight", kMatrix, {Wide, Rank}},
    {Where::kDraft, "nextn.hc_head_up.weight", kMatrix, {Rank, Wide}},
};

bool OnLayer(Where where, const ModelConfig& c, uint32_t layer) {
  const bool draft = layer >= c.layers;
  const bool sparse = draft || c.is_attention[layer] != 0;
  switch (where) {
    case Where::kGlobal: case Where::kPleOnce: return false;
    case Where::kEvery: return true;
    case Where::kDelta: return !sparse;
    case Where::kSparse: return sparse;
    case Where::kDraft: return draft;
    case Where::kPle:
      return !draft && std::any_of(c.ple.begin(), c.ple.end(), [&](const PleConfig& ple) { return ple.layer == layer; });
  }
  return false;
}

TensorSpec MakeSpec(const Row& row, const ModelConfig& config, int32_t layer) {
  TensorSpec spec{layer < 0 ? row.name : fmt::format("blk.{}.{}", layer, row.name), row.kind, {1, 1, 1, 1}, layer};
  for (int d = 0; d < 3; ++d) {
    if (row.dims[d] != nullptr) spec.ne[d] = row.dims[d](config);
  }
  return spec;
}

bool SameShape(const uint64_t (&a)[4], const uint64_t (&b)[4]) { return std::equal(a, a + 4, b); }

bool IsWeightType(TensorType type) {
  switch (type) {
    case TensorType::kI8: case TensorType::kI16: case TensorType::kI32: case TensorType::kI64: case TensorType::kF64:
    case TensorType::kQ8_1: case TensorType::kQ8_K: return false;
    default: return true;
  }
}

bool IsFloat(TensorType type) {
  return type == TensorType::kF32 || type == TensorType::kF16 || type == TensorType::kBF16;
}

bool IsVision(std::string_view name) { return name.starts_with("v.") || name.starts_with("mm."); }

// "blk.3.ffn_gate_up_exps.weight" for either of the two tensors it stands for; "" for other names.
std::string FusedName(const std::string& name) {
  for (std::string_view part : {"ffn_gate_exps.weight", "ffn_up_exps.weight"}) {
    if (name.ends_with(part)) return name.substr(0, name.size() - part.size()) + "ffn_gate_up_exps.weight";
  }
  return "";
}

Status CheckOne(const ModelSource& source, const TensorSpec& wanted, std::unordered_set<std::string_view>* known) {
  TensorSpec spec = wanted;
  const TensorInfo* tensor = source.Find(spec.name);
  if (tensor == nullptr && spec.kind == TensorKind::kExperts) {
    const std::string fused = FusedName(spec.name);
    if (const TensorInfo* both = fused.empty() ? nullptr : source.Find(fused)) {
      tensor = both;
      spec.name = fused;
      spec.ne[1] *= 2;
    }
  }
  if (tensor == nullptr) {
    return InvalidArgument("{}: tensor '{}' is missing", source.description(), spec.name);
  }
  if (!SameShape(tensor->ne, spec.ne)) {
    return InvalidArgument("{}: tensor '{}' has shape {}, the model's numbers need {}", source.description(),
                           spec.name, ShapeText(tensor->ne), ShapeText(spec.ne));
  }
  if (!IsWeightType(tensor->type)) {
    return InvalidArgument("{}: tensor '{}' has type {}, which holds no weights", source.description(), spec.name,
                           FindTensorType(static_cast<uint32_t>(tensor->type))->name);
  }
  known->insert(tensor->name);
  return OkStatus();
}

Status CheckUnknown(const ModelSource& source, const std::unordered_set<std::string_view>& known) {
  for (const TensorInfo& tensor : source.tensors()) {
    if (known.contains(tensor.name) || IsVision(tensor.name)) continue;
    if (tensor.name.ends_with(".scale") || tensor.name.ends_with(".input_scale")) {
      return InvalidArgument("{}: '{}' is a companion scale of an NVFP4 or FP8 conversion, which Lode does not apply "
                             "yet; use a pack without them", source.description(), Printable(tensor.name));
    }
    return InvalidArgument("{}: tensor '{}' is unknown to architecture {}; refusing to ignore it", source.description(),
                           Printable(tensor.name), source.config().arch);
  }
  return OkStatus();
}

}  // namespace

std::vector<TensorSpec> ModelTensors(const ModelConfig& config) {
  std::vector<TensorSpec> specs;
  for (const Row& row : kRows) {
    const bool once = row.where == Where::kGlobal || (row.where == Where::kPleOnce && !config.ple.empty());
    if (once) specs.push_back(MakeSpec(row, config, -1));
  }
  for (uint32_t layer = 0; layer < config.layers + config.nextn_layers; ++layer) {
    for (const Row& row : kRows) {
      if (OnLayer(row.where, config, layer)) specs.push_back(MakeSpec(row, config, static_cast<int32_t>(layer)));
    }
  }
  return specs;
}

Status CheckModelTensors(const ModelSource& source) {
  const ModelConfig& config = source.config();
  if (config.nextn_layers > 0 && source.Find("blk.0.hc_attn_norm.weight") == nullptr &&
      source.Find(fmt::format("blk.{}.nextn.eh_proj.weight", config.layers)) != nullptr) {
    return InvalidArgument("{}: holds only a draft (MTP) head, not the model; open the model's own file",
                           source.description());
  }
  std::unordered_set<std::string_view> known;
  for (const TensorSpec& spec : ModelTensors(config)) LODE_RETURN_IF_ERROR(CheckOne(source, spec, &known));
  return CheckUnknown(source, known);
}

Status CheckComputable(const ModelSource& source) {
  std::unordered_map<std::string, TensorKind> kinds;
  for (TensorSpec& spec : ModelTensors(source.config())) kinds.emplace(std::move(spec.name), spec.kind);
  for (const TensorInfo& tensor : source.tensors()) {
    if (IsVision(tensor.name)) continue;
    const auto it = kinds.find(tensor.name);
    const bool needs_float = it != kinds.end() && it->second == TensorKind::kFloat;
    const bool computable = needs_float ? IsFloat(tensor.type) : FormatOf(tensor.type) != Format::kCount;
    if (!computable) {
      return FailedPrecondition("{}: tensor '{}' has type {}, which Lode cannot compute with yet{}",
                                source.description(), tensor.name,
                                FindTensorType(static_cast<uint32_t>(tensor.type))->name,
                                needs_float ? " (F32, F16 or BF16 is needed here)" : "; use another pack");
    }
  }
  return OkStatus();
}

Status CheckDraftTensors(const ModelSource& head) {
  const ModelConfig& config = head.config();
  std::unordered_set<std::string_view> known = {"token_embd.weight", "output.weight", "output_hc_norm.weight",
                                                "output_hc_down.weight", "output_hc_up.weight"};
  for (const TensorSpec& spec : ModelTensors(config)) {
    if (spec.layer == static_cast<int32_t>(config.layers)) LODE_RETURN_IF_ERROR(CheckOne(head, spec, &known));
  }
  for (const TensorInfo& tensor : head.tensors()) {
    if (!tensor.name.starts_with("blk.0.") || known.contains(tensor.name)) continue;
    return InvalidArgument("{} is a whole model, not a separate draft head: its own draft layer, if it has "
                           "one, is used without --mtp when it is given as --model",
                           head.description());
  }
  return CheckUnknown(head, known);
}

StatusOr<ExpertTensors> FindExperts(const ModelSource& source, uint32_t layer) {
  ExpertTensors experts;
  const TensorInfo* both = source.Find(fmt::format("blk.{}.ffn_gate_up_exps.weight", layer));
  experts.fused = both != nullptr;
  experts.gate = experts.fused ? both : source.Find(fmt::format("blk.{}.ffn_gate_exps.weight", layer));
  experts.up = experts.fused ? both : source.Find(fmt::format("blk.{}.ffn_up_exps.weight", layer));
  experts.down = source.Find(fmt::format("blk.{}.ffn_down_exps.weight", layer));
  if (experts.gate == nullptr || experts.up == nullptr || experts.down == nullptr) {
    return NotFound("{}: layer {} has no complete set of expert tensors", source.description(), layer);
  }
  return experts;
}

std::string ShapeText(const uint64_t (&ne)[4]) {
  std::string text = fmt::format("{{{}", ne[0]);
  int last = 3;
  while (last > 0 && ne[last] == 1) --last;
  for (int d = 1; d <= last; ++d) text += fmt::format(",{}", ne[d]);
  return text + "}";
}

}  // namespace lode
