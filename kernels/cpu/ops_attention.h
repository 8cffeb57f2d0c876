// Sparse attention: KV cells, pooled index keys, block scores, block selection and attention of one
// head over the selected cells. What the cache stores is what attention reads, also for the row's
// own window. Included by kernels/cpu/ops_impl.h. Formulas and orders: docs/design/arithmetic.md,
// "Operators". Roofline: one head reads 2 * head_dim values per cell; with 8-bit cells the
// widening, not memory, is the bound.
#pragma once

#include "kernels/canonical.h"
#include "kernels/ops.h"

namespace lode {
namespace {

// The quantisation rule of activations, with the whole head as one block.
bool StoreCellQ8(const float* x, size_t n, int8_t* q, float* scale) {
  float amax = 0;
  uint32_t bad = 0;
  for (size_t i = 0; i < n; ++i) {
    bad |= canonical::IsFinite(x[i]) ? 0u : 1u;
    amax = canonical::Max(amax, canonical::Abs(x[i]));
  }
  const float d = canonical::Div(amax, 127.0f);
  const bool tiny =
      d <
      7.888609052210118e-31f;  // 2^-100: its reciprocal times a code could leave the float range
  const float inverse = tiny ? 0.0f : canonical::Div(1.0f, d);
  const float magic = 12582912.0f;  // 1.5 * 2^23: the addition rounds to the nearest even integer
  for (size_t i = 0; i < n; ++i) {
    const float t = canonical::Add(canonical::Mul(x[i], inverse), magic);
    q[i] =
        static_cast<int8_t>(static_cast<int32_t>(canonical::BitsOf(t) - canonical::BitsOf(magic)));
  }
  *scale = tiny ? 0.0f : d;
  return bad == 0;
}

bool kv_store(const float* x, size_t n, KvType type, uint8_t* cell, float* scale) {
  if (type == KvType::kQ8) return StoreCellQ8(x, n, reinterpret_cast<int8_t*>(cell), scale);
  *scale = 1.0f;
  if (type == KvType::kF16) {
    uint16_t* h = reinterpret_cast<uint16_t*>(cell);
    for (size_t i = 0; i < n; ++i) h[i] = canonical::ToF16(x[i]);
  } else {
    float* f = reinterpret_cast<float*>(cell);
    for (size_t i = 0; i < n; ++i) f[i] = x[i];
  }
  return all_finite(x, n);
}

void kv_load(const uint8_t* cell, float scale, size_t n, KvType type, float* out) {
  if (type == KvType::kQ8) {
    const int8_t* q = reinterpret_cast<const int8_t*>(cell);
    for (size_t i = 0; i < n; ++i) out[i] = canonical::Mul(static_cast<float>(q[i]), scale);
  } else if (type == KvType::kF16) {
    const uint16_t* h = reinterpret_cast<const uint16_t*>(cell);
    for (size_t i = 0; i < n; ++i) out[i] = canonical::FromF16(h[i]);
  } else {
    const float* f = reinterpret_cast<const float*>(cell);
    for (size_t i = 0; i < n; ++i) out[i] = f[i];
  }
}

void index_pool(const float* const* raw, uint32_t count, size_t n, float* out) {
  const float scale = canonical::Div(1.0f, static_cast<float>(static_cast<int32_t>(count)));
  for (size_t i = 0; i < n; ++i) out[i] = raw[0][i];
  for (uint32_t r = 1; r < count; ++r) {
    for (size_t i = 0; i < n; ++i) out[i] = canonical::Add(out[i], raw[r][i]);
  }
  for (size_t i = 0; i < n; ++i) out[i] = canonical::Mul(out[i], scale);
}

void index_scores(const float* q, uint32_t heads, size_t dim, const float* keys, size_t n,
                  float* out) {
  const float scale = canonical::InvSqrt(static_cast<float>(static_cast<int32_t>(dim)));
  for (size_t j = 0; j < n; ++j) {
    float sum = 0;
    for (uint32_t h = 0; h < heads; ++h) {
      sum = canonical::Add(sum, canonical::Max(0.0f, dot(q + h * dim, keys + j * dim, dim)));
    }
    out[j] = canonical::Mul(sum, scale);
  }
}

// Order of a score as an unsigned number: larger score, larger number; NaN below everything; -0
// counts as +0.
inline uint32_t OrderedBits(float score) {
  const uint32_t bits = canonical::BitsOf(canonical::Add(score, 0.0f));
  if (score != score) return 0;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Radix selection, eight bits of the score per round: `threshold` grows from the top until only the
// k-th best score fits it. Of the blocks with exactly that score the lower ones are taken.
uint32_t select_blocks(const float* scores, uint32_t n, uint32_t k, uint32_t* out) {
  uint32_t threshold = 0;
  uint32_t equal_left = n;  // how many blocks with the threshold score are taken
  if (n > k) {
    uint32_t left =
        k;  // rank of the wanted score among those that match the threshold's fixed bits
    for (int shift = 24; shift >= 0; shift -= 8) {
      uint32_t histogram[256] = {};
      const uint64_t fixed = ~uint64_t{0} << (shift + 8);
      for (uint32_t j = 0; j < n; ++j) {
        const uint32_t bits = OrderedBits(scores[j]);
        if (((bits ^ threshold) & fixed) == 0) ++histogram[(bits >> shift) & 255u];
      }
      uint32_t digit = 255;
      while (histogram[digit] < left) left -= histogram[digit--];
      threshold |= digit << shift;
    }
    equal_left = left;
  }
  uint32_t count = 0;
  for (uint32_t j = 0; j < n; ++j) {
    const uint32_t bits = OrderedBits(scores[j]);
    if (n > k && bits < threshold) continue;
    if (n > k && bits == threshold) {
      if (equal_left == 0) continue;
      --equal_left;
    }
    out[count++] = j;
  }
  return count;
}

// Sum of up to kPartials * 2 values: 32 interleaved additions, tree join.
inline float SumChunk(const float* e, uint32_t n) {
  float p[canonical::kPartials];
  for (uint32_t i = 0; i < canonical::kPartials; ++i) p[i] = 0.0f;
  for (uint32_t i = 0; i < n; ++i)
    p[i % canonical::kPartials] = canonical::Add(p[i % canonical::kPartials], e[i]);
  return canonical::JoinPartials(p);
}

void attend(const AttendArgs& a) {
  const size_t dim = a.head_dim;
  alignas(64) float value[kAttendHeadDimMax];
  alignas(64) float chunk_sum[kAttendHeadDimMax];
  const float scale = canonical::InvSqrt(static_cast<float>(static_cast<int32_t>(a.head_dim)));
  // Scores and their exact maximum.
  float top = canonical::FromBits(0xff800000u);
  for (uint32_t i = 0; i < a.n_cells; ++i) {
    const uint32_t block = a.blocks[a.cells[i] / kKvBlockCells], cell = a.cells[i] % kKvBlockCells;
    const size_t at = a.block_stride * block;
    kv_load(a.k + at + a.cell_bytes * cell,
            *reinterpret_cast<const float*>(a.k_scales + at + sizeof(float) * cell), dim, a.type,
            value);
    a.scores[i] = canonical::Mul(dot(a.q, value, dim), scale);
    top = canonical::Max(top, a.scores[i]);
  }
  // Chunks of cells in ascending order: each has its own numerator and denominator, added to the
  // totals as it ends.
  float total = 0;
  for (size_t d = 0; d < dim; ++d) a.out[d] = 0.0f;
  for (uint32_t begin = 0; begin < a.n_cells; begin += kAttendChunk) {
    const uint32_t left = a.n_cells - begin, n = left < kAttendChunk ? left : kAttendChunk;
    float* e = a.scores + begin;
    for (uint32_t i = 0; i < n; ++i) e[i] = canonical::Exp(canonical::Sub(e[i], top));
    for (size_t d = 0; d < dim; ++d) chunk_sum[d] = 0.0f;
    for (uint32_t i = 0; i < n; ++i) {
      const uint32_t position = a.cells[begin + i];
      const uint32_t block = a.blocks[position / kKvBlockCells], cell = position % kKvBlockCells;
      const size_t at = a.block_stride * block;
      kv_load(a.v + at + a.cell_bytes * cell,
              *reinterpret_cast<const float*>(a.v_scales + at + sizeof(float) * cell), dim, a.type,
              value);
      for (size_t d = 0; d < dim; ++d) chunk_sum[d] = canonical::Fma(e[i], value[d], chunk_sum[d]);
    }
    total = canonical::Add(total, SumChunk(e, n));
    for (size_t d = 0; d < dim; ++d) a.out[d] = canonical::Add(a.out[d], chunk_sum[d]);
  }
  for (size_t d = 0; d < dim; ++d) {
    a.out[d] = canonical::Mul(canonical::Div(a.out[d], total), canonical::Sigmoid(a.gate[d]));
  }
}

}  // namespace
}  // namespace lode
