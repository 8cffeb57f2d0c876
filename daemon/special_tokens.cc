// See special_tokens.h.

#include "daemon/special_tokens.h"

namespace lode {

void SpecialTokens::Add(std::string_view name, int32_t id) {
  uint32_t node = 0;
  for (char byte : name) {
    auto [it, fresh] = edges_.try_emplace(Edge(node, byte), nodes_);
    if (fresh) ++nodes_;
    node = it->second;
  }
  ids_.try_emplace(node, id);
  first_[static_cast<uint8_t>(name[0])] = true;
}

std::optional<SpecialTokens::Match> SpecialTokens::MatchAt(std::string_view text, size_t at,
                                                           const Veto& veto) const {
  std::optional<Match> best;
  uint32_t node = 0;
  for (size_t i = at; i < text.size(); ++i) {
    auto edge = edges_.find(Edge(node, text[i]));
    if (edge == edges_.end()) break;
    node = edge->second;
    auto end = ids_.find(node);
    if (end == ids_.end()) continue;
    const Match match = {at, i + 1 - at, end->second};
    if (!veto || !veto(match)) best = match;
  }
  return best;
}

std::optional<SpecialTokens::Match> SpecialTokens::FindNext(std::string_view text, size_t from,
                                                            const Veto& veto) const {
  for (size_t at = from; at < text.size(); ++at) {
    if (!first_[static_cast<uint8_t>(text[at])]) continue;
    if (auto match = MatchAt(text, at, veto)) return match;
  }
  return std::nullopt;
}

std::optional<int32_t> SpecialTokens::Find(std::string_view name) const {
  auto match = MatchAt(name, 0, {});
  if (!match || match->bytes != name.size()) return std::nullopt;
  return match->id;
}

}  // namespace lode
