// See utf8.h. Normal form C is done in three steps: utf8proc decomposes one character at a time,
// marks are put in canonical order here, utf8proc composes. Ordering is ours because utf8proc sorts
// by exchanging neighbours, which takes hours on a megabyte of alternating marks.

#include "daemon/utf8.h"

#include <utf8proc.h>

#include <algorithm>
#include <vector>

#include "shared/base/check.h"

namespace lode {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// Longest canonical decomposition of one character is 4 code points; twice that is asked for and
// checked.
constexpr int kDecompositionMax = 8;

struct LeadByte {
  uint32_t bytes;                // length of the character, 0: no character starts so
  uint8_t second_lo, second_hi;  // allowed second byte
};

LeadByte Lead(uint8_t b) {
  if (b < 0x80) return {1, 0, 0};
  if (b < 0xC2) return {0, 0, 0};
  if (b < 0xE0) return {2, 0x80, 0xBF};
  if (b == 0xE0) return {3, 0xA0, 0xBF};
  if (b == 0xED) return {3, 0x80, 0x9F};
  if (b < 0xF0) return {3, 0x80, 0xBF};
  if (b == 0xF0) return {4, 0x90, 0xBF};
  if (b < 0xF4) return {4, 0x80, 0xBF};
  if (b == 0xF4) return {4, 0x80, 0x8F};
  return {0, 0, 0};
}

uint32_t CombiningClass(int32_t code_point) {
  return utf8proc_get_property(code_point)->combining_class;
}

void Decompose(std::string_view text, std::vector<int32_t>* out) {
  constexpr auto kOptions = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_DECOMPOSE);
  for (size_t i = 0; i < text.size();) {
    Utf8Step step = NextUtf8(text.substr(i));
    LODE_CHECK(step.kind == Utf8Kind::kValid, "ToNfc was given ill-formed UTF-8 at byte {}", i);
    int32_t code_point = static_cast<int32_t>(DecodeUtf8(text.data() + i, step.bytes));
    int32_t parts[kDecompositionMax];
    auto n = utf8proc_decompose_char(code_point, parts, kDecompositionMax, kOptions, nullptr);
    if (n <= 0 || n > kDecompositionMax) {  // unassigned in utf8proc's tables: it stands for itself
      parts[0] = code_point;
      n = 1;
    }
    out->insert(out->end(), parts, parts + n);
    i += step.bytes;
  }
}

// Canonical order: every run of marks (class above 0) sorted by class, equal classes in their old
// order.
void OrderMarks(std::vector<int32_t>* text) {
  for (size_t i = 0; i < text->size();) {
    if (CombiningClass((*text)[i]) == 0) {
      ++i;
      continue;
    }
    size_t end = i + 1;
    while (end < text->size() && CombiningClass((*text)[end]) != 0) ++end;
    std::stable_sort(text->begin() + i, text->begin() + end,
                     [](int32_t a, int32_t b) { return CombiningClass(a) < CombiningClass(b); });
    i = end;
  }
}

}  // namespace

Utf8Step NextUtf8(std::string_view rest) {
  auto byte = [&](size_t i) { return static_cast<uint8_t>(rest[i]); };
  LeadByte lead = Lead(byte(0));
  if (lead.bytes == 0) return {Utf8Kind::kInvalid, 1};
  for (uint32_t i = 1; i < lead.bytes; ++i) {
    if (i == rest.size()) return {Utf8Kind::kIncomplete, i};
    uint8_t lo = i == 1 ? lead.second_lo : 0x80;
    uint8_t hi = i == 1 ? lead.second_hi : 0xBF;
    if (byte(i) < lo || byte(i) > hi) return {Utf8Kind::kInvalid, i};
  }
  return {Utf8Kind::kValid, lead.bytes};
}

size_t ValidUtf8Prefix(std::string_view text) {
  size_t i = 0;
  while (i < text.size()) {
    Utf8Step step = NextUtf8(text.substr(i));
    if (step.kind != Utf8Kind::kValid) break;
    i += step.bytes;
  }
  return i;
}

bool IsValidUtf8(std::string_view text) { return ValidUtf8Prefix(text) == text.size(); }

uint32_t DecodeUtf8(const char* p, uint32_t bytes) {
  auto b = [&](int i) { return static_cast<uint32_t>(static_cast<uint8_t>(p[i])); };
  switch (bytes) {
    case 1:
      return b(0);
    case 2:
      return (b(0) & 0x1F) << 6 | (b(1) & 0x3F);
    case 3:
      return (b(0) & 0x0F) << 12 | (b(1) & 0x3F) << 6 | (b(2) & 0x3F);
    default:
      return (b(0) & 0x07) << 18 | (b(1) & 0x3F) << 12 | (b(2) & 0x3F) << 6 | (b(3) & 0x3F);
  }
}

void AppendUtf8(uint32_t c, std::string* out) {
  auto put = [&](uint32_t byte) { out->push_back(static_cast<char>(byte)); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xC0 | c >> 6), put(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    put(0xE0 | c >> 12), put(0x80 | (c >> 6 & 0x3F)), put(0x80 | (c & 0x3F));
  } else {
    put(0xF0 | c >> 18), put(0x80 | (c >> 12 & 0x3F));
    put(0x80 | (c >> 6 & 0x3F)), put(0x80 | (c & 0x3F));
  }
}

bool MayNeedNfc(std::string_view text) {
  // Everything below U+0300 is inert under composition; its encodings are the ones below byte 0xCC.
  return std::any_of(text.begin(), text.end(),
                     [](char c) { return static_cast<uint8_t>(c) >= 0xCC; });
}

std::string ToNfc(std::string_view text) {
  std::vector<int32_t> points;
  points.reserve(text.size());
  Decompose(text, &points);
  OrderMarks(&points);
  auto n =
      utf8proc_normalize_utf32(points.data(), static_cast<utf8proc_ssize_t>(points.size()),
                               static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  LODE_CHECK(n >= 0, "utf8proc cannot compose: {}", utf8proc_errmsg(n));
  std::string out;
  out.reserve(text.size());
  for (utf8proc_ssize_t i = 0; i < n; ++i) AppendUtf8(static_cast<uint32_t>(points[i]), &out);
  return out;
}

void Utf8Stream::Append(std::string_view bytes, std::string* out) {
  std::string joined;
  if (!tail_.empty()) {
    joined = tail_ + std::string(bytes);
    tail_.clear();
    bytes = joined;
  }
  while (!bytes.empty()) {
    Utf8Step step = NextUtf8(bytes);
    if (step.kind == Utf8Kind::kIncomplete) {
      tail_ = bytes;
      return;
    }
    out->append(step.kind == Utf8Kind::kValid ? bytes.substr(0, step.bytes) : kReplacement);
    bytes.remove_prefix(step.bytes);
  }
}

void Utf8Stream::Flush(std::string* out) {
  if (!tail_.empty()) out->append(kReplacement);
  tail_.clear();
}

}  // namespace lode
