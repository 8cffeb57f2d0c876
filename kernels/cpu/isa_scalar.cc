// The kernel table for plain C++ for any x86-64.
// Compiled with its own -m flags (kernels/CMakeLists.txt) and chosen at run time by isa_select.cc.
// Exports one symbol and nothing weak, so that no other translation unit can end up with its code
// (checked by tests/tidy/symbols_test.py).
#define LODE_ISA_ENTRY KernelTableScalar
#define LODE_ISA_SIMD "kernels/cpu/simd/scalar.h"
#include "kernels/cpu/isa_table.inc"
