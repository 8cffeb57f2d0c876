// The kernel table for AVX-512 as in isa_avx512.cc, and VBMI.
// Compiled with its own -m flags (kernels/CMakeLists.txt) and chosen at run time by isa_select.cc.
// Exports one symbol and nothing weak, so that no other translation unit can end up with its code
// (checked by tests/tidy/symbols_test.py).
#define LODE_ISA_ENTRY KernelTableAvx512Vbmi
#define LODE_ISA_SIMD "kernels/cpu/simd/x86.h"
#define LODE_SIMD_NAME "avx512vbmi"
#define LODE_SIMD_512
#define LODE_SIMD_VBMI
#include "kernels/cpu/isa_table.inc"
