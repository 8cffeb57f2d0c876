// The usual way to sum block terms, for comparison only: every vector lane keeps its own fp32 sum
// and the lanes are added once at the end of a row. Fast and simple, but its bits depend on the
// register width. One activation row, AVX-512 with VNNI.
#pragma once

#include "kernels/kernel_table.h"

namespace lode::testing {

void FloatLanesQ8_0(const MatArgs& m);
void FloatLanesQ4_K(const MatArgs& m);

}  // namespace lode::testing
