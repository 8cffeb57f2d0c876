// The scalar kernel table with the toy format in its list (tests/kernels/toy/CMakeLists.txt adds
// the row).
#define LODE_ISA_ENTRY ToyTableScalar
#define LODE_ISA_SIMD "kernels/cpu/simd/scalar.h"
// clang-format off
#include "tests/kernels/toy/toy_decode.h"  // before the table that names it
#include "kernels/cpu/isa_table.inc"
// clang-format on
