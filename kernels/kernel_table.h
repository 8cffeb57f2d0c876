// The whole ABI of an instruction-set library: one struct of function pointers. Each ISA's translation unit exports exactly one
// symbol (a function returning its table); everything else in it is internal. The table is chosen once at start by CPUID, or
// by name (`--isa`); every table gives the same bits (docs/design/arithmetic.md), so tables may be mixed freely.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/formats.h"
#include "kernels/ops.h"

namespace lode {

// One activation row as a weight format wants it. Quantised formats read q, d, sum16; float formats and the float reference
// mode read f. Pointers that the format does not need may be null. n columns, n % 16 == 0 for quantised formats.
struct ActRow {
  const int8_t* q = nullptr;       // [n] codes in -127..127
  const float* d = nullptr;        // [n / block_len] scales
  const int16_t* sum16 = nullptr;  // [n / 16] sums of 16 codes (offsets and minima of weights)
  const float* f = nullptr;        // [n] unquantised
};

// y[a][r] = W[r] . act[a] for n_rows consecutive rows of W and up to kWindowRowsMax activation rows sharing one decode.
struct MatArgs {
  const uint8_t* w;      // first row, GGUF block bytes, no alignment
  size_t row_bytes;
  uint32_t n_rows;
  uint32_t n_cols;       // whole blocks
  const ActRow* acts;    // [n_acts]
  uint32_t n_acts;       // 1..8
  float* const* out;     // [n_acts] -> [n_rows]
  // Weights that this thread reads after these, rows like these, or null: asked for once, when the
  // last rows begin, and fetched into the cache meanwhile. Null: nothing is known.
  const uint8_t* (*next)(const void* context) = nullptr;
  const void* next_context = nullptr;
};
using MatFn = void (*)(const MatArgs& args);

// Lets `next()`, which lives as long as the call does, tell what is read after it.
template <class Function>
void SetNext(const Function* next, MatArgs* args) {
  args->next = [](const void* context) -> const uint8_t* {
    return (*static_cast<const Function*>(context))();
  };
  args->next_context = next;
}

// Every table works on groups of rows, at most this many. A call whose n_rows is no multiple pays for
// a whole last group, one with fewer rows for copying them too: cut work at multiples of it.
inline constexpr uint32_t kRowGranule = 16;

struct KernelTable {
  const char* name;             // "scalar", "avx2", "avx512", ...
  uint32_t arithmetic_version;  // == kArithmeticVersion or the table is refused
  // Integer products (float formats: float products), by Format.
  MatFn mat[kFormatCount];
  // Float reference mode: every format dequantised, multiplied with ActRow::f by the canonical float dot.
  MatFn mat_float[kFormatCount];
  // Exact dequantisation of n weights (whole blocks) to float.
  void (*dequant[kFormatCount])(const uint8_t* w, size_t n, float* out);
  // Quantises x[n] to int8 per block of block_len (32, 64, 256): fills q[n], d[n/block_len], sum16[n/16].
  // False when a value is not finite (outputs are then unspecified).
  bool (*quantize)(const float* x, size_t n, uint32_t block_len, int8_t* q, float* d, int16_t* sum16);
  // Float operators of the model, by the list in kernels/ops.h.
#define LODE_X(ret, name, args) ret(*name) args;
  LODE_OPS(LODE_X)
#undef LODE_X
};

// Bytes of one quantised activation row inside a buffer: [q | d | sum16], each part 64-byte aligned. Shared by the wire
// format of expert jobs and by device buffers.
struct ActLayout {
  uint32_t n = 0, block_len = 0;
  constexpr size_t d_offset() const { return (n + 63) / 64 * 64; }
  constexpr size_t sum16_offset() const { return d_offset() + (n / block_len * 4 + 63) / 64 * 64; }
  constexpr size_t bytes() const { return sum16_offset() + (n / 16 * 2 + 63) / 64 * 64; }
};
inline ActRow ActRowAt(const uint8_t* base, const ActLayout& layout) {
  return {reinterpret_cast<const int8_t*>(base), reinterpret_cast<const float*>(base + layout.d_offset()),
          reinterpret_cast<const int16_t*>(base + layout.sum16_offset()), nullptr};
}

// ---- selection (kernels/cpu/isa_select.cc) -----------------------------------------------------------------------------
// Tables compiled in, best last. `supported` = this CPU and OS can run it; `why_not` names the missing feature.
struct IsaChoice {
  const KernelTable* table;
  bool supported;
  const char* why_not;
};
size_t IsaChoices(const IsaChoice** out);
// name "auto" or "" = best supported; nullptr when the name is unknown or not supported (why_not then says why).
const KernelTable* FindKernelTable(const char* name, const char** why_not);

// True when MXCSR has round-to-nearest, no FTZ, no DAZ: every compute thread checks this at start, since a library may
// have changed it.
bool FloatEnvironmentIsCanonical();

}  // namespace lode
