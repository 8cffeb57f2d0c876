// The streaming detokenizer: never half a character, and the same text however it is cut.

#include "daemon/detokenizer.h"

#include "tests/daemon/tokenizer_fixture.h"

namespace lode {
namespace {

std::string Sanitized(std::string_view bytes) {
  Utf8Stream stream;
  std::string out;
  stream.Append(bytes, &out);
  stream.Flush(&out);
  return out;
}

// Examples of the Unicode standard, chapter 3.9 (tables 3-8 to 3-11), and cut tails.
TEST(Utf8Stream, MaximalSubparts) {
  const std::string r = "\xEF\xBF\xBD";
  EXPECT_EQ(Sanitized("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41"), r + r + r + r + r + r + r + r + "A");
  EXPECT_EQ(Sanitized("\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41"), r + r + r + r + r + r + r + r + "A");
  EXPECT_EQ(Sanitized("\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42"),
            r + r + r + r + r + "A" + r + r + "B");
  EXPECT_EQ(Sanitized("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41"), r + r + r + r + "A");
  EXPECT_EQ(Sanitized("ok\xF0\x9F\x99"), "ok" + r);
  EXPECT_EQ(Sanitized("\xF0\x9F\x99\x82"), "\xF0\x9F\x99\x82");
}

TEST(Utf8Stream, AnyCutGivesTheSameText) {
  std::mt19937 rng(4);
  for (int round = 0; round < 5000; ++round) {
    std::string bytes = rng() % 2 ? RandomText(&rng, 12) : RandomBytes(&rng, 20);
    if (rng() % 3 == 0 && !bytes.empty()) bytes.resize(rng() % bytes.size());
    Utf8Stream stream;
    std::string out;
    for (size_t at = 0; at < bytes.size();) {
      size_t n = std::min<size_t>(bytes.size() - at, rng() % 4);
      stream.Append(std::string_view(bytes).substr(at, n), &out);
      EXPECT_TRUE(IsValidUtf8(out));
      at += n;
    }
    stream.Flush(&out);
    EXPECT_EQ(out, Sanitized(bytes));
  }
}

TEST(Detokenizer, ChunkedEqualsOneShot) {
  const Tokenizer& t = DemoTokenizer();
  std::mt19937 rng(5);
  for (int round = 0; round < 500; ++round) {
    std::vector<int32_t> ids;
    for (int i = 0; i < 40; ++i) {
      // Single bytes often, so that characters break and get completed.
      ids.push_back(static_cast<int32_t>(rng() % 2 ? rng() % 256 : rng() % 8192));
    }
    bool keep = rng() % 2;
    Detokenizer::Options options{.keep_special = keep, .keep_ids = {}};
    Detokenizer stream(&t, options);
    std::string out;
    for (int32_t id : ids) {
      std::string piece = stream.Push(id);
      EXPECT_TRUE(IsValidUtf8(piece));
      out += piece;
    }
    out += stream.Flush();
    EXPECT_EQ(out, Sanitized(t.Decode(ids, keep)));
    EXPECT_EQ(out, Detokenizer::Text(t, ids, options));
  }
}

TEST(Detokenizer, HoldsHalfACharacter) {
  SmallVocabulary v;
  auto t = *v.Make();
  Detokenizer d(t.get());
  EXPECT_EQ(d.Push(0xE4), "");
  EXPECT_EQ(d.Push(0xB8), "");
  EXPECT_TRUE(d.holding());
  Detokenizer saved = d;
  EXPECT_EQ(d.Push(0xAD), "\xE4\xB8\xAD");
  EXPECT_FALSE(d.holding());
  EXPECT_EQ(d.Flush(), "");
  EXPECT_EQ(saved.Push('x'), "\xEF\xBF\xBDx");  // the copy is a state of its own
}

TEST(Detokenizer, ControlTokens) {
  const Tokenizer& t = DemoTokenizer();
  std::vector<int32_t> ids = {8190, 67, 8191, 67, 8189};
  EXPECT_EQ(Detokenizer::Text(t, ids, {}), "dd");
  EXPECT_EQ(Detokenizer::Text(t, ids, {.keep_special = true, .keep_ids = {}}),
            "<think>d</think>d<|im_end|>");
  EXPECT_EQ(Detokenizer::Text(t, ids, {.keep_special = false, .keep_ids = {8191}}), "d</think>d");
  EXPECT_EQ(Detokenizer::Text(t, std::vector<int32_t>{-5, 99999}, {}), "");
}

}  // namespace
}  // namespace lode
