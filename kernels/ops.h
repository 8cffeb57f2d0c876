// Float operators of the model as each instruction set exports them: one list, one definition (kernels/cpu/ops_impl.h),
// compiled once per ISA with that ISA's dot product. An operator works on one row of a window and one unit (head, stream,
// value column range), so that a device may spread units over threads without changing a bit.
// Formulas and orders: docs/design/arithmetic.md. All vectors are contiguous floats unless said otherwise.
#pragma once

#include <cstddef>
#include <cstdint>

#include "shared/base/limits.h"

namespace lode {

inline constexpr uint32_t kDeltaColumns = 16;       // value columns of one delta_step: one 512-bit register
inline constexpr uint32_t kAttendChunk = 64;        // cells per chunk of an attention sum (frozen: bits depend on it)
inline constexpr uint32_t kAttendHeadDimMax = 512;  // sizes scratch of attend

// How a KV cell holds one head's vector. kQ8: int8 codes and one scale, the rule of activations with the head as block.
enum class KvType : uint32_t { kQ8 = 0, kF16 = 1, kF32 = 2 };
constexpr size_t KvValueBytes(KvType type) { return type == KvType::kQ8 ? 1 : (type == KvType::kF16 ? 2 : 4); }

// Attention of one query head of one row over its selected cells.
struct AttendArgs {
  const float* q;            // [head_dim]
  const float* gate;         // [head_dim], before the sigmoid
  uint32_t head_dim;
  KvType type;
  const uint32_t* cells;     // positions, ascending, at least one
  uint32_t n_cells;
  const uint32_t* blocks;    // block table of the sequence: position / kKvBlockCells -> block
  // Of this layer and KV head inside block 0; block b lies b * block_stride bytes further.
  const uint8_t *k, *v, *k_scales, *v_scales;
  size_t block_stride, cell_bytes;
  float* scores;             // scratch [n_cells]
  float* out;                // [head_dim]
};

// X(return type, name, (arguments))
#define LODE_OPS(X)                                                                                                      \
  /* sum of a[i]*b[i]: 32 interleaved fma partials, tree join. Any n. */                                                 \
  X(float, dot, (const float* a, const float* b, size_t n))                                                             \
  /* out = x * (1/sqrt(mean(x^2) + eps)) * w; out may be x */                                                           \
  X(void, rms_norm, (const float* x, const float* w, size_t n, float eps, float* out))                                  \
  /* out = x / sqrt(sum(x^2) + eps) * scale; out may be x */                                                            \
  X(void, l2_norm, (const float* x, size_t n, float eps, float scale, float* out))                                      \
  /* out = rms_norm(x) * sigmoid(z) */                                                                                  \
  X(void, rms_norm_gate, (const float* x, const float* w, const float* z, size_t n, float eps, float* out))             \
  /* hyper-connection read: u = silu(l / streams) */                                                                    \
  X(void, hc_gate, (const float* l, size_t n, float inv_streams, float* u))                                             \
  /* x[i] = (sum over streams ascending of sigmoid(up_s[i]) * norm_s[i]) / streams; stream s lies s * stride further */ \
  X(void, hc_mix, (const float* up, const float* norm, uint32_t streams, size_t stride, size_t n, float inv_streams,    \
                   float* x))                                                                                           \
  /* 2 * sigmoid(norm . w / streams), n = all streams */                                                                \
  X(float, hc_inject, (const float* norm, const float* w, size_t n, float inv_streams))                                 \
  /* hyper-connection write of one stream: r = inject * y + r (fma) */                                                  \
  X(void, hc_write, (const float* y, float inject, size_t n, float* r))                                                 \
  /* out = silu(gate) * up; out may be either */                                                                        \
  X(void, swiglu, (const float* gate, const float* up, size_t n, float* out))                                           \
  /* sigmoid(x . w) */                                                                                                  \
  X(float, sigmoid_dot, (const float* x, const float* w, size_t n))                                                     \
  /* sines and cosines of position * inv_freq[i] */                                                                     \
  X(void, rope_table, (uint32_t position, const float* inv_freq, uint32_t pairs, float* sin, float* cos))               \
  /* rotates pairs (i, i + pairs) of x */                                                                               \
  X(void, rope, (float* x, uint32_t pairs, const float* sin, const float* cos))                                         \
  /* out = silu(sum over taps ascending of w[t][i] * x[t][i], fma from 0); x[t] null: no such row yet */                 \
  X(void, conv_silu, (const float* const* x, uint32_t taps, const float* w, size_t w_stride, size_t n, float* out))     \
  /* beta = sigmoid(b), g = exp(ssm_a * softplus(a + ssm_dt)) */                                                        \
  X(void, delta_gates, (const float* b, const float* a, const float* ssm_a, const float* ssm_dt, size_t n, float* beta, \
                        float* g))                                                                                      \
  /* one DeltaNet step on kDeltaColumns value columns, s[key][column]; qn and out null: update the state only */        \
  X(void, delta_step, (float* s, uint32_t keys, const float* kn, const float* qn, const float* v, float beta, float g,  \
                       float* out))                                                                                     \
  /* one cell of one head; false when a value is not finite */                                                          \
  X(bool, kv_store, (const float* x, size_t n, KvType type, uint8_t* cell, float* scale))                               \
  X(void, kv_load, (const uint8_t* cell, float scale, size_t n, KvType type, float* out))                               \
  /* mean of `count` raw index keys, added in the order given */                                                        \
  X(void, index_pool, (const float* const* raw, uint32_t count, size_t n, float* out))                                  \
  /* out[j] = (sum over heads of relu(q_h . keys_j)) / sqrt(dim) */                                                     \
  X(void, index_scores, (const float* q, uint32_t heads, size_t dim, const float* keys, size_t n, float* out))          \
  /* the min(n, k) best blocks (score, then lower number; NaN last) in ascending order; returns how many */             \
  X(uint32_t, select_blocks, (const float* scores, uint32_t n, uint32_t k, uint32_t* out))                              \
  X(void, attend, (const AttendArgs& args))                                                                             \
  /* softmax of n logits, the k best by (probability bits, lower id), renormalised. scratch: n floats */                \
  X(void, route, (const float* logits, uint32_t n, uint32_t k, float* scratch, uint16_t* ids, float* weights))          \
  /* y = sum in routing order of weights[r] * experts[r] (fma from 0), then shared_gate * shared */                     \
  X(void, combine, (const float* const* experts, const float* weights, uint32_t k, const float* shared,                 \
                    float shared_gate, size_t n, float* y))                                                             \
  /* n-gram gate of one stream: out = sigmoid(signed root of key . query / sqrt(n)) * value */                          \
  X(void, ple_gate, (const float* key, const float* query, const float* value, size_t n, float* out))                   \
  /* r = (r + gated) + z */                                                                                             \
  X(void, ple_add, (const float* gated, const float* z, size_t n, float* r))                                            \
  X(bool, all_finite, (const float* x, size_t n))

}  // namespace lode
