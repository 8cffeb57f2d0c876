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

// ---- fused kernels against the launches that they replace, whose bits are the cpu's
class CudaFused : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!card_.ok()) GTEST_SKIP() << card_.why_not();
  }
  std::vector<float> Noise(size_t n, float scale) {
    std::normal_distribution<float> normal;
    std::vector<float> x(n);
    for (float& v : x) v = normal(random_) * scale;
    return x;
  }
  std::vector<uint8_t> Matrix(uint32_t rows, uint32_t columns) {
    std::vector<uint8_t> w = Weights(Format::kQ8_0, rows, columns, random_);
    for (size_t block = 0; block < w.size(); block += Info(Format::kQ8_0).block_bytes) {
      const uint16_t d = canonical::ToF16(0.01f + 0.001f * static_cast<float>(random_() % 64));
      std::memcpy(&w[block], &d, 2);
    }
    return w;
  }
  // y = W x by quantising and multiplying in two launches.
  std::vector<float> Apart(const Buffer& w, const Buffer& x, uint32_t rows, uint32_t columns,
                           uint32_t n_acts) {
    const Buffer window = card_.Window(), y = card_.Allocate(sizeof(float) * rows * n_acts);
    const DeviceForms forms = MakeForms(card_, x, columns, 32, window);
    cuda::MatBatch batch;
    batch.tasks[0] = {
        w.as<uint8_t>(), RowBytes(Format::kQ8_0, columns), y.as<float>(), rows, Format::kQ8_0, 0};
    batch.n_tasks = 1;
    batch.n_rows = n_acts;
    batch.source = {x.as<float>(), columns, columns, forms.form};
    cuda::KernelsOf(Format::kQ8_0).mat(card_.stream(), batch, {4, 96});
    return card_.Floats(y, size_t{rows} * n_acts);
  }
  void ExpectSame(const std::vector<float>& got, const std::vector<float>& want) {
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i)
      ASSERT_TRUE(SameValue(got[i], want[i])) << i << ": " << got[i] << " is not " << want[i];
  }
  TestCard card_;
  std::mt19937 random_{7};
};

TEST_F(CudaFused, NarrowProductQuantisesItsInput) {
  for (const uint32_t columns : {96u, 128u, 640u}) {  // the tensor cores take whole pairs of blocks
    const uint32_t rows = 77;
    const Buffer w = card_.Upload(Matrix(rows, columns));
    const std::vector<float> x = Noise(size_t{columns} * kActs, 3.0f), dots = Noise(kActs, 1.0f);
    const Buffer dx = card_.Upload(x), window = card_.Window();
    for (uint32_t n = 1; n <= kActs; ++n) {
      const Buffer y = card_.Allocate(sizeof(float) * rows * n), gates = card_.Upload(dots);
      card_.Poison(y);
      cuda::NarrowProduct p;
      p.w = w.as<uint8_t>(), p.row_bytes = RowBytes(Format::kQ8_0, columns);
      p.rows = rows, p.columns = columns, p.n_rows = n;
      p.x = dx.as<float>(), p.y = y.as<float>();
      p.check.window = window.as<cuda::WindowBlock>();
      p.gates = gates.as<float>();
      ASSERT_TRUE(cuda::KernelsOf(Format::kQ8_0).narrow(card_.stream(), p));
      ExpectSame(card_.Floats(y, size_t{rows} * n), Apart(w, dx, rows, columns, n));
      const std::vector<float> got = card_.Floats(gates, n);
      for (uint32_t a = 0; a < n; ++a) ASSERT_TRUE(SameValue(got[a], canonical::Sigmoid(dots[a])));
    }
    EXPECT_EQ(card_.NotFinite(window), cuda::kAllFinite);
  }
  EXPECT_FALSE(cuda::KernelsOf(Format::kQ4_K).narrow(card_.stream(), {}));
}

TEST_F(CudaFused, SwigluOfGateAndUp) {
  const uint32_t rows = 37, columns = 160;
  const Buffer gate = card_.Upload(Matrix(rows, columns)), up = card_.Upload(Matrix(rows, columns));
  const Buffer x = card_.Upload(Noise(size_t{columns} * kActs, 1.0f)), window = card_.Window();
  const DeviceForms forms = MakeForms(card_, x, columns, 32, window);
  for (uint32_t n = 1; n <= kActs; ++n) {
    const Buffer h = card_.Allocate(sizeof(float) * rows * n);
    card_.Poison(h);
    cuda::MatBatch batch;
    const size_t row_bytes = RowBytes(Format::kQ8_0, columns);
    batch.tasks[0] = {gate.as<uint8_t>(), row_bytes, h.as<float>(), rows, Format::kQ8_0, 0};
    batch.tasks[1] = {up.as<uint8_t>(), row_bytes, nullptr, rows, Format::kQ8_0, 0};
    batch.n_tasks = 2;
    batch.n_rows = n;
    batch.source = {x.as<float>(), columns, columns, forms.form};
    ASSERT_TRUE(cuda::KernelsOf(Format::kQ8_0).swiglu(card_.stream(), batch, {8, 96}));
    std::vector<float> want = Apart(gate, x, rows, columns, n);
    const std::vector<float> of_up = Apart(up, x, rows, columns, n);
    for (size_t i = 0; i < want.size(); ++i)
      want[i] = canonical::Mul(canonical::Silu(want[i]), of_up[i]);
    ExpectSame(card_.Floats(h, want.size()), want);
  }
}

// Tensor cores against the other kernel, whose bits are the cpu's: tiles that are not whole,
// several per warp, several matrices with a float one in front, rows that are not wanted.
TEST_F(CudaFused, TensorProducts) {
  const bool had = cuda::tensor_products;
  const uint32_t multiprocessors = cuda::multiprocessors;
  const uint32_t first = 37, second = 500, riders = 3;
  for (const uint32_t columns : {256u, 1024u, 2560u, 6144u}) {
    if (!card_.real() && columns > 1024 && !had) continue;
    const size_t row_bytes = RowBytes(Format::kQ8_0, columns);
    const Buffer w = card_.Upload(Matrix(first + second, columns));
    const Buffer floats = card_.Upload(Noise(size_t{riders} * columns, 1.0f));
    const Buffer x = card_.Upload(Noise(size_t{columns} * kActs, 1.0f)), window = card_.Window();
    const DeviceForms forms = MakeForms(card_, x, columns, 32, window);
    const size_t all = size_t{first + second + riders} * kActs;
    const auto run = [&](uint32_t n, uint32_t sms, bool tensor) {
      const Buffer y = card_.Allocate(sizeof(float) * all);
      card_.Poison(y);
      cuda::MatBatch batch;
      batch.tasks[0] = {w.as<uint8_t>(), row_bytes, y.as<float>(), first, Format::kQ8_0, 0};
      batch.tasks[1] = {floats.as<uint8_t>(),
                        columns * sizeof(float),
                        y.as<float>() + size_t{first + second} * kActs,
                        riders,
                        Format::kF32,
                        0};
      batch.tasks[2] = {w.as<uint8_t>() + first * row_bytes,
                        row_bytes,
                        y.as<float>() + size_t{first} * kActs,
                        second,
                        Format::kQ8_0,
                        0};
      batch.n_tasks = 3;
      batch.n_rows = n;
      batch.source = {x.as<float>(), columns, columns, forms.form};
      cuda::tensor_products = tensor;
      cuda::multiprocessors = sms;
      cuda::KernelsOf(Format::kQ8_0).mat(card_.stream(), batch, {8, 96});
      cuda::CheckLaunches("product");
      return card_.Floats(y, all);
    };
    for (uint32_t n = 1; n <= kActs; ++n) {
      if (!card_.real() && n % 3 != 1 && n != kActs) continue;
      const std::vector<float> want = run(n, multiprocessors, false);
      for (const uint32_t sms : {1u, 9u, 17u, 20u}) ExpectSame(run(n, sms, true), want);
    }
  }
  cuda::tensor_products = had;
  cuda::multiprocessors = multiprocessors;
}

TEST_F(CudaFused, RouterLogitsAndForms) {
  const uint32_t experts = 30, columns = 320;
  const std::vector<float> weights = Noise(size_t{experts} * columns, 1.0f);
  const Buffer w = card_.Upload(weights), x = card_.Upload(Noise(size_t{columns} * kActs, 1.0f));
  const Buffer window = card_.Window(), logits = card_.Allocate(sizeof(float) * experts * kActs);
  const DeviceForms want_forms = MakeForms(card_, x, columns, 64, window);
  const std::vector<float> xs = card_.Floats(x, size_t{columns} * kActs);
  for (uint32_t n = 1; n <= kActs; ++n) {
    const Buffer made = card_.Allocate(size_t{want_forms.form.stride} * n);
    cuda::RouterArgs args;
    args.w = w.as<uint8_t>(), args.row_bytes = columns * sizeof(float);
    args.format = Format::kF32, args.x = x.as<float>();
    args.columns = columns, args.experts = experts, args.logits = logits.as<float>();
    args.forms.form[1] = want_forms.form;
    args.forms.form[1].base = made.as<uint8_t>();
    args.check.window = window.as<cuda::WindowBlock>();
    card_.Poison(logits);
    ASSERT_TRUE(cuda::LaunchRouter(card_.stream(), args, n));
    const std::vector<float> got = card_.Floats(logits, size_t{experts} * n);
    for (uint32_t a = 0; a < n; ++a) {
      for (uint32_t e = 0; e < experts; ++e) {
        float p[canonical::kPartials] = {};
        for (uint32_t i = 0; i < columns; ++i)
          p[i % 32] = canonical::Fma(weights[size_t{e} * columns + i], xs[size_t{a} * columns + i],
                                     p[i % 32]);
        for (uint32_t s = 16; s >= 1; s /= 2) {
          for (uint32_t i = 0; i < s; ++i) p[i] = canonical::Add(p[i], p[i + s]);
        }
        ASSERT_TRUE(SameValue(got[a * experts + e], p[0])) << "row " << a << ", expert " << e;
      }
    }
    std::vector<uint8_t> a(ActLayout{columns, 64}.bytes()), b(a.size());
    for (uint32_t row = 0; row < n; ++row) {
      card_.Download(a.data(), made.as<uint8_t>() + row * want_forms.form.stride, a.size());
      card_.Download(b.data(), want_forms.form.base + row * want_forms.form.stride, b.size());
      ASSERT_EQ(a, b) << "form of row " << row;
    }
  }
}

// Ids and weights of the best experts are the cpu's: usual logits, equal ones, NaN, all of them far
// below one.
TEST_F(CudaFused, RouteChoosesAsTheCpu) {
  for (const uint32_t experts : {20u, 80u, 512u, 1000u}) {
    for (const uint32_t used : {1u, 8u, 10u, 20u}) {
      std::vector<float> logits = Noise(size_t{experts} * kActs, 2.0f);
      for (uint32_t e = 0; e < experts; ++e) {
        logits[1 * experts + e] = static_cast<float>(e % 5);
        logits[2 * experts + e] = 0.0f;
        logits[3 * experts + e] = e % 7 == 3 ? 1e3f : -1e3f;
        if (e % 3 == 1) logits[4 * experts + e] = NAN;
        logits[5 * experts + e] = e == experts - 1 ? 50.0f : -50.0f;
      }
      const Buffer device = card_.Upload(logits), out = card_.Allocate(sizeof(RoutedRow) * kActs);
      cuda::LaunchRoute(card_.stream(),
                        {.logits = device.as<float>(),
                         .experts = experts,
                         .used = used,
                         .routed = out.as<RoutedRow>()},
                        kActs);
      std::vector<RoutedRow> got(kActs);
      card_.Download(got.data(), out.as<RoutedRow>(), sizeof(RoutedRow) * kActs);
      for (uint32_t a = 0; a < kActs; ++a) {
        RoutedRow want = {};
        std::vector<float> scratch(experts);
        Cpu().route(&logits[size_t{a} * experts], experts, used, scratch.data(), want.ids,
                    want.weights);
        for (uint32_t r = 0; r < used; ++r) {
          ASSERT_EQ(got[a].ids[r], want.ids[r])
              << experts << " experts, row " << a << ", place " << r << " of " << used;
          ASSERT_TRUE(SameValue(got[a].weights[r], want.weights[r])) << "row " << a << ", " << r;
        }
      }
    }
  }
}

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
