// The sampler's exponentials for every x86-64, and the choice between the two builds of them.
#define LODE_SAMPLER_MATH kSamplerMathBase
#include "gpu_worker/sampler_math.inc"

namespace lode {

const SamplerMath& GetSamplerMath() {
#if defined(__x86_64__)
  static const bool fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return fma ? kSamplerMathFma : kSamplerMathBase;
#else
  return kSamplerMathBase;
#endif
}

}  // namespace lode
