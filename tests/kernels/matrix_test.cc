// Formats x instruction sets x shapes: every kernel table equals the reference bit for bit, the
// reference equals the golden vectors, and the comparison notices a wrong nibble or two swapped
// terms.
#include <gtest/gtest.h>

#include "kernels/isa_list.h"
#include "tests/kernels/format_cases.h"

namespace lode::testing {
namespace {

const std::string kGoldenFolder = std::string(LODE_SOURCE_DIR) + "/tests/data/formats";

class EveryFormat : public ::testing::TestWithParam<Format> {};
class EveryQuantizedFormat : public ::testing::TestWithParam<Format> {};

TEST_P(EveryFormat, DequantEqualsGoldenBits) {
  const FormatInfo& info = Info(GetParam());
  const Golden golden(kGoldenFolder, info.name);
  for (const auto& [blocks_name, deq_name] :
       {std::pair("blocks", "deq"), std::pair("rows", "rows_deq")}) {
    const std::vector<uint8_t> blocks = golden.Array<uint8_t>(blocks_name);
    const std::vector<float> want = golden.Array<float>(deq_name);
    ASSERT_EQ(want.size() % info.block_len, 0u);
    const std::vector<float> by_reference =
        reference::Dequant(GetParam(), blocks.data(), want.size());
    for (size_t i = 0; i < want.size(); ++i)
      ASSERT_EQ(canonical::BitsOf(by_reference[i]), canonical::BitsOf(want[i]))
          << "reference, weight " << i;
    for (const KernelTable* table : RunnableTables()) {
      std::vector<float> got(want.size());
      table->dequant[static_cast<size_t>(GetParam())](blocks.data(), got.size(), got.data());
      for (size_t i = 0; i < want.size(); ++i)
        ASSERT_EQ(canonical::BitsOf(got[i]), canonical::BitsOf(want[i]))
            << table->name << ", weight " << i;
    }
  }
}

// The golden rows times the golden activations, quantised by us to the format's own block length,
// against the same product in double. Bar: a term t = fl(isum) * (d_w * d_a) carries 3 roundings (4
// with a minimum, on |terms| that dot_abs does not bound, hence the separate sum `magnitude`);
// adding it rounds once more, relative to the running sum. So
//   |error| <= u * (4 * sum |terms| + sum |running sums|), u = 2^-24,
// and typically far below the 2e-6 * dot_abs of the format description, which is asserted too.
TEST_P(EveryFormat, GoldenRowsWithinTheDerivedBar) {
  const Format format = GetParam();
  const FormatInfo& info = Info(format);
  const Golden golden(kGoldenFolder, info.name);
  const std::vector<uint8_t> rows = golden.Array<uint8_t>("rows");
  const std::vector<float> rows_deq = golden.Array<float>("rows_deq");
  const std::vector<float> act = golden.Array<float>("act");
  const std::vector<double> dot_abs = golden.Array<double>("dot_abs");
  const size_t n = act.size(), n_rows = golden.Rows(), row_bytes = rows.size() / n_rows;
  const uint32_t block_len = info.act_block_len ? info.act_block_len : 32;
  const reference::QuantizedRow q = reference::Quantize(act, block_len);
  const ActRow act_row = AsActRow(q, act);
  for (const KernelTable* table : RunnableTables()) {
    std::vector<float> y(n_rows);
    float* out[] = {y.data()};
    table->mat[static_cast<size_t>(format)]({rows.data(), row_bytes, static_cast<uint32_t>(n_rows),
                                             static_cast<uint32_t>(n), &act_row, 1, out});
    for (size_t r = 0; r < n_rows; ++r) {
      double exact = 0, magnitude = 0, running = 0;
      for (size_t i = 0; i < n; ++i) {
        const double x = info.act_block_len ? double(q.q[i]) * q.d[i / block_len] : act[i];
        exact += rows_deq[r * n + i] * x;
        magnitude += std::fabs(rows_deq[r * n + i] * x);
        if (i % block_len == block_len - 1) running += std::fabs(exact);
      }
      const double u = std::ldexp(1.0, -24);
      EXPECT_LE(std::fabs(y[r] - exact), u * (8 * magnitude + running))
          << table->name << " row " << r;
      EXPECT_LE(std::fabs(y[r] - exact), 2e-6 * dot_abs[r]) << table->name << " row " << r;
      // And the quantisation itself is no worse than the usual int8 activations (3.5e-3 of dot_abs,
      // format description).
      EXPECT_LE(std::fabs(y[r] - golden.Array<double>("dot_exact")[r]), 4e-3 * dot_abs[r]);
    }
  }
}

// Activations as another engine quantised them give that engine's integer dot, where its blocks are
// ours.
TEST(Golden, ForeignActivationBlocksGiveTheForeignIntegerDot) {
  for (Format format : AllFormats()) {
    const FormatInfo& info = Info(format);
    if (info.act_block_len == 0 || format == Format::kQ2_0) continue;  // Q2_0: blocks of 32 there
    const Golden golden(kGoldenFolder, info.name);
    const std::vector<uint8_t> blocks = golden.Array<uint8_t>("act_blocks");
    const size_t n = golden.Array<float>("act").size(), n_blocks = n / info.block_len;
    const size_t bytes = blocks.size() / n_blocks;
    const size_t header = info.block_len == 256 || format == Format::kQ5_1 ? 4 : 2;
    reference::QuantizedRow q;
    for (size_t b = 0; b < n_blocks; ++b) {
      const uint8_t* p = &blocks[b * bytes];
      float d;
      std::memcpy(&d, p, 4);
      q.d.push_back(
          info.block_len == 256 ? d : reference::FromF16(static_cast<uint16_t>(p[0] | p[1] << 8)));
      for (size_t i = 0; i < info.block_len; ++i) q.q.push_back(static_cast<int8_t>(p[header + i]));
    }
    for (size_t g = 0; g < n / 16; ++g) {
      int sum = 0;
      for (size_t i = 0; i < 16; ++i) sum += q.q[16 * g + i];
      q.sum16.push_back(static_cast<int16_t>(sum));
    }
    const std::vector<uint8_t> rows = golden.Array<uint8_t>("rows");
    const std::vector<double> want = golden.Array<double>("dot_int"),
                              dot_abs = golden.Array<double>("dot_abs");
    // Q5_1 rounds the block's sum of activations to binary16 there: 2^-11 of it, seen through |m|;
    // a loose bar suffices.
    const double bar = format == Format::kQ5_1 ? 1e-3 : 2e-6;
    for (size_t r = 0; r < want.size(); ++r) {
      const float got = reference::QuantizedDot(format, &rows[r * rows.size() / want.size()], q, n);
      EXPECT_LE(std::fabs(got - want[r]), bar * dot_abs[r]) << info.name << " row " << r;
    }
  }
}

struct Shape {
  uint32_t n_rows, n_acts, n_cols;
};

// Runs one shape on every table and compares with the reference; returns the number of differing
// values.
size_t Differences(Format format, const Shape& shape, const std::vector<uint8_t>& w,
                   const std::vector<uint8_t>& w_reference, bool float_mode) {
  const FormatInfo& info = Info(format);
  const uint32_t block_len = info.act_block_len ? info.act_block_len : 16;
  const size_t row_bytes = RowBytes(format, shape.n_cols);
  std::vector<std::vector<float>> x;
  std::vector<reference::QuantizedRow> q;
  std::vector<ActRow> acts;
  for (uint32_t a = 0; a < shape.n_acts; ++a) {
    x.push_back(RandomActivations(shape.n_cols, 77 + a));
    q.push_back(info.act_block_len ? reference::Quantize(x.back(), block_len)
                                   : reference::QuantizedRow());
  }
  for (uint32_t a = 0; a < shape.n_acts; ++a) acts.push_back(AsActRow(q[a], x[a]));
  size_t differences = 0;
  for (const KernelTable* table : RunnableTables()) {
    constexpr float kGuard = 12345.0f;  // a value past the end must survive
    std::vector<std::vector<float>> y(shape.n_acts, std::vector<float>(shape.n_rows + 1, kGuard));
    std::vector<float*> out;
    for (auto& row : y) out.push_back(row.data());
    const MatFn mat = (float_mode ? table->mat_float : table->mat)[static_cast<size_t>(format)];
    mat({w.data(), row_bytes, shape.n_rows, shape.n_cols, acts.data(), shape.n_acts, out.data()});
    for (uint32_t r = 0; r < shape.n_rows; ++r) {
      const uint8_t* row = w_reference.data() + r * row_bytes;
      std::vector<float> deq;
      if (float_mode || info.act_block_len == 0)
        deq = reference::Dequant(format, row, shape.n_cols);
      for (uint32_t a = 0; a < shape.n_acts; ++a) {
        const float want = deq.empty() ? reference::QuantizedDot(format, row, q[a], shape.n_cols)
                                       : reference::FloatDot(deq.data(), x[a].data(), shape.n_cols);
        differences += Bits(y[a][r]) != Bits(want);
      }
    }
    for (auto& row : y)
      EXPECT_EQ(row[shape.n_rows], kGuard) << table->name << " wrote past the last row";
  }
  return differences;
}

TEST_P(EveryFormat, EveryTableEqualsTheReferenceOverShapes) {
  const Format format = GetParam();
  const uint32_t step = Info(format).block_len == 1 ? 1 : Info(format).block_len;
  const uint32_t cols = step == 1 ? 97 : 3 * step;
  const std::vector<uint8_t> w = RandomWeights(format, 17 * cols, 5, true);
  for (uint32_t n_rows = 1; n_rows <= 17; ++n_rows)
    for (uint32_t n_acts = 1; n_acts <= 8; ++n_acts)
      for (bool float_mode : {false, true})
        ASSERT_EQ(Differences(format, {n_rows, n_acts, cols}, w, w, float_mode), 0u)
            << n_rows << " rows, " << n_acts << " activation rows, float mode " << float_mode;
}

TEST_P(EveryFormat, EveryTableEqualsTheReferenceOverColumns) {
  const Format format = GetParam();
  const uint32_t step = Info(format).block_len;
  const uint32_t count = step == 1 ? 130 : 21;
  for (uint32_t n = 1; n <= count; ++n) {
    const std::vector<uint8_t> w = RandomWeights(format, 19 * n * step, 100 + n, n % 2);
    for (bool float_mode : {false, true})
      ASSERT_EQ(Differences(format, {19, n % 3 + 1, n * step}, w, w, float_mode), 0u)
          << n << " x " << step;
  }
}

TEST_P(EveryFormat, EveryTableEqualsTheReferenceAtModelWidth) {
  const Format format = GetParam();
  const std::vector<uint8_t> w = RandomWeights(format, 40 * 2560, 9, true);
  EXPECT_EQ(Differences(format, {40, 4, 2560}, w, w, false), 0u);
  EXPECT_EQ(Differences(format, {40, 1, 2560}, w, w, false), 0u);
  EXPECT_EQ(Differences(format, {40, 3, 2560}, w, w, true), 0u);
}

// What comes next is asked for once a call, by the last group of the last columns, and only
// prefetched: it may lie anywhere.
TEST_P(EveryQuantizedFormat, NextIsAskedOnceAndChangesNoBit) {
  const Format format = GetParam();
  for (const uint32_t cols : {512u, 8192u}) {  // one panel of activations, two
    const uint32_t n_rows = 40;
    const std::vector<uint8_t> w = RandomWeights(format, size_t{n_rows} * cols, 21, false);
    const std::vector<float> x = RandomActivations(cols, 22);
    const reference::QuantizedRow q = reference::Quantize(x, Info(format).act_block_len);
    const ActRow act = AsActRow(q, x);
    for (const KernelTable* table : RunnableTables()) {
      std::vector<float> plain(n_rows), asked(n_rows);
      float *plain_out[] = {plain.data()}, *asked_out[] = {asked.data()};
      MatArgs args = {w.data(), RowBytes(format, cols), n_rows, cols, &act, 1, plain_out};
      table->mat[static_cast<size_t>(format)](args);
      int calls = 0;
      const auto next = [&calls]() -> const uint8_t* {
        ++calls;
        return reinterpret_cast<const uint8_t*>(uintptr_t{4096});
      };
      SetNext(&next, &args);
      args.out = asked_out;
      table->mat[static_cast<size_t>(format)](args);
      EXPECT_EQ(calls, 1) << table->name << ", " << cols << " columns";
      for (uint32_t r = 0; r < n_rows; ++r)
        ASSERT_EQ(Bits(asked[r]), Bits(plain[r])) << table->name << " row " << r;
    }
  }
}

TEST_P(EveryQuantizedFormat, ScalesThatAreNotFiniteStayNotFinite) {
  const Format format = GetParam();
  const uint32_t cols = 2 * Info(format).block_len;
  for (uint16_t scale : {0x7c00, 0xfc00, 0x7e00, 0x7c01}) {
    std::vector<uint8_t> w = RandomWeights(format, 5 * cols, 3, false);
    Put16(&w[RowBytes(format, cols) + ScaleOffset(format)], scale);
    EXPECT_EQ(Differences(format, {5, 2, cols}, w, w, false), 0u);
  }
}

// Integer sums at their limits: every code byte equal, every activation +-127. Nothing may
// saturate.
TEST_P(EveryQuantizedFormat, LargestSumsAreExact) {
  const Format format = GetParam();
  const FormatInfo& info = Info(format);
  const uint32_t cols = 2 * info.block_len, n_rows = 17;
  const size_t row_bytes = RowBytes(format, cols);
  for (int fill : {0xff, 0x80, 0x7f, 0x00, 0xf0, 0x0f}) {
    std::vector<uint8_t> w(n_rows * row_bytes, static_cast<uint8_t>(fill));
    for (size_t b = 0; b < w.size(); b += info.block_bytes) {
      Put16(&w[b + ScaleOffset(format)], 0x3c00);  // 1.0
      if (format == Format::kQ4_K || format == Format::kQ5_1 || format == Format::kQ5_K)
        Put16(&w[b + 2], 0x3c00);
    }
    for (int sign_pattern : {0, 1, 2}) {
      std::vector<float> x(cols);
      for (uint32_t i = 0; i < cols; ++i)
        x[i] = sign_pattern == 0 || (sign_pattern == 1 && i % 2) ? 127.0f : -127.0f;
      const reference::QuantizedRow q = reference::Quantize(x, info.act_block_len);
      const ActRow acts[] = {AsActRow(q, x), AsActRow(q, x)};
      for (const KernelTable* table : RunnableTables()) {
        std::vector<float> y(n_rows), y2(n_rows);
        float* out[] = {y.data(), y2.data()};
        for (uint32_t n_acts : {1u, 2u}) {
          table->mat[static_cast<size_t>(format)](
              {w.data(), row_bytes, n_rows, cols, acts, n_acts, out});
          for (uint32_t r = 0; r < n_rows; ++r) {
            const float want = reference::QuantizedDot(format, &w[r * row_bytes], q, cols);
            ASSERT_EQ(Bits(y[r]), Bits(want)) << table->name << " bytes " << fill << " row " << r;
            if (n_acts == 2) {
              ASSERT_EQ(Bits(y2[r]), Bits(want)) << table->name;
            }
          }
        }
      }
    }
  }
}

// Mutations: the comparison above must notice the smallest possible mistakes.
TEST_P(EveryFormat, OneFlippedCodeBitIsNoticed) {
  const Format format = GetParam();
  const uint32_t cols = 10 * (Info(format).block_len == 1 ? 32 : Info(format).block_len);
  const std::vector<uint8_t> w = RandomWeights(format, 8 * cols, 21, false);
  std::vector<uint8_t> wrong = w;
  wrong[RowBytes(format, cols) * 3 + Info(format).block_bytes / 2] ^= 0x10;  // a code byte
  EXPECT_GT(Differences(format, {8, 1, cols}, wrong, w, false), 0u);
}

TEST_P(EveryQuantizedFormat, TwoSwappedBlockTermsAreNoticed) {
  const Format format = GetParam();
  const FormatInfo& info = Info(format);
  // The same two (weight block, activation block) pairs in the other order: the exact sum is equal,
  // the rounded one is not.
  const uint32_t blocks = 6, cols = blocks * info.block_len;
  size_t noticed = 0;
  for (uint32_t seed = 0; seed < 32; ++seed) {
    const std::vector<uint8_t> w = RandomWeights(format, cols, 40 + seed, false);
    const std::vector<float> x = RandomActivations(cols, 60 + seed);
    std::vector<uint8_t> w2 = w;
    std::vector<float> x2 = x;
    std::swap_ranges(&w2[2 * info.block_bytes], &w2[3 * info.block_bytes],
                     &w2[4 * info.block_bytes]);
    std::swap_ranges(&x2[2 * info.block_len], &x2[3 * info.block_len], &x2[4 * info.block_len]);
    const float y =
        reference::QuantizedDot(format, w.data(), reference::Quantize(x, info.block_len), cols);
    const float y2 =
        reference::QuantizedDot(format, w2.data(), reference::Quantize(x2, info.block_len), cols);
    noticed += Bits(y) != Bits(y2);
  }
  EXPECT_GE(noticed, 4u) << "of 32 sums with two swapped terms";
}

std::vector<Format> QuantizedFormats() {
  std::vector<Format> quantized;
  for (Format f : AllFormats()) {
    if (Info(f).act_block_len != 0) quantized.push_back(f);
  }
  return quantized;
}
std::string NameOf(const ::testing::TestParamInfo<Format>& info) { return Info(info.param).name; }
INSTANTIATE_TEST_SUITE_P(Formats, EveryFormat, ::testing::ValuesIn(AllFormats()), NameOf);
INSTANTIATE_TEST_SUITE_P(Formats, EveryQuantizedFormat, ::testing::ValuesIn(QuantizedFormats()),
                         NameOf);

TEST(FloatSums, EveryTableEqualsTheReferenceForEveryLength) {
  for (size_t n = 0; n <= 200; ++n) {
    const std::vector<float> a = RandomActivations(n, 1), b = RandomActivations(n, 2);
    for (const KernelTable* table : RunnableTables())
      ASSERT_EQ(Bits(table->dot(a.data(), b.data(), n)),
                Bits(reference::FloatDot(a.data(), b.data(), n)))
          << table->name << " n " << n;
  }
}

TEST(FloatSums, TheSignOfAZeroPartialSurvivesARemainder) {
  // Every partial underflows to -0; a remainder processed by adding 0 * 0 would turn them into +0.
  const std::vector<float> a(33, 1e-30f);
  std::vector<float> b(33, -1e-30f);
  for (const KernelTable* table : RunnableTables())
    EXPECT_EQ(Bits(table->dot(a.data(), b.data(), 33)), 0x80000000u) << table->name;
}

TEST(FloatSums, AnotherOrderIsNoticed) {
  const std::vector<float> a = RandomActivations(2560, 3), b = RandomActivations(2560, 4);
  float serial = 0;
  for (size_t i = 0; i < a.size(); ++i) serial = std::fma(a[i], b[i], serial);
  EXPECT_NE(Bits(serial), Bits(reference::FloatDot(a.data(), b.data(), a.size())));
}

TEST(Tables, NamesVersionsAndChoice) {
  const char* why = nullptr;
  EXPECT_NE(FindKernelTable("auto", &why), nullptr);
  EXPECT_EQ(FindKernelTable("", &why), RunnableTables().back());
  EXPECT_EQ(FindKernelTable("sse9", &why), nullptr);
  EXPECT_NE(std::string(why).find("avx2"), std::string::npos) << why;
  const IsaChoice* choices;
  ASSERT_EQ(IsaChoices(&choices), kIsaCount);
  for (size_t i = 0; i < kIsaCount; ++i) {
    EXPECT_STREQ(choices[i].table->name, kIsaNames[i]);
    EXPECT_EQ(choices[i].table->arithmetic_version, kArithmeticVersion);
    EXPECT_EQ(choices[i].supported, choices[i].why_not[0] == 0);
    if (!choices[i].supported)
      std::printf("not run: %s (%s)\n", choices[i].table->name, choices[i].why_not);
    for (uint32_t f = 0; f < kFormatCount; ++f) {
      EXPECT_NE(choices[i].table->mat[f], nullptr);
      EXPECT_NE(choices[i].table->mat_float[f], nullptr);
      EXPECT_NE(choices[i].table->dequant[f], nullptr);
    }
  }
}

}  // namespace
}  // namespace lode::testing
