// Dense tensors from file to device memory: matrices as they are, vectors widened to float. See
// model_weights.h.
#include "gpu_worker/model_weights.h"

#include "gpu_worker/device.h"
#include "kernels/kernel_table.h"

namespace lode {
namespace {

// One pass over the tensors of the trunk; the first error ends it.
class Loader {
 public:
  Loader(const ModelSource& source, Device& device, const ModelWeights::Progress& progress)
      : source_(source), config_(source.config()), device_(device), progress_(progress) {}

  // The draft block; everything of it but the experts and the output.
  StatusOr<DraftWeights> RunDraft() {
    const std::string b = fmt::format("blk.{}.nextn.", config_.layers);
    DraftWeights w = {};
    w.embed_norm = Floats(b + "enorm.weight");
    w.residual_norm = Floats(b + "hnorm.weight");
    w.project = Mat(b + "eh_proj.weight");
    w.head = Hc(b + "hc_head_", false);
    Layer(config_.layers, &w.layer);
    w.bytes = done_;
    if (!status_.ok()) return status_;
    return w;
  }

  StatusOr<ModelWeights> Run() {
    for (const TensorInfo& t : source_.tensors()) {
      if (IsDense(t)) total_ += t.bytes;
    }
    ModelWeights w;
    w.embed = Mat("token_embd.weight");
    w.output = Mat("output.weight");
    w.output_hc = Hc("output_hc_", false);
    w.layers.resize(config_.layers);
    for (uint32_t l = 0; l < config_.layers; ++l) Layer(l, &w.layers[l]);
    w.bytes = done_;
    if (!status_.ok()) return status_;
    return w;
  }

 private:
  // The n-gram table and the routed experts stay out of device memory, the draft block is loaded by
  // the drafter.
  bool IsDense(const TensorInfo& t) const {
    return t.name != "per_layer_token_embd.weight" && t.name.find("_exps.") == std::string::npos &&
           !t.name.starts_with(fmt::format("blk.{}.", config_.layers));
  }

  void Layer(uint32_t l, LayerWeights* w) {
    const std::string b = fmt::format("blk.{}.", l);
    w->hc_attn = Hc(b + "hc_attn_", true);
    w->hc_ffn = Hc(b + "hc_ffn_", true);
    w->attention = l >= config_.layers || config_.is_attention[l] != 0;
    if (w->attention) {
      w->attn = {.q = Mat(b + "attn_q.weight"),
                 .k = Mat(b + "attn_k.weight"),
                 .v = Mat(b + "attn_v.weight"),
                 .index_q = Mat(b + "indexer.q_proj.weight"),
                 .index_k = Mat(b + "indexer.k_proj.weight"),
                 .q_norm = Floats(b + "attn_q_norm.weight"),
                 .k_norm = Floats(b + "attn_k_norm.weight"),
                 .index_q_norm = Floats(b + "indexer.q_norm.weight"),
                 .index_k_norm = Floats(b + "indexer.k_norm.weight"),
                 .out = Mat(b + "attn_output.weight")};
    } else {
      w->delta = {.qkv = Mat(b + "attn_qkv.weight"),
                  .gate = Mat(b + "attn_gate.weight"),
                  .beta = Mat(b + "ssm_beta.weight"),
                  .alpha = Mat(b + "ssm_alpha.weight"),
                  .a = Floats(b + "ssm_a"),
                  .dt = Floats(b + "ssm_dt.bias"),
                  .conv = Conv(b + "ssm_conv1d.weight"),
                  .norm = Floats(b + "ssm_norm.weight"),
                  .out = Mat(b + "ssm_out.weight")};
    }
    for (uint32_t p = 0; p < config_.ple.size(); ++p) {
      if (config_.ple[p].layer != l) continue;
      w->has_ple = true;
      w->ple = {.index = p,
                .key = Mat(b + "ple_key.weight"),
                .value = Mat(b + "ple_value.weight"),
                .norm_key = Floats(b + "ple_norm_key.weight"),
                .norm_query = Floats(b + "ple_norm_query.weight"),
                .norm_conv = Floats(b + "ple_norm_conv.weight"),
                .conv = Conv(b + "ple_conv1d.weight")};
    }
    w->moe = {.router = Mat(b + "ffn_gate_inp.weight"),
              .shared_gate = Mat(b + "ffn_gate_shexp.weight"),
              .shared_up = Mat(b + "ffn_up_shexp.weight"),
              .shared_down = Mat(b + "ffn_down_shexp.weight"),
              .shared_inject = Floats(b + "ffn_gate_inp_shexp.weight")};
  }

  HcWeights Hc(const std::string& prefix, bool inject) {
    return {.norm = Floats(prefix + "norm.weight"),
            .down = Mat(prefix + "down.weight"),
            .up = Mat(prefix + "up.weight"),
            .inject = inject ? Floats(prefix + "inject.weight") : nullptr};
  }

  // nullptr once anything has failed: the first error is kept and the rest of the pass does
  // nothing.
  const TensorInfo* FindComputable(const std::string& name) {
    if (!status_.ok()) return nullptr;
    const TensorInfo* t = source_.Find(name);
    if (t == nullptr) {
      status_ = NotFound("the model {} has no tensor {}", source_.description(), name);
    } else if (FormatOf(t->type) == Format::kCount) {
      status_ = InvalidArgument("tensor {} has type {}, which this version cannot compute with",
                                name, FindTensorType(static_cast<uint32_t>(t->type))->name);
    } else {
      return t;
    }
    return nullptr;
  }

  void* Store(const TensorInfo& t, const void* bytes, size_t n) {
    StatusOr<void*> memory = device_.Allocate(t.name, n);
    if (!memory.ok()) {
      status_ = memory.status();
      return nullptr;
    }
    device_.Upload(*memory, bytes, n);
    done_ += n;
    read_ += t.bytes;
    if (progress_) progress_(read_, total_);
    return *memory;
  }

  WeightMatrix Mat(const std::string& name) {
    const TensorInfo* t = FindComputable(name);
    if (t == nullptr) return {};
    std::vector<uint8_t> bytes(t->bytes);
    status_ = source_.ReadRows(*t, 0, t->rows(), bytes.data());
    if (!status_.ok()) return {};
    return {.data = static_cast<const uint8_t*>(Store(*t, bytes.data(), bytes.size())),
            .format = FormatOf(t->type),
            .rows = static_cast<uint32_t>(t->rows()),
            .cols = static_cast<uint32_t>(t->ne[0]),
            .row_bytes = t->row_bytes()};
  }

  std::vector<float> Widen(const TensorInfo& t) {
    std::vector<uint8_t> bytes(t.bytes);
    status_ = source_.ReadRows(t, 0, t.rows(), bytes.data());
    std::vector<float> out(t.ne[0] * t.rows());
    if (!status_.ok()) return out;
    FindKernelTable("scalar", nullptr)
        ->dequant[static_cast<uint32_t>(FormatOf(t.type))](bytes.data(), out.size(), out.data());
    return out;
  }

  const float* Floats(const std::string& name) {
    const TensorInfo* t = FindComputable(name);
    if (t == nullptr) return nullptr;
    const std::vector<float> values = Widen(*t);
    return static_cast<const float*>(Store(*t, values.data(), values.size() * sizeof(float)));
  }

  // {taps, channels} with the tap fastest becomes [tap][channel], so that channels are the vector
  // dimension.
  const float* Conv(const std::string& name) {
    const TensorInfo* t = FindComputable(name);
    if (t == nullptr) return nullptr;
    const std::vector<float> values = Widen(*t);
    const size_t taps = t->ne[0], channels = t->rows();
    std::vector<float> turned(values.size());
    for (size_t c = 0; c < channels; ++c) {
      for (size_t k = 0; k < taps; ++k) turned[k * channels + c] = values[c * taps + k];
    }
    return static_cast<const float*>(Store(*t, turned.data(), turned.size() * sizeof(float)));
  }

  const ModelSource& source_;
  const ModelConfig& config_;
  Device& device_;
  const ModelWeights::Progress& progress_;
  Status status_ = OkStatus();
  uint64_t total_ = 0, read_ = 0, done_ = 0;
};

}  // namespace

namespace {

// The rows of `output` that the ids name, in their order.
StatusOr<WeightMatrix> GatherOutput(const ModelSource& source, const WeightMatrix& output,
                                    Device& device, const std::vector<int32_t>& ids) {
  const TensorInfo* t = source.Find("output.weight");
  if (t == nullptr) return NotFound("the model {} has no output.weight", source.description());
  std::vector<uint8_t> bytes(ids.size() * output.row_bytes);
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] < 0 || static_cast<uint32_t>(ids[i]) >= output.rows)
      return InvalidArgument("the draft vocabulary names token {} of {}", ids[i], output.rows);
    LODE_RETURN_IF_ERROR(source.ReadRows(*t, static_cast<uint64_t>(ids[i]), 1,
                                         bytes.data() + i * output.row_bytes));
  }
  LODE_ASSIGN_OR_RETURN(void* memory, device.Allocate("draft output", bytes.size()));
  device.Upload(memory, bytes.data(), bytes.size());
  WeightMatrix reduced = output;
  reduced.data = static_cast<const uint8_t*>(memory);
  reduced.rows = static_cast<uint32_t>(ids.size());
  return reduced;
}

}  // namespace

StatusOr<DraftWeights> DraftWeights::Load(const ModelSource& head, const ModelSource& trunk_source,
                                          const ModelWeights& trunk, Device& device,
                                          std::vector<int32_t> vocabulary) {
  const ModelWeights::Progress no_progress;
  LODE_ASSIGN_OR_RETURN(DraftWeights w, Loader(head, device, no_progress).RunDraft());
  w.output = trunk.output;
  if (vocabulary.empty()) return w;
  LODE_ASSIGN_OR_RETURN(w.output, GatherOutput(trunk_source, trunk.output, device, vocabulary));
  w.bytes += w.output.rows * w.output.row_bytes;
  w.vocabulary = std::move(vocabulary);
  return w;
}

StatusOr<ModelWeights> ModelWeights::Load(const ModelSource& source, Device& device,
                                          const Progress& progress) {
  return Loader(source, device, progress).Run();
}

}  // namespace lode
