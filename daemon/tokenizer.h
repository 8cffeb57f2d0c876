// Text to token ids and back: byte-level byte-pair encoding as the model file describes it.
//
// Encoding runs in the order the models were trained with: special tokens are cut out of the raw
// text (longest match first), the text between them is brought into normal form C, split into words
// by the family's regular expression and merged by rank. Bytes that are not UTF-8 are kept: each
// run of them is a word of its own, neither normalised nor matched by the expression, so
// Decode(Encode(text)) gives them back unchanged.
//
// The daemon makes one Tokenizer at start from the model file, which is untrusted: every list is
// checked before use. Const after Create, any number of threads. Copies what it needs; the
// TokenizerData may go away.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/bpe.h"
#include "daemon/pretokenizer.h"
#include "daemon/special_tokens.h"
#include "shared/base/status.h"
#include "shared/model/model_source.h"

namespace lode {

// Longest text of one Encode: four times the longest context (2^20 tokens) at the usual four bytes
// a token.
inline constexpr size_t kEncodeBytesMax = 16u << 20;
// Normal form C makes a text at most this many times shorter (three Hangul letters of three bytes
// become one syllable of three; single characters shrink from three bytes to one).
inline constexpr size_t kNfcShrinkMax = 3;
// Longest token of a vocabulary, as written in the file. Published ones stay below 1 KiB.
inline constexpr size_t kTokenBytesMax = 4096;

struct EncodeOptions {
  // Control tokens written in the text become their ids (prompts made by a chat template). Without
  // it they are ordinary text (anything a stranger typed). User-defined tokens are recognised
  // either way, as in training.
  bool parse_special = false;
  // Byte offsets into the text, ascending: control tokens across one of them are ordinary text
  // (RenderedChat::marks).
  std::span<const size_t> marks = {};
  // More tokens than this are an error, found before the work for them is done.
  size_t tokens_max = SIZE_MAX;
  // Asked now and then in long texts; true ends with Cancelled. Empty: never.
  std::function<bool()> stop = {};
};

class Tokenizer {
 public:
  // Errors: InvalidArgument naming the token, merge or key that is wrong.
  static StatusOr<std::unique_ptr<Tokenizer>> Create(const TokenizerData& data);

  // Adds no BOS. Errors: InvalidArgument (text too long), OutOfRange (more than tokens_max tokens),
  // Cancelled (stop), ResourceExhausted (the expression's step limit).
  StatusOr<std::vector<int32_t>> Encode(std::string_view text, const EncodeOptions& options) const;
  StatusOr<std::vector<int32_t>> Encode(std::string_view text, bool parse_special) const {
    return Encode(text, EncodeOptions{.parse_special = parse_special});
  }
  // A longer text certainly has more than `tokens` tokens, whatever it says: every token stands for
  // at most token_bytes_max() bytes of its normal form. For refusing without looking.
  uint64_t TextBytesMax(uint64_t tokens) const {
    return std::min<uint64_t>(kEncodeBytesMax, tokens * token_bytes_max_ * kNfcShrinkMax);
  }
  // Longest token, in the bytes that it stands for.
  size_t token_bytes_max() const { return token_bytes_max_; }

  // The bytes of the tokens one after the other; not necessarily UTF-8 (daemon/detokenizer.h makes
  // text of it). Control and unused tokens are left out unless keep_special. Ids outside the
  // vocabulary give nothing.
  std::string Decode(std::span<const int32_t> ids, bool keep_special) const;

  int32_t vocab_size() const { return static_cast<int32_t>(kinds_.size()); }
  bool IsValid(int32_t id) const { return id >= 0 && id < vocab_size(); }

  // What the token stands for, as bytes; control tokens by their name. Empty outside the
  // vocabulary.
  std::string_view TokenBytes(int32_t id) const;
  // The same for terminals and logs: control bytes, quotes and ill-formed UTF-8 escaped.
  std::string PrintableToken(int32_t id) const;

  bool IsControl(int32_t id) const { return IsValid(id) && kinds_[id] == Kind::kControl; }
  bool IsUserDefined(int32_t id) const { return IsValid(id) && kinds_[id] == Kind::kUserDefined; }
  bool IsUnused(int32_t id) const { return IsValid(id) && kinds_[id] == Kind::kUnused; }
  // Not ordinary text: control or user defined.
  bool IsSpecial(int32_t id) const { return IsControl(id) || IsUserDefined(id); }

  // Names of all control tokens that are UTF-8, as a template's helper needs them.
  std::vector<std::string> ControlNames() const;
  // Id of a control or user-defined token by its exact name, e.g. "</think>".
  std::optional<int32_t> FindSpecial(std::string_view name) const;

  // Generation ends on any of these: the file's eos and eot, and <|im_end|> and <|endoftext|> where
  // they exist. Ascending.
  const std::vector<int32_t>& stop_ids() const { return stop_ids_; }
  bool IsStop(int32_t id) const;
  // Padding of the vocabulary, never to be sampled. Ascending.
  const std::vector<int32_t>& unused_ids() const { return unused_ids_; }

  // -1: the file names none.
  int32_t bos_id() const { return bos_id_; }
  int32_t eos_id() const { return eos_id_; }
  int32_t pad_id() const { return pad_id_; }
  bool add_bos() const { return add_bos_; }

 private:
  enum class Kind : uint8_t { kNormal, kControl, kUserDefined, kUnused };

  Tokenizer() = default;
  Status ReadTokens(const TokenizerData& data);
  Status ReadToken(const TokenizerData& data, int32_t id);
  Status ReadBytes(const TokenizerData& data);
  Status ReadMerges(const TokenizerData& data);
  Status ReadSpecialIds(const TokenizerData& data);
  Status EncodePlain(std::string_view text, const EncodeOptions& options,
                     BpeMerges::Scratch* scratch, std::vector<int32_t>* out) const;
  Status EncodeWord(std::string_view word, const EncodeOptions& options,
                    BpeMerges::Scratch* scratch, std::vector<int32_t>* out) const;

  // All const after Create.
  std::unique_ptr<Pretokenizer> pretokenizer_;
  BpeMerges merges_;
  SpecialTokens user_defined_;   // matched always
  SpecialTokens special_;        // user defined and control, matched with parse_special
  std::vector<Kind> kinds_;      // [vocab]
  std::string bytes_;            // what the tokens stand for, one after the other
  std::vector<size_t> offsets_;  // [vocab + 1] into bytes_
  size_t token_bytes_max_ = 1;
  std::vector<int32_t> stop_ids_, unused_ids_;
  int32_t bos_id_ = -1, eos_id_ = -1, pad_id_ = -1;
  bool add_bos_ = false;
};

}  // namespace lode
