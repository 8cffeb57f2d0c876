// The scalar kernel table with the toy format in its list (tests/kernels/toy/CMakeLists.txt adds
// the row).
#define LODE_ISA_ENTRY ToyTableScalar
#define LODE_ISA_SIMD "kernels/cpu/simd/scalar.h"
#include "kernels/cpu/isa_table.inc"
#include "tests/kernels/toy/toy_decode.h"
