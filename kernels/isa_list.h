// The one list of instruction sets: a kernel table, a choice of --isa and an index in messages
// between processes (shared-memory ABI) each. Slowest first; "auto" takes the last one that the
// machine supports. Whether a table can run is decided by kernels/cpu/isa_select.cc only; this
// header has no code, so that processes without kernels can name them too.
#pragma once

#include <cstdint>

namespace lode {

// X(name, Entry): the option's word and the one symbol of the translation unit.
#define LODE_ISAS(X)            \
  X(scalar, KernelTableScalar)  \
  X(avx2, KernelTableAvx2)      \
  X(avxvnni, KernelTableAvxVnni) \
  X(avx512, KernelTableAvx512)  \
  X(avx512vbmi, KernelTableAvx512Vbmi)

inline constexpr const char* kIsaNames[] = {
#define LODE_X(name, entry) #name,
    LODE_ISAS(LODE_X)
#undef LODE_X
};
inline constexpr uint32_t kIsaCount = sizeof(kIsaNames) / sizeof(kIsaNames[0]);

}  // namespace lode
