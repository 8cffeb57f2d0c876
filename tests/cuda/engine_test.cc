// Whole windows: the cuda device and the cpu device give the same logits and the same state, bit
// for bit. Demo model, synthetic models with all-float experts and with index blocks beyond the
// budget, at full width; 1..8 rows, several sequences, rejected drafts, every KV type. Runs on a
// card (cuda_kernels_test) and on the emulated device (cuda_emulated_test).
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "tests/cuda/cuda_engine.h"
#include "tests/cuda/test_card.h"
#include "tests/support/places.h"

namespace lode::testing {
namespace {

std::string DemoModel() { return TestSources() + "/tests/models/demo-q4-with-mtp.gguf"; }

// Both engines over one script of windows.
class Twins {
 public:
  static std::unique_ptr<Twins> Create(const std::string& model,
                                       const LocalEngineOptions& options) {
    auto twins = std::make_unique<Twins>();
    StatusOr<std::unique_ptr<LocalEngine>> cpu = LocalEngine::Create(model, options);
    StatusOr<std::unique_ptr<CudaEngine>> gpu = CudaEngine::Create(model, options);
    EXPECT_TRUE(cpu.ok()) << cpu.status();
    EXPECT_TRUE(gpu.ok()) << gpu.status();
    if (!cpu.ok() || !gpu.ok()) return nullptr;
    twins->cpu = std::move(*cpu);
    twins->gpu = std::move(*gpu);
    return twins;
  }

  // Runs one window on both and compares every row's logits.
  ::testing::AssertionResult Run(const std::vector<LocalRow>& rows) {
    const StatusOr<WindowOutcome> a = cpu->Run(rows), b = gpu->Run(rows);
    if (!a.ok()) return ::testing::AssertionFailure() << a.status();
    if (!b.ok()) return ::testing::AssertionFailure() << b.status();
    if (a->status != b->status ||
        (!a->ok() && (a->error.layer != b->error.layer || a->error.row != b->error.row))) {
      return ::testing::AssertionFailure() << "outcomes differ: cpu " << static_cast<int>(a->status)
                                           << " layer " << a->error.layer << " row " << a->error.row
                                           << ", cuda " << static_cast<int>(b->status) << " layer "
                                           << b->error.layer << " row " << b->error.row;
    }
    if (!a->ok()) return ::testing::AssertionSuccess();
    for (uint32_t r = 0; r < rows.size(); ++r) {
      if (!rows[r].needs_logits) continue;
      const std::vector<float> got = gpu->logits(r);
      for (uint32_t i = 0; i < got.size(); ++i) {
        if (std::memcmp(&got[i], &cpu->logits(r)[i], sizeof(float)) != 0) {
          return ::testing::AssertionFailure()
                 << "row " << r << " at position " << rows[r].position << ", logit " << i << ": "
                 << got[i] << " is not " << cpu->logits(r)[i] << ", "
                 << FirstRoutedDifference(rows);
        }
      }
      values += got.size();
    }
    return ::testing::AssertionSuccess();
  }
  ::testing::AssertionResult Same(uint32_t slot) {
    const StatusOr<WindowOutcome> a = cpu->Flush(slot), b = gpu->Flush(slot);
    if (!a.ok() || !b.ok() || !a->ok() || !b->ok()) return ::testing::AssertionFailure() << "flush";
    if (cpu->state().Hash(slot) != gpu->state().Hash(slot))
      return ::testing::AssertionFailure() << "the states of slot " << slot << " differ";
    return ::testing::AssertionSuccess();
  }
  void Commit(uint32_t slot, uint32_t position) {
    cpu->Commit(slot, position);
    gpu->Commit(slot, position);
  }
  // A pointer to where it began: the first layer whose router chose otherwise.
  std::string FirstRoutedDifference(const std::vector<LocalRow>& rows) {
    const ModelConfig& c = cpu->config();
    for (uint32_t l = 0; l < c.layers; ++l) {
      for (uint32_t r = 0; r < rows.size(); ++r) {
        const RoutedRow &a = cpu->routed(l, r), &b = gpu->lanes().routed(l, r);
        for (uint32_t k = 0; k < c.experts_used; ++k) {
          if (a.ids[k] != b.ids[k] || std::memcmp(&a.weights[k], &b.weights[k], 4) != 0)
            return fmt::format("routing differs first in layer {}, row {}, place {}", l, r, k);
        }
      }
    }
    return "routing is the same everywhere";
  }

  std::unique_ptr<LocalEngine> cpu;
  std::unique_ptr<CudaEngine> gpu;
  uint64_t values = 0;
};

// Windows of 1, 2, .. `most` rows of one sequence until `length` tokens have run; every window is
// followed by one with a wrong draft that is rejected.
void RunSequence(Twins& twins, uint32_t slot, uint32_t length, uint32_t most) {
  const uint32_t vocab = twins.cpu->config().vocab;
  uint32_t position = 0, n = 1, seed = 12345 + slot;
  const auto token = [&] {
    seed = seed * 1664525u + 1013904223u;
    return static_cast<int32_t>((seed >> 8) % std::min(vocab, 4000u));
  };
  while (position < length) {
    std::vector<LocalRow> rows;
    for (uint32_t i = 0; i < n && position + i < length; ++i)
      rows.push_back({slot, position + i, token(), i % 2 == 0 || i + 1 == n});
    twins.Commit(slot, position);
    ASSERT_TRUE(twins.Run(rows)) << rows.size() << " rows";
    // Only part of them is accepted now and then.
    position += static_cast<uint32_t>(rows.size()) > 2 && n % 3 == 0
                    ? static_cast<uint32_t>(rows.size()) - 1
                    : static_cast<uint32_t>(rows.size());
    n = n % most + 1;
  }
  twins.Commit(slot, position);
  EXPECT_TRUE(twins.Same(slot));
}

class CudaEngineTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!card_.ok()) GTEST_SKIP() << card_.why_not();
  }
  // Tokens that a test runs: fibers are slow.
  uint32_t Tokens(uint32_t on_a_card, uint32_t emulated) const {
    return card_.real() ? on_a_card : emulated;
  }
  void Report(const char* what, const Twins& twins) const {
    std::printf("bits: %s, %llu logits equal the cpu's\n", what,
                static_cast<unsigned long long>(twins.values));
  }
  TestCard card_;
};

TEST_F(CudaEngineTest, DemoModel) {
  const auto twins = Twins::Create(DemoModel(), {.threads = 2, .slots = 2, .context = 768});
  ASSERT_NE(twins, nullptr);
  RunSequence(*twins, 0, Tokens(300, 6), 8);
  twins->gpu->lanes().pieces = 3;
  twins->gpu->lanes().slow = 4;
  RunSequence(*twins, 1, Tokens(60, 3), 5);
  Report("demo model", *twins);
}

TEST_F(CudaEngineTest, SeveralSequencesInOneWindow) {
  const auto twins = Twins::Create(DemoModel(), {.threads = 2, .slots = 4, .context = 256});
  ASSERT_NE(twins, nullptr);
  uint32_t at[4] = {0, 0, 0, 0};
  const uint32_t counts[][4] = {{1, 2, 3, 2}, {3, 1, 1, 1}, {1, 1, 5, 1}, {2, 0, 0, 6}};
  const size_t first = card_.real() ? 0 : 2;  // fibers are slow
  for (size_t i = first; i < std::size(counts); ++i) {
    const auto& count = counts[i];
    std::vector<LocalRow> rows;
    for (uint32_t s = 0; s < 4; ++s) {
      if (count[s] == 0) continue;
      twins->Commit(s, at[s]);
      for (uint32_t i = 0; i < count[s]; ++i)
        rows.push_back({s, at[s] + i, static_cast<int32_t>(40 + 7 * s + 3 * (at[s] + i))});
      at[s] += count[s];
    }
    ASSERT_TRUE(twins->Run(rows));
  }
  for (uint32_t s = 0; s < 4; ++s) {
    twins->Commit(s, at[s]);
    EXPECT_TRUE(twins->Same(s));
  }
  Report("four sequences", *twins);
}

TEST_F(CudaEngineTest, EveryKvType) {
  for (const KvType type : {KvType::kF16, KvType::kF32}) {
    const auto twins =
        Twins::Create(DemoModel(), {.threads = 2, .kv_type = type, .slots = 1, .context = 256});
    ASSERT_NE(twins, nullptr);
    RunSequence(*twins, 0, Tokens(100, 3), 4);
    Report(type == KvType::kF16 ? "f16 cells" : "f32 cells", *twins);
  }
}

// More blocks than a row may select: scores, radix selection, tails of every length.
TEST_F(CudaEngineTest, SelectsBlocksBeyondTheBudget) {
  const auto twins = Twins::Create(
      "synth:layers=2,interval=2,experts=8,experts_used=2,hidden=128,width=64,shared_width=64,"
      "vocab=300,heads=4,kv_heads=2,head_dim=32,rope_dims=16,index_heads=2,index_dim=32,"
      "index_top_k=32,ssm_key_heads=2,ssm_value_heads=4,ssm_head_dim=16,hc_rank=32,ple_heads=2,"
      "ple_width=32,ple_base=100",
      {.threads = 2, .slots = 1, .context = 768});
  ASSERT_NE(twins, nullptr);
  RunSequence(*twins, 0, Tokens(700, 70), 7);
  Report("sparse selection", *twins);
}

// Every pack whose formats are computed, at the flagship's width: sums of 80 blocks, 12 heads a KV
// head, 128 x 128 states.
class CudaWidthTest : public CudaEngineTest, public ::testing::WithParamInterface<const char*> {};
TEST_P(CudaWidthTest, FullWidth) {
  const std::string pack = GetParam();
  const bool floats = pack == "f32" || pack == "f16" || pack == "bf16";
  // Fibers are slow: float products only on a card at full width.
  const char* narrow = floats && !card_.real()
                           ? ",hidden=320,width=96,shared_width=64,hc_rank=48,ssm_key_heads=4,"
                             "ssm_value_heads=8,ssm_head_dim=64,heads=4,head_dim=64"
                           : "";
  const auto twins = Twins::Create(
      fmt::format("synth:layers=2,interval=2,experts=12,experts_used=3,vocab=400,pack={}{}", pack,
                  narrow),
      {.threads = 2, .slots = 1, .context = 256});
  ASSERT_NE(twins, nullptr);
  RunSequence(*twins, 0, Tokens(40, 3), card_.real() ? 8 : 2);
  Report(GetParam(), *twins);
}
INSTANTIATE_TEST_SUITE_P(Packs, CudaWidthTest,
                         ::testing::Values("q2_0", "iq2_xs", "iq3_s", "ud_q3_k_xl", "ud_q4_k_xl",
                                           "q6_k", "iq4_xs", "q4_0", "f32", "f16", "bf16"),
                         [](const auto& info) { return std::string(info.param); });

// A value that is not finite: the same layer and row as the cpu device names.
TEST_F(CudaEngineTest, NotFiniteOutcomesAreTheSame) {
  const auto twins = Twins::Create(DemoModel(), {.threads = 2, .slots = 2, .context = 256});
  ASSERT_NE(twins, nullptr);
  ASSERT_TRUE(twins->Run({{0, 0, 50}, {1, 0, 60}}));
  // A cell of the past becomes infinite, in the same place of both.
  const uint32_t layer = 3;  // the first attention layer of the demo model
  ASSERT_NE(twins->cpu->config().is_attention[layer], 0);
  for (SequenceState* state : {&twins->cpu->state(), &twins->gpu->state()}) {
    const AttentionState& a = state->attention(layer);
    Device& device = state == &twins->cpu->state() ? static_cast<Device&>(twins->cpu->device())
                                                   : twins->gpu->device();
    // Slot 1 holds pool block 0 first (blocks of slots interleave backwards).
    const float infinite = INFINITY;
    device.Upload(a.pool + a.layout.v_scales, &infinite, sizeof(infinite));
  }
  twins->Commit(0, 1);
  twins->Commit(1, 1);
  const StatusOr<WindowOutcome> outcome =
      twins->gpu->Run(std::vector<LocalRow>{{0, 1, 51}, {1, 1, 61}});
  ASSERT_TRUE(outcome.ok());
  EXPECT_EQ(outcome->status, WindowStatus::kNotFinite);
  EXPECT_EQ(outcome->error.layer, layer);
  EXPECT_EQ(outcome->error.row, 1u);
  EXPECT_TRUE(twins->Run({{0, 1, 51}, {1, 1, 61}}));
}

}  // namespace
}  // namespace lode::testing
