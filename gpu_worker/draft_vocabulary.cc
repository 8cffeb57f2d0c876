// See draft_vocabulary.h.
#include "gpu_worker/draft_vocabulary.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <sstream>

namespace lode {
namespace {

// 1 M tokens with counts are about 20 MB.
constexpr uint64_t kFileBytesMax = 64ull << 20;

struct Entry {
  int32_t id;
  uint64_t count;
};

std::string_view Trim(std::string_view text) {
  const char* kBlank = " \t\r";
  const size_t begin = text.find_first_not_of(kBlank);
  if (begin == text.npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlank) - begin + 1);
}

// A whole number and nothing else before the next blank; moves `text` behind it.
bool TakeNumber(std::string_view* text, uint64_t* out) {
  *text = Trim(*text);
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), *out);
  const size_t length = static_cast<size_t>(end - text->data());
  if (error != std::errc() || (length < text->size() && (*text)[length] != ' ' &&
                               (*text)[length] != '\t')) {
    return false;
  }
  text->remove_prefix(length);
  return true;
}

}  // namespace

StatusOr<std::vector<int32_t>> ParseDraftVocabulary(std::string_view text, uint32_t top,
                                                    uint32_t vocab) {
  std::vector<Entry> entries;
  std::vector<bool> seen(vocab, false);
  for (uint64_t line_number = 1; !text.empty(); ++line_number) {
    const size_t end = text.find('\n');
    std::string_view line = text.substr(0, end);
    text.remove_prefix(end == text.npos ? text.size() : end + 1);
    line = Trim(line.substr(0, line.find('#')));
    if (line.empty()) continue;
    uint64_t id = 0, count = 0;
    const bool ok = TakeNumber(&line, &id) && (Trim(line).empty() || TakeNumber(&line, &count)) &&
                    Trim(line).empty();
    if (!ok)
      return InvalidArgument("line {}: expected a token id and perhaps a count", line_number);
    if (id >= vocab)
      return InvalidArgument("line {}: token {} is outside the vocabulary of {}", line_number, id,
                             vocab);
    if (seen[id]) return InvalidArgument("line {}: token {} for the second time", line_number, id);
    seen[id] = true;
    entries.push_back({static_cast<int32_t>(id), count});
  }
  if (entries.empty()) return InvalidArgument("no token is named");
  if (top > 0 && top < entries.size()) {
    std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
      return a.count != b.count ? a.count > b.count : a.id < b.id;
    });
    entries.resize(top);
  }
  std::vector<int32_t> ids;
  for (const Entry& entry : entries) ids.push_back(entry.id);
  std::sort(ids.begin(), ids.end());
  return ids;
}

StatusOr<std::vector<int32_t>> ReadDraftVocabulary(const std::string& path, uint32_t top,
                                                   uint32_t vocab) {
  if (path.empty()) return std::vector<int32_t>();
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  if (!in) return NotFound("draft vocabulary {} cannot be read (option draft_vocab)", path);
  const std::streamoff size = in.tellg();
  if (size < 0 || static_cast<uint64_t>(size) > kFileBytesMax)
    return InvalidArgument("draft vocabulary {} is not a file of at most 64 MiB", path);
  in.seekg(0);
  std::stringstream text;
  text << in.rdbuf();
  StatusOr<std::vector<int32_t>> ids = ParseDraftVocabulary(text.str(), top, vocab);
  if (!ids.ok()) return InvalidArgument("draft vocabulary {}: {}", path, Message(ids.status()));
  return ids;
}

}  // namespace lode
