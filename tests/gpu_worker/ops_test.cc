// The model's float operators: every instruction set gives the scalar table's bits on odd lengths
// and edge values, and the selections equal an obvious sort.
#include "kernels/ops.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/kernel_table.h"

namespace lode {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<const KernelTable*> Tables() {
  const IsaChoice* choices;
  std::vector<const KernelTable*> tables;
  for (size_t i = 0, n = IsaChoices(&choices); i < n; ++i) {
    if (choices[i].supported) tables.push_back(choices[i].table);
  }
  return tables;
}

std::vector<float> Random(size_t n, uint32_t seed, float scale = 2.0f) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> v(n);
  for (float& x : v) x = normal(rng);
  return v;
}

// Runs `op(table, out)` on every table and compares the bytes of out with the scalar table's.
template <typename F>
void ExpectSameOnEveryTable(const char* what, size_t n_out, const F& op) {
  std::vector<float> expected;
  for (const KernelTable* t : Tables()) {
    std::vector<float> out(n_out, -7.0f);
    op(*t, out.data());
    if (expected.empty()) expected = out;
    EXPECT_EQ(std::memcmp(expected.data(), out.data(), n_out * sizeof(float)), 0)
        << what << " on " << t->name << ", n " << n_out;
  }
}

TEST(Ops, EveryTableGivesTheSameBits) {
  const float inf = std::numeric_limits<float>::infinity();
  for (size_t n : {1u, 5u, 16u, 31u, 64u, 100u, 256u}) {
    std::vector<float> a = Random(n, 1), b = Random(n, 2), w = Random(n, 3);
    a[0] = 200.0f;  // beyond the range of exp on either side
    b[n / 2] = -200.0f;
    if (n > 20) a[7] = -0.0f, a[9] = inf, b[11] = -inf;
    ExpectSameOnEveryTable(
        "swiglu", n, [&](const KernelTable& t, float* o) { t.swiglu(a.data(), b.data(), n, o); });
    ExpectSameOnEveryTable(
        "hc_gate", n, [&](const KernelTable& t, float* o) { t.hc_gate(a.data(), n, 0.25f, o); });
    ExpectSameOnEveryTable(
        "hc_write", n, [&](const KernelTable& t, float* o) { t.hc_write(b.data(), 0.3f, n, o); });
    ExpectSameOnEveryTable("gates", 2 * n, [&](const KernelTable& t, float* o) {
      t.delta_gates(a.data(), b.data(), w.data(), w.data(), n, o, o + n);
    });
    a = Random(n, 4);
    ExpectSameOnEveryTable("l2_norm", n, [&](const KernelTable& t, float* o) {
      t.l2_norm(a.data(), n, 1e-6f, 0.5f, o);
    });
    ExpectSameOnEveryTable("rms_norm_gate", n, [&](const KernelTable& t, float* o) {
      t.rms_norm_gate(a.data(), w.data(), b.data(), n, 1e-6f, o);
    });
    ExpectSameOnEveryTable("ple_gate", n, [&](const KernelTable& t, float* o) {
      t.ple_gate(a.data(), w.data(), a.data(), n, o);
    });
    const float* taps[4] = {nullptr, a.data(), w.data(), a.data()};
    const std::vector<float> conv = Random(4 * n, 5);
    ExpectSameOnEveryTable("conv_silu", n, [&](const KernelTable& t, float* o) {
      t.conv_silu(taps, 4, conv.data(), n, n, o);
    });
    for (KvType type : {KvType::kQ8, KvType::kF16, KvType::kF32}) {
      ExpectSameOnEveryTable("kv", n + 1, [&](const KernelTable& t, float* o) {
        std::vector<uint8_t> cell(4 * n);
        EXPECT_TRUE(t.kv_store(a.data(), n, type, cell.data(), o + n));
        t.kv_load(cell.data(), o[n], n, type, o);
      });
    }
  }
  for (uint32_t position : {0u, 1u, 719u, 262143u, 1048575u}) {
    ExpectSameOnEveryTable("rope", 64 + 64, [&](const KernelTable& t, float* o) {
      const std::vector<float> inv = {1.0f, 0.3f, 0.01f, 1e-7f, 0.7f}, x = Random(64, 9);
      std::copy(x.begin(), x.end(), o + 64);
      t.rope_table(position, inv.data(), 5, o, o + 32);
      t.rope(o + 64, 5, o, o + 32);
    });
  }
}

TEST(Ops, DeltaStepIsTheStatedRecurrence) {
  for (uint32_t keys : {32u, 64u, 128u}) {
    const std::vector<float> s0 = Random(keys * kDeltaColumns, 1), k = Random(keys, 2, 0.1f),
                             q = Random(keys, 3, 0.1f), v = Random(kDeltaColumns, 4);
    const float beta = 0.7f, g = 0.9f;
    ExpectSameOnEveryTable(
        "delta_step", (keys + 1) * kDeltaColumns, [&](const KernelTable& t, float* o) {
          std::copy(s0.begin(), s0.end(), o + kDeltaColumns);
          t.delta_step(o + kDeltaColumns, keys, k.data(), q.data(), v.data(), beta, g, o);
        });
    // The same from the definition: dot products over strided columns through the canonical dot.
    const KernelTable& t = *Tables()[0];
    std::vector<float> s = s0, out(kDeltaColumns);
    t.delta_step(s.data(), keys, k.data(), q.data(), v.data(), beta, g, out.data());
    std::vector<float> folded = s0;
    t.delta_step(folded.data(), keys, k.data(), nullptr, v.data(), beta, g, nullptr);
    EXPECT_EQ(std::memcmp(folded.data(), s.data(), s.size() * sizeof(float)), 0)
        << "folding differs from stepping";
    for (uint32_t c = 0; c < kDeltaColumns; ++c) {
      std::vector<float> column(keys);
      for (uint32_t i = 0; i < keys; ++i) column[i] = g * s0[i * kDeltaColumns + c];
      const float delta = beta * (v[c] - t.dot(k.data(), column.data(), keys));
      for (uint32_t i = 0; i < keys; ++i) column[i] = std::fma(k[i], delta, column[i]);
      for (uint32_t i = 0; i < keys; ++i) ASSERT_EQ(column[i], s[i * kDeltaColumns + c]);
      ASSERT_EQ(t.dot(q.data(), column.data(), keys), out[c]);
    }
  }
}

TEST(Ops, SelectBlocksEqualsASort) {
  std::mt19937 rng(5);
  for (uint32_t round = 0; round < 200; ++round) {
    const uint32_t n = 1 + rng() % 700, k = 1 + rng() % 200;
    std::vector<float> scores(n);
    // Few distinct values: ties at the cut are the rule. Sometimes NaN, infinities, both zeros.
    const float values[] = {0.0f,   -0.0f, 1.5f, 1.5000001f,
                            3e-40f, -2.0f, kNan, std::numeric_limits<float>::infinity()};
    for (float& s : scores)
      s = round % 2 ? values[rng() % 8] : static_cast<float>(rng() % 50) * 0.37f;
    std::vector<uint32_t> order(n);
    std::iota(order.begin(), order.end(), 0u);
    std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
      if (std::isnan(scores[a]) || std::isnan(scores[b]))
        return !std::isnan(scores[a]) && std::isnan(scores[b]);
      return scores[a] > scores[b];
    });
    order.resize(std::min(n, k));
    std::sort(order.begin(), order.end());
    for (const KernelTable* t : Tables()) {
      std::vector<uint32_t> out(n);
      out.resize(t->select_blocks(scores.data(), n, k, out.data()));
      ASSERT_EQ(out, order) << t->name << " n " << n << " k " << k;
    }
  }
}

TEST(Ops, RouteIsATotalOrderEvenForNan) {
  for (const KernelTable* t : Tables()) {
    std::vector<float> logits = {1, 3, 3, kNan, 2, 3}, scratch(6);
    uint16_t ids[4];
    float weights[4];
    t->route(logits.data(), 6, 4, scratch.data(), ids, weights);
    for (uint16_t id : ids) EXPECT_LT(id, 6);
    logits[3] = 0;
    t->route(logits.data(), 6, 4, scratch.data(), ids, weights);
    EXPECT_EQ(ids[0], 1);
    EXPECT_EQ(ids[1], 2);
    EXPECT_EQ(ids[2], 5);
    EXPECT_EQ(ids[3], 4);
    EXPECT_NEAR(weights[0] + weights[1] + weights[2] + weights[3], 1.0f, 1e-6f);
    EXPECT_NEAR(weights[3], std::exp(2.0) / (3 * std::exp(3.0) + std::exp(2.0)), 1e-6f);
    std::fill(logits.begin(), logits.end(), kNan);
    t->route(logits.data(), 6, 4, scratch.data(), ids, weights);
    for (uint16_t i = 0; i < 4; ++i) EXPECT_EQ(ids[i], i);
  }
}

TEST(Ops, KvStoreRefusesWhatIsNotFinite) {
  for (const KernelTable* t : Tables()) {
    for (KvType type : {KvType::kQ8, KvType::kF16, KvType::kF32}) {
      std::vector<float> x(64, 1.0f);
      std::vector<uint8_t> cell(256);
      float scale;
      EXPECT_TRUE(t->kv_store(x.data(), 64, type, cell.data(), &scale));
      x[63] = kNan;
      EXPECT_FALSE(t->kv_store(x.data(), 64, type, cell.data(), &scale));
    }
  }
}

TEST(Ops, AttendIsSoftmaxOverTheSelectedCells) {
  constexpr uint32_t kDim = 64, kCells = 300;  // five chunks, two KV blocks in reverse order
  const std::vector<float> k = Random(kCells * kDim, 1, 0.5f), v = Random(kCells * kDim, 2),
                           q = Random(kDim, 3), gate = Random(kDim, 4);
  std::vector<uint32_t> cells;
  for (uint32_t i = 0; i < kCells; ++i) {
    if (i % 7 != 3) cells.push_back(i);
  }
  const uint32_t blocks[] = {1, 0};
  const size_t part = kKvBlockCells * kDim * sizeof(float), scales = kKvBlockCells * sizeof(float),
               stride = 2 * part + 2 * scales;
  std::vector<uint8_t> pool(2 * stride);
  for (uint32_t i = 0; i < kCells; ++i) {
    uint8_t* block = pool.data() + blocks[i / kKvBlockCells] * stride;
    const size_t c = i % kKvBlockCells;
    float* s = reinterpret_cast<float*>(block + 2 * part);
    Tables()[0]->kv_store(&k[i * kDim], kDim, KvType::kF32, block + c * kDim * 4, s + c);
    Tables()[0]->kv_store(&v[i * kDim], kDim, KvType::kF32, block + part + c * kDim * 4,
                          s + kKvBlockCells + c);
  }
  std::vector<float> last;
  ExpectSameOnEveryTable("attend", kDim, [&](const KernelTable& t, float* out) {
    std::vector<float> scores(cells.size());
    t.attend({.q = q.data(),
              .gate = gate.data(),
              .head_dim = kDim,
              .type = KvType::kF32,
              .cells = cells.data(),
              .n_cells = static_cast<uint32_t>(cells.size()),
              .blocks = blocks,
              .k = pool.data(),
              .v = pool.data() + part,
              .k_scales = pool.data() + 2 * part,
              .v_scales = pool.data() + 2 * part + scales,
              .block_stride = stride,
              .cell_bytes = kDim * 4,
              .scores = scores.data(),
              .out = out});
    last.assign(out, out + kDim);
  });
  double total = 0;
  std::vector<double> sum(kDim, 0);
  for (uint32_t i : cells) {
    double s = 0;
    for (uint32_t d = 0; d < kDim; ++d) s += double{q[d]} * k[i * kDim + d];
    const double e = std::exp(s / 8);
    total += e;
    for (uint32_t d = 0; d < kDim; ++d) sum[d] += e * v[i * kDim + d];
  }
  // fp32 sums of 257 terms: about 257 * 2^-24 relative to values of size 1.
  for (uint32_t d = 0; d < kDim; ++d)
    EXPECT_NEAR(last[d], sum[d] / total / (1 + std::exp(-double{gate[d]})), 2e-5) << d;
}

}  // namespace
}  // namespace lode
