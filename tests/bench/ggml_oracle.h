// The CPU kernels of another engine (ggml), as a yardstick on this machine: its shared libraries
// are loaded when the benchmark is given a folder with them, and used through the few functions
// below, whose prototypes were written here from its public ABI. Nothing of it is part of Lode, is
// built with it or shipped with it. Where to get a prebuilt copy: docs/HACKING.md. Single thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/formats.h"
#include "shared/base/status.h"

namespace lode::bench {

// One row of weights times one row of activations, as ggml computes it for a type.
class GgmlDot {
 public:
  // Activations in the form that this type's product wants.
  std::vector<uint8_t> Quantize(const std::vector<float>& x) const;
  float Dot(const uint8_t* w, const uint8_t* act, size_t n) const {
    float y = 0;
    vec_dot(static_cast<int>(n), &y, 0, w, 0, act, 0, 1);
    return y;
  }

  void (*from_float)(const float* x, void* y, int64_t n) = nullptr;
  void (*vec_dot)(int n, float* y, size_t y_stride, const void* w, size_t w_stride, const void* act,
                  size_t act_stride, int rows) = nullptr;
  size_t (*row_size)(int type, int64_t n) = nullptr;
  int act_type = 0;
};

class GgmlOracle {
 public:
  // Loads the library variant of that name ("haswell": AVX2), or, for an empty name, the one that
  // the oracle itself rates best for this CPU. The libraries stay loaded until the process ends.
  static StatusOr<GgmlOracle> Load(const std::string& folder, const std::string& variant);

  // False when it has no product for the type.
  bool Find(TensorType type, GgmlDot* dot) const;
  const std::string& variant() const { return variant_; }  // "zen4"

 private:
  const void* (*traits_)(int type) = nullptr;
  size_t (*row_size_)(int type, int64_t n) = nullptr;
  std::string variant_;
};

}  // namespace lode::bench
