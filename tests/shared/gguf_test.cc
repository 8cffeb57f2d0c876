// GGUF reader: typed access, split sets and their ways of being wrong, the folder form, shrinking files, version 2.
#include "shared/gguf/gguf.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <xxhash.h>

#include <filesystem>

#include "shared/gguf/printable.h"
#include "tests/support/gguf_writer.h"

namespace lode {
namespace {

using ::testing::HasSubstr;
using test::GgufWriter;
using test::TempFolder;

// Ten F32 tensors of 256 to 2,560 bytes with distinct contents.
GgufWriter TenTensors() {
  GgufWriter writer;
  writer.SetString("general.architecture", "test");
  writer.SetUint("test.number", 7);
  for (uint32_t t = 0; t < 10; ++t) {
    test::WrittenTensor tensor{fmt::format("blk.{}.weight", t), 0, {8, 8 * (t + 1)}, {}, -1};
    for (uint32_t i = 0; i < 256 * (t + 1); ++i) tensor.data.push_back(static_cast<uint8_t>(i * 31 + t));
    writer.tensors().push_back(tensor);
  }
  return writer;
}

// Name, shape and bytes of every tensor, in order; independent of how the file is cut.
uint64_t ContentHash(const GgufFile& file) {
  XXH64_state_t* state = XXH64_createState();
  XXH64_reset(state, 0);
  for (const GgufTensor& tensor : file.tensors()) {
    std::vector<uint8_t> bytes(tensor.bytes);
    EXPECT_EQ(::pread(file.shard_fd(tensor.shard), bytes.data(), bytes.size(), static_cast<off_t>(tensor.offset)),
              static_cast<ssize_t>(bytes.size()));
    EXPECT_EQ(std::memcmp(bytes.data(), tensor.data, bytes.size()), 0) << tensor.name;
    XXH64_update(state, tensor.name.data(), tensor.name.size());
    XXH64_update(state, tensor.ne, sizeof tensor.ne);
    XXH64_update(state, bytes.data(), bytes.size());
  }
  const uint64_t hash = XXH64_digest(state);
  XXH64_freeState(state);
  return hash;
}

std::string OpenError(const std::string& path) {
  StatusOr<std::unique_ptr<GgufFile>> file = GgufFile::Open(path);
  return file.ok() ? "(opened)" : Message(file.status());
}

std::unique_ptr<GgufFile> MustOpen(const std::string& path) {
  StatusOr<std::unique_ptr<GgufFile>> file = GgufFile::Open(path);
  EXPECT_TRUE(file.ok()) << Message(file.status());
  return file.ok() ? *std::move(file) : nullptr;
}

TEST(Gguf, TypedAccessChecksTypeRangeAndPresence) {
  TempFolder folder;
  GgufWriter writer;
  writer.SetString("general.architecture", "x");
  writer.SetUint("u", 5);
  writer.SetRaw("i8", GgufValueType::kI8, std::string("\x7f", 1));
  writer.SetRaw("neg", GgufValueType::kI32, std::string("\xff\xff\xff\xff", 4));
  writer.SetU64("big", uint64_t{1} << 60);
  writer.SetFloat("f", 0.5f);
  writer.SetBool("b", true);
  writer.SetUints("a", {1, 2, 3});
  writer.SetStrings("s", {"one", std::string("t\0o", 3)});
  writer.Write(folder.File("a.gguf"));
  auto file = MustOpen(folder.File("a.gguf"));
  ASSERT_NE(file, nullptr);
  EXPECT_EQ(*file->GetUint("u", 5), 5u);
  EXPECT_EQ(*file->GetUint("i8", 1000), 127u);
  EXPECT_EQ(*file->GetUint("big", UINT64_MAX), uint64_t{1} << 60);
  EXPECT_EQ(*file->GetFloat("f"), 0.5);
  EXPECT_TRUE(*file->GetBool("b"));
  EXPECT_EQ(file->GetUintArray("a", 3)->at(2), 3u);
  EXPECT_EQ(file->GetStringArray("s", 2)->at(1), std::string_view("t\0o", 3));
  EXPECT_THAT(Message(file->GetUint("u", 4).status()), HasSubstr("'u' is 5, the largest allowed value is 4"));
  EXPECT_THAT(Message(file->GetUint("neg", 9).status()), HasSubstr("'neg' is negative"));
  EXPECT_THAT(Message(file->GetUint("f", 9).status()), HasSubstr("'f' must be an integer, it is f32"));
  EXPECT_THAT(Message(file->GetString("u").status()), HasSubstr("'u' must be a string, it is u32"));
  EXPECT_THAT(Message(file->GetUintArray("a", 2).status()), HasSubstr("'a' has 3 elements"));
  EXPECT_THAT(Message(file->GetUintArray("s", 9).status()), HasSubstr("it is an array of string"));
  EXPECT_EQ(file->GetUint("none", 1).status().code(), StatusCode::kNotFound);
}

TEST(Gguf, VersionTwoReadsAlike) {
  TempFolder folder;
  test::WriteFile(folder.File("v2.gguf"), TenTensors().Bytes(2));
  TenTensors().Write(folder.File("v3.gguf"));
  auto two = MustOpen(folder.File("v2.gguf")), three = MustOpen(folder.File("v3.gguf"));
  EXPECT_EQ(ContentHash(*two), ContentHash(*three));
}

TEST(Gguf, ShardsGiveTheSameTensorsFromAnyShardAndFromTheFolder) {
  TempFolder folder;
  TenTensors().Write(folder.File("one.gguf"));
  const uint64_t whole = ContentHash(*MustOpen(folder.File("one.gguf")));
  for (bool empty_first : {false, true}) {
    const std::string sub = folder.File(empty_first ? "empty" : "full");
    std::filesystem::create_directory(sub);
    const auto paths = TenTensors().WriteShards(sub + "/model", 3, empty_first);
    std::string identity;
    std::vector<std::string> spellings = paths;
    spellings.push_back(sub);
    for (const std::string& path : spellings) {
      auto file = MustOpen(path);
      ASSERT_NE(file, nullptr) << path;
      EXPECT_EQ(ContentHash(*file), whole) << path;
      EXPECT_EQ(*file->GetUint("test.number", 100), 7u);
      EXPECT_EQ(file->FindTensor("blk.0.weight")->shard, empty_first ? 1u : 0u);
      if (identity.empty()) identity = file->identity();
      EXPECT_EQ(file->identity(), identity);
    }
  }
}

TEST(Gguf, FolderWithVisionTowerOrTwoModels) {
  TempFolder folder;
  EXPECT_THAT(OpenError(folder.path()), HasSubstr("holds no .gguf file"));
  TenTensors().Write(folder.File("model.gguf"));
  TenTensors().Write(folder.File("mmproj-model.gguf"));
  EXPECT_NE(MustOpen(folder.path()), nullptr);
  TenTensors().Write(folder.File("other.gguf"));
  EXPECT_THAT(OpenError(folder.path()), HasSubstr("holds 2 models"));
}

TEST(Gguf, BrokenSplitSetsNameTheShard) {
  TempFolder folder;
  const auto paths = TenTensors().WriteShards(folder.File("m"), 3, false);
  const std::string second = test::ReadFile(paths[1]), third = test::ReadFile(paths[2]);

  std::filesystem::remove(paths[1]);
  EXPECT_THAT(OpenError(paths[0]), HasSubstr("shard 2 of 3 is missing: " + paths[1]));
  test::WriteFile(paths[1], third);  // wrong split.no
  EXPECT_THAT(OpenError(paths[0]), HasSubstr(paths[1] + ": says it is shard 3, its name says 2"));

  const auto four = TenTensors().WriteShards(folder.File("n"), 4, false);
  test::WriteFile(paths[1], test::ReadFile(four[1]));  // of a set of four
  EXPECT_THAT(OpenError(paths[0]), HasSubstr(paths[1] + ": says it is one of 4 shards, its name says 3"));

  GgufWriter writer = TenTensors();
  writer.tensors().pop_back();
  writer.tensors()[8].name = "blk.0.weight";  // in the last shard: a duplicate of the first shard's
  const auto mixed = writer.WriteShards(folder.File("q"), 3, false);
  EXPECT_THAT(OpenError(mixed[0]), HasSubstr("tensor 'blk.0.weight' is already in"));
  test::WriteFile(paths[1], second);
  std::filesystem::copy_file(mixed[2], paths[2], std::filesystem::copy_options::overwrite_existing);
  EXPECT_THAT(OpenError(paths[0]), HasSubstr("tensors, the shards hold"));

  std::filesystem::copy_file(paths[0], folder.File("renamed.gguf"));
  EXPECT_THAT(OpenError(folder.File("renamed.gguf")), HasSubstr("is one of 3 shards but is not named like"));
  TenTensors().Write(folder.File("z-00001-of-00002.gguf"));
  TenTensors().Write(folder.File("z-00002-of-00002.gguf"));
  EXPECT_THAT(OpenError(folder.File("z-00001-of-00002.gguf")), HasSubstr("has no key 'split.count'"));
}

TEST(Gguf, EveryTruncationIsRefusedWithASentence) {
  TempFolder folder;
  const std::string bytes = TenTensors().Bytes();
  const std::string path = folder.File("cut.gguf");
  test::WriteFile(path, bytes);
  for (size_t size = bytes.size() - 1; size > 0; size -= size <= 1200 ? 1 : 97) {
    std::filesystem::resize_file(path, size);
    EXPECT_THAT(OpenError(path), HasSubstr(path + ":")) << size;
  }
}

TEST(Gguf, ForeignQ2LayoutIsNamed) {
  TempFolder folder;
  GgufWriter writer;
  writer.SetString("general.architecture", "x");
  for (const char* name : {"a", "b"}) {
    // 128 weights in 34 bytes where the format has 2 x 18: 64 rows of 256.
    writer.tensors().push_back({name, 42, {256, 64}, std::vector<uint8_t>(64 * 2 * 34), -1});
  }
  writer.Write(folder.File("prism.gguf"));
  EXPECT_THAT(OpenError(folder.File("prism.gguf")), HasSubstr("PrismML"));
  writer.tensors().pop_back();
  writer.Write(folder.File("one.gguf"));
  EXPECT_THAT(OpenError(folder.File("one.gguf")), HasSubstr("PrismML"));
}

TEST(Gguf, ThingsThatAreNotFiles) {
  TempFolder folder;
  EXPECT_THAT(OpenError(folder.File("none.gguf")), HasSubstr("none.gguf"));
  EXPECT_THAT(OpenError("/dev/zero"), HasSubstr("not a regular file"));
}

TEST(Gguf, IdentityDependsOnMetadataAndSizes) {
  TempFolder folder;
  GgufWriter writer = TenTensors();
  writer.Write(folder.File("a.gguf"));
  writer.SetUint("test.number", 8);
  writer.Write(folder.File("b.gguf"));
  auto a = MustOpen(folder.File("a.gguf")), b = MustOpen(folder.File("b.gguf"));
  EXPECT_EQ(a->identity().size(), 32u);
  EXPECT_NE(a->identity(), b->identity());
}

TEST(Printable, EscapesEverythingATerminalCouldActOn) {
  EXPECT_EQ(Printable(std::string_view("a\x1b[2J\n\0\\\xff", 9)), "a\\x1b[2J\\x0a\\x00\\x5c\\xff");
  EXPECT_EQ(Printable("abcdef", 3), "abc...");
}

}  // namespace
}  // namespace lode
