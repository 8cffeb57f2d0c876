// Host side of the matrix products: random quantised activation rows, their packed device layouts,
// and the scalar reference of the canonical dot product. Plain C++; compiled with
// -ffp-contract=off.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/canonical.h"
#include "tests/device/term_order/gemv.cuh"
#include "tests/device/term_order/harness.cuh"

namespace lode::term_order {

// One activation row quantised per block of `block_len` columns.
struct QuantRow {
  std::vector<int8_t> q;
  std::vector<float> d;
};
// Every seventh block is all zero with scale 0, as a zero activation block is.
inline std::vector<QuantRow> RandomActs(int n_acts, int block_len, uint32_t seed) {
  std::vector<QuantRow> rows(n_acts);
  for (int a = 0; a < n_acts; ++a) {
    rows[a].q.resize(kColumns);
    rows[a].d.resize(kColumns / block_len);
    for (int b = 0; b < kColumns / block_len; ++b) {
      const bool zero = Random(seed, 7000000 + a * 1000 + b) % 7 == 0;
      rows[a].d[b] = zero ? 0.0f : 0.01f * (1.5f + RandomUnit(seed + 1, a * 1000 + b));
      for (int i = b * block_len; i < (b + 1) * block_len; ++i) {
        rows[a].q[i] = zero ? 0
                            : static_cast<int8_t>(
                                  static_cast<int>(Random(seed + 2, a * 100000 + i) % 255) - 127);
      }
    }
  }
  return rows;
}

inline int Sum32(const QuantRow& row, int first) {
  int sum = 0;
  for (int i = 0; i < 32; ++i) sum += row.q[first + i];
  return sum;
}
inline int8_t PermutedQ8(const QuantRow& row, int block, int position) {
  return row.q[block * 32 + CodeAtPosition(block % 2 != 0, position)];
}
template <class T>
inline void Put(std::vector<uint8_t>& out, size_t at, T value) {
  std::memcpy(out.data() + at, &value, sizeof value);
}

// Layouts: see the kernels in gemv.cuh.
inline std::vector<uint8_t> PackQ8Dp4a(const std::vector<QuantRow>& acts, int n) {
  std::vector<uint8_t> out(n * (kColumns + kQ8Blocks * 4));
  for (int a = 0; a < n; ++a) {
    for (int b = 0; b < kQ8Blocks; ++b) {
      for (int i = 0; i < 32; ++i)
        Put(out, a * kColumns + (i / 16) * kQ8Blocks * 16 + b * 16 + i % 16,
            PermutedQ8(acts[a], b, i));
      Put(out, n * kColumns + (a * kQ8Blocks + b) * 4, acts[a].d[b]);
    }
  }
  return out;
}
inline std::vector<uint8_t> PackQ4Dp4a(const std::vector<QuantRow>& acts, int n) {
  std::vector<uint8_t> out((n * kQ4Blocks * (kQ4ActStride + 16 + 4) + 15) / 16 * 16);
  const size_t sums = n * kQ4Blocks * kQ4ActStride, scales = sums + n * kQ4Blocks * 16;
  for (int a = 0; a < n; ++a) {
    for (int b = 0; b < kQ4Blocks; ++b) {
      const int block = a * kQ4Blocks + b;
      std::memcpy(out.data() + block * kQ4ActStride, acts[a].q.data() + b * 256, 256);
      for (int g = 0; g < 8; ++g)
        Put(out, sums + block * 16 + g * 2, static_cast<int16_t>(Sum32(acts[a], b * 256 + g * 32)));
      Put(out, scales + block * 4, acts[a].d[b]);
    }
  }
  return out;
}
// Fragment words of 8 columns: [group of 32][lane][2]; lane = 4 * act + t holds words t and 4 + t
// of the act's group.
template <class CodeAt>
inline void PackFragments(std::vector<uint8_t>& out, int n, CodeAt code_at) {
  for (int group = 0; group < kColumns / 32; ++group) {
    for (int a = 0; a < n; ++a) {
      for (int i = 0; i < 32; ++i) {
        const int word = i / 4, lane = 4 * a + word % 4;
        Put(out, (group * 32 + lane) * 8 + word / 4 * 4 + i % 4, code_at(a, group, i));
      }
    }
  }
}
inline std::vector<uint8_t> PackQ8Mma(const std::vector<QuantRow>& acts, int n) {
  std::vector<uint8_t> out(kFragmentBytes + kQ8Blocks * kActsMax * 4, 0);
  PackFragments(out, n, [&](int a, int group, int i) { return PermutedQ8(acts[a], group, i); });
  for (int b = 0; b < kQ8Blocks; ++b) {
    for (int a = 0; a < n; ++a) Put(out, kFragmentBytes + (b * kActsMax + a) * 4, acts[a].d[b]);
  }
  return out;
}
inline std::vector<uint8_t> PackQ4Mma(const std::vector<QuantRow>& acts, int n) {
  const size_t scales = kFragmentBytes + kQ4Blocks * kActsMax * 16;
  std::vector<uint8_t> out(scales + kQ4Blocks * kActsMax * 4, 0);
  PackFragments(out, n, [&](int a, int group, int i) { return acts[a].q[group * 32 + i]; });
  for (int b = 0; b < kQ4Blocks; ++b) {
    for (int a = 0; a < n; ++a) {
      for (int g = 0; g < 8; ++g) {
        Put(out, kFragmentBytes + (b * kActsMax + a) * 16 + g * 2,
            static_cast<int16_t>(Sum32(acts[a], b * 256 + g * 32)));
      }
      Put(out, scales + (b * kActsMax + a) * 4, acts[a].d[b]);
    }
  }
  return out;
}
// Codes and scales of the prompt-row kernel (gemm.cuh).
inline void PackGemm(const std::vector<QuantRow>& acts, std::vector<int8_t>& codes,
                     std::vector<float>& scales) {
  codes.resize(acts.size() * kColumns);
  scales.resize(acts.size() * kQ8Blocks);
  for (size_t a = 0; a < acts.size(); ++a) {
    for (int b = 0; b < kQ8Blocks; ++b) {
      for (int i = 0; i < 32; ++i) {
        const int word = i / 4, at = (word % 4) * 8 + word / 4 * 4 + i % 4;
        codes[a * kColumns + b * 32 + at] = PermutedQ8(acts[a], b, i);
      }
      scales[b * acts.size() + a] = acts[a].d[b];
    }
  }
}

// ---- the canonical dot products, scalar ----
inline float HalfAt(const uint8_t* p) {
  return canonical::FromF16(static_cast<uint16_t>(p[0] | p[1] << 8));
}

// Codes are read through a signed pointer on purpose: g++ 12 with AVX-512 VNNI turns a sum of
// static_cast<int8_t>(unsigned byte) * int8 into vpdpbusd, which takes the byte as unsigned, and
// gives wrong sums.
inline const int8_t* SignedCodes(const uint8_t* p) { return reinterpret_cast<const int8_t*>(p); }

inline std::vector<float> Q8Terms(const uint8_t* row, const QuantRow& act) {
  std::vector<float> terms;
  for (int b = 0; b < kQ8Blocks; ++b) {
    const uint8_t* block = row + b * 34;
    const int8_t* codes = SignedCodes(block + 2);
    int isum = 0;
    for (int i = 0; i < 32; ++i) isum += codes[i] * act.q[b * 32 + i];
    terms.push_back(
        canonical::Mul(static_cast<float>(isum), canonical::Mul(HalfAt(block), act.d[b])));
  }
  return terms;
}
inline int64_t Q8IntegerSum(const uint8_t* row, const QuantRow& act) {
  int64_t sum = 0;
  for (int i = 0; i < kColumns; ++i) sum += SignedCodes(row)[i / 32 * 34 + 2 + i % 32] * act.q[i];
  return sum;
}
inline std::vector<float> Q4Terms(const uint8_t* row, const QuantRow& act) {
  using namespace canonical;
  std::vector<float> terms;
  for (int b = 0; b < kQ4Blocks; ++b) {
    const uint8_t* block = row + b * kQ4BlockBytes;
    const uint8_t* p = block + 4;
    int isum = 0, msum = 0;
    for (int g = 0; g < 8; ++g) {
      const int s = g < 4 ? p[g] & 63 : (p[4 + g] & 15) | (p[g - 4] >> 6) << 4;
      const int m = g < 4 ? p[4 + g] & 63 : (p[4 + g] >> 4) | (p[g] >> 6) << 4;
      int dot = 0;
      for (int i = 0; i < 32; ++i) {
        const int byte = block[16 + 32 * (g / 2) + i];
        dot += (g % 2 == 0 ? byte & 15 : byte >> 4) * act.q[b * 256 + g * 32 + i];
      }
      isum += s * dot;
      msum += m * Sum32(act, b * 256 + g * 32);
    }
    // t = float(isum) * (d_w d_a) + float(msum) * (m_w d_a) with m_w = -dmin: the sign moves into
    // the subtraction, exactly.
    const float d = HalfAt(block), dmin = HalfAt(block + 2);
    terms.push_back(Sub(Mul(static_cast<float>(isum), Mul(d, act.d[b])),
                        Mul(static_cast<float>(msum), Mul(dmin, act.d[b]))));
  }
  return terms;
}
inline float AddTerms(const std::vector<float>& terms) {
  float sum = 0.0f;
  for (float t : terms) sum = canonical::Add(sum, t);
  return sum;
}

}  // namespace lode::term_order
