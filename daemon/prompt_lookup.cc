// See daemon/prompt_lookup.h.
#include "daemon/prompt_lookup.h"

#include <algorithm>

namespace lode {

// The gram that ends before position `end`, hashed; a collision costs a wrong guess at most.
uint64_t PromptLookup::KeyAt(std::span<const int32_t> tokens, uint32_t end) {
  constexpr uint64_t kMix = 0x9e3779b97f4a7c15ull;  // 2^64 / golden ratio: spreads small ids
  uint64_t key = 0;
  for (uint32_t i = end - kGram; i < end; ++i)
    key = (key ^ static_cast<uint32_t>(tokens[i])) * kMix;
  return key ^ (key >> 29);
}

void PromptLookup::Extend(std::span<const int32_t> tokens) {
  // The gram at the very end is left out until something follows it: it would only find itself.
  const uint32_t size = static_cast<uint32_t>(tokens.size());
  if (before_.empty()) before_.assign(kGram, kNone);
  const uint32_t first = static_cast<uint32_t>(before_.size());
  const uint32_t end = std::min(size, first + kIndexPerCall);
  for (uint32_t at = first; at < end; ++at) {
    const auto [entry, is_new] = last_.try_emplace(KeyAt(tokens, at), at);
    before_.push_back(is_new ? kNone : entry->second);
    entry->second = at;
  }
}

PromptLookup::Match PromptLookup::Find(std::span<const int32_t> tokens, uint32_t wanted) const {
  Match best;
  const uint32_t size = static_cast<uint32_t>(tokens.size());
  if (size <= kGram || wanted == 0) return best;
  const auto entry = last_.find(KeyAt(tokens, size));
  if (entry == last_.end()) return best;
  uint32_t end = entry->second;
  for (uint32_t tries = 0; end != kNone && tries < kTries; ++tries, end = before_[end]) {
    uint32_t length = 0;
    while (length < std::min(end, kMatchMax) &&
           tokens[end - 1 - length] == tokens[size - 1 - length]) {
      ++length;
    }
    if (length < kGram || length <= best.length) continue;
    best = {length, end, std::min(wanted, size - end)};
  }
  return best;
}

}  // namespace lode
