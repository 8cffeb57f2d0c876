// Token ids to text as they arrive, never half a character.
//
// A byte-level token may end inside a UTF-8 character; the tail is held back until the next token
// completes it. Bytes that no token can complete any more become U+FFFD, one per maximal subpart,
// so what Push and Flush return is always UTF-8 and, put together, does not depend on how the
// tokens were grouped. The daemon keeps one per sequence, used by the thread that commits its
// tokens; copying it saves the state.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "daemon/tokenizer.h"
#include "daemon/utf8.h"

namespace lode {

class Detokenizer {
 public:
  struct Options {
    bool keep_special = false;  // control tokens appear by name
    std::vector<int32_t>
        keep_ids;  // these do in any case (markers such as </think> that a parser wants to see)
  };

  // The tokenizer must outlive this.
  explicit Detokenizer(const Tokenizer* tokenizer) : Detokenizer(tokenizer, Options{}) {}
  Detokenizer(const Tokenizer* tokenizer, Options options);

  // Text that became complete with this token; often empty. Ids outside the vocabulary give
  // nothing.
  std::string Push(int32_t id);
  // The end of the answer: a held tail becomes U+FFFD. The next Push starts afresh.
  std::string Flush();
  bool holding() const { return stream_.holding(); }

  // All at once.
  static std::string Text(const Tokenizer& tokenizer, std::span<const int32_t> ids,
                          Options options);

 private:
  const Tokenizer* tokenizer_;
  Options options_;
  Utf8Stream stream_;
};

}  // namespace lode
