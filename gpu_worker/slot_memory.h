// Where the bytes of expert slots live and how an expert gets into one: device memory with the copy
// engine on cuda, anonymous pages and memcpy on the cpu device. The tier (expert_tier.h) decides
// which expert goes where and when; this only holds and copies. Slots of a layer have equal size and
// are numbered from 0. Threads: Copy is the upload thread's (and the loading thread's), everything
// else the worker loop's; the tier never copies into a slot that a window may read.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "gpu_worker/arena_set.h"
#include "shared/base/status.h"

namespace lode {

class SlotMemory {
 public:
  virtual ~SlotMemory() = default;

  // Bytes of all slots together; larger budgets are cut to it.
  virtual uint64_t capacity() const = 0;
  // New numbers of slots, [layer]; no window runs and no copy is under way. False: slots move, so
  // what they held is lost. REQUIRES: their bytes fit the capacity.
  virtual bool SetSlots(const std::vector<uint16_t>& slots) = 0;
  // After SetSlots returned true: moves one slot's bytes, then gives back what lies above `slots`.
  virtual void Move(uint32_t layer, uint16_t from, uint16_t to) = 0;
  virtual void Trim(uint32_t layer, uint16_t slots) = 0;

  // A device pointer; slot s lies s * slot_bytes further.
  virtual uint8_t* slots(uint32_t layer) const = 0;
  // Returns when the expert's bytes are in the slot.
  virtual void Copy(uint32_t layer, uint32_t expert, uint16_t slot) = 0;
};

// The cpu device's: address space for every expert of every layer, pages for the used slots only.
StatusOr<std::unique_ptr<SlotMemory>> MakeHostSlots(const ArenaSet& arenas);

}  // namespace lode
