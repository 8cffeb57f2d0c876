// libFuzzer target: arbitrary bytes as vocabulary, text and stream cuts. The first byte chooses
// what the rest is.
//
// Invariants: a vocabulary is refused or works; encoding never fails for short texts and gives ids
// of the vocabulary; bytes that are not text survive; streamed text equals text at once and is
// UTF-8; a stop string never comes out.

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/detokenizer.h"
#include "daemon/stop_matcher.h"
#include "daemon/tokenizer.h"
#include "daemon/utf8.h"
#include "shared/base/check.h"

namespace lode {
namespace {

struct Vocabulary {
  std::vector<std::string> tokens;
  TokenizerData data;

  Vocabulary() {
    data.model = "gpt2";
    data.pre = "qwen35";
    // The byte alphabet: visible Latin-1 stands for itself, the rest is U+0100 and up.
    uint32_t next = 0x100;
    for (uint32_t b = 0; b < 256; ++b) {
      bool visible = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
      tokens.emplace_back();
      AppendUtf8(visible ? b : next++, &tokens.back());
    }
    data.token_types.assign(256, 1);
  }
  StatusOr<std::unique_ptr<Tokenizer>> Make() {
    data.tokens.assign(tokens.begin(), tokens.end());
    return Tokenizer::Create(data);
  }
};

const Tokenizer& Plain() {
  static const auto tokenizer = [] {
    Vocabulary v;
    for (const char* name : {"<|im_end|>", "<think>", "<th"}) {
      v.tokens.emplace_back(name);
      v.data.token_types.push_back(3);
    }
    return *v.Make();
  }();
  return *tokenizer;
}

void CheckText(const Tokenizer& t, std::string_view text) {
  for (bool special : {false, true}) {
    auto ids = t.Encode(text, special);
    LODE_CHECK(ids.ok(), "{}", Message(ids.status()));
    for (int32_t id : *ids) LODE_CHECK(t.IsValid(id), "id {}", id);
    std::string back = t.Decode(*ids, true);
    if (!MayNeedNfc(text)) LODE_CHECK(back == text, "bytes lost");
    Detokenizer stream(&t, {.keep_special = true, .keep_ids = {}});
    std::string streamed;
    for (int32_t id : *ids) streamed += stream.Push(id);
    streamed += stream.Flush();
    Utf8Stream whole;
    std::string at_once;
    whole.Append(back, &at_once);
    whole.Flush(&at_once);
    LODE_CHECK(streamed == at_once && IsValidUtf8(streamed), "the stream differs");
  }
}

// Lines of the input: a type digit and a token, or 'm' and a merge.
void CheckVocabulary(std::string_view input) {
  Vocabulary v;
  std::vector<std::string> merges;
  while (!input.empty()) {
    size_t end = std::min(input.find('\n'), input.size());
    std::string_view line = input.substr(0, end);
    input.remove_prefix(std::min(end + 1, input.size()));
    if (line.empty()) continue;
    if (line[0] == 'm') {
      merges.emplace_back(line.substr(1));
    } else {
      v.tokens.emplace_back(line.substr(1));
      v.data.token_types.push_back(static_cast<uint64_t>(line[0] - '0'));
    }
  }
  v.data.merges.assign(merges.begin(), merges.end());
  auto made = v.Make();
  if (!made.ok()) return;
  for (int32_t id = 0; id < (*made)->vocab_size(); ++id) {
    LODE_CHECK(IsValidUtf8((*made)->PrintableToken(id)), "unprintable token {}", id);
  }
  for (const std::string& token : v.tokens) CheckText(**made, token);
}

// Stop strings separated by NUL, then the text after two of them.
void CheckStops(std::string_view input) {
  size_t split = input.find(std::string_view("\0\0", 2));
  if (split == std::string_view::npos) return;
  std::vector<std::string> stops;
  std::string_view list = input.substr(0, split), text = input.substr(split + 2);
  for (size_t at = 0; at <= list.size();) {
    size_t end = std::min(list.find('\0', at), list.size());
    stops.emplace_back(list.substr(at, end - at));
    at = end + 1;
  }
  auto one = StopMatcher::Create(stops);
  if (!one.ok()) return;
  StopMatcher bytewise = *one;
  StopMatcher::Piece all = one->Push(text);
  std::string expected = all.text + one->Flush(), got;
  for (char c : text) got += bytewise.Push(std::string_view(&c, 1)).text;
  got += bytewise.Flush();
  LODE_CHECK(got == expected && bytewise.matched() == all.matched, "cuts change the result");
  for (const std::string& stop : stops) {
    LODE_CHECK(got.find(stop) == std::string::npos, "a stop string came out");
  }
}

}  // namespace
}  // namespace lode

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % 3) {
    case 0:
      lode::CheckText(lode::Plain(), rest);
      break;
    case 1:
      lode::CheckVocabulary(rest);
      break;
    default:
      lode::CheckStops(rest);
  }
  return 0;
}
