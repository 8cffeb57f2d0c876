// How much an expert's output loses to 8-bit activations: gate and up, silu(gate) * up,
// requantised, down, by every runnable kernel table, against the same expert in float64 with
// activations as they are. The bar is an ideal 8-bit implementation: float64 everywhere,
// activations rounded to the nearest of 255 levels of the same blocks. Binary32 scales, terms and
// sums may add at most 5 %.
#include <gtest/gtest.h>

#include "tests/kernels/format_cases.h"

namespace lode::testing {
namespace {

constexpr uint32_t kHidden = 512, kWidth = 256;  // whole blocks of every format
constexpr double kBar = 1.05;
constexpr uint32_t kExperts = 8;  // errors add up over some experts: one alone is noisy

using Vector = std::vector<double>;

struct Expert {
  Format format;
  std::vector<uint8_t> gate, up, down;
  std::vector<float> gate_f, up_f, down_f;  // dequantised

  Expert(Format f, uint32_t seed) : format(f) {
    gate = RandomWeights(f, kWidth * kHidden, seed, false);
    up = RandomWeights(f, kWidth * kHidden, seed + 1, false);
    down = RandomWeights(f, kHidden * kWidth, seed + 2, false);
    gate_f = reference::Dequant(f, gate.data(), kWidth * kHidden);
    up_f = reference::Dequant(f, up.data(), kWidth * kHidden);
    down_f = reference::Dequant(f, down.data(), kHidden * kWidth);
  }
};

Vector Product(const std::vector<float>& w, const Vector& x) {
  Vector y(w.size() / x.size());
  for (size_t r = 0; r < y.size(); ++r)
    for (size_t i = 0; i < x.size(); ++i) y[r] += w[r * x.size() + i] * x[i];
  return y;
}

Vector IdealEightBits(const Vector& x, uint32_t block) {
  Vector y(x.size());
  for (size_t b = 0; b < x.size(); b += block) {
    double amax = 0;
    for (uint32_t i = 0; i < block; ++i) amax = std::max(amax, std::fabs(x[b + i]));
    const double d = amax / 127;
    for (uint32_t i = 0; i < block && d > 0; ++i) y[b + i] = std::nearbyint(x[b + i] / d) * d;
  }
  return y;
}

// act(x) is what the activations become before a product.
template <class Act>
Vector InDouble(const Expert& e, const Vector& x, Act act) {
  const Vector xq = act(x);
  Vector gate = Product(e.gate_f, xq);
  const Vector up = Product(e.up_f, xq);
  for (size_t i = 0; i < gate.size(); ++i) gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
  return Product(e.down_f, act(gate));
}

std::vector<float> MatOf(const KernelTable& table, Format format, const std::vector<uint8_t>& w,
                         const std::vector<float>& x, uint32_t rows) {
  const uint32_t n = static_cast<uint32_t>(x.size()), block = Info(format).act_block_len;
  std::vector<int8_t> q(n);
  std::vector<float> d(n / block), y(rows);
  std::vector<int16_t> sums(n / 16);
  EXPECT_TRUE(table.quantize(x.data(), n, block, q.data(), d.data(), sums.data()));
  const ActRow act = {q.data(), d.data(), sums.data(), nullptr};
  float* out[] = {y.data()};
  table.mat[static_cast<size_t>(format)]({w.data(), RowBytes(format, n), rows, n, &act, 1, out});
  return y;
}

double Distance(const Vector& a, const Vector& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return sum;
}

TEST(ExpertError, NoWorseThanIdealEightBitActivations) {
  for (Format format : AllFormats()) {
    const uint32_t block = Info(format).act_block_len;
    if (block == 0) continue;
    double ideal = 0;
    std::vector<double> ours(RunnableTables().size());
    for (uint32_t seed = 0; seed < kExperts; ++seed) {
      const Expert e(format, 10 * seed);
      const std::vector<float> x = RandomActivations(kHidden, 500 + seed);
      const Vector xd(x.begin(), x.end());
      const Vector exact = InDouble(e, xd, [](const Vector& v) { return v; });
      ideal += Distance(exact,
                        InDouble(e, xd, [&](const Vector& v) { return IdealEightBits(v, block); }));
      for (size_t t = 0; t < ours.size(); ++t) {
        const KernelTable& table = *RunnableTables()[t];
        std::vector<float> gate = MatOf(table, format, e.gate, x, kWidth);
        const std::vector<float> up = MatOf(table, format, e.up, x, kWidth);
        table.swiglu(gate.data(), up.data(), kWidth, gate.data());
        const std::vector<float> y = MatOf(table, format, e.down, gate, kHidden);
        ours[t] += Distance(exact, Vector(y.begin(), y.end()));
      }
    }
    ASSERT_GT(ideal, 0);
    for (size_t t = 0; t < ours.size(); ++t)
      EXPECT_LE(std::sqrt(ours[t] / ideal), kBar)
          << Info(format).name << " " << RunnableTables()[t]->name;
    std::printf("%s: error %.4f of ideal 8-bit activations\n", Info(format).name,
                std::sqrt(ours.back() / ideal));
  }
}

}  // namespace
}  // namespace lode::testing
