// The cuda device: the operations of device.h as kernels on one stream, with the bits of the cpu
// device (docs/design/arithmetic.md). An operation only enqueues: it allocates nothing, waits for
// nothing, and reads everything that changes between windows of the same row count from the
// WindowBlock in device memory. So the calls of a window may be captured once per row count and
// replayed; BeginWindow is then the part that fills the pinned block and enqueues its copy.
// Plain C++ (no CUDA header needed by those who include it). Thread: the worker loop's.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gpu_worker/device.h"
#include "kernels/cuda/experts.h"
#include "kernels/cuda/window.h"

struct CUstream_st;  // cudaStream_t is a pointer to it

namespace lode {

struct CudaDeviceOptions {
  int ordinal = 0;       // CUDA's number of the card
  uint32_t context = 0;  // longest sequence in tokens; sizes the attention scratch
};

// What one card is, for errors and start-up tables.
struct CudaCard {
  std::string name;
  uint32_t capability = 0;  // 10 * major + minor
  uint32_t multiprocessors = 0;
  uint64_t total_bytes = 0, free_bytes = 0;
};

class CudaDevice final : public Device {
 public:
  // Unavailable: no driver, no card, or built without CUDA; the sentence says which.
  static StatusOr<CudaCard> Describe(int ordinal);
  // Refuses, naming it, a card or a model shape that the kernels were not made for. Takes scratch
  // memory and loads every kernel.
  static StatusOr<std::unique_ptr<CudaDevice>> Create(const ModelConfig& config,
                                                      const CudaDeviceOptions& options);
  ~CudaDevice() override;

  CUstream_st* stream() const;
  const CudaCard& card() const;

  // ---- memory. Before "ready" only.
  StatusOr<void*> Allocate(const std::string& what, size_t bytes) override;
  const std::vector<DeviceAllocation>& allocations() const override;
  // Host memory may change once these return, unless the stream is being captured: then `host` is
  // pinned and read or written by every replay.
  void Upload(void* device, const void* host, size_t bytes) override;
  void Download(void* host, const void* device, size_t bytes) override;
  void Zero(void* device, size_t bytes) override;

  // ---- window
  // Fills the pinned block and enqueues the copy. During a capture params.n_rows and n_seqs fix the
  // shape of the graph; later windows of that shape call StageWindow and launch the graph.
  void BeginWindow(const StepParams& params) override;
  // The host half of BeginWindow. REQUIRES: no enqueued copy of the block is pending, i.e. the
  // window before has ended.
  void StageWindow(const StepParams& params);
  // A window of n_rows rows whose block the device itself has written (chained drafts): nothing is
  // copied, and values that are not finite add to those of the window before.
  void ContinueWindow(uint32_t n_rows);
  void BeginLayer(uint32_t layer) override;
  WindowOutcome Outcome() override;  // synchronises with the stream
  // Enqueues a copy of the error word to pinned memory; FromWord reads it after the stream got
  // there.
  void EnqueueOutcome(uint64_t* pinned_word);
  static WindowOutcome FromWord(uint64_t not_finite);
  // Device memory; kernels of others read the parameters and the error word here.
  cuda::WindowBlock* window_block() const;

  // ---- operations
  void Embed(const WeightMatrix& table, float* wide) override;
  void HcRead(const HcWeights& w, const float* wide, float* x, float* inject) override;
  // Joined with the next HcRead of the same streams; until then, or until an operation or copy that
  // may touch them, it is only remembered: y, inject and wide must stay as they are.
  void HcWrite(const float* y, const float* inject, float* wide) override;
  void Ple(const PleWeights& w, const PleState& state, const uint8_t* rows, Format rows_format,
           float* wide) override;
  void DeltaInput(const DeltaWeights& w, const DeltaState& state, const float* x) override;
  void DeltaRecurrence(const DeltaState& state) override;
  void DeltaOutput(const DeltaWeights& w, float* y) override;
  void AttentionInput(const AttentionWeights& w, const AttentionState& state,
                      const float* x) override;
  void AttentionSelect(const AttentionState& state) override;
  void AttentionOutput(const AttentionWeights& w, const AttentionState& state, float* y) override;
  void Route(const MoeWeights& w, const float* x, RoutedRow* routed) override;
  void FoldsNext(const DeltaState& state) override;
  void SharedExpert(const MoeWeights& w, const float* x, float* shared) override;
  // lanes.Result() must give device-readable addresses that are constants of the graph.
  void Combine(uint32_t layer, const RoutedRow* routed, const ExpertLanes& lanes,
               const float* shared, float* y) override;
  // The same with the addresses in device memory: table[row * experts_used + order].
  void CombineFrom(const RoutedRow* routed, const float* const* table, const float* shared,
                   float* y);
  // For lanes that combine by a kernel of their own: the gates of the last SharedExpert, [row], and
  // a word that y will be overwritten.
  const float* shared_gate() const;
  void WillWrite(const float* y);
  void Head(const WeightMatrix& output, const float* x, float* logits) override;

  // ---- draft head
  // Takes the memory that DraftInput needs. Before "ready".
  Status EnableDrafts();
  void DraftInput(const DraftWeights& w, const WeightMatrix& embed, const float* residual,
                  float* wide) override;

  // ---- routed experts
  // results[row * experts_used + order][hidden] of every entry of the list: x -> gate, up -> swiglu
  // -> quantised for the down type -> down. list, x and results: device memory; the list is read
  // when the kernels run. x: [row][hidden].
  // On `stream`, null: this device's. before_down is called between the launches that read gate and
  // up and the one that reads down. Lists that share no (row, expert) may run beside each other; x
  // has been quantised before then.
  void LaunchExperts(const cuda::ExpertFormats& formats, const cuda::ExpertList* list,
                     const float* x, float* results, CUstream_st* stream = nullptr,
                     const std::function<void()>& before_down = {});
  // x quantised for matrices of `format`, as the jobs of the CPU workers want it: device memory,
  // [row] at *row_stride bytes, each ActLayout{hidden, act_block_len}. Valid from the call (in
  // stream order) until the next operation that quantises another input. Null for float formats.
  const uint8_t* QuantisedInput(Format format, const float* x, size_t* row_stride);

 private:
  struct Impl;
  explicit CudaDevice(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace lode
