// Section "exact": every function of canonical.h (and the rotary sines) on about 16 million inputs,
// device against host, bit for bit (NaN counts as one value). Each case is a functor index ->
// result bits compiled by both compilers, so the inputs are the same by construction. Host work is
// spread over all cores.
#pragma once

#include <thread>

#include "kernels/canonical_trig.h"
#include "tests/device/term_order/harness.cuh"
#include "tests/device/term_order/intrinsics.cuh"

namespace lode::term_order {

#define LODE_BOTH __host__ __device__ __forceinline__

LODE_FN uint32_t Canon(float x) { return x != x ? 0x7fc00000u : canonical::BitsOf(x); }

// All signs and exponents evenly, denormals and special patterns included: 256-pattern steps with a
// random low byte, and in front 64 thresholds with their 63 neighbours each.
LODE_FN float Sweep(uint32_t i) {
  constexpr uint32_t kAround[] = {0x00000000u, 0x80000000u, 0x7f800000u, 0xff800000u, 0x7fc00000u,
                                  0xffc00000u, 0x7f7fffffu, 0xff7fffffu,  // 0 inf nan max
                                  0x00800000u, 0x80800000u, 0x007fffffu, 0x807fffffu, 0x3f800000u,
                                  0xbf800000u, 0x40000000u, 0xc0000000u,  // denormal edge, 1, 2
                                  0x3f3504f3u, 0x3fb504f3u, 0x3f000000u, 0xbf000000u, 0x41a00000u,
                                  0xc1a00000u, 0xc2d00000u, 0x42b20000u,  // sqrt2, .5, 20, -104, 89
                                  0x42b17218u, 0xc2aeac50u, 0xc2cff1b5u, 0x3f317218u, 0xbf317218u,
                                  0x4b000000u, 0x4b800000u, 0x4c800000u,  // overflow, ln2, 2^23..
                                  0x38800000u, 0x33800000u, 0x477fe000u, 0x477ff000u, 0x47800000u,
                                  0x387fc000u, 0xb8800000u, 0xc77ff000u,  // f16 edges
                                  0x3fc90fdbu, 0x40490fdbu, 0x40c90fdbu, 0x3f490fdbu, 0x4016cbe4u,
                                  0xbfc90fdbu, 0x49742400u, 0x4c7fffffu,  // multiples of pi/4
                                  0x34000000u, 0xb4000000u, 0x33ffffffu, 0x2b800000u, 0x7e800000u,
                                  0x00000001u, 0x80000001u, 0x00400000u, 0x40a00000u, 0xc0a00000u,
                                  0x41800000u, 0xc1800000u, 0x42000000u, 0xc2000000u, 0x447a0000u,
                                  0xc47a0000u};
  if (i < 4096) return canonical::FromBits(kAround[i / 64] + i % 64 - 32);
  return canonical::FromBits((i << 8) | (Random(11, i) & 0xffu));
}
// A second operand near the first in exponent, so that sums cancel and quotients round.
LODE_FN float Near(uint32_t i, float x) {
  const uint32_t r = Random(12, i);
  return canonical::FromBits((canonical::BitsOf(x) ^ (r & 0x807fffffu)) +
                             ((r >> 23) % 5 - 2) * 0x00800000u);
}

#define LODE_UNARY(Name)                                                                         \
  struct Name##Case {                                                                            \
    static constexpr const char* kName = #Name;                                                  \
    LODE_BOTH uint32_t operator()(uint32_t i) const { return Canon(canonical::Name(Sweep(i))); } \
  };
LODE_UNARY(Exp)
LODE_UNARY(Log)
LODE_UNARY(Log1p)
LODE_UNARY(Sigmoid)
LODE_UNARY(Silu)
LODE_UNARY(Softplus)
LODE_UNARY(Sqrt)
LODE_UNARY(InvSqrt)
#undef LODE_UNARY

struct AddCase {
  static constexpr const char* kName = "Add";
  LODE_BOTH uint32_t operator()(uint32_t i) const {
    return Canon(canonical::Add(Sweep(i), Near(i, Sweep(i))));
  }
};
struct MulCase {  // every exponent pair, so results overflow and underflow too
  static constexpr const char* kName = "Mul";
  LODE_BOTH uint32_t operator()(uint32_t i) const {
    return Canon(canonical::Mul(Sweep(i), canonical::FromBits(Random(13, i))));
  }
};
struct DivCase {
  static constexpr const char* kName = "Div";
  LODE_BOTH uint32_t operator()(uint32_t i) const {
    const float x = Sweep(i);
    return Canon(canonical::Div(x, i % 2 ? Near(i, x) : canonical::FromBits(Random(14, i))));
  }
};
// A third of the sums cancel to the product's rounding error, a third have nearby exponents, a
// third are arbitrary.
struct FmaCase {
  static constexpr const char* kName = "Fma";
  LODE_BOTH uint32_t operator()(uint32_t i) const {
    const float a = Sweep(i),
                b = canonical::FromBits(i % 2 ? Random(15, i)
                                              : 0x3f000000u + (Random(15, i) & 0x80ffffffu));
    float c = canonical::FromBits(Random(16, i));
    if (i % 3 == 0) c = -canonical::Mul(a, b);
    if (i % 3 == 1) c = Near(i, canonical::Mul(a, b));
    return Canon(canonical::Fma(a, b, c));
  }
};
struct FromF16Case {
  static constexpr const char* kName = "FromF16";
  LODE_BOTH uint32_t operator()(uint32_t i) const {
    return Canon(canonical::FromF16(static_cast<uint16_t>(i)));
  }
};
struct FromBf16Case {
  static constexpr const char* kName = "FromBf16";
  LODE_BOTH uint32_t operator()(uint32_t i) const {
    return Canon(canonical::FromBf16(static_cast<uint16_t>(i)));
  }
};
struct ToF16Case {
  static constexpr const char* kName = "ToF16";
  LODE_BOTH uint32_t operator()(uint32_t i) const { return canonical::ToF16(Sweep(i)); }
};
// The instruction the kernels use instead of FromF16: device result by hardware, host result by
// canonical.h.
struct HardwareHalfCase {
  static constexpr const char* kName = "hardware half->float";
  LODE_BOTH uint32_t operator()(uint32_t i) const {
#if defined(__CUDA_ARCH__)
    return Canon(HalfBitsToFloat(i & 0xffffu));
#else
    return Canon(canonical::FromF16(static_cast<uint16_t>(i)));
#endif
  }
};
struct GumbelCase {
  static constexpr const char* kName = "Gumbel";
  LODE_BOTH uint32_t operator()(uint32_t i) const {
    const uint64_t seed = static_cast<uint64_t>(Random(17, i / 1024)) << 32 | Random(18, i / 1024);
    return Canon(canonical::Gumbel(seed, Random(19, i / 64) & 0xfffffu, i & 0x3ffffu, i % 4));
  }
};
// The logarithms at every value UniformOpen can give (2^23 of them).
struct UniformCase {
  static constexpr const char* kName = "-log(-log(UniformOpen))";
  LODE_BOTH uint32_t operator()(uint32_t i) const {
    return Canon(-canonical::Log(-canonical::Log(canonical::UniformOpen(i << 9))));
  }
};
struct JoinCase {
  static constexpr const char* kName = "JoinPartials (32 inputs each)";
  LODE_BOTH uint32_t operator()(uint32_t i) const {
    float p[canonical::kPartials];
    for (int k = 0; k < canonical::kPartials; ++k) {
      // Most sets have comparable magnitudes (where the order shows), one in 16 arbitrary patterns.
      const uint32_t r = Random(20, static_cast<uint64_t>(i) * 32 + k);
      p[k] = canonical::FromBits(i % 16 == 0 ? r : (r & 0x83ffffffu) + 0x3d000000u);
    }
    return Canon(canonical::JoinPartials(p));
  }
};
// Finite angles below 2^26 in magnitude (the function's domain).
LODE_FN float Angle(uint32_t i) {
  const uint32_t bits = canonical::BitsOf(Sweep(i)), exponent = (bits >> 23) & 0xffu;
  return canonical::FromBits((bits & 0x807fffffu) | (exponent % 153) << 23);
}
struct SinCase {
  static constexpr const char* kName = "SinCos.sin";
  LODE_BOTH uint32_t operator()(uint32_t i) const { return Canon(canonical::SinCos(Angle(i)).sin); }
};
struct CosCase {
  static constexpr const char* kName = "SinCos.cos";
  LODE_BOTH uint32_t operator()(uint32_t i) const { return Canon(canonical::SinCos(Angle(i)).cos); }
};
struct RopeCase {
  static constexpr const char* kName = "RopeInvFreq";
  LODE_BOTH uint32_t operator()(uint32_t i) const {
    const double theta = 1000.0 + static_cast<double>(Random(21, i) % 20000000u);
    return Canon(canonical::RopeInvFreq(theta, i % 128, i % 3 == 0 ? 64 : i % 3 == 1 ? 128 : 256));
  }
};

template <class Case>
__global__ void CaseKernel(uint32_t* out, uint32_t n) {
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    out[i] = Case{}(i);
}

template <class Case>
bool RunCase(Section& section, DeviceBuffer<uint32_t>& out, uint32_t n) {
  LODE_TRY(section, out.Poison(), false);
  CaseKernel<Case><<<2048, 256>>>(out.get(), n);
  LODE_TRY(section, cudaGetLastError(), false);
  LODE_TRY(section, cudaDeviceSynchronize(), false);
  std::vector<uint32_t> device;
  LODE_TRY(section, out.Download(device, 0, n), false);
  const uint32_t n_threads = std::max(1u, std::thread::hardware_concurrency());
  std::vector<uint64_t> wrong(n_threads, 0);
  std::vector<uint32_t> first(n_threads, n);
  std::vector<std::thread> threads;
  for (uint32_t t = 0; t < n_threads; ++t) {
    threads.emplace_back([&, t] {
      const uint32_t from = static_cast<uint64_t>(n) * t / n_threads,
                     to = static_cast<uint64_t>(n) * (t + 1) / n_threads;
      uint64_t bad = 0;
      for (uint32_t i = from; i < to; ++i) {
        if (device[i] == Case{}(i)) continue;
        if (bad++ == 0) first[t] = i;
      }
      wrong[t] = bad;
    });
  }
  for (std::thread& thread : threads) thread.join();
  uint64_t total = 0;
  for (uint64_t w : wrong) total += w;
  const uint32_t at = *std::min_element(first.begin(), first.end());
  section.Value(std::string("mismatches ") + Case::kName, static_cast<double>(total));
  section.Line("%-30s %10u inputs %10llu mismatches", Case::kName, n,
               static_cast<unsigned long long>(total));
  char text[160] = "";
  if (at < n) {
    std::snprintf(text, sizeof text, "%s: first at %u, input %08x: device %08x, host %08x",
                  Case::kName, at, canonical::BitsOf(Sweep(at)), device[at], Case{}(at));
  }
  section.Expect(total == 0, text);
  return true;
}

inline void RunExact(Section& section) {
  constexpr uint32_t kInputs = 1u << 24;
  DeviceBuffer<uint32_t> out;
  LODE_TRY(section, out.Allocate(kInputs), );
  bool ok = true;
  const auto run = [&]<class... Cases>(uint32_t n) {
    ((ok = ok && RunCase<Cases>(section, out, n)), ...);
  };
  run.template operator()<ExpCase, LogCase, Log1pCase, SigmoidCase, SiluCase, SoftplusCase,
                          SqrtCase, InvSqrtCase>(kInputs);
  run.template
  operator()<AddCase, MulCase, DivCase, FmaCase, ToF16Case, GumbelCase, SinCase, CosCase>(kInputs);
  run.template operator()<UniformCase>(1u << 23);
  run.template operator()<JoinCase, RopeCase>(1u << 19);
  run.template operator()<FromF16Case, FromBf16Case, HardwareHalfCase>(1u << 16);
}

}  // namespace lode::term_order
