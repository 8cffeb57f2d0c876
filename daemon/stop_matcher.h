// Finds stop strings in a stream of text that comes in pieces of any size.
//
// Text is released as soon as it cannot be part of a stop string any more: the longest suffix that
// could still grow into one is held back. All output paths (streaming or not, chat, completion,
// tools) go through this one class.
//
// The rule: the stop string that is complete first wins; of several complete at the same place, the
// longest. So the result does not depend on how the text was cut. An Aho-Corasick automaton makes
// it one step per byte. One matcher per sequence, one thread at a time.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "shared/base/status.h"

namespace lode {

// Bounds of one request; the OpenAI API itself allows four stop strings.
inline constexpr size_t kStopStringsMax = 64;
inline constexpr size_t kStopBytesMax = 1024;  // of one stop string

class StopMatcher {
 public:
  struct Piece {
    std::string text;  // released text; on a match everything before the stop string that was not
                       // yet released
    int matched = -1;  // index of the stop string that ended the stream, -1: none
  };

  // Duplicates are allowed (the lower index is reported). No stop strings: every text passes at
  // once. Errors: InvalidArgument for an empty, ill-formed or too long stop string, or too many of
  // them.
  static StatusOr<StopMatcher> Create(std::vector<std::string> stops);

  // After a match all further text is swallowed.
  Piece Push(std::string_view text);
  // End of the stream without a match: the held text. Nothing after a match.
  std::string Flush();

  int matched() const { return matched_; }
  const std::string& held() const { return held_; }
  const std::vector<std::string>& stops() const { return stops_; }

 private:
  struct Node {
    uint32_t depth = 0;    // bytes from the root: length of the suffix this state stands for
    uint32_t failure = 0;  // longest proper suffix that is a state
    int stop = -1;         // longest stop string that ends here, also through failure links
  };

  StopMatcher() = default;
  void Insert(int index);
  void Link();
  uint32_t Step(uint32_t node, char byte) const;
  static uint64_t Edge(uint32_t node, char byte) {
    return static_cast<uint64_t>(node) << 8 | static_cast<uint8_t>(byte);
  }

  std::vector<std::string> stops_;
  std::vector<Node> nodes_{1};
  absl::flat_hash_map<uint64_t, uint32_t> edges_;
  uint32_t state_ = 0;
  std::string held_;  // the last nodes_[state_].depth bytes of the stream
  int matched_ = -1;
};

}  // namespace lode
