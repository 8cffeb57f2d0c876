// Bytes of synthetic weights: any row of any tensor alone, from (seed, tensor name, row) and nothing else.
//
// Idea: a row is first filled with the words of a counter-based generator, then the scale fields of its blocks are
// overwritten with values that give the weights a wanted standard deviation. Integer arithmetic and single IEEE
// operations only, so the bytes are the same on every machine. Pure functions; any thread.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "kernels/formats.h"
#include "shared/base/status.h"

namespace lode {

// How the numbers of one tensor are spread: uniform in [center - half, center + half] for float types, standard
// deviation `sigma` around 0 for block types.
struct SynthSpread {
  float center = 0, half = 0, sigma = 0;
};

class SynthTensor {
 public:
  // `spread.center` must be 0 for block types.
  static StatusOr<SynthTensor> Make(uint64_t seed, std::string_view name, TensorType type, uint64_t row_weights,
                                    const SynthSpread& spread);

  uint64_t row_bytes() const { return row_bytes_; }
  void FillRow(uint64_t row, uint8_t* out) const;

 private:
  // Block scales take one of this many values around the base, so that neighbours differ.
  static constexpr int kVariants = 64;

  void FillFloats(uint8_t* out) const;
  void PatchBlocks(uint8_t* out) const;

  TensorType type_ = TensorType::kF32;
  uint64_t key_ = 0;
  uint64_t row_weights_ = 0, row_bytes_ = 0;
  uint32_t block_bytes_ = 0;
  SynthSpread spread_;
  std::array<uint16_t, kVariants> scale_{}, minimum_{};  // f16 bits
  uint8_t byte_scale_ = 0;                               // MXFP4, NVFP4
};

// f16 bits of `value`, rounded to nearest even; for finite values inside f16's range.
uint16_t HalfBits(float value);
// floor(sqrt(n))
uint64_t IntegerSqrt(uint64_t n);
// The usual 64-bit finaliser behind splitmix64 (without its increment).
uint64_t Mix64(uint64_t z);
inline constexpr uint64_t kGoldenGamma = 0x9E3779B97F4A7C15;

}  // namespace lode
