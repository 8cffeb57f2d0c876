// Generates synthetic rows: see synth_bytes.h; scale rules: docs/design/synth.md. Called by loading threads; about one
// multiply-xor chain per 8 bytes, so a row costs little more than writing it.
#include "shared/model/synth_bytes.h"

#include <xxhash.h>

#include <bit>
#include <cstring>

#include "shared/base/check.h"

namespace lode {
namespace {

// Where a block keeps its scale, and what a block of random codes with scale 1 has as root mean square. With a minimum,
// minimum = minimum_factor * scale centres the codes on 0. `random_sign`: codes are lopsided, so half the scales are
// negative (the formats allow it).
struct BlockRule {
  TensorType type;
  float unit_rms;
  int scale_at;    // byte; -1: no f16 field of this kind
  int minimum_at;  // byte; -1: none
  float minimum_factor;
  bool random_sign;
};

constexpr BlockRule kRules[] = {
    {TensorType::kQ4_0, 4.639f, 0, -1, 0, true},
    {TensorType::kQ4_1, 4.606f, 0, 2, -7.5f, false},
    {TensorType::kQ5_0, 9.242f, 0, -1, 0, true},
    {TensorType::kQ5_1, 9.252f, 0, 2, -15.5f, false},
    {TensorType::kQ8_0, 73.99f, 0, -1, 0, false},
    {TensorType::kQ2_K, 13.11f, 80, 82, 1.5f, false},
    {TensorType::kQ3_K, 43.45f, 108, -1, 0, false},
    {TensorType::kQ4_K, 223.1f, 0, 2, 7.5f, false},
    {TensorType::kQ5_K, 447.4f, 0, 2, 15.5f, false},
    {TensorType::kQ6_K, 1370.f, 208, -1, 0, false},
    {TensorType::kIQ2_XXS, 53.31f, 0, -1, 0, false},
    {TensorType::kIQ2_XS, 55.73f, 0, -1, 0, false},
    {TensorType::kIQ2_S, 56.29f, 0, -1, 0, false},
    {TensorType::kIQ3_XXS, 142.5f, 0, -1, 0, false},
    {TensorType::kIQ3_S, 140.8f, 0, -1, 0, false},
    {TensorType::kIQ1_S, 7.194f, 0, -1, 0, false},
    {TensorType::kIQ1_M, 7.218f, -1, -1, 0, false},  // its f16 is spread over four words
    {TensorType::kIQ4_NL, 67.42f, 0, -1, 0, true},
    {TensorType::kIQ4_XS, 1246.f, 0, -1, 0, false},
    {TensorType::kTQ1_0, 0.8173f, 52, -1, 0, false},
    {TensorType::kTQ2_0, 1.224f, 64, -1, 0, true},
    {TensorType::kQ1_0, 1.f, 0, -1, 0, false},
    {TensorType::kQ2_0, 1.224f, 0, -1, 0, true},
    {TensorType::kMXFP4, 5.859f, -1, -1, 0, false},  // unit: exponent byte 128
    {TensorType::kNVFP4, 2.926f, -1, -1, 0, false},  // unit: E4M3 scale 1
};

const BlockRule* FindRule(TensorType type) {
  for (const BlockRule& rule : kRules) {
    if (rule.type == type) return &rule;
  }
  return nullptr;
}

void Put16(uint8_t* at, uint16_t bits) { std::memcpy(at, &bits, sizeof bits); }
uint16_t Get16(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  return bits;
}

// Six random bits choose the scale's variant, the top bit its sign.
int Variant(uint16_t random) { return random & 63; }
uint16_t Sign(uint16_t random) { return random & 0x8000; }

// The 12 bytes of eight 6-bit scales and minima of Q4_K and Q5_K: scales 32..63, minima equal to them but for the
// lowest bit. Random content would centre no group on 0.
void PackScales(uint8_t* p) {
  uint8_t s[8], m[8];
  for (int g = 0; g < 8; ++g) {
    s[g] = 32 + (p[g] & 31);
    m[g] = s[g] ^ (p[g] >> 7);
  }
  for (int g = 0; g < 4; ++g) {
    p[g] = static_cast<uint8_t>(s[g] | (s[g + 4] >> 4) << 6);
    p[4 + g] = static_cast<uint8_t>(m[g] | (m[g + 4] >> 4) << 6);
    p[8 + g] = static_cast<uint8_t>((s[g + 4] & 15) | (m[g + 4] & 15) << 4);
  }
}

float E4m3(uint32_t s) {
  const uint32_t exponent = s >> 3 & 15, mantissa = s & 7;
  const float value = exponent == 0 ? mantissa / 8.f : 1 + mantissa / 8.f;
  const int power = exponent == 0 ? -6 : static_cast<int>(exponent) - 7;
  return power < 0 ? value / static_cast<float>(1 << -power) : value * static_cast<float>(1 << power);
}

// A uniform number in [-1, 1) from 24 random bits: exact.
float Uniform(uint32_t random24) { return (static_cast<float>(random24) - 8388608.f) * (1.f / 8388608.f); }

uint16_t Bf16Bits(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace

uint64_t Mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

uint64_t IntegerSqrt(uint64_t n) {
  uint64_t root = 0;
  for (uint64_t bit = uint64_t{1} << 31; bit != 0; bit >>= 1) {
    const uint64_t trial = root | bit;
    if (trial * trial <= n) root = trial;
  }
  return root;
}

uint16_t HalfBits(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = bits >> 16 & 0x8000;
  const int exponent = static_cast<int>(bits >> 23 & 255) - 127 + 15;
  uint32_t mantissa = (bits & 0x7fffff) | 0x800000;
  if (exponent < -10) return sign;  // below half of the smallest denormal
  // Denormals lose more bits; the rounding carry moves into the exponent by itself.
  const int shift = exponent <= 0 ? 14 - exponent : 13;
  const uint32_t base = exponent <= 0 ? 0 : static_cast<uint32_t>(exponent - 1) << 10;
  const uint32_t half = 1u << (shift - 1), rest = mantissa & ((1u << shift) - 1);
  mantissa >>= shift;
  mantissa += rest + (mantissa & 1) > half;  // above half, or half and odd; no branch: it would go either way at random
  return static_cast<uint16_t>(sign | (base + mantissa));
}

StatusOr<SynthTensor> SynthTensor::Make(uint64_t seed, std::string_view name, TensorType type, uint64_t row_weights,
                                        const SynthSpread& spread) {
  SynthTensor tensor;
  const TensorTypeInfo* info = FindTensorType(static_cast<uint32_t>(type));
  LODE_CHECK(info != nullptr && row_weights % info->block_len == 0, "{} weights in rows of {}", row_weights, name);
  tensor.type_ = type;
  tensor.key_ = Mix64(seed * kGoldenGamma + XXH3_64bits(name.data(), name.size()));
  tensor.row_weights_ = row_weights;
  tensor.block_bytes_ = info->block_bytes;
  tensor.row_bytes_ = row_weights / info->block_len * info->block_bytes;
  tensor.spread_ = spread;
  if (type == TensorType::kF32 || type == TensorType::kF16 || type == TensorType::kBF16) return tensor;
  const BlockRule* rule = FindRule(type);
  if (rule == nullptr) return InvalidArgument("synthetic weights of type {} cannot be made", info->name);
  LODE_CHECK(spread.center == 0, "tensor {} of type {} cannot have a centre", name, info->name);
  const float base = spread.sigma / rule->unit_rms;
  for (int v = 0; v < kVariants; ++v) {
    const float scale = base * (0.75f + static_cast<float>(v) / 128.f);  // 0.75 to 1.24 times the base
    tensor.scale_[v] = HalfBits(scale);
    tensor.minimum_[v] = HalfBits(scale * rule->minimum_factor);
  }
  if (type == TensorType::kMXFP4) {
    // The largest power of two that does not exceed the base: its exponent field, one up for the format's halving.
    tensor.byte_scale_ = static_cast<uint8_t>((std::bit_cast<uint32_t>(base) >> 23) + 1);
  }
  if (type == TensorType::kNVFP4) {
    while (tensor.byte_scale_ < 126 && E4m3(tensor.byte_scale_ + 1u) <= base) ++tensor.byte_scale_;
    if (tensor.byte_scale_ == 0) tensor.byte_scale_ = 1;
  }
  return tensor;
}

void SynthTensor::FillRow(uint64_t row, uint8_t* out) const {
  const uint64_t words = (row_bytes_ + 7) / 8;
  uint64_t counter = key_ + (row * words + 1) * kGoldenGamma;
  const uint64_t whole = row_bytes_ / 8;
  for (uint64_t w = 0; w < whole; ++w, counter += kGoldenGamma) {
    const uint64_t word = Mix64(counter);
    std::memcpy(out + 8 * w, &word, 8);
  }
  if (whole != words) {
    const uint64_t word = Mix64(counter);
    std::memcpy(out + 8 * whole, &word, row_bytes_ - 8 * whole);
  }
  if (FindTensorType(static_cast<uint32_t>(type_))->block_len == 1) {
    FillFloats(out);
  } else {
    PatchBlocks(out);
  }
}

// Turns the random words in `out` into floats, in place.
void SynthTensor::FillFloats(uint8_t* out) const {
  const auto value = [this](uint32_t random24) { return spread_.center + spread_.half * Uniform(random24); };
  if (type_ == TensorType::kF32) {
    for (uint64_t i = 0; i < row_weights_; ++i) {
      uint32_t random;
      std::memcpy(&random, out + 4 * i, 4);
      const float number = value(random >> 8);
      std::memcpy(out + 4 * i, &number, 4);
    }
  } else if (type_ == TensorType::kBF16) {
    for (uint64_t i = 0; i < row_weights_; ++i) Put16(out + 2 * i, Bf16Bits(value(uint32_t{Get16(out + 2 * i)} << 8)));
  } else {
    for (uint64_t i = 0; i < row_weights_; ++i) Put16(out + 2 * i, HalfBits(value(uint32_t{Get16(out + 2 * i)} << 8)));
  }
}

void SynthTensor::PatchBlocks(uint8_t* out) const {
  const BlockRule& rule = *FindRule(type_);
  for (uint8_t *block = out, *end = out + row_bytes_; block != end; block += block_bytes_) {
    if (rule.scale_at >= 0) {
      const uint16_t random = Get16(block + rule.scale_at);
      Put16(block + rule.scale_at, scale_[Variant(random)] | (rule.random_sign ? Sign(random) : 0));
      if (rule.minimum_at >= 0) Put16(block + rule.minimum_at, minimum_[Variant(random)]);
    }
    switch (type_) {
      case TensorType::kQ4_K: case TensorType::kQ5_K: PackScales(block + 4); break;
      case TensorType::kQ2_K:  // scale and minimum nibble equal, 8..15
        for (int g = 0; g < 16; ++g) block[g] = static_cast<uint8_t>((8 + (block[g] & 7)) * 17);
        break;
      case TensorType::kIQ1_M: {
        const uint16_t bits = scale_[Variant(block[0])];
        for (int k = 0; k < 4; ++k) {
          block[49 + 2 * k] = static_cast<uint8_t>((block[49 + 2 * k] & 15) | (bits >> (4 * k) & 15) << 4);
        }
        break;
      }
      case TensorType::kMXFP4: block[0] = byte_scale_; break;
      case TensorType::kNVFP4: std::memset(block, byte_scale_, 4); break;
      default: break;
    }
  }
}

}  // namespace lode
