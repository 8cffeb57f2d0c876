// The GGUF model source: numbers of the demo model, reads by rows and scattered, the fused expert form, several n-gram
// layers, split sets, types that cannot be computed yet.
#include "shared/model/model_source.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <thread>

#include "shared/gguf/gguf.h"
#include "shared/model/scattered_reader.h"
#include "tests/support/gguf_writer.h"
#include "tests/support/tiny_model.h"

namespace lode {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using test::GgufWriter;
using test::TempFolder;

const std::string kDemo = std::string(LODE_SOURCE_DIR) + "/tests/models/demo-q4-with-mtp.gguf";

std::unique_ptr<ModelSource> MustOpen(const std::string& model) {
  StatusOr<std::unique_ptr<ModelSource>> source = ModelSource::Open(model);
  EXPECT_TRUE(source.ok()) << Message(source.status());
  return source.ok() ? *std::move(source) : nullptr;
}

std::vector<uint8_t> AllRows(const ModelSource& source, const TensorInfo& tensor) {
  std::vector<uint8_t> bytes(tensor.bytes);
  EXPECT_TRUE(source.ReadRows(tensor, 0, tensor.rows(), bytes.data()).ok());
  return bytes;
}

TEST(ModelSource, DemoNumbers) {
  auto source = MustOpen(kDemo);
  ASSERT_NE(source, nullptr);
  const ModelConfig& c = source->config();
  EXPECT_EQ(c.arch, "qwen4exp");
  EXPECT_EQ(c.layers, 8u);
  EXPECT_EQ(c.nextn_layers, 1u);
  EXPECT_EQ(c.vocab, 8192u);
  EXPECT_EQ(c.hidden, 256u);
  EXPECT_EQ(c.context, 8192u);
  EXPECT_EQ(c.rms_eps, 1e-6f);
  EXPECT_EQ(c.rope_theta, 1e7);
  EXPECT_THAT((std::vector<uint32_t>{c.heads, c.kv_heads, c.head_dim, c.rope_dims}), ElementsAre(4, 2, 256, 64));
  EXPECT_THAT((std::vector<uint32_t>{c.index_heads, c.index_dim, c.index_top_k, c.index_block}),
              ElementsAre(2, 128, 512, 4));
  EXPECT_THAT(c.is_attention, ElementsAre(0, 0, 0, 1, 0, 0, 0, 1));
  EXPECT_THAT((std::vector<uint32_t>{c.ssm_conv, c.ssm_key_heads, c.ssm_value_heads, c.ssm_head_dim}),
              ElementsAre(4, 2, 6, 128));
  EXPECT_EQ(c.SsmConvWidth(), 1280u);
  EXPECT_THAT((std::vector<uint32_t>{c.experts, c.experts_used, c.expert_width, c.shared_width}),
              ElementsAre(64, 8, 64, 64));
  EXPECT_THAT((std::vector<uint32_t>{c.streams, c.hc_rank}), ElementsAre(4, 32));
  ASSERT_EQ(c.ple.size(), 1u);
  EXPECT_EQ(c.ple[0].layer, 1u);
  EXPECT_THAT(c.ple[0].multipliers, ElementsAre(917459169272335u, 551719545110387u, 145018054610633u));
  EXPECT_THAT(c.ple[0].head_offsets, ElementsAre(0, 8009, 16020, 24037, 32076, 40129, 48188, 56257));
  EXPECT_EQ(c.ple[0].head_sizes[7], 8081u);
  EXPECT_THAT((std::vector<uint64_t>{c.ple_rows, c.ple_row_width, c.ple_eos, c.ple_conv, c.ngram_size}),
              ElementsAre(64384, 32, 8187, 4, 3));
  EXPECT_EQ(c.PleWidth(), 256u);
  EXPECT_TRUE(CheckComputable(*source).ok());
}

TEST(ModelSource, DemoTokenizer) {
  auto source = MustOpen(kDemo);
  StatusOr<TokenizerData> data = source->tokenizer();
  ASSERT_TRUE(data.ok()) << Message(data.status());
  EXPECT_EQ(data->model, "gpt2");
  EXPECT_EQ(data->pre, "qwen35");
  EXPECT_EQ(data->tokens.size(), 8192u);
  EXPECT_EQ(data->tokens[8188], "<|im_start|>");
  EXPECT_EQ(data->token_types[8188], 3u);
  EXPECT_EQ(data->merges.size(), 7931u);
  EXPECT_EQ(data->eos, 8189);
  EXPECT_EQ(data->eot, 8189);
  EXPECT_EQ(data->pad, 8187);
  EXPECT_EQ(data->bos, -1);
  EXPECT_FALSE(data->add_bos);
  EXPECT_NEAR(data->temperature, 0.7, 1e-6);
  EXPECT_NEAR(data->top_p, 0.8, 1e-6);
  EXPECT_EQ(data->min_p, -1);
  EXPECT_EQ(data->top_k, 20);
  EXPECT_THAT(data->chat_template, HasSubstr("im_start"));
}

TEST(ModelSource, ReadsAreTheFilesBytes) {
  auto source = MustOpen(kDemo);
  auto file = GgufFile::Open(kDemo);
  ASSERT_TRUE(file.ok());
  for (const TensorInfo& tensor : source->tensors()) {
    const GgufTensor& place = *(*file)->FindTensor(tensor.name);
    ASSERT_EQ(std::memcmp(AllRows(*source, tensor).data(), place.data, tensor.bytes), 0) << tensor.name;
  }
  const TensorInfo& experts = *source->Find("blk.4.ffn_down_exps.weight");
  std::vector<uint8_t> rows(3 * experts.row_bytes());
  ASSERT_TRUE(source->ReadRows(experts, 255, 3, rows.data()).ok());  // over the border of two experts
  EXPECT_EQ(std::memcmp(rows.data(), (*file)->FindTensor(experts.name)->data + 255 * experts.row_bytes(), rows.size()),
            0);
}

TEST(ModelSource, ScatteredReadsEqualRowReads) {
  auto source = MustOpen(kDemo);
  const TensorInfo& table = *source->Find("per_layer_token_embd.weight");
  const std::vector<uint8_t> all = AllRows(*source, table);
  const uint64_t row_bytes = table.row_bytes();
  std::vector<uint64_t> rows;
  for (uint64_t i = 0; i < 1000; ++i) rows.push_back(i * 48271 % table.rows());  // more than one batch
  rows.push_back(table.rows() - 1);
  rows.push_back(0);
  rows.push_back(0);
  // Several threads at once: every one must get its own rows.
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::vector<uint64_t> mine(rows.begin() + t * 100, rows.end());
      std::vector<uint8_t> got(mine.size() * row_bytes, 0xee);
      EXPECT_TRUE(source->ReadScattered(table, mine, got.data()).ok());
      for (size_t i = 0; i < mine.size(); ++i) {
        EXPECT_EQ(std::memcmp(&got[i * row_bytes], &all[mine[i] * row_bytes], row_bytes), 0) << i;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(source->ReadScattered(table, {}, nullptr).ok());
  // A matrix outside of the table's use works as well.
  const TensorInfo& embedding = *source->Find("token_embd.weight");
  std::vector<uint8_t> one(embedding.row_bytes()), same(embedding.row_bytes());
  const uint64_t row[] = {4711};
  EXPECT_TRUE(source->ReadScattered(embedding, row, one.data()).ok());
  EXPECT_TRUE(source->ReadRows(embedding, 4711, 1, same.data()).ok());
  EXPECT_EQ(one, same);
}

TEST(ScatteredReader, RingAndPreadAgreeAndNameTheEndOfTheFile) {
  TempFolder folder;
  std::string bytes;
  for (int i = 0; i < 100000; ++i) bytes.push_back(static_cast<char>(i * 7 % 251));
  test::WriteFile(folder.File("f"), bytes);
  Fd fd(::open(folder.File("f").c_str(), O_RDONLY));
  for (bool use_ring : {true, false}) {
    ScatteredReader reader(fd.get(), "the-file", use_ring);
    if (use_ring && !reader.uses_ring()) std::puts("note: io_uring is not available here; pread is tested twice");
    for (uint32_t piece : {1u, 90u, 4097u, 20000u}) {
      std::vector<uint64_t> offsets;
      for (uint64_t i = 0; i < 300; ++i) offsets.push_back(i * 7919 % (bytes.size() - piece));
      std::vector<uint8_t> got(offsets.size() * piece);
      ASSERT_TRUE(reader.Read(offsets, piece, got.data()).ok());
      for (size_t i = 0; i < offsets.size(); ++i) {
        ASSERT_EQ(std::memcmp(&got[i * piece], &bytes[offsets[i]], piece), 0) << piece << " " << i;
      }
    }
    const uint64_t beyond[] = {0, bytes.size() - 10};
    std::vector<uint8_t> got(180);
    const Status status = reader.Read(beyond, 90, got.data());
    EXPECT_THAT(Message(status), HasSubstr("the-file: the file has nothing at offset 100000, where 80 more bytes belong"));
  }
}

TEST(ModelSource, AShrunkenFileIsAnErrorNotASignal) {
  TempFolder folder;
  test::TinyModel().Write(folder.File("m.gguf"));
  auto source = MustOpen(folder.File("m.gguf"));
  ASSERT_EQ(::truncate(folder.File("m.gguf").c_str(), 4096), 0);
  const TensorInfo& tensor = source->tensors().back();
  std::vector<uint8_t> bytes(tensor.bytes);
  const Status read = source->ReadRows(tensor, 0, tensor.rows(), bytes.data());
  EXPECT_THAT(Message(read), HasSubstr("m.gguf: the file has nothing at offset"));
  EXPECT_THAT(Message(read), HasSubstr(tensor.name));
  EXPECT_TRUE(source->tokenizer().ok());  // held in memory
}

TEST(ModelSource, SplitSetsAreTheSameModel) {
  TempFolder folder;
  const GgufWriter whole = test::TinyModel();
  whole.Write(folder.File("one.gguf"));
  auto one = MustOpen(folder.File("one.gguf"));
  for (bool empty_first : {false, true}) {
    const auto paths = whole.WriteShards(folder.File(empty_first ? "e" : "f"), 4, empty_first);
    auto source = MustOpen(paths[2]);
    ASSERT_NE(source, nullptr);
    ASSERT_EQ(source->tensors().size(), one->tensors().size());
    for (const TensorInfo& tensor : one->tensors()) {
      EXPECT_EQ(AllRows(*source, *source->Find(tensor.name)), AllRows(*one, tensor)) << tensor.name;
    }
    const TensorInfo& table = *source->Find("per_layer_token_embd.weight");
    const uint64_t rows[] = {5, 1, 100};
    std::vector<uint8_t> got(3 * table.row_bytes()), row(table.row_bytes());
    ASSERT_TRUE(source->ReadScattered(table, rows, got.data()).ok());
    ASSERT_TRUE(one->ReadRows(*one->Find(table.name), 100, 1, row.data()).ok());
    EXPECT_EQ(std::memcmp(&got[2 * row.size()], row.data(), row.size()), 0);
  }
}

TEST(ModelSource, IntegerWidthsAndLayerRulesOfTheWild) {
  TempFolder folder;
  GgufWriter writer = test::TinyModel();
  writer.SetRaw("qwen4exp.block_count", GgufValueType::kI32, std::string("\4\0\0\0", 4));
  writer.SetRaw("qwen4exp.expert_count", GgufValueType::kU16, std::string("\4\0", 2));
  writer.SetU64("qwen4exp.context_length", 512);
  writer.SetUints("qwen4exp.expert_feed_forward_length", {32, 32, 32, 32});
  writer.SetUints("qwen4exp.rope.dimension_sections", {3, 3, 2});  // three entries, as some writers do
  writer.Remove("qwen4exp.attention.recurrent_layers");            // the interval rule then
  writer.Remove("qwen4exp.vocab_size");                            // the token list's length then
  writer.tensors().push_back({"v.patch_embd.weight", 0, {1}, {0, 0, 0, 0}, -1});  // vision tower: passed over
  writer.Write(folder.File("m.gguf"));
  auto source = MustOpen(folder.File("m.gguf"));
  ASSERT_NE(source, nullptr);
  EXPECT_EQ(source->config().vocab, 300u);
  EXPECT_THAT(source->config().is_attention, ElementsAre(0, 0, 0, 1));
}

TEST(ModelSource, FusedExpertsAreTheSameRows) {
  TempFolder folder;
  GgufWriter writer = test::TinyModel();
  writer.Write(folder.File("plain.gguf"));
  const uint64_t width = 32;
  const test::WrittenTensor gate = *writer.Find("blk.0.ffn_gate_exps.weight");
  test::WrittenTensor* up = writer.Find("blk.0.ffn_up_exps.weight");
  test::WrittenTensor fused{"blk.0.ffn_gate_up_exps.weight", gate.type, {64, 2 * width, 4}, {}, -1};
  const size_t expert_bytes = gate.data.size() / 4;
  for (size_t e = 0; e < 4; ++e) {
    for (const std::vector<uint8_t>* data : {&gate.data, &std::as_const(up->data)}) {
      fused.data.insert(fused.data.end(), data->begin() + e * expert_bytes, data->begin() + (e + 1) * expert_bytes);
    }
  }
  *up = fused;
  std::erase_if(writer.tensors(), [&](const auto& tensor) { return tensor.name == gate.name; });
  writer.Write(folder.File("fused.gguf"));
  auto a = MustOpen(folder.File("plain.gguf")), b = MustOpen(folder.File("fused.gguf"));
  ASSERT_NE(b, nullptr);
  const ExpertTensors plain = *FindExperts(*a, 0), both = *FindExperts(*b, 0);
  EXPECT_FALSE(plain.fused);
  EXPECT_TRUE(both.fused);
  std::vector<uint8_t> x(plain.gate->row_bytes()), y(x.size());
  for (uint64_t expert : {0, 3}) {
    for (uint64_t row : {0, 31}) {
      ASSERT_TRUE(a->ReadRows(*plain.gate, plain.gate_row(expert, row, width), 1, x.data()).ok());
      ASSERT_TRUE(b->ReadRows(*both.gate, both.gate_row(expert, row, width), 1, y.data()).ok());
      EXPECT_EQ(x, y);
      ASSERT_TRUE(a->ReadRows(*plain.up, plain.up_row(expert, row, width), 1, x.data()).ok());
      ASSERT_TRUE(b->ReadRows(*both.up, both.up_row(expert, row, width), 1, y.data()).ok());
      EXPECT_EQ(x, y);
    }
  }
  EXPECT_EQ(FindExperts(*a, 4).status().code(), StatusCode::kNotFound);  // no draft block here
}

TEST(ModelSource, SeveralNgramLayers) {
  TempFolder folder;
  std::string synth = test::kTinySynth;  // with more layers; a key may be given only once
  synth.replace(synth.find("layers=4"), 8, "layers=8");
  synth += ",ple=2,mtp=1";
  test::GgufFromSource(*MustOpen(synth)).Write(folder.File("m.gguf"));
  auto source = MustOpen(folder.File("m.gguf"));
  ASSERT_NE(source, nullptr);
  const ModelConfig& c = source->config();
  EXPECT_EQ(c.layers, 8u);
  EXPECT_EQ(c.nextn_layers, 1u);
  ASSERT_EQ(c.ple.size(), 2u);
  EXPECT_EQ(c.ple[0].layer, 1u);
  EXPECT_EQ(c.ple[1].layer, 5u);
  EXPECT_EQ(c.ple[1].head_offsets[0], c.ple_rows / 2);  // rows of the joined table
  EXPECT_NE(c.ple[0].multipliers, c.ple[1].multipliers);
  EXPECT_NE(source->Find("blk.5.ple_key.weight"), nullptr);
}

TEST(ModelSource, TypesThatCannotBeComputedYetAreNamed) {
  TempFolder folder;
  GgufWriter writer = test::TinyModel();
  test::WrittenTensor* tensor = writer.Find("blk.1.attn_qkv.weight");
  tensor->type = static_cast<uint32_t>(TensorType::kQ5_0);  // 22 bytes per 32 weights
  tensor->data.resize(tensor->ne[0] / 32 * 22 * tensor->ne[1]);
  writer.Write(folder.File("a.gguf"));
  EXPECT_THAT(Message(CheckComputable(*MustOpen(folder.File("a.gguf")))),
              HasSubstr("tensor 'blk.1.attn_qkv.weight' has type Q5_0"));
  writer = test::TinyModel();
  tensor = writer.Find("blk.1.hc_attn_norm.weight");
  tensor->type = static_cast<uint32_t>(TensorType::kQ8_0);
  tensor->data.resize(tensor->ne[0] / 32 * 34);
  writer.Write(folder.File("b.gguf"));
  EXPECT_THAT(Message(CheckComputable(*MustOpen(folder.File("b.gguf")))),
              HasSubstr("tensor 'blk.1.hc_attn_norm.weight' has type Q8_0, which Lode cannot compute with yet (F32"));
}

}  // namespace
}  // namespace lode
