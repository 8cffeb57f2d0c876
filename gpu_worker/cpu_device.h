// The cpu device: the operations of device.h executed by host threads through the kernel table.
// Each operation is cut into units (matrix rows, heads, column blocks, rows of the window) that a
// ThreadPool spreads; no result depends on the cut. It is the oracle for the cuda device, the
// device of machines without a GPU, and, with `float_reference`, the reference that golden files of
// the public implementation are compared with. Device pointers are host pointers. Thread: the
// worker loop's; units run on the pool.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gpu_worker/device.h"
#include "gpu_worker/thread_pool.h"
#include "kernels/kernel_table.h"

namespace lode {

struct CpuDeviceOptions {
  uint32_t threads = 1;
  std::vector<uint32_t> cpus;  // one per thread to pin it to; empty: not pinned
  bool lock_memory = false;    // keep what Allocate gives in RAM; a warning when the limit says no
  uint32_t spin_ns = 0;        // how long an idle thread spins before it sleeps
  std::string isa = "auto";
  bool float_reference = false;  // matrices dequantised, activations not quantised
  uint32_t context = 0;          // longest sequence in tokens; sizes the attention scratch
  bool drafts = false;           // DraftInput will be called
};

// y[row][*] = w . x[row], for all rows of the window.
struct MatJob {
  const WeightMatrix* w;
  float* y;  // [row][w->rows]
};

class CpuDevice final : public Device {
 public:
  // Refuses an unknown or unsupported instruction set, naming the missing feature.
  static StatusOr<std::unique_ptr<CpuDevice>> Create(const ModelConfig& config,
                                                     const CpuDeviceOptions& options);
  ~CpuDevice() override;

  ThreadPool& pool() { return pool_; }
  const KernelTable& kernels() const { return *kernels_; }
  // Every allocation so far is locked. False also when nobody asked for it.
  bool memory_locked() const { return options_.lock_memory && !lock_failed_; }
  bool float_reference() const { return options_.float_reference; }
  // At window borders only; every table gives the same bits.
  void SetKernels(const KernelTable* kernels) { kernels_ = kernels; }

  StatusOr<void*> Allocate(const std::string& what, size_t bytes) override;
  const std::vector<DeviceAllocation>& allocations() const override { return allocations_; }
  void Upload(void* device, const void* host, size_t bytes) override;
  void Download(void* host, const void* device, size_t bytes) override;
  void Zero(void* device, size_t bytes) override;

  void BeginWindow(const StepParams& params) override;
  void BeginLayer(uint32_t layer) override { layer_ = layer; }
  WindowOutcome Outcome() override;

  void Embed(const WeightMatrix& table, float* wide) override;
  void HcRead(const HcWeights& w, const float* wide, float* x, float* inject) override;
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
  void SharedExpert(const MoeWeights& w, const float* x, float* shared) override;
  void Combine(uint32_t layer, const RoutedRow* routed, const ExpertLanes& lanes,
               const float* shared, float* y) override;
  void DraftInput(const DraftWeights& w, const WeightMatrix& embed, const float* residual,
                  float* wide) override;
  void Head(const WeightMatrix& output, const float* x, float* logits) override;

 private:
  struct Scratch;  // cpu_device_scratch.h

  CpuDevice(const ModelConfig& config, const CpuDeviceOptions& options, const KernelTable* kernels);
  StatusOr<void*> AllocateZeroed(size_t bytes);

  // All matrices see the same x [row][cols]; activations are quantised once per block length in
  // use. `rows`: which rows.
  void Mat(std::span<const MatJob> jobs, const float* x, RowMask rows);
  void Mat(std::span<const MatJob> jobs, const float* x) { Mat(jobs, x, AllRows()); }
  RowMask AllRows() const { return static_cast<RowMask>((uint64_t{1} << params_.n_rows) - 1); }
  void QuantizeRows(std::span<const MatJob> jobs, const float* x, RowMask rows);
  void ReportNotFinite(uint32_t row);
  // cpu_device_attention.cc
  void StoreAttentionRow(const AttentionWeights& w, const AttentionState& state, uint32_t row);
  void PoolIndexBlock(const AttentionWeights& w, const AttentionState& state, uint32_t row);
  uint8_t* CellBlock(const AttentionState& state, const StepRow& row, uint32_t position) const;
  // cpu_device_delta.cc
  void DeltaConvHead(const DeltaWeights& w, const DeltaState& state, uint32_t row, uint32_t head);
  void DeltaColumnBlock(const DeltaState& state, uint32_t seq, uint32_t head, uint32_t block,
                        uint32_t thread);

  const ModelConfig config_;
  const CpuDeviceOptions options_;
  const KernelTable* kernels_;
  ThreadPool pool_;
  bool lock_failed_ = false;
  std::vector<std::unique_ptr<uint8_t, void (*)(void*)>> memory_;
  std::vector<DeviceAllocation> allocations_;

  StepParams params_ = {};
  uint32_t layer_ = 0;
  std::atomic<uint64_t> not_finite_{
      ~uint64_t{0}};  // layer << 32 | row, lowest wins; all ones: none
  std::unique_ptr<Scratch> scratch_;
};

}  // namespace lode
