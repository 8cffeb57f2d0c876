// Would the bit tests see a wrong order? Mutants of the engine that compute the same terms and add
// two of them in swapped order, or put one expert at another's place, must change the hash that the
// matrix compares; the same wrappers without the swap, and swaps that cannot matter, must not. In
// process, over copies of the kernel table and a wrapper of the expert lanes: the product needs no
// hook for it.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>

#include "shared/base/log.h"
#include "tests/bits/answers.h"

namespace lode {
namespace {

constexpr uint32_t kRowsPerWindow = 5;

// What the mutant table swaps; kernels are plain functions, so this is global. Set between windows
// only.
struct Mutation {
  const KernelTable* base = nullptr;
  Format format =
      Format::kCount;  // products of this format get blocks `a` and `b` of each row swapped
  uint32_t a = 0, b = 0;
  bool one_row = false;  // only in the first row of each call
  uint32_t combine_a = 0, combine_b = 0;
  std::atomic<uint64_t> products{0}, combines{0};  // how often something was swapped
};
Mutation mutation;

void SwapBytes(uint8_t* base, size_t a, size_t b, size_t n) {
  std::swap_ranges(base + a * n, base + (a + 1) * n, base + b * n);
}

// The product with two blocks of weights and activations exchanged: the same terms, two of them at
// each other's place.
void SwappedProduct(const MatArgs& args) {
  const FormatInfo& info = Info(mutation.format);
  const MatFn product = mutation.base->mat[static_cast<uint32_t>(mutation.format)];
  const uint32_t len = info.act_block_len;
  if (args.n_cols / len <= std::max(mutation.a, mutation.b)) return product(args);
  const size_t block_bytes = args.row_bytes / (args.n_cols / len);
  const uint32_t rows = mutation.one_row ? 1 : args.n_rows;
  std::vector<uint8_t> w(args.w, args.w + rows * args.row_bytes);
  for (uint32_t r = 0; r < rows; ++r)
    SwapBytes(w.data() + r * args.row_bytes, mutation.a, mutation.b, block_bytes);
  std::vector<std::vector<int8_t>> q;
  std::vector<std::vector<float>> d;
  std::vector<std::vector<int16_t>> sums;
  std::vector<ActRow> acts;
  for (uint32_t i = 0; i < args.n_acts; ++i) {
    const ActRow& act = args.acts[i];
    q.emplace_back(act.q, act.q + args.n_cols);
    d.emplace_back(act.d, act.d + args.n_cols / len);
    sums.emplace_back(act.sum16, act.sum16 + args.n_cols / 16);
    SwapBytes(reinterpret_cast<uint8_t*>(q.back().data()), mutation.a, mutation.b, len);
    std::swap(d.back()[mutation.a], d.back()[mutation.b]);
    SwapBytes(reinterpret_cast<uint8_t*>(sums.back().data()), mutation.a, mutation.b, len / 16 * 2);
    acts.push_back({q.back().data(), d.back().data(), sums.back().data(), act.f});
  }
  product(args);
  MatArgs swapped = args;
  swapped.w = w.data();
  swapped.n_rows = rows;
  swapped.acts = acts.data();
  product(swapped);
  mutation.products += 1;
}

// The weighted sum of a row's experts with two of them, weights included, at each other's place.
void SwappedCombine(const float* const* experts, const float* weights, uint32_t used,
                    const float* shared, float shared_weight, size_t n, float* out) {
  std::vector<const float*> e(experts, experts + used);
  std::vector<float> w(weights, weights + used);
  std::swap(e[mutation.combine_a], e[mutation.combine_b]);
  std::swap(w[mutation.combine_a], w[mutation.combine_b]);
  mutation.base->combine(e.data(), w.data(), used, shared, shared_weight, n, out);
  mutation.combines += 1;
}

// Hands out the results of two places of the routing order exchanged, in rows where `row_of` says
// so.
class SwappedLanes final : public ExpertLanes {
 public:
  SwappedLanes(ExpertLanes& base, uint32_t a, uint32_t b) : base_(base), a_(a), b_(b) {}
  WindowOutcome Start(uint32_t layer, const float* x, uint32_t n_rows,
                      const RoutedRow* routed) override {
    return base_.Start(layer, x, n_rows, routed);
  }
  WindowOutcome Finish(uint32_t layer) override { return base_.Finish(layer); }
  const float* Result(uint32_t layer, uint32_t row, uint32_t order) const override {
    return base_.Result(layer, row, order == a_ ? b_ : order == b_ ? a_ : order);
  }

 private:
  ExpertLanes& base_;
  const uint32_t a_, b_;
};

class BitMutation : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    spdlog::set_level(spdlog::level::err);
    const BitsModel* model = FindBitsModel(GetParam());
    ASSERT_NE(model, nullptr);
    auto source = ModelSource::Open(model->description);
    ASSERT_TRUE(source.ok()) << source.status();
    auto data = (*source)->tokenizer();
    ASSERT_TRUE(data.ok()) << data.status();
    auto tokenizer = Tokenizer::Create(*data);
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    requests_ = BitsRequests(*model, **tokenizer);
    auto engine = LocalEngine::Create(model->description, {.threads = 2});
    ASSERT_TRUE(engine.ok()) << engine.status();
    engine_ = std::move(*engine);
    base_ = &engine_->device().kernels();
    expected_ = Answer();
    std::printf("%s unmutated: hash=%016llx\n", GetParam(), Number(expected_));
  }
  static unsigned long long Number(const BitsAnswer& answer) { return answer.Hash(); }

  BitsAnswer Answer(ExpertLanes* lanes = nullptr) {
    auto answer = AnswerLocally(*engine_, requests_, kRowsPerWindow, lanes);
    EXPECT_TRUE(answer.ok()) << answer.status();
    return answer.ok() ? *answer : BitsAnswer{};
  }
  // The answer with products of `format` mutated; `swapped` must really have happened.
  BitsAnswer WithProducts(Format format, uint32_t a, uint32_t b, bool one_row) {
    mutation.base = base_;
    mutation.format = format;
    mutation.a = a;
    mutation.b = b;
    mutation.one_row = one_row;
    mutation.products = 0;
    KernelTable table = *base_;
    table.mat[static_cast<uint32_t>(format)] = SwappedProduct;
    engine_->device().SetKernels(&table);
    const BitsAnswer answer = Answer();
    engine_->device().SetKernels(base_);
    EXPECT_GT(mutation.products, 0u) << "nothing was swapped";
    return answer;
  }
  BitsAnswer WithCombine(uint32_t a, uint32_t b) {
    mutation.base = base_;
    mutation.combine_a = a;
    mutation.combine_b = b;
    mutation.combines = 0;
    KernelTable table = *base_;
    table.combine = SwappedCombine;
    engine_->device().SetKernels(&table);
    const BitsAnswer answer = Answer();
    engine_->device().SetKernels(base_);
    EXPECT_GT(mutation.combines, 0u) << "nothing was swapped";
    return answer;
  }
  void ExpectSeen(const BitsAnswer& answer, const std::string& what) {
    std::printf("%s %s: hash=%016llx, tokens %s\n", GetParam(), what.c_str(), Number(answer),
                answer.tokens == expected_.tokens ? "equal" : "differ");
    EXPECT_NE(answer.Hash(), expected_.Hash()) << what << " was not seen";
    EXPECT_NE(answer.logits_hash[0], expected_.logits_hash[0]) << what << " was not seen";
  }

  std::vector<Request> requests_;
  std::unique_ptr<LocalEngine> engine_;
  const KernelTable* base_ = nullptr;
  BitsAnswer expected_;
};

TEST_P(BitMutation, TwoBlockTermsSwapped) {
  // The mutant's own machinery changes nothing; nor do the first two terms, whose sum has no order.
  EXPECT_EQ(WithProducts(Format::kQ8_0, 1, 1, false).Hash(), expected_.Hash());
  EXPECT_EQ(WithProducts(Format::kQ8_0, 0, 1, false).Hash(), expected_.Hash());
  ExpectSeen(WithProducts(Format::kQ8_0, 1, 2, false), "Q8_0 terms 1 and 2 swapped");
  ExpectSeen(WithProducts(Format::kQ8_0, 1, 2, true), "Q8_0 terms 1 and 2 swapped, one row a call");
  ExpectSeen(WithProducts(Format::kQ8_0, 6, 7, false), "Q8_0 terms 6 and 7 swapped");
}

// The demo model's experts have rows of at most two blocks, whose sum has no order: that is why
// there is a second model.
TEST_P(BitMutation, TwoBlockTermsOfTheExpertsSwapped) {
  if (std::string(GetParam()) == "demo") {
    EXPECT_EQ(Info(Format::kQ4_K).act_block_len, engine_->config().hidden);
    EXPECT_EQ(Info(Format::kQ5_1).act_block_len * 2, engine_->config().expert_width);
    return;
  }
  EXPECT_EQ(WithProducts(Format::kQ2_0, 0, 1, false).Hash(), expected_.Hash());
  ExpectSeen(WithProducts(Format::kQ2_0, 1, 2, false), "expert terms 1 and 2 swapped");
  ExpectSeen(WithProducts(Format::kQ2_0, 8, 9, true),
             "expert terms 8 and 9 swapped, one row a call");
}

TEST_P(BitMutation, AnExpertAtAnotherPlace) {
  const uint32_t last = engine_->config().experts_used - 1;
  EXPECT_EQ(WithCombine(1, 1).Hash(), expected_.Hash());
  ExpectSeen(WithCombine(last - 1, last), "last two experts added in swapped order");
  ExpectSeen(WithCombine(0, last), "first and last expert added in swapped order");
}

TEST_P(BitMutation, TwoExpertsResultsExchanged) {
  SwappedLanes same(engine_->lanes(), 0, 0);
  EXPECT_EQ(Answer(&same).Hash(), expected_.Hash());
  SwappedLanes swapped(engine_->lanes(), 0, 1);
  ExpectSeen(Answer(&swapped), "results 0 and 1 exchanged");
}

INSTANTIATE_TEST_SUITE_P(Models, BitMutation, testing::Values("demo", "synth"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace lode
