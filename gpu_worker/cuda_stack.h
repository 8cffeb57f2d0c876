// The cuda half of a GPU worker, behind an interface without CUDA types: gpu_worker.cc assembles a
// worker from it, and a build without LODE_CUDA links cuda_absent.cc in its place. Order of calls:
// MakeCudaStack (driver, card, compute capability), dense weights and state through device(),
// MakeDrafter where there is a draft head, MakeEngine (registers segments, captures graphs), MakeSlots (carves what is left), Attach. After
// Attach nothing is allocated or registered on the device. Thread: the loading thread, then the
// worker loop's.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gpu_worker/device.h"
#include "gpu_worker/draft_engine.h"
#include "gpu_worker/expert_tier.h"
#include "gpu_worker/forward.h"
#include "gpu_worker/window_engine.h"
#include "shared/control/load_plan.h"
#include "shared/shm/segment.h"

namespace lode {

class CudaStack {
 public:
  virtual ~CudaStack() = default;

  virtual Device& device() = 0;
  // Whether read-only mappings can be registered; otherwise arenas must be mapped writable.
  virtual bool registers_read_only() const = 0;
  // The draft head of `head` (the trunk's own source, or a separate one): loads its experts, takes its
  // memory, captures its passes. Before MakeEngine. All references outlive it. `draft_bytes`: of the
  // experts.
  virtual StatusOr<std::unique_ptr<DraftEngine>> MakeDrafter(
      const ModelSource& head, const DraftWeights& weights, const ModelWeights& trunk,
      const AttentionState& cells, const Forward& forward, uint64_t* draft_bytes) = 0;
  // Registers the segments with the driver and captures one graph per row count. All arguments
  // outlive the engine; `arenas` are complete.
  virtual StatusOr<std::unique_ptr<WindowEngine>> MakeEngine(Forward& forward,
                                                             const ArenaSet& arenas,
                                                             Segment& exchange,
                                                             const std::vector<Segment*>& mapped) = 0;
  // Takes min(budget, what is free minus the reserve) for expert slots.
  virtual StatusOr<std::unique_ptr<SlotMemory>> MakeSlots(const ArenaSet& arenas,
                                                          uint64_t budget_bytes) = 0;
  // The filled tier: from now on windows may run.
  virtual Status Attach(ExpertTier* tier) = 0;

  virtual uint32_t host_threads() const = 0;  // of the sampler
  virtual void AddFacts(std::map<std::string, std::string>* facts) const = 0;
};

// Refuses with one sentence: no CUDA in this build, no driver, no such card, a card that is too old.
StatusOr<std::unique_ptr<CudaStack>> MakeCudaStack(const ModelSource& source, const LoadPlan& plan,
                                                   uint32_t generation);

// One line about the card ("NVIDIA H200, compute capability 90, 139 GiB"), or why it cannot be used.
StatusOr<std::string> ProbeCuda(uint32_t device_index);

}  // namespace lode
