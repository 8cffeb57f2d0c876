// What the tokenizer tests share: the demo model's vocabulary, a small vocabulary made in memory
// (it owns the texts that TokenizerData points to), random text, and reading of golden files.
#pragma once

#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "daemon/tokenizer.h"
#include "daemon/utf8.h"
#include "nlohmann/json.hpp"
#include "shared/base/check.h"
#include "tests/support/places.h"

namespace lode {

inline const ModelSource& DemoModel() {
  static const std::unique_ptr<ModelSource> source = [] {
    auto opened = ModelSource::Open(TestSources() + "/tests/models/demo-q4-with-mtp.gguf");
    LODE_CHECK(opened.ok(), "{}", Message(opened.status()));
    return std::move(*opened);
  }();
  return *source;
}

inline const Tokenizer& DemoTokenizer() {
  static const std::unique_ptr<Tokenizer> tokenizer = [] {
    auto data = DemoModel().tokenizer();
    LODE_CHECK(data.ok(), "{}", Message(data.status()));
    auto made = Tokenizer::Create(*data);
    LODE_CHECK(made.ok(), "{}", Message(made.status()));
    return std::move(*made);
  }();
  return *tokenizer;
}

inline nlohmann::json Golden(const std::string& name) {
  std::ifstream in(TestSources() + "/tests/models/golden/master/" + name);
  LODE_CHECK(in.good(), "golden file {} is missing", name);
  return nlohmann::json::parse(in);
}

// The character that spells a byte in a byte-level vocabulary.
inline std::string Spelling(int byte) {
  auto visible = [](int b) {
    return (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
  };
  uint32_t c = static_cast<uint32_t>(byte);
  if (!visible(byte)) {
    c = 0x100;
    for (int b = 0; b < byte; ++b) c += visible(b) ? 0 : 1;
  }
  std::string out;
  AppendUtf8(c, &out);
  return out;
}

struct SmallVocabulary {
  std::vector<std::string> tokens, merges;
  std::vector<uint64_t> types;
  std::string pre = "qwen35", model = "gpt2";
  int64_t eos = -1, pad = -1;

  SmallVocabulary() {
    for (int b = 0; b < 256; ++b) Add(Spelling(b));
  }
  int32_t Add(const std::string& text, uint64_t type = 1) {
    tokens.push_back(text);
    types.push_back(type);
    return static_cast<int32_t>(tokens.size()) - 1;
  }
  // A merge together with the token it makes.
  int32_t Merge(const std::string& a, const std::string& b) {
    merges.push_back(a + " " + b);
    return Add(a + b);
  }
  StatusOr<std::unique_ptr<Tokenizer>> Make() const {
    TokenizerData data;
    data.model = model;
    data.pre = pre;
    data.tokens.assign(tokens.begin(), tokens.end());
    data.token_types = types;
    data.merges.assign(merges.begin(), merges.end());
    data.eos = eos;
    data.pad = pad;
    return Tokenizer::Create(data);
  }
};

// Random text: mostly what people write, plus what breaks tokenizers (marks, joiners, Hangul,
// blanks, line ends).
inline std::string RandomText(std::mt19937* rng, size_t characters) {
  static const std::pair<uint32_t, uint32_t> kRanges[] = {
      {0x20, 0x7E},     {0x09, 0x0D},       {0x20, 0x20},       {'a', 'z'},
      {0xA0, 0x24F},    {0x300, 0x36F},     {0x370, 0x52F},     {0x591, 0x5F4},
      {0x900, 0x97F},   {0x1100, 0x11FF},   {0xAC00, 0xD7A3},   {0x1E00, 0x1EFF},
      {0x2000, 0x206F}, {0x3040, 0x30FF},   {0x4E00, 0x9FFF},   {0xF900, 0xFAFF},
      {0xFB00, 0xFFFD}, {0x1D100, 0x1D1FF}, {0x1F300, 0x1FAFF}, {0x2F800, 0x2FA1F},
      {0x1680, 0x180F}, {0x0, 0x10FFFF}};
  std::string out;
  for (size_t i = 0; i < characters; ++i) {
    auto [lo, hi] = kRanges[(*rng)() % std::size(kRanges)];
    uint32_t c = lo + (*rng)() % (hi - lo + 1);
    if (c >= 0xD800 && c < 0xE000) c = '\n';
    AppendUtf8(c, &out);
  }
  return out;
}

inline std::string RandomBytes(std::mt19937* rng, size_t n) {
  std::string out;
  for (size_t i = 0; i < n; ++i) out.push_back(static_cast<char>((*rng)()));
  return out;
}

}  // namespace lode
