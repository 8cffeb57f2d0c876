// Cuts text into the words that byte-pair encoding works on, by the regular expression of a
// tokenizer family.
//
// Called by Tokenizer::Encode, once per stretch of well-formed text. PCRE2 does the matching (with
// its JIT compiler where the machine allows one); the number of steps is bounded in proportion to
// the text, so a hostile text ends in an error instead of a hang. Const after Create, any number of
// threads.
#pragma once

#include <functional>
#include <memory>
#include <string_view>

#include "shared/base/status.h"

namespace lode {

class Pretokenizer {
 public:
  // `name` is the file's tokenizer.ggml.pre: "qwen2" or "qwen35".
  static StatusOr<std::unique_ptr<Pretokenizer>> Create(std::string_view name);
  ~Pretokenizer();
  Pretokenizer(const Pretokenizer&) = delete;
  Pretokenizer& operator=(const Pretokenizer&) = delete;

  // Calls `word` for each word in order until it returns false; together they are the text.
  // REQUIRES: valid UTF-8.
  Status Split(std::string_view text, const std::function<bool(std::string_view)>& word) const;

 private:
  explicit Pretokenizer(void* code) : code_(code) {}
  void* code_;  // pcre2_code, owned
};

}  // namespace lode
