// Products of the cuda kernels against the cpu tables, bit for bit: every computed format, 1..8
// activation rows, every kind of tile, random and edge blocks. Also the forms of activations and
// dequantised rows. Runs on a card (cuda_kernels_test) and on the emulated device
// (cuda_emulated_test).
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/runtime.h"
#include "kernels/kernel_table.h"
#include "tests/cuda/test_card.h"

namespace lode::testing {
namespace {

constexpr uint32_t kRows = 37;  // no multiple of any tile
constexpr uint32_t kActs = kWindowRowsMax;

const KernelTable& Cpu() { return *FindKernelTable("auto", nullptr); }

// Which NaN a value is, is no part of the arithmetic.
bool SameValue(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) || std::memcmp(&a, &b, sizeof(a)) == 0;
}

// Rows of activations: usual ones, zeros, values below the smallest scale, huge, one spike.
std::vector<float> Activations(uint32_t n, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> x(size_t{n} * kActs);
  for (float& v : x) v = normal(random);
  for (uint32_t i = 0; i < n; ++i) {
    x[1 * n + i] *= i % 64 < 32 ? 0.0f : 1e30f;
    x[2 * n + i] *= 1e-32f;
    x[3 * n + i] = i % 37 == 5 ? -3e38f : x[3 * n + i];
    x[4 * n + i] *= 1e-40f;
  }
  return x;
}

// Random bytes; in the second half of the rows the binary16 fields are made finite and usual by
// clearing an exponent bit wherever they may stand, so that infinities do not hide everything else.
std::vector<uint8_t> Weights(Format format, uint32_t rows, uint32_t columns, std::mt19937& random) {
  const FormatInfo& info = Info(format);
  const size_t row_bytes = RowBytes(format, columns);
  std::vector<uint8_t> w(row_bytes * rows);
  for (uint8_t& b : w) b = static_cast<uint8_t>(random());
  if (info.act_block_len == 0) {
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < w.size(); i += info.block_bytes) {
      const float v = normal(random);
      const uint16_t half = format == Format::kF16
                                ? canonical::ToF16(v)
                                : static_cast<uint16_t>(canonical::BitsOf(v) >> 16);
      if (info.block_bytes == 4) {
        std::memcpy(&w[i], &v, 4);
      } else if (random() % 64 != 0) {
        std::memcpy(&w[i], &half, 2);
      }
    }
    return w;
  }
  for (size_t row = 2; row < rows; ++row) {
    for (uint32_t b = 0; b < columns / info.block_len; ++b) {
      uint8_t* block = &w[row * row_bytes + size_t{b} * info.block_bytes];
      // d and its companions stand at the front, in Q6_K at the end.
      for (uint32_t at : {1u, 3u, info.block_bytes - 1})
        block[at] &= at == 3 && info.block_bytes < 24 ? 0xff : 0xbf;
    }
  }
  return w;
}

struct DeviceForms {
  cuda::ActForm form;
  Buffer memory;
};
DeviceForms MakeForms(TestCard& card, const Buffer& x, uint32_t n, uint32_t len,
                      const Buffer& window) {
  const ActLayout layout = {n, len};
  const uint32_t stride = static_cast<uint32_t>((layout.bytes() + n + 63) / 64 * 64);
  DeviceForms out;
  out.memory = card.Allocate(size_t{stride} * kActs);
  out.form = {.base = out.memory.as<uint8_t>(),
              .stride = stride,
              .d_offset = static_cast<uint32_t>(layout.d_offset()),
              .sum_offset = static_cast<uint32_t>(layout.sum16_offset()),
              .crumb_offset = len == 64 ? static_cast<uint32_t>(layout.bytes()) : 0};
  cuda::QuantizeArgs args;
  args.x = x.as<float>();
  args.stride = args.n = n;
  args.forms.form[len == 32 ? 0 : (len == 64 ? 1 : 2)] = out.form;
  args.check.window = window.as<cuda::WindowBlock>();
  cuda::LaunchQuantize(card.stream(), args, kActs);
  return out;
}

class CudaProducts : public ::testing::TestWithParam<uint32_t> {
 protected:
  void SetUp() override {
    if (!card_.ok()) GTEST_SKIP() << card_.why_not();
  }
  TestCard card_;
  std::mt19937 random_{GetParam() + 1};
};

std::vector<uint32_t> ColumnsOf(const FormatInfo& info) {
  if (info.act_block_len == 0) return {16, 31, 100, 640, 2600};
  // One block, the narrow down matrix, and more chunks than one span of terms.
  const uint32_t len = info.block_len;
  return {len, 5 * len, (640 + len - 1) / len * len, (2592 + len - 1) / len * len};
}

// What the cpu makes of the same activations and weights.
struct CpuAnswer {
  std::vector<std::vector<uint8_t>> forms;  // [activation row], empty for float formats
  std::vector<float> y;                     // [activation row][weight row]
};
CpuAnswer AskCpu(Format format, uint32_t n, const std::vector<float>& x,
                 const std::vector<uint8_t>& w) {
  const uint32_t len = Info(format).act_block_len;
  CpuAnswer answer;
  answer.y.resize(size_t{kRows} * kActs);
  ActRow rows[kActs];
  float* out[kActs];
  for (uint32_t a = 0; a < kActs; ++a) {
    if (len != 0) {
      const ActLayout layout = {n, len};
      answer.forms.emplace_back(layout.bytes());
      uint8_t* base = answer.forms.back().data();
      EXPECT_TRUE(Cpu().quantize(&x[size_t{a} * n], n, len, reinterpret_cast<int8_t*>(base),
                                 reinterpret_cast<float*>(base + layout.d_offset()),
                                 reinterpret_cast<int16_t*>(base + layout.sum16_offset())));
      rows[a] = ActRowAt(base, layout);
    }
    rows[a].f = &x[size_t{a} * n];
    out[a] = &answer.y[size_t{a} * kRows];
  }
  Cpu().mat[static_cast<uint32_t>(format)]({.w = w.data(),
                                            .row_bytes = RowBytes(format, n),
                                            .n_rows = kRows,
                                            .n_cols = n,
                                            .acts = rows,
                                            .n_acts = kActs,
                                            .out = out});
  return answer;
}

void ExpectSameForms(TestCard& card, const cuda::ActForm& form, uint32_t n, uint32_t len,
                     const CpuAnswer& want) {
  const ActLayout layout = {n, len};
  for (uint32_t a = 0; a < kActs; ++a) {
    std::vector<uint8_t> got(layout.bytes());
    card.Download(got.data(), form.base + size_t{a} * form.stride, got.size());
    const auto same = [&](size_t at, size_t bytes) {
      return std::memcmp(&got[at], &want.forms[a][at], bytes) == 0;
    };
    ASSERT_TRUE(same(0, n)) << "codes of row " << a;
    ASSERT_TRUE(same(layout.d_offset(), n / len * 4)) << "scales of row " << a;
    ASSERT_TRUE(same(layout.sum16_offset(), n / 16 * 2)) << "sums of row " << a;
  }
}

TEST_P(CudaProducts, EqualTheCpu) {
  const Format format = static_cast<Format>(GetParam());
  const FormatInfo& info = Info(format);
  uint64_t compared = 0;
  for (const uint32_t n : ColumnsOf(info)) {
    const std::vector<float> x = Activations(n, random_);
    const std::vector<uint8_t> w = Weights(format, kRows, n, random_);
    const CpuAnswer want = AskCpu(format, n, x, w);
    const Buffer dx = card_.Upload(x), dw = card_.Upload(w), window = card_.Window();
    const Buffer dy = card_.Allocate(sizeof(float) * kRows * kActs);
    DeviceForms forms;
    if (info.act_block_len != 0) {
      forms = MakeForms(card_, dx, n, info.act_block_len, window);
      ExpectSameForms(card_, forms.form, n, info.act_block_len, want);
    }
    for (const cuda::ProductShape& shape : Shapes()) {
      for (uint32_t n_acts = 1; n_acts <= kActs; ++n_acts) {
        if (!cuda::ShapeIsValid(shape, n_acts)) continue;
        // Fibers are slow.
        if (!card_.real() && n_acts % 3 != 1 && (shape.tile_rows != 16 || n_acts != 8)) continue;
        cuda::MatBatch batch;
        batch.tasks[0] = {dw.as<uint8_t>(), RowBytes(format, n), dy.as<float>(), kRows, format, 0};
        batch.n_tasks = 1;
        batch.n_rows = n_acts;
        batch.source = {dx.as<float>(), n, n, forms.form};
        card_.Poison(dy);
        cuda::KernelsOf(format).mat(card_.stream(), batch, shape);
        cuda::CheckLaunches("product");
        const std::vector<float> got = card_.Floats(dy, size_t{kRows} * n_acts);
        for (size_t i = 0; i < got.size(); ++i) {
          ASSERT_TRUE(SameValue(got[i], want.y[i]))
              << info.name << ", " << n << " columns, row " << i % kRows << ", activation row "
              << i / kRows << " of " << n_acts << ", tiles of " << shape.tile_rows << " rows, "
              << shape.threads << " threads: " << got[i] << " is not " << want.y[i];
        }
        compared += got.size();
      }
    }
  }
  std::printf("bits: %s products, %llu values equal the cpu's\n", info.name,
              static_cast<unsigned long long>(compared));
}

TEST_P(CudaProducts, DequantisedRowsEqualTheCpu) {
  const Format format = static_cast<Format>(GetParam());
  const uint32_t n = Info(format).act_block_len == 0 ? 100 : 5 * Info(format).block_len;
  const std::vector<uint8_t> w = Weights(format, kRows, n, random_);
  std::vector<float> want(size_t{kRows} * n);
  Cpu().dequant[GetParam()](w.data(), want.size(), want.data());
  const Buffer dw = card_.Upload(w), dy = card_.Allocate(want.size() * sizeof(float));
  card_.Poison(dy);
  cuda::KernelsOf(format).dequant(card_.stream(),
                                  {.table = dw.as<uint8_t>(),
                                   .row_bytes = RowBytes(format, n),
                                   .n = n,
                                   .out = dy.as<float>(),
                                   .out_stride = n},
                                  kRows);
  const std::vector<float> got = card_.Floats(dy, want.size());
  for (size_t i = 0; i < got.size(); ++i)
    ASSERT_TRUE(SameValue(got[i], want[i]))
        << "weight " << i << ": " << got[i] << " is not " << want[i];
  std::printf("bits: %s dequantised, %zu values equal the cpu's\n", Info(format).name, got.size());
}

INSTANTIATE_TEST_SUITE_P(Formats, CudaProducts, ::testing::Range(0u, kFormatCount),
                         [](const auto& info) {
                           return Info(static_cast<Format>(info.param)).name;
                         });

TEST(CudaQuantize, NamesTheLowestRowThatIsNotFinite) {
  TestCard card;
  if (!card.ok()) GTEST_SKIP() << card.why_not();
  const uint32_t n = 320;
  std::vector<float> x(size_t{n} * kActs, 1.0f);
  x[5 * n + 319] = INFINITY;
  x[3 * n + 7] = NAN;
  const Buffer dx = card.Upload(x), window = card.Window();
  cuda::QuantizeArgs args;
  args.x = dx.as<float>();
  args.stride = args.n = n;
  args.check = {window.as<cuda::WindowBlock>(), 9, cuda::LayerPart::kExperts, false};
  cuda::LaunchQuantize(card.stream(), args, kActs);
  EXPECT_EQ(card.NotFinite(window), cuda::NotFiniteKey(9, cuda::LayerPart::kExperts, 3));
  args.check.layer = 8;
  args.check.part = cuda::LayerPart::kShared;
  cuda::LaunchQuantize(card.stream(), args, kActs);
  EXPECT_EQ(card.NotFinite(window), cuda::NotFiniteKey(8, cuda::LayerPart::kShared, 3));
}

}  // namespace
}  // namespace lode::testing
