// Hostile files: one file per rule of the container, models that are wrong in one place, and thousands of deterministic
// mutations. Refusal must be a sentence that names the thing; a crash, a hang or a huge allocation fails the test.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>

#include "shared/gguf/gguf.h"
#include "shared/model/model_source.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/tiny_model.h"

namespace lode {
namespace {

using ::testing::HasSubstr;
using test::GgufWriter;
using test::TempFolder;

const std::string kBadFiles = std::string(LODE_SOURCE_DIR) + "/tests/data/badfiles/";

// What the message about each file must contain, beside its path. Files not listed must load.
const std::map<std::string, std::string> kWanted = {
    {"bad_magic", "not a GGUF file"}, {"version1", "version 1"}, {"big_endian", "big-endian"},
    {"header_only", "the tensor count"}, {"n_kv_huge", "9223372036854775808 keys"},
    {"n_tensors_huge", "9223372036854775808 tensors"}, {"n_tensors_wrap", "tensors"}, {"key_empty", "key 1"},
    {"key_dup", "'general.architecture' occurs twice"}, {"str_len_past_end", "'general.architecture'"},
    {"vtype_huge", "'x' has unknown value type 4294967295"}, {"bool_2", "'x' holds a bool with value 2"},
    {"arr_count_huge", "'x' claims"}, {"arr_str_count_huge", "'x' claims"}, {"arr_nested", "'x' is an array of arrays"},
    {"arr_nested_deep", "'x' is an array of arrays"}, {"arr_elem_unknown", "'x' has unknown value type 99"},
    {"align_0", "'general.alignment' is 0"}, {"align_3", "'general.alignment' is 3"},
    {"align_2g", "'general.alignment' is 2147483648"}, {"align_type", "must be u32, it is u64"},
    {"align_str", "must be u32, it is string"}, {"name_dup", "'a' occurs twice"}, {"name_empty", "tensor 0"},
    {"name_len_huge", "the name of tensor 0"}, {"dims_0", "'t' has 0 dimensions"}, {"dims_5", "'t' has 5 dimensions"},
    {"dims_huge", "'t' has 4294967295 dimensions"}, {"ne_zero", "dimension 1 of tensor 't' is 0"},
    {"ne_wrap3", "dimension 2 of tensor 't'"}, {"row_not_block", "'t' has rows of 33 weights, but Q8_0"},
    {"type_unknown", "'t' has type 43"}, {"type_neg", "'t' has type 4294967295"}, {"type_fork", "'t' has type 142"},
    {"off_wrap", "'t' starts at data offset"}, {"overlap", "'b' starts at data offset 32, expected 96: it overlaps"},
    {"gap", "'b' starts at data offset 128, expected 96: it leaves a hole"}, {"trunc_info", "claims 1 tensors"},
};

TEST(Malformed, EveryBadFileIsRefusedByNameAndGoodOnesLoad) {
  std::ifstream index_file(kBadFiles + "index.json");
  const nlohmann::json index = nlohmann::json::parse(index_file);
  int loaded = 0, refused = 0;
  for (const nlohmann::json& entry : index) {
    const std::string name = entry["file"];
    const std::string stem = name.substr(0, name.size() - 5);
    StatusOr<std::unique_ptr<GgufFile>> file = GgufFile::Open(kBadFiles + name);
    EXPECT_EQ(file.ok(), entry["must_load"].get<bool>()) << name << ": " << entry["what"];
    EXPECT_EQ(file.ok(), !kWanted.contains(stem)) << name;
    if (file.ok()) {
      ++loaded;
      continue;
    }
    ++refused;
    EXPECT_THAT(Message(file.status()), HasSubstr(name + ": ")) << name;
    EXPECT_THAT(Message(file.status()), HasSubstr(kWanted.at(stem))) << name;
  }
  EXPECT_EQ(loaded, 4);
  EXPECT_EQ(refused, 38);
}

struct ModelCase {
  const char* what;
  std::function<void(GgufWriter*)> damage;
  const char* wanted;  // part of the message
};

void SetUint(GgufWriter* w, const char* key, uint32_t value) { w->SetUint(std::string("qwen4exp.") + key, value); }
void Erase(GgufWriter* w, const std::string& name) {
  std::erase_if(w->tensors(), [&](const test::WrittenTensor& tensor) { return tensor.name == name; });
}

const ModelCase kModelCases[] = {
    {"relative not supported", [](GgufWriter* w) { w->SetString("general.architecture", "qwen3next"); },
     "architecture qwen3next is not supported yet"},
    {"third-party name", [](GgufWriter* w) { w->SetString("general.architecture", "qwen4_exp"); }, "qwen4_exp"},
    {"unknown architecture", [](GgufWriter* w) { w->SetString("general.architecture", "ll\x1b[31mama"); },
     "architecture 'll\\x1b[31mama' is unknown"},
    {"no architecture", [](GgufWriter* w) { w->Remove("general.architecture"); }, "'general.architecture' is missing"},
    {"architecture is a number", [](GgufWriter* w) { w->SetUint("general.architecture", 1); }, "must be a string"},
    {"missing key", [](GgufWriter* w) { w->Remove("qwen4exp.embedding_length"); },
     "'qwen4exp.embedding_length' is missing"},
    {"missing tensor", [](GgufWriter* w) { Erase(w, "blk.2.ssm_out.weight"); },
     "tensor 'blk.2.ssm_out.weight' is missing"},
    {"missing n-gram table", [](GgufWriter* w) { Erase(w, "per_layer_token_embd.weight"); },
     "tensor 'per_layer_token_embd.weight' is missing"},
    {"wrong shape",
     [](GgufWriter* w) { std::swap(w->Find("blk.0.attn_gate.weight")->ne[0], w->Find("blk.0.attn_gate.weight")->ne[1]);
                         w->Find("blk.0.attn_gate.weight")->ne = {32, 128}; },
     "tensor 'blk.0.attn_gate.weight' has shape {32,128}, the model's numbers need {64,64}"},
    {"unknown tensor",
     [](GgufWriter* w) { w->tensors().push_back({"blk.0.attn_norm.weight", 0, {1}, {0, 0, 0, 0}, -1}); },
     "tensor 'blk.0.attn_norm.weight' is unknown"},
    {"companion scale",
     [](GgufWriter* w) { w->tensors().push_back({"blk.0.ffn_up_exps.scale", 0, {4}, std::vector<uint8_t>(16), -1}); },
     "'blk.0.ffn_up_exps.scale' is a companion scale"},
    {"integers as weights", [](GgufWriter* w) { w->Find("blk.0.ssm_a")->type = 26; },
     "tensor 'blk.0.ssm_a' has type I32, which holds no weights"},
    {"zero heads", [](GgufWriter* w) { SetUint(w, "attention.head_count", 0); }, "attention head count is 0"},
    {"KV heads do not divide", [](GgufWriter* w) { SetUint(w, "attention.head_count_kv", 3); },
     "attention head count (2) is not a multiple of its KV head count (3)"},
    {"absurd expert count", [](GgufWriter* w) { SetUint(w, "expert_count", 1u << 30); }, "expert count is 1073741824"},
    {"more experts used than there are", [](GgufWriter* w) { SetUint(w, "expert_used_count", 5); },
     "experts used per token is 5, allowed are 1 to 4"},
    {"absurd layer count", [](GgufWriter* w) { SetUint(w, "block_count", 1000000); }, "1000000 blocks"},
    {"no layers", [](GgufWriter* w) { SetUint(w, "block_count", 0); }, "0 blocks"},
    {"layer list too short", [](GgufWriter* w) { w->SetUints("qwen4exp.attention.recurrent_layers", {1, 1}); },
     "'qwen4exp.attention.recurrent_layers' has 2 elements for 4 layers"},
    {"interval zero",
     [](GgufWriter* w) { w->Remove("qwen4exp.attention.recurrent_layers"); SetUint(w, "full_attention_interval", 0); },
     "'qwen4exp.full_attention_interval' is 0"},
    {"ratio on a DeltaNet layer", [](GgufWriter* w) { w->SetUints("qwen4exp.attention.compress_ratios", {4, 0, 0, 4}); },
     "says 4 for layer 0, which is a DeltaNet layer"},
    {"top_k not in blocks", [](GgufWriter* w) { SetUint(w, "attention.indexer.top_k", 17); },
     "index top_k (17) is not a multiple"},
    {"token list length", [](GgufWriter* w) { w->SetStrings("tokenizer.ggml.tokens", {"a", "b"}); },
     "'tokenizer.ggml.tokens' has 2 tokens, the vocabulary size is 300"},
    {"token type length", [](GgufWriter* w) { w->SetUints("tokenizer.ggml.token_type", {1}); },
     "'tokenizer.ggml.token_type' has 1 elements"},
    {"end token beyond the vocabulary", [](GgufWriter* w) { w->SetUint("tokenizer.ggml.eos_token_id", 300); },
     "'tokenizer.ggml.eos_token_id' is 300"},
    {"foreign tokenizer", [](GgufWriter* w) { w->SetString("tokenizer.ggml.model", "llama"); }, "tokenizer model 'llama'"},
    {"experts differ by layer",
     [](GgufWriter* w) { w->SetUints("qwen4exp.expert_feed_forward_length", {32, 32, 64, 32}); },
     "'qwen4exp.expert_feed_forward_length' differs between layers"},
    {"n-gram head beyond the table", [](GgufWriter* w) { w->SetU64s("qwen4exp.ple.head_offsets", {0, 11, 24, 1u << 30}); },
     "head 3 takes 19 rows from 1073741824"},
    {"n-gram modulus zero", [](GgufWriter* w) { w->SetU64s("qwen4exp.ple.head_vocab_sizes", {11, 0, 17, 19}); },
     "head 1 takes 0 rows"},
    {"n-gram multiplier count", [](GgufWriter* w) { w->SetU64s("qwen4exp.ple.layer_multipliers", {1, 3}); },
     "3 'ple.layer_multipliers'"},
    {"n-gram multiplier overflows", [](GgufWriter* w) { w->SetU64s("qwen4exp.ple.layer_multipliers", {1, 3, UINT64_MAX}); },
     "multiplier 18446744073709551615"},
    {"n-gram layer beyond the model", [](GgufWriter* w) { w->SetUints("qwen4exp.ple.layers", {9}); }, "names layer 9 of 4"},
    {"inner size", [](GgufWriter* w) { SetUint(w, "ssm.inner_size", 65); }, "'qwen4exp.ssm.inner_size' is 65"},
    {"epsilon NaN",
     [](GgufWriter* w) { w->SetRaw("qwen4exp.attention.layer_norm_rms_epsilon", GgufValueType::kF32, "\xff\xff\xff\x7f"); },
     "norm epsilon"},
    {"rotary sections", [](GgufWriter* w) { w->SetUints("qwen4exp.rope.dimension_sections", {1, 2, 3, 0}); },
     "'qwen4exp.rope.dimension_sections'"},
    {"rotary dimensions odd", [](GgufWriter* w) { SetUint(w, "rope.dimension_count", 15); }, "pair size"},
};

TEST(Malformed, TheUndamagedTinyModelOpens) {
  TempFolder folder;
  test::TinyModel().Write(folder.File("m.gguf"));
  StatusOr<std::unique_ptr<ModelSource>> source = ModelSource::Open(folder.File("m.gguf"));
  ASSERT_TRUE(source.ok()) << Message(source.status());
  EXPECT_TRUE(CheckComputable(**source).ok());
}

TEST(Malformed, EveryDamagedModelIsRefusedByName) {
  TempFolder folder;
  const GgufWriter good = test::TinyModel();
  for (const ModelCase& damaged : kModelCases) {
    GgufWriter writer = good;
    damaged.damage(&writer);
    writer.Write(folder.File("m.gguf"));
    StatusOr<std::unique_ptr<ModelSource>> source = ModelSource::Open(folder.File("m.gguf"));
    ASSERT_FALSE(source.ok()) << damaged.what;
    EXPECT_THAT(Message(source.status()), HasSubstr(damaged.wanted)) << damaged.what;
  }
}

// A small deterministic generator of mutations: overwrites of a byte, of a whole number by an extreme, cuts, copies.
class Mutator {
 public:
  explicit Mutator(uint64_t seed) : state_(seed) {}
  uint64_t Next() {
    state_ += 0x9E3779B97F4A7C15;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    return z ^ (z >> 29);
  }
  void Mutate(std::string* bytes) {
    for (uint64_t n = 1 + Next() % 4; n > 0 && bytes->size() > 16; --n) {
      const size_t at = Next() % bytes->size();
      switch (Next() % 5) {
        case 0: (*bytes)[at] = static_cast<char>(Next()); break;
        case 1: (*bytes)[at] = static_cast<char>((*bytes)[at] ^ (1 << Next() % 8)); break;
        case 2: {
          static constexpr uint64_t kExtremes[] = {0, 1, 0x7fffffff, 0xffffffff, INT64_MAX, UINT64_MAX, 1ull << 32};
          const uint64_t value = kExtremes[Next() % 7];
          const size_t size = std::min<size_t>(Next() % 2 ? 8 : 4, bytes->size() - at);
          bytes->replace(at, size, reinterpret_cast<const char*>(&value), size);
          break;
        }
        case 3: bytes->resize(at); break;
        case 4: bytes->insert(at, bytes->substr(Next() % bytes->size(), Next() % 24)); break;
      }
    }
  }

 private:
  uint64_t state_;
};

TEST(Malformed, MutatedFilesNeverCrash) {
  test::MemoryFile memory;
  std::vector<std::string> seeds;
  for (const auto& entry : std::filesystem::directory_iterator(kBadFiles)) {
    if (entry.path().extension() == ".gguf") seeds.push_back(test::ReadFile(entry.path()));
  }
  std::sort(seeds.begin(), seeds.end());
  ASSERT_EQ(seeds.size(), 42u);
  Mutator mutator(1);
  int opened = 0;
  for (int i = 0; i < 4000; ++i) {
    std::string bytes = seeds[mutator.Next() % seeds.size()];
    mutator.Mutate(&bytes);
    memory.Set(bytes);
    StatusOr<std::unique_ptr<GgufFile>> file = GgufFile::Open(memory.path());
    if (!file.ok()) {
      EXPECT_GT(file.status().message().size(), 10u);
      continue;
    }
    ++opened;
    for (const GgufTensor& tensor : (*file)->tensors()) {
      EXPECT_LE(tensor.offset + tensor.bytes, bytes.size());
    }
  }
  EXPECT_GT(opened, 10);  // the mutations are not all trivial
}

TEST(Malformed, MutatedModelHeadersNeverCrash) {
  test::MemoryFile memory;
  const std::string good = test::TinyModel().Bytes();
  const size_t header = good.find("per_layer_token_embd.weight");  // metadata and the first records
  ASSERT_NE(header, good.npos);
  Mutator mutator(2);
  int opened = 0;
  for (int i = 0; i < 1500; ++i) {
    std::string head = good.substr(0, header);
    mutator.Mutate(&head);
    memory.Set(head + good.substr(header));
    StatusOr<std::unique_ptr<ModelSource>> source = ModelSource::Open(memory.path());
    if (!source.ok()) continue;
    ++opened;
    EXPECT_TRUE((*source)->config().Validate().ok());
  }
  EXPECT_GT(opened, 10);
}

}  // namespace
}  // namespace lode
