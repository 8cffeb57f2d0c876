// See reference.h. Every formula is written out per weight index, as docs/design/formats.md states
// it.
#include "kernels/reference/reference.h"

#include <cmath>
#include <cstring>

#include "kernels/reference/grid_reference.h"

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
    case Format::kQ4_0:
      return {(i < 16 ? b[2 + i] & 15 : b[2 + i - 16] >> 4) - 8, 1, 0};
    case Format::kQ5_K: {
      const uint32_t g = i / 32;
      const uint8_t byte = b[48 + 32 * (g / 2) + i % 32];
      const int high = (b[16 + i % 32] >> g) & 1;
      return {(g % 2 ? byte >> 4 : byte & 15) + 16 * high, Q4KScale(b + 4, g), Q4KMin(b + 4, g)};
    }
    case Format::kQ6_K: {
      const uint32_t h = i / 128, t = i % 128 / 32, l = i % 32;
      const uint8_t byte = b[64 * h + 32 * (t % 2) + l];
      const int top = (b[128 + 32 * h + l] >> (2 * t)) & 3;
      return {(t < 2 ? byte & 15 : byte >> 4) + 16 * top - 32, static_cast<int8_t>(b[192 + i / 16]),
              0};
    }
    case Format::kIQ4_XS: {
      const uint32_t g = i / 32;
      const int low = g % 2 ? b[4 + g / 2] >> 4 : b[4 + g / 2] & 15;
      const int scale = low + 16 * ((U16(b + 2) >> (2 * g)) & 3) - 32;
      const uint8_t byte = b[8 + 16 * g + i % 16];
      return {kIq4Nl[i % 32 < 16 ? byte & 15 : byte >> 4], scale, 0};
    }
    case Format::kIQ2_XS: {
      const uint16_t v = U16(b + 2 + 2 * (i / 8));
      const uint8_t scales = b[66 + i / 32];
      const int scale = i % 32 < 16 ? scales & 15 : scales >> 4;
      const int magnitude = Iq2XsMagnitude(v % 512, i % 8);
      return {EvenSign(v / 512, i % 8) ? -magnitude : magnitude, 2 * scale + 1, 0};
    }
    case Format::kIQ3_XXS: {
      const uint8_t* a = b + 66 + 4 * (i / 32);
      const uint32_t word = U16(a) | static_cast<uint32_t>(U16(a + 2)) << 16;
      const int magnitude = Iq3XxsMagnitude(b[2 + i / 4], i % 4);
      const bool negative = EvenSign((word >> (7 * (i % 32 / 8))) % 128, i % 8);
      return {negative ? -magnitude : magnitude, 2 * static_cast<int>(word >> 28) + 1, 0};
    }
    case Format::kIQ3_S: {
      const uint32_t n = i / 4;
      const uint32_t index = b[2 + n] + 256 * ((b[66 + n / 8] >> (n % 8)) & 1u);
      const uint8_t scales = b[106 + i / 64];
      const int scale = i % 64 < 32 ? scales & 15 : scales >> 4;
      const int magnitude = Iq3SMagnitude(index, i % 4);
      return {(b[74 + i / 8] >> (i % 8)) & 1 ? -magnitude : magnitude, 2 * scale + 1, 0};
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
    case Format::kQ5_K:
      return {F16At(b), -F16At(b + 2)};
    case Format::kQ6_K:
      return {F16At(b + 208), 0};
    case Format::kIQ2_XS:
      return {F16At(b) * 0.125f, 0};
    case Format::kIQ3_XXS:
      return {F16At(b) * 0.25f, 0};
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
    const float d = FactorsOf(format, b).d;
    const float code = static_cast<float>(weight.code);
    if (format == Format::kQ4_K || format == Format::kQ5_K) {
      const float ds = d * static_cast<float>(weight.group_scale);
      const float dm = F16At(b + 2) * static_cast<float>(weight.group_min);
      const float product = ds * code;
      out[i] = product - dm;
    } else if (format == Format::kQ5_1) {
      const float product = d * code;
      out[i] = product + F16At(b + 2);
    } else {
      const float ds = d * static_cast<float>(weight.group_scale);
      out[i] = ds * code;
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
  const bool has_min =
      format == Format::kQ5_1 || format == Format::kQ4_K || format == Format::kQ5_K;
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
