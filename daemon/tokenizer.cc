// See tokenizer.h. The file spells bytes as printable characters (the byte alphabet of GPT-2):
// bytes that are visible in Latin-1 stand for themselves, the other 68 are U+0100 and up in
// ascending order, so a blank is U+0120.

#include "daemon/tokenizer.h"

#include <algorithm>
#include <array>

#include "absl/strings/string_view.h"
#include "daemon/utf8.h"
#include "shared/base/limits.h"

namespace lode {
namespace {

// Values of tokenizer.ggml.token_type.
constexpr uint64_t kTypeNormal = 1, kTypeUnknown = 2, kTypeControl = 3, kTypeUserDefined = 4,
                   kTypeUnused = 5, kTypeByte = 6;

constexpr uint32_t kAlphabetEnd = 0x100 + 68;  // one past the last character of the byte alphabet

// [character] -> byte it spells, -1 for none.
std::array<int16_t, kAlphabetEnd> MakeAlphabet() {
  std::array<int16_t, kAlphabetEnd> table;
  table.fill(-1);
  uint32_t next = 0x100;
  for (int b = 0; b < 256; ++b) {
    bool visible = (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
    table[visible ? b : next++] = static_cast<int16_t>(b);
  }
  return table;
}

int SpelledByte(uint32_t code_point) {
  static const std::array<int16_t, kAlphabetEnd> table = MakeAlphabet();
  return code_point < kAlphabetEnd ? table[code_point] : -1;
}

// Bytes that a normal token spells; nothing when some character is not of the alphabet.
std::optional<std::string> SpelledBytes(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    Utf8Step step = NextUtf8(text.substr(i));
    if (step.kind != Utf8Kind::kValid) return std::nullopt;
    int byte = SpelledByte(DecodeUtf8(text.data() + i, step.bytes));
    if (byte < 0) return std::nullopt;
    out.push_back(static_cast<char>(byte));
    i += step.bytes;
  }
  return out;
}

// "<0xE4>" -> 0xE4. Exactly two hexadecimal digits; signs and blanks are no digits.
std::optional<uint8_t> ByteToken(std::string_view text) {
  if (text.size() != 6 || text.substr(0, 3) != "<0x" || text[5] != '>') return std::nullopt;
  int value = 0;
  for (char c : text.substr(3, 2)) {
    int digit = c >= '0' && c <= '9'   ? c - '0'
                : c >= 'a' && c <= 'f' ? c - 'a' + 10
                : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                       : -1;
    if (digit < 0) return std::nullopt;
    value = value * 16 + digit;
  }
  return static_cast<uint8_t>(value);
}

// Untrusted bytes for a message or a log line.
std::string Escaped(std::string_view bytes) {
  std::string out;
  for (size_t i = 0; i < bytes.size();) {
    Utf8Step step = NextUtf8(bytes.substr(i));
    uint32_t c = static_cast<uint8_t>(bytes[i]);
    if (step.kind == Utf8Kind::kValid && step.bytes > 1) {
      c = DecodeUtf8(bytes.data() + i, step.bytes);
      // C1 controls and the characters that turn the writing direction can garble a terminal, too.
      bool harmful = c < 0xA0 || c == 0x200E || c == 0x200F || (c >= 0x2028 && c <= 0x202E) ||
                     (c >= 0x2066 && c <= 0x2069);
      out += harmful ? fmt::format("\\u{{{:x}}}", c) : std::string(bytes.substr(i, step.bytes));
    } else if (step.kind == Utf8Kind::kValid && c >= 0x20 && c != 0x7F && c != '"' && c != '\\') {
      out.push_back(static_cast<char>(c));
    } else {
      for (uint32_t k = 0; k < step.bytes; ++k) {
        out += fmt::format("\\x{:02x}", static_cast<uint8_t>(bytes[i + k]));
      }
    }
    i += step.bytes;
  }
  return out;
}

constexpr size_t kQuotedBytesMax = 80;  // of a token in an error sentence
std::string Quoted(std::string_view bytes) {
  bool cut = bytes.size() > kQuotedBytesMax;
  return fmt::format("\"{}{}\"", Escaped(bytes.substr(0, kQuotedBytesMax)), cut ? "..." : "");
}

Status TooMany(const EncodeOptions& options) {
  return Error(StatusCode::kOutOfRange, "the text has more than {} tokens", options.tokens_max);
}
Status Stopped() { return Error(StatusCode::kCancelled, "the text is not wanted any more"); }
constexpr size_t kTokensPerLook = 4096;  // about a millisecond

absl::string_view AbslView(std::string_view s) { return {s.data(), s.size()}; }

}  // namespace

StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Create(const TokenizerData& data) {
  if (data.model != "gpt2") {
    return InvalidArgument(
        "the model's tokenizer is {}; this version knows \"gpt2\" (byte-level BPE)",
        Quoted(data.model));
  }
  std::unique_ptr<Tokenizer> t(new Tokenizer);
  LODE_ASSIGN_OR_RETURN(t->pretokenizer_, Pretokenizer::Create(data.pre));
  LODE_RETURN_IF_ERROR(t->ReadTokens(data));
  LODE_RETURN_IF_ERROR(t->ReadBytes(data));
  LODE_RETURN_IF_ERROR(t->ReadMerges(data));
  LODE_RETURN_IF_ERROR(t->ReadSpecialIds(data));
  return t;
}

Status Tokenizer::ReadTokens(const TokenizerData& data) {
  size_t n = data.tokens.size();
  if (n == 0) return InvalidArgument("the model file has an empty token list");
  if (n > kVocabMax) {
    return InvalidArgument("the model file has {} tokens; at most {} are supported", n, kVocabMax);
  }
  if (data.token_types.size() != n) {
    return InvalidArgument("the model file has {} tokens but {} token types", n,
                           data.token_types.size());
  }
  kinds_.reserve(n);
  offsets_.reserve(n + 1);
  offsets_.push_back(0);
  for (size_t id = 0; id < n; ++id) LODE_RETURN_IF_ERROR(ReadToken(data, static_cast<int32_t>(id)));
  return OkStatus();
}

Status Tokenizer::ReadToken(const TokenizerData& data, int32_t id) {
  std::string_view text = data.tokens[id];
  if (text.size() > kTokenBytesMax) {
    return InvalidArgument("token {} of the model file has {} bytes; at most {} are supported", id,
                           text.size(), kTokenBytesMax);
  }
  uint64_t type = data.token_types[id];
  if (text.empty() && type != kTypeUnused) {
    return InvalidArgument("token {} of the model file is empty", id);
  }
  switch (type) {
    case kTypeNormal:
      kinds_.push_back(Kind::kNormal);
      // A token outside the byte alphabet can never be a merge's result of text; it stands for
      // itself.
      bytes_ += SpelledBytes(text).value_or(std::string(text));
      break;
    case kTypeByte: {
      auto byte = ByteToken(text);
      if (!byte) {
        return InvalidArgument("byte token {} of the model file is {}, not \"<0xNN>\"", id,
                               Quoted(text));
      }
      kinds_.push_back(Kind::kNormal);
      bytes_.push_back(static_cast<char>(*byte));
      break;
    }
    case kTypeUnknown:
    case kTypeControl:
      kinds_.push_back(Kind::kControl);
      special_.Add(text, id);
      bytes_ += text;
      break;
    case kTypeUserDefined:
      kinds_.push_back(Kind::kUserDefined);
      special_.Add(text, id);
      user_defined_.Add(text, id);
      bytes_ += text;
      break;
    case kTypeUnused:
      kinds_.push_back(Kind::kUnused);
      unused_ids_.push_back(id);
      bytes_ += text;
      break;
    default:
      return InvalidArgument("token {} of the model file has the unknown type {}", id, type);
  }
  token_bytes_max_ = std::max(token_bytes_max_, bytes_.size() - offsets_.back());
  offsets_.push_back(bytes_.size());
  return OkStatus();
}

Status Tokenizer::ReadBytes(const TokenizerData& data) {
  std::array<int32_t, 256> ids;
  ids.fill(-1);
  for (int32_t id = 0; id < vocab_size(); ++id) {
    std::string_view bytes = TokenBytes(id);
    // A byte is the token that spells it; "<0xNN>" only stands in where the vocabulary has no such
    // token.
    if (kinds_[id] != Kind::kNormal || bytes.size() != 1) continue;
    int32_t& slot = ids[static_cast<uint8_t>(bytes[0])];
    if (slot < 0 || data.token_types[slot] == kTypeByte) slot = id;
  }
  for (int b = 0; b < 256; ++b) {
    if (ids[b] < 0) {
      return InvalidArgument("the model's vocabulary has no token for the byte {:#04x}", b);
    }
    merges_.SetByte(static_cast<uint8_t>(b), ids[b]);
  }
  return OkStatus();
}

Status Tokenizer::ReadMerges(const TokenizerData& data) {
  absl::flat_hash_map<absl::string_view, int32_t> ids;
  ids.reserve(data.tokens.size());
  for (int32_t id = 0; id < vocab_size(); ++id) {
    if (kinds_[id] == Kind::kUnused) continue;
    auto [it, fresh] = ids.try_emplace(AbslView(data.tokens[id]), id);
    if (!fresh) {
      return InvalidArgument("tokens {} and {} of the model file are both {}", it->second, id,
                             Quoted(data.tokens[id]));
    }
  }
  merges_.Reserve(data.merges.size());
  std::string joined;
  for (size_t rank = 0; rank < data.merges.size(); ++rank) {
    std::string_view merge = data.merges[rank];
    size_t blank = merge.find(' ', 1);
    if (blank == std::string_view::npos || blank + 1 == merge.size() ||
        merge.find(' ', blank + 1) != std::string_view::npos) {
      return InvalidArgument("merge {} of the model file is {}, not two tokens and a blank", rank,
                             Quoted(merge));
    }
    std::string_view parts[2] = {merge.substr(0, blank), merge.substr(blank + 1)};
    joined.assign(parts[0]).append(parts[1]);
    int32_t found[3];
    for (int i = 0; i < 3; ++i) {
      std::string_view text = i < 2 ? parts[i] : joined;
      auto it = ids.find(AbslView(text));
      if (it == ids.end()) {
        return InvalidArgument("merge {} of the model file, {}, needs {}, which is no token", rank,
                               Quoted(merge), Quoted(text));
      }
      found[i] = it->second;
    }
    merges_.Add(found[0], found[1], static_cast<uint32_t>(rank), found[2]);
  }
  return OkStatus();
}

Status Tokenizer::ReadSpecialIds(const TokenizerData& data) {
  struct Named {
    const char* name;
    int64_t id;
  };
  for (Named named : {Named{"bos", data.bos}, Named{"eos", data.eos}, Named{"eot", data.eot},
                      Named{"padding", data.pad}}) {
    if (named.id < -1 || named.id >= vocab_size()) {
      return InvalidArgument("the model's {} token id is {}, outside its {} tokens", named.name,
                             named.id, vocab_size());
    }
  }
  bos_id_ = static_cast<int32_t>(data.bos);
  eos_id_ = static_cast<int32_t>(data.eos);
  pad_id_ = static_cast<int32_t>(data.pad);
  add_bos_ = data.add_bos && bos_id_ >= 0;
  if (data.eos >= 0) stop_ids_.push_back(eos_id_);
  if (data.eot >= 0) stop_ids_.push_back(static_cast<int32_t>(data.eot));
  // Models of this family end a turn with the first and a document with the second, whichever the
  // file calls eos.
  for (const char* name : {"<|im_end|>", "<|endoftext|>"}) {
    if (auto id = FindSpecial(name)) stop_ids_.push_back(*id);
  }
  std::sort(stop_ids_.begin(), stop_ids_.end());
  stop_ids_.erase(std::unique(stop_ids_.begin(), stop_ids_.end()), stop_ids_.end());
  return OkStatus();
}

StatusOr<std::vector<int32_t>> Tokenizer::Encode(std::string_view text,
                                                 const EncodeOptions& options) const {
  if (text.size() > kEncodeBytesMax) {
    return InvalidArgument("the text has {} bytes; at most {} can be tokenized", text.size(),
                           kEncodeBytesMax);
  }
  const SpecialTokens& names = options.parse_special ? special_ : user_defined_;
  SpecialTokens::Veto veto;
  if (!options.marks.empty()) {
    veto = [&](const SpecialTokens::Match& match) {
      const auto mark = std::upper_bound(options.marks.begin(), options.marks.end(), match.begin);
      return IsControl(match.id) && mark != options.marks.end() &&
             *mark < match.begin + match.bytes;
    };
  }
  std::vector<int32_t> ids;
  BpeMerges::Scratch scratch;
  for (size_t at = 0; at < text.size();) {
    auto match = names.FindNext(text, at, veto);
    size_t end = match ? match->begin : text.size();
    LODE_RETURN_IF_ERROR(EncodePlain(text.substr(at, end - at), options, &scratch, &ids));
    if (!match) break;
    ids.push_back(match->id);
    if (ids.size() > options.tokens_max) return TooMany(options);
    at = end + match->bytes;
  }
  return ids;
}

Status Tokenizer::EncodePlain(std::string_view text, const EncodeOptions& options,
                              BpeMerges::Scratch* scratch, std::vector<int32_t>* out) const {
  Status status;
  auto word = [&](std::string_view w) {
    status = EncodeWord(w, options, scratch, out);
    return status.ok();
  };
  std::string normal;
  while (!text.empty()) {
    std::string_view valid = text.substr(0, ValidUtf8Prefix(text));
    text.remove_prefix(valid.size());
    if (MayNeedNfc(valid)) {
      normal = ToNfc(valid);
      valid = normal;
    }
    LODE_RETURN_IF_ERROR(pretokenizer_->Split(valid, word));
    LODE_RETURN_IF_ERROR(status);
    size_t raw = 0;
    while (raw < text.size()) {
      Utf8Step step = NextUtf8(text.substr(raw));
      if (step.kind == Utf8Kind::kValid) break;
      raw += step.bytes;
    }
    if (!word(text.substr(0, raw))) return status;
    text.remove_prefix(raw);
  }
  return OkStatus();
}

Status Tokenizer::EncodeWord(std::string_view word, const EncodeOptions& options,
                             BpeMerges::Scratch* scratch, std::vector<int32_t>* out) const {
  // A lower bound of what the word will add, so that a word as long as a book costs nothing.
  const size_t at_least = (word.size() + token_bytes_max_ - 1) / token_bytes_max_;
  if (out->size() + at_least > options.tokens_max) return TooMany(options);
  const size_t before = out->size();
  if (!merges_.Encode(word, scratch, options.stop, out)) return Stopped();
  if (out->size() > options.tokens_max) return TooMany(options);
  // Many short words: look at the clock of the caller once per some thousand tokens.
  if (options.stop && before / kTokensPerLook != out->size() / kTokensPerLook && options.stop())
    return Stopped();
  return OkStatus();
}

std::string Tokenizer::Decode(std::span<const int32_t> ids, bool keep_special) const {
  std::string out;
  for (int32_t id : ids) {
    if (keep_special || !(IsControl(id) || IsUnused(id))) out += TokenBytes(id);
  }
  return out;
}

std::string_view Tokenizer::TokenBytes(int32_t id) const {
  if (!IsValid(id)) return {};
  return std::string_view(bytes_).substr(offsets_[id], offsets_[id + 1] - offsets_[id]);
}

std::string Tokenizer::PrintableToken(int32_t id) const { return Escaped(TokenBytes(id)); }

std::vector<std::string> Tokenizer::ControlNames() const {
  std::vector<std::string> names;
  for (int32_t id = 0; id < vocab_size(); ++id) {
    if (IsControl(id) && IsValidUtf8(TokenBytes(id))) names.emplace_back(TokenBytes(id));
  }
  return names;
}

std::optional<int32_t> Tokenizer::FindSpecial(std::string_view name) const {
  return special_.Find(name);
}

bool Tokenizer::IsStop(int32_t id) const {
  return std::binary_search(stop_ids_.begin(), stop_ids_.end(), id);
}

}  // namespace lode
