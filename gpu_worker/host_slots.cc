// Expert slots in anonymous memory: the emulated VRAM of the cpu device. See slot_memory.h.
#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "gpu_worker/slot_memory.h"

namespace lode {
namespace {

constexpr uint64_t kPageBytes = 4096;

class HostSlots final : public SlotMemory {
 public:
  explicit HostSlots(const ArenaSet& arenas) : arenas_(arenas), used_(arenas.layers(), 0) {}
  ~HostSlots() override {
    for (uint32_t layer = 0; layer < slabs_.size(); ++layer)
      munmap(slabs_[layer], arenas_.slot_bytes(layer) * arenas_.experts());
  }

  // Address space for every expert of every layer: slots never move, a larger budget needs no new
  // mapping, and only slots in use have pages (a shrink gives them back).
  Status Reserve() {
    for (uint32_t layer = 0; layer < arenas_.layers(); ++layer) {
      const uint64_t bytes = arenas_.slot_bytes(layer) * arenas_.experts();
      void* slab = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (slab == MAP_FAILED) {
        return ErrnoStatus(
            fmt::format("expert tier: reserving {} bytes of address space for layer {}", bytes,
                        layer),
            errno);
      }
      slabs_.push_back(static_cast<uint8_t*>(slab));
    }
    return OkStatus();
  }

  uint64_t capacity() const override { return UINT64_MAX; }
  bool SetSlots(const std::vector<uint16_t>&) override { return true; }
  void Move(uint32_t layer, uint16_t from, uint16_t to) override {
    std::memcpy(Slot(layer, to), Slot(layer, from), arenas_.slot_bytes(layer));
  }
  // Pages wholly above the last slot go back to the system.
  void Trim(uint32_t layer, uint16_t slots) override {
    const uint64_t used = arenas_.slot_bytes(layer) * slots,
                   before = arenas_.slot_bytes(layer) * used_[layer];
    const uint64_t from = (used + kPageBytes - 1) / kPageBytes * kPageBytes;
    if (before > from) madvise(slabs_[layer] + from, before - from, MADV_DONTNEED);
    used_[layer] = slots;
  }
  uint8_t* slots(uint32_t layer) const override { return slabs_[layer]; }
  void Copy(uint32_t layer, uint32_t expert, uint16_t slot) override {
    arenas_.CopyExpert(layer, expert, Slot(layer, slot));
  }

 private:
  uint8_t* Slot(uint32_t layer, uint16_t slot) const {
    return slabs_[layer] + slot * arenas_.slot_bytes(layer);
  }

  const ArenaSet& arenas_;
  std::vector<uint8_t*> slabs_;
  std::vector<uint16_t> used_;  // [layer]
};

}  // namespace

StatusOr<std::unique_ptr<SlotMemory>> MakeHostSlots(const ArenaSet& arenas) {
  auto slots = std::make_unique<HostSlots>(arenas);
  LODE_RETURN_IF_ERROR(slots->Reserve());
  return std::unique_ptr<SlotMemory>(std::move(slots));
}

}  // namespace lode
