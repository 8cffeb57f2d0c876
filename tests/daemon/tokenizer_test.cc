// Tokenizer properties that hold for any vocabulary, hostile texts, hostile vocabularies.

#include <utf8proc.h>

#include <cstdlib>
#include <map>

#include "tests/daemon/tokenizer_fixture.h"

namespace lode {
namespace {

using ::testing::Test;

std::vector<int32_t> Ids(const Tokenizer& t, std::string_view text, bool parse_special = false) {
  auto ids = t.Encode(text, parse_special);
  EXPECT_TRUE(ids.ok()) << ids.status();
  return ids.ok() ? *ids : std::vector<int32_t>{};
}

std::string OracleNfc(const std::string& text) {
  std::string terminated = text;
  auto options = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
  utf8proc_uint8_t* out = nullptr;
  auto n = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(terminated.data()),
                        static_cast<utf8proc_ssize_t>(terminated.size()), &out, options);
  LODE_CHECK(n >= 0, "utf8proc_map: {}", utf8proc_errmsg(n));
  std::string result(reinterpret_cast<char*>(out), static_cast<size_t>(n));
  std::free(out);
  return result;
}

TEST(Tokenizer, RoundTripIsNfc) {
  std::mt19937 rng(1);
  for (int round = 0; round < 3000; ++round) {
    std::string text = RandomText(&rng, rng() % 40);
    EXPECT_EQ(DemoTokenizer().Decode(Ids(DemoTokenizer(), text), true), OracleNfc(text));
  }
}

TEST(Tokenizer, InvalidBytesSurvive) {
  std::mt19937 rng(2);
  for (int round = 0; round < 3000; ++round) {
    // ASCII, so that normalisation changes nothing, with bytes above 0xCC..0xFF and loose
    // continuation bytes.
    std::string text;
    for (int i = 0, n = rng() % 30; i < n; ++i) {
      text.push_back(static_cast<char>(rng() % 2 ? rng() % 128 : 0xF5 + rng() % 11));
      if (rng() % 4 == 0) text.push_back(static_cast<char>(0x80 + rng() % 64));
    }
    EXPECT_EQ(DemoTokenizer().Decode(Ids(DemoTokenizer(), text), true), text);
  }
  // A surrogate, an overlong slash, a value above U+10FFFF, cut characters at the end and in the
  // middle.
  for (std::string text :
       {"a\xED\xA0\x80z", "\xC0\xAF", "\xF4\x90\x80\x80", "x\xE6\x9D", "\xE6\x9D y\xF0\x9F\x99"}) {
    EXPECT_EQ(DemoTokenizer().Decode(Ids(DemoTokenizer(), text), true), text);
  }
}

TEST(Tokenizer, InvalidBytesDoNotChangeTheirNeighbours) {
  const Tokenizer& t = DemoTokenizer();
  auto joined = Ids(t, "hello\xFFworld");
  auto expected = Ids(t, "hello");
  for (int32_t id : Ids(t, "\xFF")) expected.push_back(id);
  for (int32_t id : Ids(t, "world")) expected.push_back(id);
  EXPECT_EQ(joined, expected);
}

TEST(Tokenizer, SpecialTokensOnlyWhenAsked) {
  const Tokenizer& t = DemoTokenizer();
  std::string text = "<|im_end|>";
  EXPECT_EQ(Ids(t, text, true), std::vector<int32_t>{8189});
  auto plain = Ids(t, text, false);
  EXPECT_GT(plain.size(), 1u);
  for (int32_t id : plain) EXPECT_FALSE(t.IsSpecial(id));
  EXPECT_EQ(t.Decode(plain, false), text);
  EXPECT_EQ(t.Decode(std::vector<int32_t>{8188, 67, 8189}, false), "d");
}

TEST(Tokenizer, LongestSpecialTokenFirst) {
  SmallVocabulary v;
  int32_t shorter = v.Add("<a", 3), longer = v.Add("<a>b", 3), user = v.Add("##", 4);
  auto t = *v.Make();
  EXPECT_EQ(Ids(*t, "<a>b", true), std::vector<int32_t>{longer});
  EXPECT_EQ(Ids(*t, "<a>", true), (std::vector<int32_t>{shorter, '>'}));
  EXPECT_EQ(Ids(*t, "<a", false).size(), 2u);
  // User-defined tokens are always matched, and matched again after another match.
  EXPECT_EQ(Ids(*t, "####", false), (std::vector<int32_t>{user, user}));
}

TEST(Tokenizer, NormalisationStopsAtSpecialTokens) {
  SmallVocabulary v;
  int32_t s = v.Add("<s>", 3);
  auto t = *v.Make();
  // The accent may not join the letter across the token.
  std::string text = "e<s>\xCC\x81";
  EXPECT_EQ(Ids(*t, text, true), (std::vector<int32_t>{'e', s, 0xCC, 0x81}));
}

// The families differ only in whether marks belong to words.
TEST(Tokenizer, PreTokenizerFamilies) {
  SmallVocabulary v;
  std::string mark = Spelling(0xCC) + Spelling(0x96);  // U+0316, does not compose with x
  v.Merge(Spelling(0xCC), Spelling(0x96));
  int32_t joined = v.Merge("x", mark);
  EXPECT_EQ(Ids(**v.Make(), "x\xCC\x96"), std::vector<int32_t>{joined});
  v.pre = "qwen2";
  EXPECT_EQ(Ids(**v.Make(), "x\xCC\x96").size(), 2u);
}

TEST(Tokenizer, WordBoundaries) {
  struct Case {
    const char* text;
    std::vector<std::string> words;
  };
  const Case cases[] = {
      {"a  b", {"a", " ", " b"}},
      {"it's I'LL o'x", {"it", "'s", " I", "'LL", " o", "'x"}},
      {"12 3", {"1", "2", " ", "3"}},
      {"a \n\n b  ", {"a", " \n\n", " b", "  "}},
      {"!!\n\nx", {"!!\n\n", "x"}},
      {"\xC2\x85 x", {"\xC2\x85", " x"}},          // U+0085 is white space
      {"\xE1\xA0\x8E x", {"\xE1\xA0\x8E", " x"}},  // U+180E is not
      {"  \xE1\xA0\x8E", {" ", " \xE1\xA0\x8E"}},
      {"\xE3\x80\x80\xE3\x80\x80x", {"\xE3\x80\x80", "\xE3\x80\x80x"}},  // ideographic space
  };
  auto pre = Pretokenizer::Create("qwen35");
  ASSERT_TRUE(pre.ok());
  for (const Case& c : cases) {
    std::vector<std::string> words;
    ASSERT_TRUE((*pre)
                    ->Split(c.text, [&](std::string_view w) { return words.emplace_back(w), true; })
                    .ok());
    EXPECT_EQ(words, c.words) << c.text;
  }
}

// Merging against the definition, executed literally. Every eighth word is long enough for the
// other algorithm; ranks are random, so pairs with a new token often come before older ones.
TEST(Tokenizer, MergesAgreeWithTheDefinition) {
  std::mt19937 rng(3);
  for (int round = 0; round < 240; ++round) {
    SmallVocabulary v;
    std::map<std::pair<std::string, std::string>, size_t> ranks;
    std::vector<std::string> known = {"a", "b", "c"};
    for (int i = 0; i < 25; ++i) {
      std::string a = known[rng() % known.size()], b = known[rng() % known.size()];
      if (ranks.contains({a, b}) || a.size() + b.size() > 9) continue;
      ranks[{a, b}] = v.merges.size();
      v.merges.push_back(a + " " + b);
      if (std::find(known.begin(), known.end(), a + b) == known.end()) {
        known.push_back(a + b);
        v.Add(a + b);
      }
    }
    auto t = *v.Make();
    std::string word;
    const size_t bytes = round % 8 ? 1 + rng() % 40 : BpeMerges::kLongWordBytes + 1 + rng() % 200;
    const uint32_t letters = 1 + rng() % 3;
    for (size_t i = 0; i < bytes; ++i) word.push_back("abc"[rng() % letters]);
    std::vector<std::string> parts;
    for (char c : word) parts.emplace_back(1, c);
    while (true) {
      size_t best = SIZE_MAX, at = 0;
      for (size_t i = 0; i + 1 < parts.size(); ++i) {
        auto it = ranks.find({parts[i], parts[i + 1]});
        if (it != ranks.end() && it->second < best) best = it->second, at = i;
      }
      if (best == SIZE_MAX) break;
      parts[at] += parts[at + 1];
      parts.erase(parts.begin() + at + 1);
    }
    std::vector<std::string> got;
    for (int32_t id : Ids(*t, word)) got.emplace_back(t->TokenBytes(id));
    EXPECT_EQ(got, parts) << word;
  }
}

// Trained merges on a long word: one letter, and a text without blanks.
TEST(Tokenizer, LongWordsAreMergedLikeShortOnes) {
  SmallVocabulary v;
  std::string run = "a";
  for (int i = 0; i < 6; ++i, run += run) v.Merge(run, run);
  auto t = *v.Make();
  for (const size_t bytes : {513u, 1000u, 4096u, 5000u}) {
    const auto ids = Ids(*t, std::string(bytes, 'a'));
    size_t at = 0;
    for (const int32_t id : ids) at += t->TokenBytes(id).size();
    EXPECT_EQ(at, bytes);
    // Halving from the left: as many of the longest as fit, then one of each power in the rest.
    EXPECT_EQ(ids.size(), bytes / 64 + static_cast<size_t>(__builtin_popcount(bytes % 64)));
    EXPECT_EQ(t->TokenBytes(ids[0]).size(), 64u);
  }
}

TEST(Tokenizer, TooManyTokensAreFoundBeforeTheyAreMade) {
  const Tokenizer& t = DemoTokenizer();
  EncodeOptions options;
  options.tokens_max = 3;
  EXPECT_EQ(t.Encode("a b c", options)->size(), 3u);
  EXPECT_EQ(t.Encode("a b c d", options).status().code(), StatusCode::kOutOfRange);
  options.parse_special = true;
  EXPECT_EQ(t.Encode("<|im_end|><|im_end|><|im_end|><|im_end|>", options).status().code(),
            StatusCode::kOutOfRange);
  // A word of so many bytes cannot be three tokens, so nobody is asked whether to go on.
  options.stop = [] {
    ADD_FAILURE() << "the word was worked on";
    return true;
  };
  EXPECT_EQ(t.Encode(std::string(1 << 20, 'a'), options).status().code(), StatusCode::kOutOfRange);
  EXPECT_EQ(t.TextBytesMax(3), 3 * 3 * t.token_bytes_max());
  EXPECT_EQ(t.TextBytesMax(UINT32_MAX), kEncodeBytesMax);
}

TEST(Tokenizer, StopsWhenAsked) {
  int asked = 0;
  EncodeOptions options;
  options.stop = [&] { return ++asked == 3; };
  std::string words;
  for (int i = 0; i < 100'000; ++i) words += " x";
  for (const std::string& text : {std::string(1 << 20, 'a'), words}) {
    asked = 0;
    EXPECT_EQ(DemoTokenizer().Encode(text, options).status().code(), StatusCode::kCancelled);
    EXPECT_EQ(asked, 3);
  }
}

// Each of these takes milliseconds; a quadratic step anywhere would need hours (ctest's limit).
TEST(Tokenizer, HostileTextsEndInTime) {
  auto repeat = [](std::string_view piece, size_t bytes) {
    std::string out;
    while (out.size() < bytes) out += piece;
    return out;
  };
  const size_t kBytes = 1'000'000;
  std::string many_specials = repeat("<|im_end|", kBytes);
  for (const std::string& text :
       {repeat("a", 200'000), repeat("a", kEncodeBytesMax - 1), repeat(" ", kBytes),
        repeat(" ", kBytes) + "x", repeat("\n ", kBytes), repeat(" \t", kBytes) + "\n",
        repeat("\xCC\x81\xCC\xA3", kBytes), "a" + repeat("\xCC\x81\xCC\xA3", kBytes),
        repeat("\xFF", kBytes), repeat("\xE6\x9D", kBytes), repeat("'", kBytes),
        repeat("\xE1\x84\x80\xE1\x85\xA1", kBytes), many_specials}) {
    auto ids = DemoTokenizer().Encode(text, true);
    ASSERT_TRUE(ids.ok()) << ids.status();
    EXPECT_FALSE(ids->empty());
  }
  std::string too_long(kEncodeBytesMax + 1, 'a');
  EXPECT_TRUE(absl::IsInvalidArgument(DemoTokenizer().Encode(too_long, true).status()));
}

TEST(Tokenizer, IdsOutsideTheVocabulary) {
  const Tokenizer& t = DemoTokenizer();
  EXPECT_EQ(t.TokenBytes(-1), "");
  EXPECT_EQ(t.TokenBytes(8192), "");
  EXPECT_EQ(t.Decode(std::vector<int32_t>{-1, 67, INT32_MAX, INT32_MIN}, true), "d");
  EXPECT_FALSE(t.IsSpecial(-1) || t.IsUnused(9000));
}

TEST(Tokenizer, PrintableTokensAreHarmless) {
  SmallVocabulary v;
  int32_t evil = v.Add("\x1b[2J\"\xE2\x80\xAE\xFF\xC2\x9B", 3);
  auto t = *v.Make();
  EXPECT_EQ(t->PrintableToken(evil), "\\x1b[2J\\x22\\u{202e}\\xff\\u{9b}");
  EXPECT_EQ(t->PrintableToken('a'), "a");
}

TEST(Tokenizer, UnusedAndByteTokens) {
  SmallVocabulary v;
  int32_t unused = v.Add("[PAD1]", 5), again = v.Add("[PAD1]", 5), byte = v.Add("<0xE4>", 6);
  auto t = *v.Make();
  EXPECT_EQ(t->unused_ids(), (std::vector<int32_t>{unused, again}));
  EXPECT_EQ(t->Decode(std::vector<int32_t>{unused, byte}, false), "\xE4");
  EXPECT_EQ(Ids(*t, "\xE4"), std::vector<int32_t>{0xE4});
}

struct Hostile {
  const char* expected;  // part of the one sentence
  void (*spoil)(SmallVocabulary* v);
};

TEST(Tokenizer, HostileVocabulariesAreRefused) {
  const Hostile cases[] = {
      {"empty token list", [](SmallVocabulary* v) { v->tokens.clear(), v->types.clear(); }},
      {"token types", [](SmallVocabulary* v) { v->types.pop_back(); }},
      {"unknown type 7", [](SmallVocabulary* v) { v->types[3] = 7; }},
      {"unknown type 0", [](SmallVocabulary* v) { v->types[3] = 0; }},
      {"are both \"xy\"", [](SmallVocabulary* v) { v->Add("xy"), v->Add("xy", 3); }},
      {"is empty", [](SmallVocabulary* v) { v->Add(""); }},
      {"at most 4096", [](SmallVocabulary* v) { v->Add(std::string(4097, 'x')); }},
      {"needs \"qq\", which is no token", [](SmallVocabulary* v) { v->merges.push_back("qq a"); }},
      {"needs \"ab\", which is no token", [](SmallVocabulary* v) { v->merges.push_back("a b"); }},
      {"not two tokens", [](SmallVocabulary* v) { v->merges.push_back("ab"); }},
      {"not two tokens", [](SmallVocabulary* v) { v->merges.push_back(""); }},
      {"not two tokens", [](SmallVocabulary* v) { v->merges.push_back(" "); }},
      {"not two tokens", [](SmallVocabulary* v) { v->merges.push_back("a "); }},
      {"not two tokens", [](SmallVocabulary* v) { v->merges.push_back("a b c"); }},
      {"no token for the byte 0x61", [](SmallVocabulary* v) { v->tokens['a'] = "aaa"; }},
      {"not \"<0xNN>\"", [](SmallVocabulary* v) { v->Add("<0x-1>", 6); }},
      {"not \"<0xNN>\"", [](SmallVocabulary* v) { v->Add("<0x123>", 6); }},
      {"outside its 256 tokens", [](SmallVocabulary* v) { v->eos = 256; }},
      {"outside its 256 tokens", [](SmallVocabulary* v) { v->pad = -7; }},
      {"pre-tokenizer", [](SmallVocabulary* v) { v->pre = "llama-bpe"; }},
      {"tokenizer is \"llama\"", [](SmallVocabulary* v) { v->model = "llama"; }},
  };
  for (const Hostile& c : cases) {
    SmallVocabulary v;
    ASSERT_TRUE(v.Make().ok());
    c.spoil(&v);
    auto made = v.Make();
    ASSERT_FALSE(made.ok()) << c.expected;
    EXPECT_TRUE(absl::IsInvalidArgument(made.status()));
    EXPECT_NE(Message(made.status()).find(c.expected), std::string::npos) << made.status();
    EXPECT_EQ(Message(made.status()).find('\n'), std::string::npos);
  }
}

}  // namespace
}  // namespace lode
