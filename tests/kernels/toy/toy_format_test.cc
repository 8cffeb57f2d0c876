// A format takes one row in the list (CMakeLists.txt here adds it to a copy of kernels/formats.h),
// one decode (toy_decode.h) and one golden (below), and then has products of every shape and
// dequantisation on every instruction set. Links no other kernels.
#include <gtest/gtest.h>

#include <vector>

#include "kernels/kernel_table.h"

namespace lode {
const KernelTable* ToyTableScalar();
const KernelTable* ToyTableAvx2();

namespace {

// Two blocks: d = 0.5 with nibbles 0, 1, ..., 15, 15, 14, ..., 0; d = -2 with nibbles 7 and 9 in
// turn.
constexpr uint8_t kBlocks[36] = {0x00, 0x38, 0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc,
                                 0xfe, 0xef, 0xcd, 0xab, 0x89, 0x67, 0x45, 0x23, 0x01,
                                 0x00, 0xc0, 0x97, 0x97, 0x97, 0x97, 0x97, 0x97, 0x97,
                                 0x97, 0x97, 0x97, 0x97, 0x97, 0x97, 0x97, 0x97, 0x97};
float GoldenWeight(int i) {
  if (i < 16) return 0.5f * static_cast<float>(i - 8);
  if (i < 32) return 0.5f * static_cast<float>(31 - i - 8);
  return i % 2 == 0 ? 2.0f : -2.0f;
}
// Those weights times activations 0.25 * (i - 30); every step is exact.
double GoldenDot() {
  double sum = 0;
  for (int i = 0; i < 64; ++i) sum += static_cast<double>(GoldenWeight(i)) * 0.25 * (i - 30);
  return sum;
}

std::vector<const KernelTable*> Tables() {
  std::vector<const KernelTable*> tables = {ToyTableScalar()};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    tables.push_back(ToyTableAvx2());
  } else {
    std::printf("not run: avx2 (this CPU has none)\n");
  }
  return tables;
}

TEST(ToyFormat, DequantEqualsTheGolden) {
  for (const KernelTable* table : Tables()) {
    float out[64];
    table->dequant[static_cast<size_t>(Format::kTOY)](kBlocks, 64, out);
    for (int i = 0; i < 64; ++i) EXPECT_EQ(out[i], GoldenWeight(i)) << table->name << " " << i;
  }
}

TEST(ToyFormat, ProductsOfEveryShapeEqualTheGolden) {
  std::vector<uint8_t> w;
  constexpr uint32_t kRows = 21, kActs = 3;
  for (uint32_t r = 0; r < kRows; ++r) w.insert(w.end(), kBlocks, kBlocks + sizeof(kBlocks));
  int8_t q[64];
  int16_t sums[4] = {};
  const float d[2] = {0.25f, 0.25f};
  for (int i = 0; i < 64; ++i) {
    q[i] = static_cast<int8_t>(i - 30);
    sums[i / 16] = static_cast<int16_t>(sums[i / 16] + q[i]);
  }
  const ActRow acts[kActs] = {{q, d, sums, nullptr}, {q, d, sums, nullptr}, {q, d, sums, nullptr}};
  for (const KernelTable* table : Tables()) {
    for (uint32_t n_rows = 1; n_rows <= kRows; ++n_rows) {
      float y[kActs][kRows];
      float* out[kActs] = {y[0], y[1], y[2]};
      table->mat[static_cast<size_t>(Format::kTOY)](
          {w.data(), sizeof(kBlocks), n_rows, 64, acts, kActs, out});
      for (uint32_t a = 0; a < kActs; ++a)
        for (uint32_t r = 0; r < n_rows; ++r)
          ASSERT_EQ(y[a][r], GoldenDot()) << table->name << " row " << r;  // exact in binary32
    }
  }
}

}  // namespace
}  // namespace lode
