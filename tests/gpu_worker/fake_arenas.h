// Arenas of a made-up model in plain memory: random block bytes of whole matrices, cut into rows
// over N nodes as the CPU workers would do it. For tests of the tier and the lanes.
#pragma once

#include <array>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "gpu_worker/arena_set.h"

namespace lode {

struct FakeShape {
  uint32_t layers = 3, experts = 8, hidden = 64, width = 32;
  // By layer: formats of layer l are those of l % size.
  std::vector<std::array<Format, 3>> formats = {{Format::kQ8_0, Format::kQ8_0, Format::kQ8_0}};
};

class FakeArenas {
 public:
  explicit FakeArenas(const FakeShape& shape, uint32_t nodes, uint32_t seed = 1) : shape_(shape) {
    for (uint32_t node = 0; node < nodes; ++node) AddNode(node, nodes, seed);
  }
  std::vector<ArenaLayout> layouts() const { return layouts_; }
  std::vector<const uint8_t*> data() const {
    std::vector<const uint8_t*> all;
    for (const auto& d : data_) all.push_back(d.get());
    return all;
  }
  // The whole matrix of an expert, as a file would hold it.
  std::vector<uint8_t> Whole(uint32_t layer, uint32_t expert, uint32_t matrix,
                             uint32_t seed = 1) const {
    const Format format = shape_.formats[layer % shape_.formats.size()][matrix];
    const uint32_t rows = matrix == 2 ? shape_.hidden : shape_.width,
                   columns = matrix == 2 ? shape_.width : shape_.hidden;
    std::vector<uint8_t> bytes(RowBytes(format, columns) * rows);
    std::mt19937 rng(seed * 7919 + (layer * 1031 + expert) * 3 + matrix);
    FillBlocks(format, &rng, &bytes);
    return bytes;
  }

 private:
  static uint64_t Align(uint64_t n) { return (n + 63) / 64 * 64; }

  // Random codes with sane scales: the first two bytes of these formats' blocks are an fp16 scale
  // (F32: whole numbers / 64).
  static void FillBlocks(Format format, std::mt19937* rng, std::vector<uint8_t>* bytes) {
    if (format == Format::kF32) {
      for (size_t i = 0; i < bytes->size(); i += 4) {
        const float w = static_cast<float>(static_cast<int>((*rng)() % 201) - 100) / 640.0f;
        std::memcpy(bytes->data() + i, &w, 4);
      }
      return;
    }
    for (uint8_t& b : *bytes) b = static_cast<uint8_t>((*rng)());
    const uint32_t block = Info(format).block_bytes;
    for (size_t i = 0; i < bytes->size(); i += block) {
      const uint16_t scale = static_cast<uint16_t>(0x1800 + (*rng)() % 0x400);  // 2^-9 .. 2^-8
      std::memcpy(bytes->data() + i, &scale, 2);
      // Q4_K and Q5_1 have a second fp16 (the minimum's scale) behind it.
      if (format == Format::kQ4_K || format == Format::kQ5_1)
        std::memcpy(bytes->data() + i + 2, &scale, 2);
    }
  }

  void AddNode(uint32_t node, uint32_t nodes, uint32_t seed) {
    ArenaLayout layout = {node, nodes, shape_.experts, shape_.hidden, shape_.width, {}, 0};
    uint64_t at = Align(sizeof(ArenaHeader) + sizeof(ArenaExpert) * shape_.layers * shape_.experts);
    for (uint32_t l = 0; l < shape_.layers; ++l) {
      const auto& f = shape_.formats[l % shape_.formats.size()];
      LayerExperts e = {};
      e.gate = f[0], e.up = f[1], e.down = f[2];
      e.gate_row_bytes = RowBytes(f[0], shape_.hidden);
      e.up_row_bytes = RowBytes(f[1], shape_.hidden);
      e.down_row_bytes = RowBytes(f[2], shape_.width);
      e.base = at;
      e.up_offset = Align(uint64_t{layout.width_rows().size()} * e.gate_row_bytes);
      e.down_offset = e.up_offset + Align(uint64_t{layout.width_rows().size()} * e.up_row_bytes);
      e.stride = e.down_offset + Align(uint64_t{layout.hidden_rows().size()} * e.down_row_bytes);
      at += e.stride * shape_.experts;
      layout.layers.push_back(e);
    }
    layout.bytes = at;
    data_.emplace_back(new (std::align_val_t(64)) uint8_t[at]());
    uint8_t* data = data_.back().get();
    new (data) ArenaHeader{};
    for (uint32_t l = 0; l < shape_.layers; ++l) {
      const LayerExperts& e = layout.layers[l];
      for (uint32_t x = 0; x < shape_.experts; ++x) {
        uint8_t* base = data + layout.offset(l, x);
        Cut(Whole(l, x, 0, seed), layout.width_rows(), e.gate_row_bytes, base);
        Cut(Whole(l, x, 1, seed), layout.width_rows(), e.up_row_bytes, base + e.up_offset);
        Cut(Whole(l, x, 2, seed), layout.hidden_rows(), e.down_row_bytes, base + e.down_offset);
      }
    }
    reinterpret_cast<ArenaHeader*>(data)->experts_complete =
        uint64_t{shape_.layers} * shape_.experts;
    layouts_.push_back(layout);
  }
  static void Cut(const std::vector<uint8_t>& whole, RowRange rows, uint32_t row_bytes,
                  uint8_t* out) {
    std::memcpy(out, whole.data() + uint64_t{rows.begin} * row_bytes,
                uint64_t{rows.size()} * row_bytes);
  }
  struct Delete {
    void operator()(uint8_t* p) const { ::operator delete[](p, std::align_val_t(64)); }
  };

  FakeShape shape_;
  std::vector<ArenaLayout> layouts_;
  std::vector<std::unique_ptr<uint8_t[], Delete>> data_;
};

}  // namespace lode
