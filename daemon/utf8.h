// UTF-8 at the level of bytes: where the next character ends, what is not UTF-8, and Unicode normal
// form C.
//
// The tokenizer needs to know which bytes of a prompt are text (and may be normalised and split by
// a regular expression) and which are not (and stay bytes). The detokenizer needs to cut a byte
// stream only between characters. Both use one definition of "ill-formed": the maximal subparts of
// the Unicode standard (chapter 3.9, table 3-7), so surrogates, overlong forms and values above
// U+10FFFF are ill-formed.
//
// Pure functions and one small value type; any thread.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace lode {

enum class Utf8Kind : uint8_t {
  kValid,       // one whole character
  kInvalid,     // a maximal subpart that no further byte can complete
  kIncomplete,  // well-formed so far, but the input ends inside the character
};

struct Utf8Step {
  Utf8Kind kind;
  uint32_t bytes;  // 1..4
};

// What `rest` starts with. REQUIRES: not empty.
Utf8Step NextUtf8(std::string_view rest);

// Whole string well-formed?
bool IsValidUtf8(std::string_view text);

// Length of the longest well-formed prefix.
size_t ValidUtf8Prefix(std::string_view text);

// Code point of a character that NextUtf8 called valid; `bytes` is its length.
uint32_t DecodeUtf8(const char* p, uint32_t bytes);
void AppendUtf8(uint32_t code_point, std::string* out);

// False only when the text certainly is in normal form C already (a cheap test that knows western
// text).
bool MayNeedNfc(std::string_view text);

// Normal form C. REQUIRES: valid UTF-8. Linear up to a sort of each run of combining marks, also
// for hostile input.
std::string ToNfc(std::string_view valid_utf8);

// Turns a byte stream cut anywhere into text: holds an incomplete tail back, replaces every
// ill-formed maximal subpart by U+FFFD. The output over all calls does not depend on where the
// stream was cut. Copyable.
class Utf8Stream {
 public:
  void Append(std::string_view bytes, std::string* out);
  void Flush(std::string* out);  // end of stream: a held tail becomes one U+FFFD
  bool holding() const { return !tail_.empty(); }

 private:
  std::string tail_;  // at most 3 bytes, always kIncomplete
};

}  // namespace lode
