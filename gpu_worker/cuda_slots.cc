// See cuda_slots.h.
#include "gpu_worker/cuda_slots.h"

#include "gpu_worker/cuda_api.h"
#include "gpu_worker/cuda_lanes.h"
#include "kernels/cuda/runtime.h"
#include "shared/base/check.h"

namespace lode {

StatusOr<std::unique_ptr<CudaSlots>> CudaSlots::Create(const ArenaSet& arenas, uint8_t* memory,
                                                       uint64_t capacity) {
  std::unique_ptr<CudaSlots> slots(new CudaSlots(arenas, memory, capacity));
  LODE_ASSIGN_OR_RETURN(slots->stream_, cuda::OpenStream());
  return slots;
}

CudaSlots::~CudaSlots() { cuda::CloseStream(stream_); }

bool CudaSlots::SetSlots(const std::vector<uint16_t>& slots) {
  if (slots == counts_) return true;
  uint64_t at = 0;
  for (uint32_t layer = 0; layer < slots.size(); ++layer) {
    bases_[layer] = memory_ + at;
    at += slots[layer] * arenas_.slot_bytes(layer);
  }
  LODE_CHECK(at <= capacity_, "slots of {} bytes in {}", at, capacity_);
  counts_ = slots;
  return false;
}

void CudaSlots::Move(uint32_t layer, uint16_t from, uint16_t to) {
  LODE_CHECK(false, "layer {}: slot {} would move to {} though no slot count changed", layer, from,
             to);
}

void CudaSlots::Copy(uint32_t layer, uint32_t expert, uint16_t slot) {
  uint8_t* const to = bases_[layer] + slot * arenas_.slot_bytes(layer);
  for (uint32_t m = 0; m < kMatrices; ++m) {
    const Matrix matrix = static_cast<Matrix>(m);
    const MatrixShape& s = arenas_.shape(layer, matrix);
    for (uint32_t node = 0; node < arenas_.nodes(); ++node) {
      const RowRange r = arenas_.rows(node, matrix);
      if (r.size() == 0) continue;
      cuda::CopyRegistered(to + s.slot_offset + uint64_t{r.begin} * s.row_bytes,
                           arenas_.piece(node, layer, expert, matrix),
                           uint64_t{r.size()} * s.row_bytes, stream_);
    }
  }
  const Status status = cuda::WaitAsleep(stream_);
  if (!status.ok()) DeviceFault(status);
}

}  // namespace lode
