// Case generators of the kernel tests: golden vectors from tests/data/formats, random and edge
// blocks of every computed format, activations with outliers. Shared by the tests and the kernel
// benchmark, so that what is timed is what is verified.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "kernels/canonical.h"
#include "kernels/kernel_table.h"
#include "kernels/reference/reference.h"

namespace lode::testing {

inline std::vector<Format> AllFormats() {
  std::vector<Format> all;
  for (uint32_t i = 0; i < kFormatCount; ++i) all.push_back(static_cast<Format>(i));
  return all;
}

// Tables this machine can run.
inline std::vector<const KernelTable*> RunnableTables() {
  const IsaChoice* choices;
  const size_t n = IsaChoices(&choices);
  std::vector<const KernelTable*> tables;
  for (size_t i = 0; i < n; ++i) {
    if (choices[i].supported) tables.push_back(choices[i].table);
  }
  return tables;
}

// One golden file: raw arrays by name.
class Golden {
 public:
  Golden(const std::string& folder, const std::string& type) {
    std::ifstream json(folder + "/" + type + ".json");
    meta_ = nlohmann::json::parse(json);
    std::ifstream bin(folder + "/" + type + ".bin", std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(bin), {});
  }
  template <class T>
  std::vector<T> Array(const std::string& name) const {
    const auto& array = meta_.at("arrays").at(name);
    size_t count = 1;
    for (const auto& dim : array.at("shape")) count *= dim.get<size_t>();
    std::vector<T> v(count);
    const size_t offset = array.at("offset").get<size_t>();
    if (offset + count * sizeof(T) > bytes_.size()) throw std::runtime_error(name + " is cut off");
    std::memcpy(v.data(), bytes_.data() + offset, count * sizeof(T));
    return v;
  }
  size_t Rows() const { return meta_.at("arrays").at("rows").at("shape").at(0).get<size_t>(); }

 private:
  nlohmann::json meta_;
  std::vector<char> bytes_;
};

// Binary16 scale of an ordinary weight block: 2^-9 .. 2^-3, 15 % negative.
inline uint16_t OrdinaryScale(std::mt19937& rng) {
  const uint16_t magnitude = static_cast<uint16_t>((6 + rng() % 6) << 10 | (rng() & 1023));
  return rng() % 100 < 15 ? magnitude | 0x8000 : magnitude;
}
// Zeros, denormals, the largest values: scales that must not be flushed or lose their sign.
inline uint16_t EdgeScale(std::mt19937& rng) {
  static const uint16_t kEdges[] = {0x0000, 0x8000, 0x0001, 0x8001, 0x03ff,
                                    0x83ff, 0x0400, 0x7bff, 0xfbff, 0x3c00};
  return kEdges[rng() % (sizeof(kEdges) / sizeof(kEdges[0]))];
}
inline void Put16(uint8_t* p, uint16_t x) {
  p[0] = static_cast<uint8_t>(x);
  p[1] = static_cast<uint8_t>(x >> 8);
}

// Where a block's binary16 scale lies.
inline size_t ScaleOffset(Format format) { return format == Format::kQ6_K ? 208 : 0; }

// n weights of random bytes with sane scales; with `edges`, a third of the blocks are edge cases:
// extreme scales, all codes 0x00, 0xff or 0x80 (-128 in Q8_0).
inline std::vector<uint8_t> RandomWeights(Format format, size_t n, uint32_t seed, bool edges) {
  const FormatInfo& info = Info(format);
  std::mt19937 rng(seed);
  std::vector<uint8_t> w(n / info.block_len * info.block_bytes);
  for (uint8_t& b : w) b = static_cast<uint8_t>(rng());
  if (info.act_block_len == 0) {
    for (size_t i = 0; i < n; ++i) {
      const float x = (static_cast<float>(rng() % 20001) - 10000.0f) / 4096.0f;
      const uint32_t bits = canonical::BitsOf(x);
      if (format == Format::kF32) std::memcpy(&w[4 * i], &bits, 4);
      if (format == Format::kF16)
        Put16(&w[2 * i], edges && rng() % 8 == 0 ? EdgeScale(rng) : canonical::ToF16(x));
      if (format == Format::kBF16) Put16(&w[2 * i], static_cast<uint16_t>(bits >> 16));
    }
    return w;
  }
  const bool two_halves =
      format == Format::kQ4_K || format == Format::kQ5_1 || format == Format::kQ5_K;
  const size_t scale_at = ScaleOffset(format);
  for (size_t b = 0; b < w.size(); b += info.block_bytes) {
    const bool edge = edges && rng() % 3 == 0;
    if (edge && rng() % 2 == 0) {
      static const int kFill[] = {0x00, 0xff, 0x80, 0x0f, 0xf0};
      std::memset(&w[b], kFill[rng() % 5], info.block_bytes);
    }
    Put16(&w[b + scale_at], edge ? EdgeScale(rng) : OrdinaryScale(rng));
    if (two_halves) Put16(&w[b + 2], edge ? EdgeScale(rng) : OrdinaryScale(rng));
  }
  return w;
}

// Gaussian activations, one outlier in 200 twenty times larger, one block of zeros when there is
// room.
inline std::vector<float> RandomActivations(size_t n, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0.0f, 1.0f);
  std::vector<float> x(n);
  for (float& v : x) v = normal(rng) * (rng() % 200 == 0 ? 20.0f : 1.0f);
  if (n >= 512) std::fill(x.begin() + 256, x.begin() + 512, 0.0f);
  return x;
}

inline ActRow AsActRow(const reference::QuantizedRow& r, const std::vector<float>& f) {
  return {r.q.data(), r.d.data(), r.sum16.data(), f.data()};
}

// Bits, with every NaN made one: which NaN comes out of an operation is not part of the arithmetic.
inline uint32_t Bits(float x) { return x != x ? 0x7fc00000u : canonical::BitsOf(x); }

}  // namespace lode::testing
