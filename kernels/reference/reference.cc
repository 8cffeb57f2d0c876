// See reference.h. Every formula is written out per weight index, as docs/design/formats.md states
// it.
#include "kernels/reference/reference.h"

#include <cmath>
#include <cstring>

namespace lode::reference {
namespace {

uint16_t U16(const uint8_t* p) { return static_cast<uint16_t>(p[0] + 256 * p[1]); }
float F16At(const uint8_t* p) { return FromF16(U16(p)); }

constexpr int kIq4Nl[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                            1,    13,   25,  38,  53,  69,  89,  113};

int Q4KScale(const uint8_t* p, uint32_t g) {
  return g < 4 ? p[g] & 63 : (p[4 + g] & 15) | (p[g - 4] >> 6) << 4;
}
int Q4KMin(const uint8_t* p, uint32_t g) {
  return g < 4 ? p[4 + g] & 63 : (p[4 + g] >> 4) | (p[g] >> 6) << 4;
}

float PlainFloat(Format format, const uint8_t* p) {
  if (format == Format::kF16) return F16At(p);
  const uint32_t bits = format == Format::kBF16 ? static_cast<uint32_t>(U16(p)) << 16
                                                : U16(p) | static_cast<uint32_t>(U16(p + 2)) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

}  // namespace

float FromF16(uint16_t h) {
  const int exponent = (h >> 10) & 31, mantissa = h & 1023;
  float magnitude;
  if (exponent == 31) {
    const uint32_t bits = 0x7f800000u | static_cast<uint32_t>(mantissa) << 13;
    std::memcpy(&magnitude, &bits, 4);
  } else if (exponent == 0) {
    magnitude = std::ldexp(static_cast<float>(mantissa), -24);
  } else {
    magnitude = std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
  }
  return h & 0x8000 ? -magnitude : magnitude;
}

Weight WeightAt(Format format, const uint8_t* b, uint32_t i) {
  switch (format) {
    case Format::kQ8_0:
      return {static_cast<int8_t>(b[2 + i]), 1, 0};
    case Format::kQ5_1: {
      const int nibble = i < 16 ? b[8 + i] & 15 : b[8 + i - 16] >> 4;
      const int high = (b[4 + i / 8] >> (i % 8)) & 1;
      return {nibble | high << 4, 1, 1};
    }
    case Format::kQ2_0:
      return {((b[2 + i / 4] >> (2 * (i % 4))) & 3) - 1, 1, 0};
    case Format::kIQ4_NL:
      return {kIq4Nl[i < 16 ? b[2 + i] & 15 : b[2 + i - 16] >> 4], 1, 0};
    case Format::kQ4_K: {
      const uint32_t g = i / 32;
      const uint8_t byte = b[16 + 32 * (g / 2) + i % 32];
      return {g % 2 ? byte >> 4 : byte & 15, Q4KScale(b + 4, g), Q4KMin(b + 4, g)};
    }
    default:
      return {0, 0, 0};
  }
}

BlockFactors FactorsOf(Format format, const uint8_t* b) {
  switch (format) {
    case Format::kQ5_1:
      return {F16At(b), F16At(b + 2)};
    case Format::kQ4_K:
      return {F16At(b), -F16At(b + 2)};
    default:
      return {F16At(b), 0};
  }
}

std::vector<float> Dequant(Format format, const uint8_t* w, size_t n) {
  const FormatInfo& info = Info(format);
  std::vector<float> out(n);
  for (size_t i = 0; i < n; ++i) {
    const uint8_t* b = w + i / info.block_len * info.block_bytes;
    if (info.act_block_len == 0) {
      out[i] = PlainFloat(format, b);
      continue;
    }
    const Weight weight = WeightAt(format, b, static_cast<uint32_t>(i % info.block_len));
    const float d = F16At(b);
    const float code = static_cast<float>(weight.code);
    if (format == Format::kQ4_K) {
      const float ds = d * static_cast<float>(weight.group_scale);
      const float dm = F16At(b + 2) * static_cast<float>(weight.group_min);
      const float product = ds * code;
      out[i] = product - dm;
    } else if (format == Format::kQ5_1) {
      const float product = d * code;
      out[i] = product + F16At(b + 2);
    } else {
      out[i] = d * code;
    }
  }
  return out;
}

QuantizedRow Quantize(const std::vector<float>& x, uint32_t block_len) {
  QuantizedRow r;
  for (size_t b = 0; b < x.size() / block_len; ++b) {
    float amax = 0;
    for (uint32_t i = 0; i < block_len; ++i) {
      const float v = x[b * block_len + i];
      if (!std::isfinite(v)) r.finite = false;
      if (std::fabs(v) > amax) amax = std::fabs(v);
    }
    float d = amax / 127.0f;
    if (d < std::ldexp(1.0f, -100)) d = 0;
    r.d.push_back(d);
    const float inv = d == 0 ? 0 : 1.0f / d;
    for (uint32_t i = 0; i < block_len; ++i) {
      const float scaled = x[b * block_len + i] * inv;
      // The default rounding mode is nearest, ties to even.
      r.q.push_back(r.finite ? static_cast<int8_t>(std::nearbyint(scaled)) : int8_t{0});
    }
  }
  for (size_t g = 0; g < r.q.size() / 16; ++g) {
    int sum = 0;
    for (size_t i = 0; i < 16; ++i) sum += r.q[16 * g + i];
    r.sum16.push_back(static_cast<int16_t>(sum));
  }
  return r;
}

float QuantizedDot(Format format, const uint8_t* w, const QuantizedRow& act, size_t n) {
  const FormatInfo& info = Info(format);
  const bool has_min = format == Format::kQ5_1 || format == Format::kQ4_K;
  float acc = 0;
  for (size_t b = 0; b < n / info.block_len; ++b) {
    const uint8_t* block = w + b * info.block_bytes;
    int64_t isum = 0, msum = 0;
    for (uint32_t i = 0; i < info.block_len; ++i) {
      const Weight weight = WeightAt(format, block, i);
      const int y = act.q[b * info.block_len + i];
      isum += weight.group_scale * weight.code * y;
      msum += weight.group_min * y;
    }
    const BlockFactors factors = FactorsOf(format, block);
    const float scale = factors.d * act.d[b];
    float t = static_cast<float>(isum) * scale;
    if (has_min) {
      const float min_scale = factors.m * act.d[b];
      const float min_term = static_cast<float>(msum) * min_scale;
      t = t + min_term;
    }
    acc = acc + t;
  }
  return acc;
}

float FloatDot(const float* a, const float* b, size_t n) {
  float partial[32] = {};
  for (size_t i = 0; i < n; ++i) partial[i % 32] = std::fma(a[i], b[i], partial[i % 32]);
  for (int half = 16; half >= 1; half /= 2) {
    for (int i = 0; i < half; ++i) partial[i] = partial[i] + partial[i + half];
  }
  return partial[0];
}

}  // namespace lode::reference
