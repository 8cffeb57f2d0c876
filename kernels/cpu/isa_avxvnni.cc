// The kernel table for AVX2, FMA, F16C and AVX-VNNI (client CPUs without AVX-512).
// Compiled with its own -m flags (kernels/CMakeLists.txt) and chosen at run time by isa_select.cc.
// Exports one symbol and nothing weak, so that no other translation unit can end up with its code
// (checked by tests/tidy/symbols_test.py).
#define LODE_ISA_ENTRY KernelTableAvxVnni
#define LODE_ISA_SIMD "kernels/cpu/simd/x86.h"
#define LODE_SIMD_NAME "avxvnni"
#define LODE_SIMD_VNNI
#include "kernels/cpu/isa_table.inc"
