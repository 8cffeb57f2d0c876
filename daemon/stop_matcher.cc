// See stop_matcher.h.

#include "daemon/stop_matcher.h"

#include <utility>

#include "daemon/utf8.h"

namespace lode {

StatusOr<StopMatcher> StopMatcher::Create(std::vector<std::string> stops) {
  if (stops.size() > kStopStringsMax) {
    return InvalidArgument("{} stop strings were given; at most {} are allowed", stops.size(),
                           kStopStringsMax);
  }
  StopMatcher matcher;
  matcher.stops_ = std::move(stops);
  for (size_t i = 0; i < matcher.stops_.size(); ++i) {
    const std::string& stop = matcher.stops_[i];
    if (stop.empty()) return InvalidArgument("stop string {} is empty", i);
    if (stop.size() > kStopBytesMax) {
      return InvalidArgument("stop string {} has {} bytes; at most {} are allowed", i, stop.size(),
                             kStopBytesMax);
    }
    // Well-formed stop strings start at a character, so text is never held back inside one.
    if (!IsValidUtf8(stop)) return InvalidArgument("stop string {} is not UTF-8", i);
    matcher.Insert(static_cast<int>(i));
  }
  matcher.Link();
  return matcher;
}

void StopMatcher::Insert(int index) {
  uint32_t node = 0;
  for (char byte : stops_[index]) {
    auto [it, fresh] = edges_.try_emplace(Edge(node, byte), static_cast<uint32_t>(nodes_.size()));
    uint32_t next = it->second;
    if (fresh) {
      Node child;
      child.depth = nodes_[node].depth + 1;
      nodes_.push_back(child);
    }
    node = next;
  }
  if (nodes_[node].stop < 0) nodes_[node].stop = index;
}

void StopMatcher::Link() {
  // Failure links of short states first: each is one step from its parent's, which is shorter
  // still.
  struct Child {
    uint32_t parent, node;
    char byte;
  };
  std::vector<std::vector<Child>> by_depth(kStopBytesMax + 1);
  for (const auto& [edge, node] : edges_) {
    by_depth[nodes_[node].depth].push_back(
        {static_cast<uint32_t>(edge >> 8), node, static_cast<char>(edge & 0xFF)});
  }
  for (const auto& level : by_depth) {
    for (const Child& child : level) {
      Node& node = nodes_[child.node];
      node.failure = child.parent == 0 ? 0 : Step(nodes_[child.parent].failure, child.byte);
      if (node.stop < 0) node.stop = nodes_[node.failure].stop;
    }
  }
}

uint32_t StopMatcher::Step(uint32_t node, char byte) const {
  while (true) {
    auto it = edges_.find(Edge(node, byte));
    if (it != edges_.end()) return it->second;
    if (node == 0) return 0;
    node = nodes_[node].failure;
  }
}

StopMatcher::Piece StopMatcher::Push(std::string_view text) {
  Piece piece;
  if (matched_ >= 0) return piece;
  std::string& out = piece.text;
  out = std::move(held_);
  held_.clear();
  for (char byte : text) {
    out.push_back(byte);
    state_ = Step(state_, byte);
    int stop = nodes_[state_].stop;
    if (stop < 0) continue;
    matched_ = piece.matched = stop;
    out.resize(out.size() - stops_[stop].size());
    return piece;
  }
  size_t held = nodes_[state_].depth;
  held_ = out.substr(out.size() - held);
  out.resize(out.size() - held);
  return piece;
}

std::string StopMatcher::Flush() {
  state_ = 0;
  return std::exchange(held_, {});
}

}  // namespace lode
