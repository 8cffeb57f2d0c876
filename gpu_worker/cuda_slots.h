// Expert slots in device memory: one piece, taken once, cut into the layers' slots; experts come by
// the copy engine on a stream of its own, beside whatever window runs. See slot_memory.h for the
// contract. Used by cuda_stack.cc.
#pragma once

#include <memory>

#include "gpu_worker/slot_memory.h"

struct CUstream_st;

namespace lode {

class CudaSlots final : public SlotMemory {
 public:
  // `memory`: device memory of `capacity` bytes, owned by the device; both outlive the slots. The
  // arenas are registered.
  static StatusOr<std::unique_ptr<CudaSlots>> Create(const ArenaSet& arenas, uint8_t* memory,
                                                     uint64_t capacity);
  ~CudaSlots() override;

  uint64_t capacity() const override { return capacity_; }
  bool SetSlots(const std::vector<uint16_t>& slots) override;
  void Move(uint32_t layer, uint16_t from, uint16_t to) override;
  void Trim(uint32_t, uint16_t) override {}
  uint8_t* slots(uint32_t layer) const override { return bases_[layer]; }
  void Copy(uint32_t layer, uint32_t expert, uint16_t slot) override;

 private:
  CudaSlots(const ArenaSet& arenas, uint8_t* memory, uint64_t capacity)
      : arenas_(arenas), memory_(memory), capacity_(capacity), bases_(arenas.layers(), memory) {}

  const ArenaSet& arenas_;
  uint8_t* const memory_;
  const uint64_t capacity_;
  std::vector<uint8_t*> bases_;   // [layer]
  std::vector<uint16_t> counts_;  // [layer]
  CUstream_st* stream_ = nullptr;
};

}  // namespace lode
