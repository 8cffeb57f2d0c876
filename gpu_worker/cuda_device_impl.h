// Inside of the cuda device: scratch memory and the helpers that operations share. Private to
// cuda_device*.cc. Scratch is one allocation, carved at start; everything in it is rows of one
// window that an operation leaves for the next.
#pragma once

#include <initializer_list>
#include <vector>

#include "gpu_worker/cuda_device.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/runtime.h"

namespace lode {

// One matrix of a product: y [row][w->rows].
struct CudaMatJob {
  const WeightMatrix* w;
  float* y;
};

struct CudaDevice::Impl {
  // What a product reads, and which forms of it exist already.
  struct Input {
    const float* x = nullptr;
    uint32_t columns = 0;
    cuda::ActForms forms;  // base null: not made
    bool checked = false;  // some kernel has looked for values that are not finite
  };
  // A set of forms for rows of up to `columns_max` columns.
  struct FormBuffer {
    uint8_t* memory = nullptr;
    uint32_t rows = 0;
    size_t stride = 0;
  };
  struct Scratch {
    FormBuffer x_forms, forms, pair_forms;
    float *normed, *low, *up;
    float *qkv, *z, *beta, *alpha, *query, *mixed;
    uint32_t* finished;
    float *inv_freq, *sin, *cos;
    float *q, *k, *v, *index_q, *index_k, *attended, *block_scores;
    uint32_t *cells, *n_cells, *arrived;
    float *scores, *chunk_total, *chunk_sum;
    float *router_logits, *shared_gate, *shared_up, *shared_inject;
    float *expert_hidden, *expert_up;
    float *ple_embed, *ple_key, *ple_value, *ple_gated;
  };

  Impl(const ModelConfig& c, const CudaDeviceOptions& o) : config(c), options(o) {}
  ~Impl();
  Status Start();
  // Hands out the scratch; with memory null it only counts bytes.
  size_t Carve(uint8_t* memory);

  // Of the way into the draft head; empty without EnableDrafts.
  struct DraftScratch {
    float *embed = nullptr, *normed = nullptr, *joined = nullptr;
    FormBuffer forms;  // by row * streams + stream
  };

  // ---- activations
  static uint32_t FormOf(Format format);  // index of kFormLens, or kForms for float formats
  uint32_t FormsOf(std::initializer_list<const WeightMatrix*> matrices) const;  // bit per form
  cuda::ActForms Forms(const FormBuffer& buffer, uint32_t columns, uint32_t wanted) const;
  cuda::CheckArgs Check(cuda::LayerPart part, bool logits_only = false) const;
  // Of x of HcRead, missing forms are made and kept; other inputs get what the matrices want.
  Input InputOf(const float* x, uint32_t columns, cuda::LayerPart part, uint32_t wanted,
                bool logits_only = false);
  // A hyper-connection write that the next read of the same streams does on its way.
  struct PendingWrite {
    const float *y = nullptr, *inject = nullptr;
    float* wide = nullptr;
  };
  void FlushWrite();
  // Write gates of the last HcRead that are still to be made; TakeGates adds them to a batch
  // (false: there are none, or no room), FlushGates makes them at once.
  struct DueGates {
    const float* weight = nullptr;  // [streams][streams * hidden]
    float* inject = nullptr;
  };
  bool TakeGates(cuda::MatBatch* batch);
  void FlushGates();
  Input HcNorm(const HcWeights& w, const float* wide);
  // An output overwrites a vector whose forms were kept.
  void Wrote(const float* p) {
    if (p == x_source) x_source = nullptr;
  }

  // y = W x of all jobs, a launch per format; makes forms that the input has not got.
  void Mat(std::initializer_list<CudaMatJob> jobs, const Input& input, bool logits_only = false);

  // The products behind the norm of HcRead: one fused launch where the shape allows, else three.
  void HcMix(const HcWeights& w, float* x);
  void HcMixApart(const HcWeights& w, float* x);
  // One batch of matrices of `format` and of float ones on one input.
  cuda::MatBatch BatchOf(Format format, const Input& input, const cuda::ActForms& made) const;
  bool SwigluOfShared(const MoeWeights& w, const Input& input);

  std::vector<const CudaMatJob*> LaunchFormat(const std::vector<const CudaMatJob*>& jobs,
                                              const Input& input, const Input& made,
                                              bool logits_only);

  cuda::AttentionShape Attention() const;
  static cuda::KvCache Cache(const AttentionState& state);
  cuda::RopeTables Rope() const;
  cuda::DeltaShape Delta() const;
  cuda::DeltaConvArgs DeltaConv(const DeltaWeights& w, const DeltaState& state) const;
  cuda::DeltaStepArgs DeltaSteps(const DeltaState& state) const;
  cuda::DeltaGateArgs DeltaGate(const DeltaWeights& w) const;
  uint32_t rows() const { return staged->params.n_rows; }
  CUstream_st* s() const { return stream; }

  const ModelConfig config;
  const CudaDeviceOptions options;
  CudaCard card;
  CUstream_st* stream = nullptr;
  cuda::WindowBlock* block = nullptr;   // device
  cuda::WindowBlock* staged = nullptr;  // pinned
  uint64_t* outcome_word = nullptr;     // pinned
  std::vector<void*> memory;
  std::vector<DeviceAllocation> allocations;
  uint32_t layer = 0;
  Scratch scratch = {};
  DraftScratch draft;
  const float* x_source = nullptr;  // whose forms x_forms holds
  uint32_t x_made = 0;              // which of them: bit per form
  PendingWrite pending;
  DueGates due_gates;
  uint32_t reads = 0;                    // HcRead calls of this layer
  const DeltaWeights* mixing = nullptr;  // of DeltaInput, for the recurrence
  bool gated = false;                    // the recurrence's launch has made DeltaOutput's input
  size_t cells_max = 0, blocks_max = 0;
};

}  // namespace lode
