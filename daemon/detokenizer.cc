// See detokenizer.h.

#include "daemon/detokenizer.h"

#include <algorithm>
#include <utility>

namespace lode {

Detokenizer::Detokenizer(const Tokenizer* tokenizer, Options options)
    : tokenizer_(tokenizer), options_(std::move(options)) {}

std::string Detokenizer::Push(int32_t id) {
  std::string out;
  bool silent = tokenizer_->IsControl(id) || tokenizer_->IsUnused(id);
  if (silent && !options_.keep_special) {
    const auto& keep = options_.keep_ids;
    if (std::find(keep.begin(), keep.end(), id) == keep.end()) return out;
  }
  stream_.Append(tokenizer_->TokenBytes(id), &out);
  return out;
}

std::string Detokenizer::Flush() {
  std::string out;
  stream_.Flush(&out);
  return out;
}

std::string Detokenizer::Text(const Tokenizer& tokenizer, std::span<const int32_t> ids,
                              Options options) {
  Detokenizer detokenizer(&tokenizer, std::move(options));
  std::string out;
  for (int32_t id : ids) out += detokenizer.Push(id);
  out += detokenizer.Flush();
  return out;
}

}  // namespace lode
