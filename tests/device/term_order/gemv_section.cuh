// Section "gemv": bits of every matrix-vector kernel first (against the scalar host reference on
// sample rows and against each other on all rows), then bandwidth of each, best of a few (warps,
// stages) configurations per variant.
#pragma once

#include <set>

#include "tests/device/term_order/gemv.cuh"
#include "tests/device/term_order/reference.h"

namespace lode::term_order {

// ---- random weights ----
// fp16 scale bits: 2^-10..2^-7 with a random mantissa, one in eight negative, one in 64 denormal,
// one in 256 zero.
LODE_FN uint32_t RandomHalf(uint32_t seed, uint64_t index) {
  const uint32_t r = Random(seed, index);
  const uint32_t exponent = 5 + (r >> 10) % 4, kind = (r >> 16) & 255;
  const uint32_t sign = (r >> 24) % 8 == 0 ? 0x8000u : 0u;
  return kind == 0 ? 0u : (kind < 5 ? (r & 0x3ffu) : (exponent << 10 | (r & 0x3ffu))) | sign;
}
static __global__ void FillWords(uint32_t* out, size_t n, uint32_t seed) {
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n;
       i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    out[i] = Random(seed, i);
  }
}
// `n_scales` halves at the front of each block: one for Q8_0 (d), two for Q4_K (d, dmin).
static __global__ void FillScales(uint8_t* out, size_t n_blocks, uint32_t block_bytes,
                                  uint32_t n_scales, uint32_t seed) {
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n_blocks;
       i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    for (uint32_t k = 0; k < n_scales; ++k) {
      *reinterpret_cast<uint16_t*>(out + i * block_bytes + 2 * k) =
          static_cast<uint16_t>(RandomHalf(seed + 1, i * n_scales + k));
    }
  }
}
inline bool FillWeights(Section& section, uint8_t* w, size_t bytes, uint32_t block_bytes,
                        uint32_t n_scales, uint32_t seed) {
  FillWords<<<2048, 256>>>(reinterpret_cast<uint32_t*>(w), bytes / 4, seed);
  FillScales<<<2048, 256>>>(w, bytes / block_bytes, block_bytes, n_scales, seed);
  LODE_TRY(section, cudaGetLastError(), false);
  LODE_TRY(section, cudaDeviceSynchronize(), false);
  return true;
}

// ---- comparison on the device ----
struct Difference {
  unsigned long long bits;    // elements whose bits differ
  unsigned long long poison;  // elements of x never written
  uint32_t largest;           // float bits of max |x - y|
  uint32_t scale;             // float bits of max |y|
};
static __global__ void CompareKernel(const float* x, const float* y, size_t n, Difference* out) {
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n;
       i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    const uint32_t bx = __float_as_uint(x[i]), by = __float_as_uint(y[i]);
    if (bx == 0xffffffffu) atomicAdd(&out->poison, 1ull);
    if (bx != by) {
      atomicAdd(&out->bits, 1ull);
      atomicMax(&out->largest, __float_as_uint(fabsf(x[i] - y[i])));
    }
    if ((by & 0x7fffffffu) > out->scale) atomicMax(&out->scale, by & 0x7fffffffu);
  }
}
inline bool Compare(Section& section, const float* x, const float* y, size_t n,
                    Difference& result) {
  DeviceBuffer<Difference> out;
  LODE_TRY(section, out.Allocate(1), false);
  LODE_TRY(section, cudaMemset(out.get(), 0, sizeof(Difference)), false);
  CompareKernel<<<1024, 256>>>(x, y, n, out.get());
  LODE_TRY(section, cudaGetLastError(), false);
  LODE_TRY(section, cudaMemcpy(&result, out.get(), sizeof result, cudaMemcpyDeviceToHost), false);
  return true;
}

// ---- device read bandwidth ----
static __global__ void __launch_bounds__(512)
    ReadSumKernel(const uint4* __restrict__ in, size_t n, uint32_t* out) {
  constexpr int kInFlight = 8;
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  uint32_t sum = 0;
  for (; i + (kInFlight - 1) * stride < n; i += kInFlight * stride) {
    uint4 v[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) v[k] = __ldcs(in + i + k * stride);
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) sum += v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  for (; i < n; i += stride) {
    const uint4 v = in[i];
    sum += v.x ^ v.y ^ v.z ^ v.w;
  }
  atomicAdd(out, sum);
}

struct GemvContext {
  GemvContext(Section& s, const char* f) : section(s), format(f) {}
  Section& section;
  const char* format;
  int multiprocessors = 0;
  uint32_t n_rows = 0;
  size_t bytes = 0;      // of the weights
  double read_gb_s = 0;  // measured ceiling
  DeviceBuffer<uint8_t> w;
  DeviceBuffer<float> expected;  // [8][n_rows], checked against the host on sample rows
  DeviceBuffer<float> y;
};

inline double MeasureRead(GemvContext& c) {
  DeviceBuffer<uint32_t> out;
  LODE_TRY(c.section, out.Allocate(1), 0);
  LODE_TRY(c.section, cudaMemset(out.get(), 0, 4), 0);
  double best = 0;
  for (int blocks_per_sm : {1, 2, 4}) {
    const double ms = MedianMs(c.section, 1, [&] {
      ReadSumKernel<<<c.multiprocessors * blocks_per_sm, 512>>>(
          reinterpret_cast<const uint4*>(c.w.get()), c.bytes / 16, out.get());
    });
    if (ms > 0) best = std::max(best, c.bytes / ms * 1e-6);
  }
  return best;
}

template <class K>
void LaunchGemv(int multiprocessors, const uint8_t* w, const uint8_t* acts, float* y,
                uint32_t n_rows) {
  constexpr size_t kShared = kGemvShared<K>;
  GemvKernel<K><<<multiprocessors, K::kWarps * 32, kShared>>>(w, acts, y, n_rows);
}
template <class K>
void LaunchGemv(GemvContext& c, const uint8_t* acts, float* y) {
  LaunchGemv<K>(c.multiprocessors, c.w.get(), acts, y, c.n_rows);
}
template <class K>
bool PrepareGemv(GemvContext& c) {
  LODE_TRY(c.section,
           cudaFuncSetAttribute(GemvKernel<K>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                int(kGemvShared<K>)),
           false);
  return true;
}

// What one variant (format, way, acts) reached over its configurations.
struct GemvResult {
  double gb_s = 0;
  int warps = 0, stages = 0;
};

// Bits, then (when `measure`) time of one kernel. Ordered kernels must equal c.expected everywhere;
// free ones must be close (2e-5 of the largest output: 80 roundings of 2^-24 of sums a few times
// larger than the result).
template <class K, bool kOrdered>
void CheckAndTime(GemvContext& c, const char* way, int acts, const std::vector<uint8_t>& packed,
                  bool measure, GemvResult& best) {
  Section& s = c.section;
  char text[200];
  DeviceBuffer<uint8_t> device_acts;
  LODE_TRY(s, device_acts.Upload(packed), );
  if (!s.Expect(packed.size() == static_cast<size_t>(K::kActBytes),
                "packed activations have the kernel's size"))
    return;
  if (!PrepareGemv<K>(c)) return;
  LODE_TRY(s, c.y.Poison(), );
  LaunchGemv<K>(c, device_acts.get(), c.y.get());
  LODE_TRY(s, cudaGetLastError(), );
  LODE_TRY(s, cudaDeviceSynchronize(), );
  Difference diff{};
  if (!Compare(s, c.y.get(), c.expected.get(), static_cast<size_t>(acts) * c.n_rows, diff)) return;
  const float largest = canonical::FromBits(diff.largest), scale = canonical::FromBits(diff.scale);
  std::snprintf(
      text, sizeof text,
      "%s %s acts=%d %dx%d: %llu of %llu outputs differ (max %.3g of %.3g), %llu never written",
      c.format, way, acts, K::kWarps, K::kStages, diff.bits,
      static_cast<unsigned long long>(acts) * c.n_rows, largest, scale, diff.poison);
  const bool right = diff.poison == 0 && (kOrdered ? diff.bits == 0 : largest <= 2e-5f * scale);
  s.Expect(right, text);
  if (!kOrdered && best.warps == 0) {
    std::snprintf(text, sizeof text, "%s free acts=%d share of outputs with other bits", c.format,
                  acts);
    s.Value(text, static_cast<double>(diff.bits) / (static_cast<double>(acts) * c.n_rows));
  }
  if (!measure || !right) return;
  const double ms = MedianMs(s, 1, [&] { LaunchGemv<K>(c, device_acts.get(), c.y.get()); });
  if (ms <= 0) return;
  const double gb_s = c.bytes / ms * 1e-6;
  std::snprintf(text, sizeof text, "%s %s acts=%d %dx%d GB/s", c.format, way, acts, K::kWarps,
                K::kStages);
  s.Value(text, gb_s);
  if (gb_s > best.gb_s) best = {gb_s, K::kWarps, K::kStages};
}

// Rows whose outputs the host recomputes: both ends, and a few dozen in between.
inline std::set<uint32_t> SampleRows(uint32_t n_rows) {
  std::set<uint32_t> rows = {0, 1, 7, 8, 15, 16, n_rows - 1, n_rows - 2, n_rows - 16};
  for (uint32_t i = 0; i < 55; ++i) rows.insert(Random(31, i) % n_rows);
  return rows;
}

// Fills c.expected with kernel K and compares sample rows with the host. Also counts how many of
// these outputs change when two neighbouring block terms swap places: a test that cannot see an
// order would be worth nothing.
template <class K, class Terms>
bool EstablishExpected(GemvContext& c, const std::vector<uint8_t>& packed,
                       const std::vector<QuantRow>& acts, Terms terms_of) {
  Section& s = c.section;
  DeviceBuffer<uint8_t> device_acts;
  LODE_TRY(s, device_acts.Upload(packed), false);
  if (!PrepareGemv<K>(c)) return false;
  LODE_TRY(s, c.expected.Poison(), false);
  LaunchGemv<K>(c, device_acts.get(), c.expected.get());
  LODE_TRY(s, cudaGetLastError(), false);
  LODE_TRY(s, cudaDeviceSynchronize(), false);
  int wrong = 0, outputs = 0, order_seen = 0;
  std::vector<uint8_t> row;
  std::vector<float> y;
  for (uint32_t r : SampleRows(c.n_rows)) {
    LODE_TRY(s, c.w.Download(row, static_cast<size_t>(r) * K::kRowBytes, K::kRowBytes), false);
    for (int a = 0; a < kActsMax; ++a) {
      LODE_TRY(s, c.expected.Download(y, static_cast<size_t>(a) * c.n_rows + r, 1), false);
      std::vector<float> terms = terms_of(row.data(), acts[a]);
      const uint32_t host = canonical::BitsOf(AddTerms(terms));
      wrong += host != canonical::BitsOf(y[0]);
      std::swap(terms[terms.size() / 2], terms[terms.size() / 2 + 1]);
      order_seen += host != canonical::BitsOf(AddTerms(terms));
      ++outputs;
    }
  }
  char text[160];
  std::snprintf(text, sizeof text,
                "%s: %d of %d sample outputs differ from the scalar host reference", c.format,
                wrong, outputs);
  s.Line("%s", text);
  s.Line("%s: swapping two neighbouring terms changes %d of %d outputs", c.format, order_seen,
         outputs);
  s.Expect(order_seen > 0, std::string(c.format) + ": the sample can see an order");
  return s.Expect(wrong == 0, text);
}

inline void PrintPair(GemvContext& c, int acts, const GemvResult& free, const GemvResult& ordered,
                      const GemvResult& mma) {
  const auto line = [&](const char* way, const GemvResult& r) {
    if (r.gb_s <= 0) return;
    char key[96];
    std::snprintf(key, sizeof key, "%s acts=%d %s best GB/s", c.format, acts, way);
    c.section.Value(key, r.gb_s);
    c.section.Line(
        "%-5s acts=%d %-13s %7.0f GB/s  %5.1f %% of read  %5.1f %% of free  (%d warps x %d stages)",
        c.format, acts, way, r.gb_s, 100 * r.gb_s / c.read_gb_s,
        free.gb_s > 0 ? 100 * r.gb_s / free.gb_s : 0.0, r.warps, r.stages);
  };
  line("free dp4a", free);
  line("ordered dp4a", ordered);
  line("ordered mma", mma);
}

// One variant over every configuration that fits into shared memory.
template <template <int, bool, int, int> class Dp4a, int kActs, bool kOrdered>
GemvResult RunDp4a(GemvContext& c, const std::vector<uint8_t>& packed, bool measure) {
  GemvResult best;
  const auto run = [&]<int kW, int kS>() {
    using K = Dp4a<kActs, kOrdered, kW, kS>;
    if constexpr (kGemvShared<K> <= kSharedBytesMax) {
      CheckAndTime<K, kOrdered>(c, kOrdered ? "ordered" : "free", kActs, packed, measure, best);
    }
  };
  run.template operator()<8, 4>();
  run.template operator()<12, 3>();
  run.template operator()<12, 2>();
  run.template operator()<16, 2>();
  return best;
}
template <template <int, int, int> class Mma, int kActs>
GemvResult RunMma(GemvContext& c, const std::vector<uint8_t>& packed, bool measure) {
  GemvResult best;
  const auto run = [&]<int kW, int kS>() {
    using K = Mma<kActs, kW, kS>;
    if constexpr (kGemvShared<K> <= kSharedBytesMax)
      CheckAndTime<K, true>(c, "ordered mma", kActs, packed, measure, best);
  };
  run.template operator()<6, 3>();
  run.template operator()<8, 2>();
  run.template operator()<8, 4>();
  run.template operator()<12, 3>();
  run.template operator()<16, 2>();
  return best;
}

// Weight rows so that the weights are several times any L2: 2.1 GB.
inline bool SetUpWeights(GemvContext& c, uint32_t row_bytes, uint32_t block_bytes,
                         uint32_t n_scales, bool small) {
  c.n_rows = (small ? 64u << 20 : 2140u << 20) / row_bytes / 16 * 16;
  c.bytes = static_cast<size_t>(c.n_rows) * row_bytes;
  cudaDeviceProp prop;
  LODE_TRY(c.section, cudaGetDeviceProperties(&prop, 0), false);
  c.multiprocessors = prop.multiProcessorCount;
  LODE_TRY(c.section, c.w.Allocate(c.bytes), false);
  LODE_TRY(c.section, c.expected.Allocate(static_cast<size_t>(kActsMax) * c.n_rows), false);
  LODE_TRY(c.section, c.y.Allocate(static_cast<size_t>(kActsMax) * c.n_rows), false);
  return FillWeights(c.section, c.w.get(), c.bytes, block_bytes, n_scales, 41);
}

template <template <int, bool, int, int> class Dp4a, template <int, int, int> class Mma,
          class PackDp4a, class PackMma, class Terms>
void RunFormat(GemvContext& c, const std::vector<QuantRow>& acts, PackDp4a pack_dp4a,
               PackMma pack_mma, Terms terms, bool measure) {
  if (!EstablishExpected<Dp4a<8, true, 8, 4>>(c, pack_dp4a(acts, 8), acts, terms)) return;
  if (measure) {
    c.read_gb_s = MeasureRead(c);
    c.section.Value(std::string(c.format) + " device read GB/s", c.read_gb_s);
    c.section.Line("%-5s %u rows, %.2f GB; plain 16-byte read-sum: %.0f GB/s", c.format, c.n_rows,
                   c.bytes * 1e-9, c.read_gb_s);
  }
  const auto run = [&]<int kActs>() {
    const GemvResult free = RunDp4a<Dp4a, kActs, false>(c, pack_dp4a(acts, kActs), measure);
    const GemvResult ordered = RunDp4a<Dp4a, kActs, true>(c, pack_dp4a(acts, kActs), measure);
    const GemvResult mma = RunMma<Mma, kActs>(c, pack_mma(acts, kActs), measure);
    PrintPair(c, kActs, free, ordered, mma);
  };
  run.template operator()<1>();
  run.template operator()<4>();
  run.template operator()<8>();
}

inline void RunGemvQ8(Section& section, bool measure) {
  GemvContext c(section, "Q8_0");
  if (!SetUpWeights(c, kQ8RowBytes, 34, 1, !measure)) return;
  RunFormat<Q8Dp4a, Q8Mma>(c, RandomActs(8, 32, 51), PackQ8Dp4a, PackQ8Mma, Q8Terms, measure);
}
inline void RunGemvQ4(Section& section, bool measure) {
  GemvContext c(section, "Q4_K");
  if (!SetUpWeights(c, kQ4RowBytes, kQ4BlockBytes, 2, !measure)) return;
  RunFormat<Q4Dp4a, Q4Mma>(c, RandomActs(8, 256, 52), PackQ4Dp4a, PackQ4Mma, Q4Terms, measure);
}

}  // namespace lode::term_order
