// Section "gemm": the ordered prompt-row product against the matrix-vector kernel (all weight rows,
// first and last 8 activation rows) and the scalar host, the integer product against the host; then
// operations per second of both.
#pragma once

#include "tests/device/term_order/gemm.cuh"
#include "tests/device/term_order/gemv_section.cuh"

namespace lode::term_order {

inline constexpr uint32_t kGemmActRows = 512;

struct GemmContext {
  GemmContext(Section& s, uint32_t rows) : section(s), n_rows(rows) {}
  Section& section;
  uint32_t n_rows;
  DeviceBuffer<uint8_t> w;
  DeviceBuffer<int8_t> codes;
  DeviceBuffer<float> scales;
  DeviceBuffer<uint32_t> y;
};

template <bool kOrdered>
void LaunchGemm(GemmContext& c) {
  const dim3 grid(c.n_rows / kGemmRows, kGemmActRows / kGemmActs);
  GemmKernel<kOrdered><<<grid, kGemmThreads, kGemmShared>>>(
      c.w.get(), c.codes.get(), c.scales.get(), c.y.get(), c.n_rows, kGemmActRows);
}
template <bool kOrdered>
bool RunGemmOnce(GemmContext& c) {
  LODE_TRY(c.section,
           cudaFuncSetAttribute(GemmKernel<kOrdered>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                kGemmShared),
           false);
  LODE_TRY(c.section, c.y.Poison(), false);
  LaunchGemm<kOrdered>(c);
  LODE_TRY(c.section, cudaGetLastError(), false);
  LODE_TRY(c.section, cudaDeviceSynchronize(), false);
  return true;
}

// Eight activation rows starting at `first` through the matrix-vector kernel: every output equal.
inline bool CompareWithGemv(GemmContext& c, const std::vector<QuantRow>& acts, uint32_t first,
                            int multiprocessors) {
  using K = Q8Dp4a<8, true, 8, 4>;
  Section& s = c.section;
  DeviceBuffer<uint8_t> packed;
  DeviceBuffer<float> y;
  const std::vector<QuantRow> eight(acts.begin() + first, acts.begin() + first + 8);
  LODE_TRY(s, packed.Upload(PackQ8Dp4a(eight, 8)), false);
  LODE_TRY(s, y.Allocate(static_cast<size_t>(8) * c.n_rows), false);
  LODE_TRY(s, y.Poison(), false);
  LODE_TRY(s,
           cudaFuncSetAttribute(GemvKernel<K>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                int(kGemvShared<K>)),
           false);
  LaunchGemv<K>(multiprocessors, c.w.get(), packed.get(), y.get(), c.n_rows);
  LODE_TRY(s, cudaGetLastError(), false);
  LODE_TRY(s, cudaDeviceSynchronize(), false);
  Difference diff{};
  const float* x =
      reinterpret_cast<const float*>(c.y.get()) + static_cast<size_t>(first) * c.n_rows;
  if (!Compare(s, x, y.get(), static_cast<size_t>(8) * c.n_rows, diff)) return false;
  char text[160];
  std::snprintf(
      text, sizeof text,
      "rows=%u acts %u..%u: %llu outputs differ from the matrix-vector kernel, %llu never written",
      c.n_rows, first, first + 7, diff.bits, diff.poison);
  return s.Expect(diff.bits == 0 && diff.poison == 0, text);
}

// Sample outputs against the host, for whichever product c.y holds.
inline bool CompareWithHost(GemmContext& c, const std::vector<QuantRow>& acts, bool ordered) {
  Section& s = c.section;
  int wrong = 0, outputs = 0;
  std::vector<uint8_t> row;
  std::vector<uint32_t> y;
  for (uint32_t r : SampleRows(c.n_rows)) {
    LODE_TRY(s, c.w.Download(row, static_cast<size_t>(r) * kQ8RowBytes, kQ8RowBytes), false);
    for (uint32_t a = 3; a < kGemmActRows; a += 37) {
      LODE_TRY(s, c.y.Download(y, static_cast<size_t>(a) * c.n_rows + r, 1), false);
      const uint32_t host = ordered ? canonical::BitsOf(AddTerms(Q8Terms(row.data(), acts[a])))
                                    : static_cast<uint32_t>(Q8IntegerSum(row.data(), acts[a]));
      wrong += host != y[0];
      ++outputs;
    }
  }
  char text[160];
  std::snprintf(text, sizeof text,
                "rows=%u %s: %d of %d sample outputs differ from the scalar host reference",
                c.n_rows, ordered ? "ordered" : "integer", wrong, outputs);
  s.Line("%s", text);
  return s.Expect(wrong == 0, text);
}

inline void RunGemmSize(Section& section, uint32_t n_rows, bool measure) {
  GemmContext c(section, n_rows);
  const std::vector<QuantRow> acts = RandomActs(kGemmActRows, 32, 61);
  std::vector<int8_t> codes;
  std::vector<float> scales;
  PackGemm(acts, codes, scales);
  cudaDeviceProp prop;
  LODE_TRY(section, cudaGetDeviceProperties(&prop, 0), );
  LODE_TRY(section, c.codes.Upload(codes), );
  LODE_TRY(section, c.scales.Upload(scales), );
  LODE_TRY(section, c.y.Allocate(static_cast<size_t>(kGemmActRows) * n_rows), );
  LODE_TRY(section, c.w.Allocate(static_cast<size_t>(n_rows) * kQ8RowBytes), );
  if (!FillWeights(section, c.w.get(), c.w.size(), 34, 1, 62)) return;

  if (!RunGemmOnce<false>(c) || !CompareWithHost(c, acts, false)) return;
  if (!RunGemmOnce<true>(c) || !CompareWithHost(c, acts, true)) return;
  if (!CompareWithGemv(c, acts, 0, prop.multiProcessorCount)) return;
  if (!CompareWithGemv(c, acts, kGemmActRows - 8, prop.multiProcessorCount)) return;
  if (!measure) return;
  const double integer_ms = MedianMs(section, 10, [&] { LaunchGemm<false>(c); });
  const double ordered_ms = MedianMs(section, 10, [&] { LaunchGemm<true>(c); });
  if (integer_ms <= 0 || ordered_ms <= 0) return;
  const double tera = 2e-9 * n_rows * kGemmActRows * kColumns;
  char key[64];
  std::snprintf(key, sizeof key, "rows=%u integer TOPS", n_rows);
  section.Value(key, tera / integer_ms);
  std::snprintf(key, sizeof key, "rows=%u ordered TOPS", n_rows);
  section.Value(key, tera / ordered_ms);
  section.Line(
      "%5u x %d x %u: integer %.3f ms %.0f TOPS; ordered %.3f ms %.0f TOPS; ordered/integer %.2f",
      n_rows, kColumns, kGemmActRows, integer_ms, tera / integer_ms, ordered_ms, tera / ordered_ms,
      integer_ms / ordered_ms);
}

inline void RunGemm(Section& section, bool measure) {
  RunGemmSize(section, 2560, measure);
  RunGemmSize(section, 10240, measure);
}

}  // namespace lode::term_order
