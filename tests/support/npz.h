// Reader of NumPy .npz archives (zip members stored or deflated, each a little-endian .npy array in
// C order): how the golden files of the reference implementation are kept. Test code: trusts the
// files, but fails with a message instead of crashing.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "shared/base/status.h"

namespace lode::testing {

struct NpyArray {
  std::string dtype;  // "<f4", "<i4", "|u1", "<u2", ...
  std::vector<uint64_t> shape;
  std::vector<uint8_t> bytes;

  uint64_t size() const;
  // All elements as float or int64, whatever the stored type.
  std::vector<float> Floats() const;
  std::vector<int64_t> Ints() const;
};

// Array name (without ".npy") -> array.
StatusOr<std::map<std::string, NpyArray>> ReadNpz(const std::string& path);

}  // namespace lode::testing
