// Which kernel table this machine runs: CPUID for the instructions, XGETBV for the registers the
// operating system saves. Called once at start by every process that computes (`--isa` overrides),
// on its main thread; the answer never changes.
#include <cpuid.h>
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels/canonical.h"
#include "kernels/isa_list.h"
#include "kernels/kernel_table.h"

namespace lode {

#define LODE_X(name, Entry) const KernelTable* Entry();
LODE_ISAS(LODE_X)
#undef LODE_X

namespace {

// One requirement of a table: a CPUID bit and how to name it.
struct Feature {
  uint32_t leaf, subleaf, word, bit;  // word: 0 = eax, 1 = ebx, 2 = ecx
  const char* missing;
};
constexpr Feature kAvx2Features[] = {
    {1, 0, 2, 12, "the CPU has no FMA"},
    {1, 0, 2, 29, "the CPU has no F16C"},
    {7, 0, 1, 5, "the CPU has no AVX2"},
};
constexpr Feature kAvxVnniFeatures[] = {{7, 1, 0, 4, "the CPU has no AVX-VNNI"}};
constexpr Feature kAvx512Features[] = {
    {7, 0, 1, 16, "the CPU has no AVX-512 F"},    {7, 0, 1, 17, "the CPU has no AVX-512 DQ"},
    {7, 0, 1, 30, "the CPU has no AVX-512 BW"},   {7, 0, 1, 31, "the CPU has no AVX-512 VL"},
    {7, 0, 2, 11, "the CPU has no AVX-512 VNNI"},
};
constexpr Feature kAvx512VbmiFeatures[] = {{7, 0, 2, 1, "the CPU has no AVX-512 VBMI"},
                                           {7, 0, 2, 8, "the CPU has no GFNI"}};
constexpr uint32_t kOsxsaveBit = 27;     // leaf 1, ecx: XGETBV exists and the system uses XSAVE
constexpr uint64_t kAvxState = 0x06;     // XCR0: SSE and AVX registers
constexpr uint64_t kAvx512State = 0xe6;  // and opmask, upper halves, registers 16..31

bool HasBit(const Feature& f) {
  uint32_t r[4] = {};
  if (!__get_cpuid_count(f.leaf, f.subleaf, &r[0], &r[1], &r[2], &r[3])) return false;
  return (r[f.word] >> f.bit) & 1;
}

__attribute__((target("xsave"))) uint64_t SavedState() {
  return HasBit({1, 0, 2, kOsxsaveBit, ""}) ? _xgetbv(0) : 0;
}

// nullptr when all is there.
template <size_t kCount>
const char* Missing(const Feature (&features)[kCount]) {
  for (const Feature& f : features) {
    if (!HasBit(f)) return f.missing;
  }
  return nullptr;
}
const char* MissingForAvx2() {
  if ((SavedState() & kAvxState) != kAvxState)
    return "the operating system does not save AVX registers";
  return Missing(kAvx2Features);
}
const char* MissingForAvx512() {
  if (const char* missing = MissingForAvx2()) return missing;
  if ((SavedState() & kAvx512State) != kAvx512State)
    return "the operating system does not save AVX-512 registers";
  return Missing(kAvx512Features);
}

const char* MissingForAvxVnni() {
  const char* missing = MissingForAvx2();
  return missing != nullptr ? missing : Missing(kAvxVnniFeatures);
}
const char* MissingForAvx512Vbmi() {
  const char* missing = MissingForAvx512();
  return missing != nullptr ? missing : Missing(kAvx512VbmiFeatures);
}

// By table, in the order of LODE_ISAS.
const char* MissingFor(const KernelTable* table) {
  if (table == KernelTableAvx2()) return MissingForAvx2();
  if (table == KernelTableAvxVnni()) return MissingForAvxVnni();
  if (table == KernelTableAvx512()) return MissingForAvx512();
  if (table == KernelTableAvx512Vbmi()) return MissingForAvx512Vbmi();
  return nullptr;
}

IsaChoice Choice(const KernelTable* table) {
  const char* missing = MissingFor(table);
  if (table->arithmetic_version != kArithmeticVersion)
    missing = "the table was built for another arithmetic version; rebuild it";
  return {table, missing == nullptr, missing == nullptr ? "" : missing};
}

}  // namespace

size_t IsaChoices(const IsaChoice** out) {
  static const IsaChoice choices[] = {
#define LODE_X(name, Entry) Choice(Entry()),
      LODE_ISAS(LODE_X)
#undef LODE_X
  };
  *out = choices;
  return sizeof(choices) / sizeof(choices[0]);
}

const KernelTable* FindKernelTable(const char* name, const char** why_not) {
  const IsaChoice* choices;
  const size_t n = IsaChoices(&choices);
  const bool best = name == nullptr || *name == 0 || std::strcmp(name, "auto") == 0;
#define LODE_X(name, Entry) " " #name
  const char* reason =
      "no instruction set of this name is compiled in; there are" LODE_ISAS(LODE_X);
#undef LODE_X
  for (size_t i = n; i-- > 0;) {
    if (!best && std::strcmp(name, choices[i].table->name) != 0) continue;
    if (choices[i].supported) return choices[i].table;
    reason = choices[i].why_not;
  }
  if (why_not != nullptr) *why_not = reason;
  return nullptr;
}

bool FloatEnvironmentIsCanonical() {
  constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040, kRoundingMode = 0x6000;
  return (_mm_getcsr() & (kFlushToZero | kDenormalsAreZero | kRoundingMode)) == 0;
}

}  // namespace lode
