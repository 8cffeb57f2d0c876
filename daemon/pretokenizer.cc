// See pretokenizer.h. The expression is put together from named pieces so that the two families
// show their only difference: whether combining marks (\p{M}) belong to words. White space is
// spelled out because PCRE2's \s also takes U+180E, which Unicode's White_Space property, used by
// the tokenizers models were trained with, does not.

#define PCRE2_CODE_UNIT_WIDTH 8
#include "daemon/pretokenizer.h"

#include <pcre2.h>

#include <algorithm>
#include <string>

#include "shared/base/check.h"

namespace lode {
namespace {

// Steps PCRE2 may take for one word, per byte of text that is left and at least. Each alternative
// of the expression looks at a run of characters at most twice; 16 leaves room for how PCRE2
// counts.
constexpr uint64_t kMatchStepsPerByte = 16;
constexpr uint64_t kMatchStepsMin = 100'000;
constexpr uint32_t kMatchHeapKib = 64 * 1024;

constexpr std::string_view kSpace =
    R"(\t-\r\x20\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";

std::string Expression(bool marks_in_words) {
  std::string mark = marks_in_words ? R"(\p{M})" : "";
  std::string space = fmt::format("[{}]", kSpace);
  return fmt::format(
      "{contraction}|{letters}|{number}|{other}|{lines}|{inner_space}|{space}",
      fmt::arg("contraction", R"((?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]))"),
      fmt::arg("letters", fmt::format(R"([^\r\n\p{{L}}\p{{N}}]?[\p{{L}}{}]+)", mark)),
      fmt::arg("number", R"(\p{N})"),
      fmt::arg("other", fmt::format(R"( ?[^{}\p{{L}}{}\p{{N}}]+[\r\n]*)", kSpace, mark)),
      fmt::arg("lines", fmt::format(R"({}*[\r\n]+)", space)),
      fmt::arg("inner_space", fmt::format(R"({}+(?![^{}]))", space, kSpace)),
      fmt::arg("space", fmt::format("{}+", space)));
}

std::string PcreMessage(int code) {
  unsigned char buffer[256];
  pcre2_get_error_message(code, buffer, sizeof(buffer));
  return reinterpret_cast<const char*>(buffer);
}

struct MatchState {
  explicit MatchState(const pcre2_code* code)
      : data(pcre2_match_data_create_from_pattern(code, nullptr)),
        context(pcre2_match_context_create(nullptr)) {
    LODE_CHECK(data != nullptr && context != nullptr, "out of memory for a PCRE2 match");
    pcre2_set_heap_limit(context, kMatchHeapKib);
  }
  ~MatchState() {
    pcre2_match_data_free(data);
    pcre2_match_context_free(context);
  }
  MatchState(const MatchState&) = delete;
  MatchState& operator=(const MatchState&) = delete;

  pcre2_match_data* data;
  pcre2_match_context* context;
};

}  // namespace

StatusOr<std::unique_ptr<Pretokenizer>> Pretokenizer::Create(std::string_view name) {
  if (name != "qwen2" && name != "qwen35") {
    return InvalidArgument(
        "the model's pre-tokenizer is \"{}\"; this version knows \"qwen2\" and \"qwen35\"", name);
  }
  std::string expression = Expression(/*marks_in_words=*/name == "qwen35");
  int error = 0;
  size_t offset = 0;
  pcre2_code* code =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(expression.data()), expression.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &offset, nullptr);
  if (code == nullptr) {
    return Internal("PCRE2 refuses the {} expression at {}: {}", name, offset, PcreMessage(error));
  }
  // Without a JIT (hardened kernels forbid writable code pages) the interpreter gives the same
  // words.
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
  return std::unique_ptr<Pretokenizer>(new Pretokenizer(code));
}

Pretokenizer::~Pretokenizer() { pcre2_code_free(static_cast<pcre2_code*>(code_)); }

Status Pretokenizer::Split(std::string_view text,
                           const std::function<bool(std::string_view)>& word) const {
  const pcre2_code* code = static_cast<const pcre2_code*>(code_);
  MatchState state(code);
  auto subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  for (size_t at = 0; at < text.size();) {
    uint64_t steps = std::max(kMatchStepsMin, kMatchStepsPerByte * (text.size() - at));
    pcre2_set_match_limit(state.context,
                          static_cast<uint32_t>(std::min<uint64_t>(steps, UINT32_MAX)));
    auto match = [&](uint32_t options) {
      return pcre2_match(code, subject, text.size(), at, PCRE2_NO_UTF_CHECK | options, state.data,
                         state.context);
    };
    int rc = match(0);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT) rc = match(PCRE2_NO_JIT);
    if (rc < 0 && rc != PCRE2_ERROR_NOMATCH) {
      return ResourceExhausted("the text cannot be split into words at byte {}: {}", at,
                               PcreMessage(rc));
    }
    const size_t* span = pcre2_get_ovector_pointer(state.data);
    // The alternatives cover every character, so a gap cannot happen; if one did, it would be a
    // word of its own.
    size_t begin = rc < 0 ? text.size() : span[0];
    if (begin > at && !word(text.substr(at, begin - at))) return OkStatus();
    size_t end = rc < 0 ? begin : span[1];
    LODE_CHECK(end > at, "the pre-tokenizer does not advance at byte {}", at);
    if (end > begin && !word(text.substr(begin, end - begin))) return OkStatus();
    at = end;
  }
  return OkStatus();
}

}  // namespace lode
