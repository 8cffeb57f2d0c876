// The sampler's exponentials with AVX2 and FMA (flags in CMakeLists.txt): same bits, a register of
// tokens at a time.
#define LODE_SAMPLER_MATH kSamplerMathFma
#include "gpu_worker/sampler_math.inc"
