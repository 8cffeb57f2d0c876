// Synthetic models: bytes fixed for ever (golden hashes), rows independent of how they are read, the published packs'
// types and the flagship's numbers, values in a healthy range.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <xxhash.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <map>

#include "shared/gguf/gguf.h"
#include "shared/model/model_source.h"
#include "shared/model/synth_bytes.h"

namespace lode {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::unique_ptr<ModelSource> MustOpen(const std::string& model) {
  StatusOr<std::unique_ptr<ModelSource>> source = ModelSource::Open(model);
  EXPECT_TRUE(source.ok()) << Message(source.status());
  return source.ok() ? *std::move(source) : nullptr;
}

std::string OpenError(const std::string& model) {
  StatusOr<std::unique_ptr<ModelSource>> source = ModelSource::Open(model);
  return source.ok() ? "(opened)" : Message(source.status());
}

const char* TypeOf(const ModelSource& source, const std::string& name) {
  const TensorInfo* tensor = source.Find(name);
  return tensor == nullptr ? "(absent)" : FindTensorType(static_cast<uint32_t>(tensor->type))->name;
}

std::vector<uint8_t> Rows(const ModelSource& source, const std::string& name, uint64_t first, uint64_t n) {
  const TensorInfo& tensor = *source.Find(name);
  std::vector<uint8_t> bytes(n * tensor.row_bytes());
  EXPECT_TRUE(source.ReadRows(tensor, first, n, bytes.data()).ok());
  return bytes;
}

struct Golden {
  const char* type;
  uint64_t hash;
};
// xxh3 of rows 0, 1 and 1,000,003 of a tensor named "golden" with 2,560 weights per row, seed 7, sigma 1/64. These
// numbers are a promise: measurements and bit tests on synth: models compare across machines and versions.
constexpr Golden kGolden[] = {
    {"F32", 0xd52895ba1f597ee7}, {"F16", 0xda141d463e0a6ea5}, {"Q4_0", 0x1e6fa2d09e0fd669},
    {"Q4_1", 0xa5622ed732812557}, {"Q5_0", 0x3696062474c54d1c}, {"Q5_1", 0x0ca1d0cd03f563e5},
    {"Q8_0", 0xe0a7b192eb6b6c78}, {"Q2_K", 0x1ece114ed657bf4b}, {"Q3_K", 0xdd5da69dab121fbd},
    {"Q4_K", 0x319fa9828d7c01be}, {"Q5_K", 0x1cd7638671d8977e}, {"Q6_K", 0x4d9b3135d938d0fd},
    {"IQ2_XXS", 0x4ad91264e9a6e4c1}, {"IQ2_XS", 0x695d4272cd503e74},
    {"IQ3_XXS", 0x65af27238711aaec}, {"IQ1_S", 0xcd111ec099ac7322},
    {"IQ4_NL", 0x61bdda9867482fe0}, {"IQ3_S", 0x541cdfaccf6f8bb0}, {"IQ2_S", 0x4c8e37d38d7ad41d},
    {"IQ4_XS", 0x8d91eb06a5a01276}, {"IQ1_M", 0x4c4970d2fd468570}, {"BF16", 0x4946da03e23a364d},
    {"TQ1_0", 0x709b29bf86b20987}, {"TQ2_0", 0x94afbcccde250170}, {"MXFP4", 0xa995a36515948a5c},
    {"NVFP4", 0x8f0cb7670634541e}, {"Q1_0", 0x217ae354b041b8b9}, {"Q2_0", 0x3372f92ee0cf422c},
};

uint64_t HashOfType(TensorType type) {
  const SynthSpread spread{0, 0.02f, 1.f / 64};
  StatusOr<SynthTensor> tensor = SynthTensor::Make(7, "golden", type, 2560, spread);
  EXPECT_TRUE(tensor.ok());
  std::vector<uint8_t> bytes(3 * tensor->row_bytes());
  tensor->FillRow(0, bytes.data());
  tensor->FillRow(1, bytes.data() + tensor->row_bytes());
  tensor->FillRow(1000003, bytes.data() + 2 * tensor->row_bytes());
  return XXH3_64bits(bytes.data(), bytes.size());
}

TEST(Synth, GoldenBytesOfEveryType) {
  std::map<std::string, uint64_t> golden;
  for (const Golden& entry : kGolden) golden[entry.type] = entry.hash;
  int checked = 0;
  for (const TensorTypeInfo& info : kTensorTypes) {
    if (!SynthTensor::Make(7, "golden", info.type, info.block_len * 10, {}).ok()) continue;
    ++checked;
    const uint64_t hash = HashOfType(info.type);
    EXPECT_EQ(hash, golden[info.name]) << fmt::format("    {{\"{}\", 0x{:016x}}},", info.name, hash);
  }
  EXPECT_EQ(checked, 28);
}

TEST(Synth, FlagshipPresetHasThePublishedNumbers) {
  auto source = MustOpen("synth:qwen3.8-flash-next,pack=ud_q4_k_xl");
  ASSERT_NE(source, nullptr);
  const ModelConfig& c = source->config();
  EXPECT_EQ(source->tensors().size(), 1224u);
  EXPECT_THAT((std::vector<uint32_t>{c.layers, c.experts, c.experts_used, c.vocab, c.hidden, c.expert_width}),
              ElementsAre(48, 512, 10, 248320, 2560, 640));
  EXPECT_EQ(c.ple_rows, 320001536u);
  EXPECT_THAT(c.ple[0].multipliers, ElementsAre(23703573157769u, 20109073645365u, 8052911324071u));
  EXPECT_EQ(c.ple[0].head_sizes.front(), 20000003u);
  EXPECT_EQ(c.ple[0].head_sizes.back(), 20000171u);
  EXPECT_EQ(c.ple[0].head_offsets.back(), 300001275u);
  uint64_t bytes = 0;
  for (const TensorInfo& tensor : source->tensors()) bytes += tensor.bytes;
  // The published pack holds 111.324 GB; its layer 2 has Q5_K gate and up experts where ours may have Q4_K.
  EXPECT_NEAR(static_cast<double>(bytes), 111.324e9, 0.22e9);
  EXPECT_STREQ(TypeOf(*source, "blk.46.ffn_down_exps.weight"), "Q8_0");
  EXPECT_STREQ(TypeOf(*source, "blk.45.ffn_down_exps.weight"), "Q5_1");
  EXPECT_STREQ(TypeOf(*source, "per_layer_token_embd.weight"), "IQ4_NL");
  // A row far into the 28.8 GB table costs nothing to reach.
  EXPECT_EQ(Rows(*source, "per_layer_token_embd.weight", 320001535, 1).size(), 90u);
  EXPECT_EQ(source->tokenizer()->tokens.size(), 248320u);
}

TEST(Synth, PacksMapTypesPerTensor) {
  auto q4 = MustOpen("synth:pack=q4,layers=5");
  EXPECT_STREQ(TypeOf(*q4, "blk.0.ffn_gate_exps.weight"), "Q4_K");
  EXPECT_STREQ(TypeOf(*q4, "blk.0.ffn_down_exps.weight"), "Q5_1");
  EXPECT_STREQ(TypeOf(*q4, "blk.4.ffn_down_exps.weight"), "Q8_0");
  EXPECT_STREQ(TypeOf(*q4, "blk.0.attn_qkv.weight"), "Q8_0");
  EXPECT_STREQ(TypeOf(*q4, "blk.3.indexer.k_proj.weight"), "BF16");
  for (const char* name : {"blk.0.ffn_gate_inp.weight", "blk.0.hc_attn_inject.weight", "blk.0.ssm_alpha.weight",
                           "blk.0.ssm_a", "blk.0.ssm_conv1d.weight", "output_hc_norm.weight"}) {
    EXPECT_STREQ(TypeOf(*q4, name), "F32") << name;
  }
  EXPECT_TRUE(CheckComputable(*q4).ok());
  auto iq3 = MustOpen("synth:pack=iq3_s");
  EXPECT_STREQ(TypeOf(*iq3, "blk.0.ffn_up_exps.weight"), "IQ3_S");
  EXPECT_STREQ(TypeOf(*iq3, "blk.0.ffn_down_exps.weight"), "Q2_0");
  EXPECT_STREQ(TypeOf(*iq3, "blk.1.ffn_down_exps.weight"), "IQ4_NL");
  auto plain = MustOpen("synth:pack=iq4_nl,mtp=1");
  EXPECT_STREQ(TypeOf(*plain, "blk.4.ffn_up_exps.weight"), "IQ4_NL");
  EXPECT_STREQ(TypeOf(*plain, "blk.4.nextn.eh_proj.weight"), "Q8_0");
  EXPECT_TRUE(CheckComputable(*plain).ok());
  // 640 weights are no whole number of 256-blocks.
  EXPECT_STREQ(TypeOf(*MustOpen("synth:pack=q4_k"), "blk.0.ffn_down_exps.weight"), "IQ4_NL");
  EXPECT_STREQ(TypeOf(*MustOpen("synth:pack=bf16"), "blk.0.ffn_down_exps.weight"), "BF16");
}

TEST(Synth, RowsDoNotDependOnHowTheyAreRead) {
  auto a = MustOpen("synth:experts=8,pack=q2_0"), b = MustOpen("synth:pack=q2_0,experts=8");
  EXPECT_EQ(a->identity(), b->identity());
  for (const char* name : {"blk.2.ffn_down_exps.weight", "per_layer_token_embd.weight", "blk.0.ssm_conv1d.weight"}) {
    const TensorInfo& tensor = *a->Find(name);
    const std::vector<uint8_t> block = Rows(*a, name, 100, 50);
    for (uint64_t r : {0, 1, 49}) {
      const std::vector<uint8_t> row = Rows(*b, name, 100 + r, 1);
      EXPECT_EQ(std::memcmp(row.data(), &block[r * row.size()], row.size()), 0) << name;
    }
    const uint64_t rows[] = {149, 100};
    std::vector<uint8_t> scattered(2 * tensor.row_bytes());
    ASSERT_TRUE(a->ReadScattered(tensor, rows, scattered.data()).ok());
    EXPECT_EQ(std::memcmp(scattered.data(), &block[49 * tensor.row_bytes()], tensor.row_bytes()), 0);
    EXPECT_NE(Rows(*a, name, 100, 1), Rows(*a, name, 101, 1));
  }
  EXPECT_NE(Rows(*a, "blk.0.attn_qkv.weight", 0, 1), Rows(*a, "blk.1.attn_qkv.weight", 0, 1));
}

TEST(Synth, SeedAndSizesChangeIdentityAndBytes) {
  auto a = MustOpen("synth:experts=8"), b = MustOpen("synth:experts=8,seed=2"), c = MustOpen("synth:experts=9");
  EXPECT_NE(a->identity(), b->identity());
  EXPECT_NE(a->identity(), c->identity());
  EXPECT_NE(Rows(*a, "output.weight", 5, 1), Rows(*b, "output.weight", 5, 1));
}

// Mean and standard deviation of a tensor's first rows, for the types decoded here.
void Moments(const ModelSource& source, const std::string& name, double* mean, double* deviation) {
  const TensorInfo& tensor = *source.Find(name);
  const uint64_t n_rows = std::min<uint64_t>(tensor.rows(), 200'000 / tensor.ne[0] + 1);
  const std::vector<uint8_t> bytes = Rows(source, name, 0, n_rows);
  std::vector<double> values;
  const auto half = [&](size_t at) {
    const int bits = bytes[at] | bytes[at + 1] << 8, exponent = bits >> 10 & 31;
    const double magnitude = exponent == 0 ? std::ldexp(bits & 1023, -24) : std::ldexp(1024 + (bits & 1023), exponent - 25);
    return bits & 0x8000 ? -magnitude : magnitude;
  };
  if (tensor.type == TensorType::kQ8_0) {
    for (size_t block = 0; block < bytes.size(); block += 34) {
      for (int j = 0; j < 32; ++j) values.push_back(half(block) * static_cast<int8_t>(bytes[block + 2 + j]));
    }
  } else if (tensor.type == TensorType::kQ2_0) {
    for (size_t block = 0; block < bytes.size(); block += 18) {
      for (int j = 0; j < 64; ++j) values.push_back(half(block) * ((bytes[block + 2 + j / 4] >> 2 * (j % 4) & 3) - 1));
    }
  } else if (tensor.type == TensorType::kQ5_1) {
    for (size_t block = 0; block < bytes.size(); block += 24) {
      uint32_t high;
      std::memcpy(&high, &bytes[block + 4], 4);
      for (int j = 0; j < 32; ++j) {
        const int nibble = j < 16 ? bytes[block + 8 + j] & 15 : bytes[block + 8 + j - 16] >> 4;
        values.push_back(half(block) * (nibble | (high >> j & 1) << 4) + half(block + 2));
      }
    }
  } else {
    ASSERT_EQ(tensor.type, TensorType::kF32);
    for (size_t at = 0; at < bytes.size(); at += 4) {
      float value;
      std::memcpy(&value, &bytes[at], 4);
      values.push_back(value);
    }
  }
  double sum = 0, squares = 0;
  for (double value : values) sum += value, squares += value * value;
  *mean = sum / static_cast<double>(values.size());
  *deviation = std::sqrt(squares / static_cast<double>(values.size()) - *mean * *mean);
}

TEST(Synth, ValuesKeepActivationsHealthy) {
  auto q2 = MustOpen("synth:pack=q2_0,experts=4"), q4 = MustOpen("synth:pack=q4,experts=4");
  struct Case {
    const ModelSource* source;
    const char* name;
    double mean, deviation;
  };
  const Case cases[] = {
      {q2.get(), "blk.0.attn_qkv.weight", 0, 1 / std::sqrt(2560.)},
      {q2.get(), "blk.0.ffn_gate_exps.weight", 0, 2 / std::sqrt(2560.)},
      {q4.get(), "blk.0.ffn_down_exps.weight", 0, 2 / std::sqrt(640.)},
      {q4.get(), "token_embd.weight", 0, 1},
      {q4.get(), "blk.0.ssm_conv1d.weight", 0, 0.5},
      {q4.get(), "blk.0.hc_attn_norm.weight", 1, 0.25 / std::sqrt(12.)},
      {q4.get(), "blk.0.ssm_a", -4.25, 7.5 / std::sqrt(12.)},
  };
  for (const Case& c : cases) {
    double mean = 0, deviation = 0;
    Moments(*c.source, c.name, &mean, &deviation);
    // 48 values of ssm_a scatter by 20 %; the others have at least 10,000.
    const double tolerance = std::string(c.name) == "blk.0.ssm_a" ? 0.3 : 0.02;
    EXPECT_NEAR(deviation, c.deviation, tolerance * c.deviation) << c.name;
    EXPECT_NEAR(mean, c.mean, tolerance * c.deviation) << c.name;
  }
}

TEST(Synth, TokenizerIsByteLevel) {
  auto source = MustOpen("synth:vocab=300");
  StatusOr<TokenizerData> data = source->tokenizer();
  ASSERT_TRUE(data.ok());
  EXPECT_EQ(data->pre, "qwen35");
  ASSERT_EQ(data->tokens.size(), 300u);
  EXPECT_EQ(data->tokens['A'], "A");
  EXPECT_EQ(data->tokens[' '], "\u0120");
  EXPECT_EQ(data->tokens[0], "\u0100");
  EXPECT_EQ(data->tokens[0xad], "\u0143");  // the last byte without a printable form of its own
  EXPECT_EQ(data->tokens[0xff], "\u00ff");
  EXPECT_EQ(data->tokens[257], "<|im_start|>");
  EXPECT_EQ(data->token_types[257], 3u);
  EXPECT_EQ(data->token_types[299], 5u);
  EXPECT_EQ(data->eos, 258);
  EXPECT_TRUE(data->merges.empty());
}

TEST(Synth, MistakesAreNamed) {
  EXPECT_THAT(OpenError("synth:foo=1"), HasSubstr("key 'foo' is unknown; known are pack, layers"));
  EXPECT_THAT(OpenError("synth:layers=0"), HasSubstr("layers=0 is not a whole number from 1 to 256"));
  EXPECT_THAT(OpenError("synth:layers=4x"), HasSubstr("layers=4x"));
  EXPECT_THAT(OpenError("synth:layers"), HasSubstr("'layers' is neither key=value nor the preset"));
  EXPECT_THAT(OpenError("synth:pack=q9"), HasSubstr("pack 'q9' is unknown; known are q2_0"));
  EXPECT_THAT(OpenError("synth:pack=i32"), HasSubstr("type I32 cannot be made"));
  EXPECT_THAT(OpenError("synth:heads=7"), HasSubstr("attention head count (7) is not a multiple"));
}

TEST(Synth, HalfBitsRoundsToNearestEven) {
  EXPECT_EQ(HalfBits(1.f), 0x3c00);
  EXPECT_EQ(HalfBits(-2.f), 0xc000);
  EXPECT_EQ(HalfBits(65504.f), 0x7bff);
  EXPECT_EQ(HalfBits(0.f), 0);
  EXPECT_EQ(HalfBits(std::ldexp(1.f, -24)), 1);
  EXPECT_EQ(HalfBits(std::ldexp(1.f, -25)), 0);          // tie to even
  EXPECT_EQ(HalfBits(std::ldexp(3.f, -25)), 2);          // tie to even
  EXPECT_EQ(HalfBits(std::ldexp(1.f, -14)), 0x0400);
  EXPECT_EQ(HalfBits(1.f + std::ldexp(1.f, -11)), 0x3c00);
  EXPECT_EQ(HalfBits(1.f + std::ldexp(3.f, -11)), 0x3c02);
  for (uint32_t bits = 0; bits < 0x7c00; ++bits) {       // every finite value survives
    const int exponent = static_cast<int>(bits >> 10);
    const float value = exponent == 0 ? std::ldexp(static_cast<float>(bits & 1023), -24)
                                      : std::ldexp(static_cast<float>(1024 + (bits & 1023)), exponent - 25);
    ASSERT_EQ(HalfBits(value), bits);
  }
  EXPECT_EQ(IntegerSqrt(uint64_t{2560} << 20), 51810u);
  EXPECT_EQ(IntegerSqrt(99), 9u);
}

}  // namespace
}  // namespace lode
