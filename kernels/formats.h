// The one list of tensor types. Enum, names, sizes, readers, dispatch, tests and docs derive from its rows.
// Adding a computed format: one row in LODE_COMPUTED_FORMATS, its decode, its golden vectors. Nothing else.
// Layouts and formulas: docs/design/formats.md.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lode {

// X(name, GGUF id, weights per block, bytes per block). Every type a GGUF file may hold; ids not listed are refused.
#define LODE_TENSOR_TYPES(X) \
  X(F32, 0, 1, 4)            \
  X(F16, 1, 1, 2)            \
  X(Q4_0, 2, 32, 18)         \
  X(Q4_1, 3, 32, 20)         \
  X(Q5_0, 6, 32, 22)         \
  X(Q5_1, 7, 32, 24)         \
  X(Q8_0, 8, 32, 34)         \
  X(Q8_1, 9, 32, 36)         \
  X(Q2_K, 10, 256, 84)       \
  X(Q3_K, 11, 256, 110)      \
  X(Q4_K, 12, 256, 144)      \
  X(Q5_K, 13, 256, 176)      \
  X(Q6_K, 14, 256, 210)      \
  X(Q8_K, 15, 256, 292)      \
  X(IQ2_XXS, 16, 256, 66)    \
  X(IQ2_XS, 17, 256, 74)     \
  X(IQ3_XXS, 18, 256, 98)    \
  X(IQ1_S, 19, 256, 50)      \
  X(IQ4_NL, 20, 32, 18)      \
  X(IQ3_S, 21, 256, 110)     \
  X(IQ2_S, 22, 256, 82)      \
  X(IQ4_XS, 23, 256, 136)    \
  X(I8, 24, 1, 1)            \
  X(I16, 25, 1, 2)           \
  X(I32, 26, 1, 4)           \
  X(I64, 27, 1, 8)           \
  X(F64, 28, 1, 8)           \
  X(IQ1_M, 29, 256, 56)      \
  X(BF16, 30, 1, 2)          \
  X(TQ1_0, 34, 256, 54)      \
  X(TQ2_0, 35, 256, 66)      \
  X(MXFP4, 39, 32, 17)       \
  X(NVFP4, 40, 64, 36)       \
  X(Q1_0, 41, 128, 18)       \
  X(Q2_0, 42, 64, 18)

// X(name): the types the engine computes with, in the order of the kernel table (shared-memory ABI: append only).
#define LODE_COMPUTED_FORMATS(X) \
  X(F32)                         \
  X(F16)                         \
  X(BF16)                        \
  X(Q8_0)                        \
  X(Q4_K)                        \
  X(Q5_1)                        \
  X(Q2_0)                        \
  X(IQ4_NL)                      \
  X(Q4_0)                        \
  X(Q5_K)                        \
  X(Q6_K)                        \
  X(IQ2_XS)                      \
  X(IQ3_XXS)                     \
  X(IQ3_S)                       \
  X(IQ4_XS)

enum class TensorType : uint32_t {
#define LODE_X(name, id, len, bytes) k##name = id,
  LODE_TENSOR_TYPES(LODE_X)
#undef LODE_X
};

enum class Format : uint32_t {
#define LODE_X(name) k##name,
  LODE_COMPUTED_FORMATS(LODE_X)
#undef LODE_X
      kCount,
};
inline constexpr uint32_t kFormatCount = static_cast<uint32_t>(Format::kCount);

struct TensorTypeInfo {
  const char* name;
  TensorType type;
  uint32_t block_len;    // weights
  uint32_t block_bytes;  // bytes
};

inline constexpr TensorTypeInfo kTensorTypes[] = {
#define LODE_X(name, id, len, bytes) {#name, TensorType::k##name, len, bytes},
    LODE_TENSOR_TYPES(LODE_X)
#undef LODE_X
};

// nullptr when `gguf_id` is no type a file may hold.
constexpr const TensorTypeInfo* FindTensorType(uint32_t gguf_id) {
  for (const TensorTypeInfo& info : kTensorTypes) {
    if (static_cast<uint32_t>(info.type) == gguf_id) return &info;
  }
  return nullptr;
}

struct FormatInfo {
  const char* name;
  TensorType type;
  uint32_t block_len;
  uint32_t block_bytes;
  // Block length to which activations are quantised before meeting this format; 0 = they stay f32 (float weights).
  uint32_t act_block_len;
};

inline constexpr FormatInfo kFormats[kFormatCount] = {
#define LODE_X(name)                                                                  \
  {#name, TensorType::k##name, FindTensorType(uint32_t(TensorType::k##name))->block_len, \
   FindTensorType(uint32_t(TensorType::k##name))->block_bytes,                        \
   FindTensorType(uint32_t(TensorType::k##name))->block_len == 1                      \
       ? 0u                                                                           \
       : FindTensorType(uint32_t(TensorType::k##name))->block_len},
    LODE_COMPUTED_FORMATS(LODE_X)
#undef LODE_X
};
constexpr const FormatInfo& Info(Format format) { return kFormats[static_cast<uint32_t>(format)]; }

// Format::kCount when the type is known by size only.
constexpr Format FormatOf(TensorType type) {
  for (uint32_t i = 0; i < kFormatCount; ++i) {
    if (kFormats[i].type == type) return static_cast<Format>(i);
  }
  return Format::kCount;
}

// Bytes of one row of `n` weights; 0 when n is not a whole number of blocks.
constexpr size_t RowBytes(Format format, size_t n) {
  const FormatInfo& info = Info(format);
  return n % info.block_len ? 0 : n / info.block_len * info.block_bytes;
}

}  // namespace lode
