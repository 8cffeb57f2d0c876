// Activations to int8 on the device, by the rule of docs/design/arithmetic.md: a warp treats 256
// columns of one row, 8 consecutive ones per lane, so that blocks of 32, 64 and 256 are 4, 8 and 32
// neighbouring lanes and every form comes out of one set of registers. Any kernel that produces an
// activation can end with it. Included by kernels that write activations.
#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/cuda/platform.h"

namespace lode::cuda {

inline constexpr uint32_t kWarpColumns = 256;
inline constexpr uint32_t kLaneColumns = 8;
inline constexpr float kTiniestScale = 7.888609052210118e-31f;  // 2^-100
inline constexpr uint32_t kInfinityBits = 0x7f800000u;

LODE_DEVICE uint32_t Larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

// Eight values from p on; those beyond `left` are zero. whole: p is 16-byte aligned.
struct Eight {
  float v[kLaneColumns];
};
LODE_DEVICE Eight LoadEight(const float* p, uint32_t left, bool whole) {
  Eight out;
  if (whole && left >= kLaneColumns) {
    const Word4* from = reinterpret_cast<const Word4*>(p);
    LODE_UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
      const Word4 w = from[i];
      out.v[4 * i] = canonical::FromBits(w.x), out.v[4 * i + 1] = canonical::FromBits(w.y);
      out.v[4 * i + 2] = canonical::FromBits(w.z), out.v[4 * i + 3] = canonical::FromBits(w.w);
    }
    return out;
  }
  LODE_UNROLL
  for (uint32_t i = 0; i < kLaneColumns; ++i) out.v[i] = i < left ? p[i] : 0.0f;
  return out;
}
LODE_DEVICE void StoreEight(float* p, const Eight& x, uint32_t left, bool whole) {
  if (whole && left >= kLaneColumns) {
    Word4* to = reinterpret_cast<Word4*>(p);
    LODE_UNROLL
    for (uint32_t i = 0; i < 2; ++i)
      to[i] = Word4{canonical::BitsOf(x.v[4 * i]), canonical::BitsOf(x.v[4 * i + 1]),
                    canonical::BitsOf(x.v[4 * i + 2]), canonical::BitsOf(x.v[4 * i + 3])};
    return;
  }
  LODE_UNROLL
  for (uint32_t i = 0; i < kLaneColumns; ++i) {
    if (i < left) p[i] = x.v[i];
  }
}

// Where this lane's codes go.
struct LanePlace {
  uint32_t row, column;
  bool inside;  // column < the row's length
};

LODE_DEVICE void StoreForm(const ActForm& form, uint32_t len, const LanePlace& at,
                           const float (&v)[kLaneColumns], uint32_t amax_bits) {
  using namespace canonical;
  const float scale = Div(FromBits(amax_bits), 127.0f);
  const float d = scale < kTiniestScale ? 0.0f : scale;
  const float inverse = d == 0.0f ? 0.0f : Div(1.0f, d);
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: the addition rounds to the nearest integer
  uint32_t word[2] = {0, 0};
  int32_t sum = 0;
  LODE_UNROLL
  for (uint32_t i = 0; i < kLaneColumns; ++i) {
    const uint32_t code = BitsOf(Add(Mul(v[i], inverse), kMagic)) - BitsOf(kMagic);
    word[i / 4] |= (code & 255u) << (8 * (i % 4));
    sum += static_cast<int32_t>(code << 24) >> 24;
  }
  const int32_t sum16 = sum + ShuffleXor(sum, 1);
  uint8_t* row = form.base + static_cast<size_t>(at.row) * form.stride;
  if (at.inside) {
    *reinterpret_cast<Word2*>(row + at.column) = Word2{word[0], word[1]};
    if (at.column % len == 0) reinterpret_cast<float*>(row + form.d_offset)[at.column / len] = d;
    if (at.column % 16 == 0)
      reinterpret_cast<int16_t*>(row + form.sum_offset)[at.column / 16] =
          static_cast<int16_t>(sum16);
  }
  if (form.crumb_offset == 0) return;
  // Sixteen columns are the words w0 w1 of an even lane and w2 w3 of its neighbour; word j of the
  // arranged order holds byte j of each.
  const uint32_t other[2] = {ShuffleXor(word[0], 1), ShuffleXor(word[1], 1)};
  const bool upper = at.column % 16 != 0;
  const uint32_t w0 = upper ? other[0] : word[0], w1 = upper ? other[1] : word[1];
  const uint32_t w2 = upper ? word[0] : other[0], w3 = upper ? word[1] : other[1];
  const uint32_t pick = upper ? 0x7362u : 0x5140u;
  const uint32_t a = BytePermute(w0, w1, pick), b = BytePermute(w2, w3, pick);
  if (at.inside) {
    *reinterpret_cast<Word2*>(row + form.crumb_offset + at.column) =
        Word2{BytePermute(a, b, 0x5410u), BytePermute(a, b, 0x7632u)};
  }
}

// Bits of the largest magnitude of 32 columns: four neighbouring lanes.
LODE_DEVICE uint32_t LargestOf32(const float (&v)[kLaneColumns]) {
  uint32_t amax = 0;
  LODE_UNROLL
  for (uint32_t i = 0; i < kLaneColumns; ++i)
    amax = Larger(amax, canonical::BitsOf(v[i]) & 0x7fffffffu);
  amax = Larger(amax, ShuffleXor(amax, 1));
  return Larger(amax, ShuffleXor(amax, 2));
}

// Quantises 8 values per lane; all lanes of the warp call it for the same row. Lanes that are not
// inside pass zeros. False in every lane when a value of the warp is not finite.
LODE_DEVICE bool StoreForms(const ActForms& forms, const LanePlace& at,
                            const float (&v)[kLaneColumns]) {
  const uint32_t of32 = LargestOf32(v);
  const uint32_t of64 = Larger(of32, ShuffleXor(of32, 4));
  const uint32_t of128 = Larger(of64, ShuffleXor(of64, 8));
  const uint32_t of256 = Larger(of128, ShuffleXor(of128, 16));
  if (forms.form[0].base != nullptr) StoreForm(forms.form[0], 32, at, v, of32);
  if (forms.form[1].base != nullptr) StoreForm(forms.form[1], 64, at, v, of64);
  if (forms.form[2].base != nullptr) StoreForm(forms.form[2], 256, at, v, of256);
  return of256 < kInfinityBits;
}

LODE_DEVICE void ReportNotFinite(const CheckArgs& check, uint32_t row) {
  if (check.logits_only && check.window->params.rows[row].needs_logits == 0) return;
  AtomicMin(&check.window->not_finite, static_cast<uint64_t>(check.layer) << 32 |
                                           static_cast<uint64_t>(check.part) << 16 | row);
}
// One warp's share of a finished activation: forms, check, report.
LODE_DEVICE void FinishColumns(const ActForms& forms, const CheckArgs& check, const LanePlace& at,
                               uint32_t window_row, const float (&v)[kLaneColumns]) {
  const bool finite = StoreForms(forms, at, v);
  if (!finite && ThreadId() % 32 == 0) ReportNotFinite(check, window_row);
}

// A block's share: v[n] in shared memory are columns first_column .. of one row; all threads come
// here after a barrier. Segments of 256 columns go to the block's warps in turn.
LODE_DEVICE void FinishShared(const ActForms& forms, const CheckArgs& check, uint32_t form_row,
                              uint32_t window_row, uint32_t first_column, uint32_t n,
                              const float* v) {
  for (uint32_t base = ThreadId() / 32 * kWarpColumns; base < n;
       base += ThreadCount() / 32 * kWarpColumns) {
    const uint32_t at = base + ThreadId() % 32 * kLaneColumns;
    float lane[kLaneColumns];
    LODE_UNROLL
    for (uint32_t i = 0; i < kLaneColumns; ++i) lane[i] = at + i < n ? v[at + i] : 0.0f;
    FinishColumns(forms, check, {form_row, first_column + at, at < n}, window_row, lane);
  }
}

}  // namespace lode::cuda
