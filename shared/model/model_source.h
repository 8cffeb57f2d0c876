// Where weights come from: a GGUF file or a synth: description, behind one interface. The rest of Lode asks for tensors
// by their GGUF names and never knows which it is. Thread-safe after Open.
//
// synth:layers=4,experts=32,pack=q2_0[,hidden=2560,width=640,vocab=4096,seed=1,...] makes weights from a seed, byte-identical
// on every machine, with the per-tensor types of the published packs (docs/design/synth.md).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/formats.h"
#include "shared/base/status.h"
#include "shared/model/model_config.h"

namespace lode {

struct TensorInfo {
  std::string name;
  TensorType type;
  uint64_t ne[4];
  uint64_t bytes;
  uint64_t rows() const { return ne[1] * ne[2] * ne[3]; }
  uint64_t row_bytes() const { return bytes / rows(); }
};

// Tokenizer facts of the file, by value or pointing into the source (valid while it lives).
struct TokenizerData {
  std::string model;                         // "gpt2" = byte-level BPE
  std::string pre;                           // "qwen2" | "qwen35"
  std::vector<std::string_view> tokens;      // [vocab]
  std::vector<uint64_t> token_types;         // [vocab] 1 normal, 3 control, 4 user defined, 5 unused, 6 byte
  std::vector<std::string_view> merges;      // "a b", by rank
  int64_t bos = -1, eos = -1, eot = -1, pad = -1;  // -1: not stated
  bool add_bos = false;
  std::string chat_template;                 // Jinja source; empty: none
  // general.sampling.*: defaults of the file; negative = not stated
  double temperature = -1, top_p = -1, min_p = -1;
  int64_t top_k = -1;
};

class ModelSource {
 public:
  virtual ~ModelSource() = default;

  // GGUF path (single, any shard, folder) or "synth:...". Checks the architecture, every tensor the architecture needs,
  // its shape and that its type is known; one sentence names what is wrong.
  static StatusOr<std::unique_ptr<ModelSource>> Open(const std::string& model);

  // A separate draft (MTP) head for the model with these numbers: a GGUF file with the draft block's 32 tensors, or
  // with 34, whose own embedding and output are not used. config() is the trunk's with one draft layer; no tokenizer.
  static StatusOr<std::unique_ptr<ModelSource>> OpenDraftHead(const std::string& path, const ModelConfig& trunk);

  virtual const ModelConfig& config() const = 0;
  virtual StatusOr<TokenizerData> tokenizer() const = 0;
  virtual const std::vector<TensorInfo>& tensors() const = 0;
  virtual const TensorInfo* Find(std::string_view name) const = 0;  // nullptr: absent

  // Copies rows [first_row, first_row + n_rows) of the tensor (rows run over ne[1]*ne[2]*ne[3]) into `out`, which holds
  // exactly n_rows * row_bytes. Experts of a 3-D tensor are row ranges. Errors: I/O, with shard and offset.
  virtual Status ReadRows(const TensorInfo& tensor, uint64_t first_row, uint64_t n_rows, uint8_t* out) const = 0;

  // Random rows of one tensor in one batch (the n-gram table: 16 rows per token). out holds rows.size() * row_bytes.
  // GGUF: io_uring when available, else pread; never page faults of a map.
  virtual Status ReadScattered(const TensorInfo& tensor, std::span<const uint64_t> rows, uint8_t* out) const = 0;

  // 32 hex digits; equal for the same weights, different otherwise (GGUF: sizes + metadata + tensor infos; synth: the string).
  virtual const std::string& identity() const = 0;
  virtual const std::string& description() const = 0;  // for people: path or synth string
};

// Where the three expert matrices of a layer live. Handles the fused ffn_gate_up_exps form.
struct ExpertTensors {
  const TensorInfo* gate = nullptr;   // {hidden, width, experts} or the fused tensor
  const TensorInfo* up = nullptr;     // == gate when fused
  const TensorInfo* down = nullptr;   // {width, hidden, experts}
  bool fused = false;                 // gate rows [0, width), up rows [width, 2*width) of each expert
  uint64_t gate_row(uint64_t expert, uint64_t row, uint64_t width) const { return expert * (fused ? 2 : 1) * width + row; }
  uint64_t up_row(uint64_t expert, uint64_t row, uint64_t width) const {
    return fused ? expert * 2 * width + width + row : expert * width + row;
  }
};
// Layer `layer` of the trunk (or the MTP block at index config().layers).
StatusOr<ExpertTensors> FindExperts(const ModelSource& source, uint32_t layer);


// Open accepts every weight type that GGUF knows by size. This names the first tensor whose type the engine cannot
// compute with yet: norms, convolutions and other vectors must be F32, F16 or BF16, matrices a LODE_COMPUTED_FORMATS type.
Status CheckComputable(const ModelSource& source);

}  // namespace lode
