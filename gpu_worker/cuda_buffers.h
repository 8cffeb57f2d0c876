// Typed memory for the parts of the cuda engine that own many buffers: one line per buffer where
// they are taken. The device frees its own; pinned memory is its owner's (cuda::FreePinned). Called
// at start only. Thread: the worker loop's.
#pragma once

#include "gpu_worker/cuda_api.h"
#include "gpu_worker/cuda_device.h"

namespace lode {

// Device memory, as CudaDevice::Allocate gives it.
struct DeviceBuffers {
  CudaDevice& device;
  template <class T>
  Status operator()(const char* what, size_t bytes, T** out) const {
    LODE_ASSIGN_OR_RETURN(void* memory, device.Allocate(what, bytes));
    *out = static_cast<T*>(memory);
    return OkStatus();
  }
};

// Zeroed pinned memory.
struct PinnedBuffers {
  template <class T>
  Status operator()(const char* what, size_t bytes, T** out) const {
    LODE_ASSIGN_OR_RETURN(void* memory, cuda::AllocateZeroedPinned(bytes, what));
    *out = static_cast<T*>(memory);
    return OkStatus();
  }
};

}  // namespace lode
