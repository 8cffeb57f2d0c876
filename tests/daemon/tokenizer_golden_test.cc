// The tokenizer against ids that the public reference tokenizer gave for the demo model's
// vocabulary.

#include "daemon/detokenizer.h"
#include "tests/daemon/tokenizer_fixture.h"

namespace lode {
namespace {

TEST(TokenizerGolden, AllCases) {
  nlohmann::json cases = Golden("tokenizer.json");
  ASSERT_EQ(cases.size(), 14u);
  for (const auto& c : cases) {
    std::string text = c["text"];
    auto ids = DemoTokenizer().Encode(text, /*parse_special=*/true);
    ASSERT_TRUE(ids.ok()) << ids.status();
    EXPECT_EQ(*ids, c["ids"].get<std::vector<int32_t>>()) << text;
    EXPECT_EQ(DemoTokenizer().Decode(*ids, /*keep_special=*/true), c["decoded"].get<std::string>());
  }
}

TEST(TokenizerGolden, Prompts) {
  nlohmann::json texts = Golden("golden.json")["summary"];
  nlohmann::json ids = Golden("prompt_ids.json");
  for (const char* name : {"single", "chat", "code", "english", "unicode"}) {
    auto got = DemoTokenizer().Encode(texts[name]["text"].get<std::string>(), true);
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_EQ(*got, ids[name]["ids"].get<std::vector<int32_t>>()) << name;
  }
  // The long prompt's text is given by its beginning only.
  auto long_ids = ids["long"]["ids"].get<std::vector<int32_t>>();
  std::string text = DemoTokenizer().Decode(long_ids, true);
  std::string start = texts["long"]["text"];
  ASSERT_EQ(start.substr(start.size() - 3), "...");
  EXPECT_EQ(text.substr(0, start.size() - 3), start.substr(0, start.size() - 3));
  auto again = DemoTokenizer().Encode(text, true);
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(*again, long_ids);
}

// The reference decodes its greedy continuations; one of them ends inside a character (U+FFFD at
// the end).
TEST(TokenizerGolden, GreedyTexts) {
  nlohmann::json texts = Golden("golden.json")["summary"];
  nlohmann::json ids = Golden("prompt_ids.json");
  for (const auto& [name, prompt] : ids.items()) {
    auto greedy = prompt["greedy"].get<std::vector<int32_t>>();
    Detokenizer::Options keep{.keep_special = true, .keep_ids = {}};
    EXPECT_EQ(Detokenizer::Text(DemoTokenizer(), greedy, keep),
              texts[name]["greedy_text"].get<std::string>())
        << name;
  }
}

TEST(TokenizerGolden, DemoFacts) {
  const Tokenizer& t = DemoTokenizer();
  EXPECT_EQ(t.vocab_size(), 8192);
  EXPECT_EQ(t.stop_ids(), (std::vector<int32_t>{8187, 8189}));
  EXPECT_TRUE(t.IsStop(8187) && t.IsStop(8189) && !t.IsStop(8188) && !t.IsStop(-1));
  EXPECT_EQ(t.FindSpecial("</think>"), std::optional<int32_t>(8191));
  EXPECT_EQ(t.FindSpecial("</think"), std::nullopt);
  EXPECT_EQ(t.FindSpecial("</think>x"), std::nullopt);
  EXPECT_EQ(t.eos_id(), 8189);
  EXPECT_EQ(t.pad_id(), 8187);
  EXPECT_FALSE(t.add_bos());
  EXPECT_TRUE(t.IsControl(8188) && !t.IsControl(100));
}

}  // namespace
}  // namespace lode
