// The block of device memory that a window reads and writes beside its rows: its parameters, and
// the word in which kernels report activations that are not finite. One fixed address per device; a
// window starts by copying one pinned host block over it, so a captured graph needs no patching.
// Plain C++, for both compilers.
#pragma once

#include <cstdint>

#include "gpu_worker/step_params.h"

namespace lode::cuda {

inline constexpr uint64_t kAllFinite = ~uint64_t{0};

struct WindowBlock {
  StepParams params;
  // Smallest NotFiniteKey of the window so far, or kAllFinite. Kernels lower it by atomic minimum.
  uint64_t not_finite;
};

// Where in a layer a value is first looked at. The cpu device stops behind the router and behind
// the lanes, so an earlier part of a layer wins over a lower row.
enum class LayerPart : uint32_t { kMixer = 0, kExperts = 1, kShared = 2 };

constexpr uint64_t NotFiniteKey(uint32_t layer, LayerPart part, uint32_t row) {
  return static_cast<uint64_t>(layer) << 32 | static_cast<uint64_t>(part) << 16 | row;
}
constexpr uint32_t NotFiniteLayer(uint64_t key) { return static_cast<uint32_t>(key >> 32); }
constexpr uint32_t NotFiniteRow(uint64_t key) { return static_cast<uint32_t>(key) & 0xffffu; }

}  // namespace lode::cuda
