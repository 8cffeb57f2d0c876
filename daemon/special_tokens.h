// Finds the names of special tokens in a text, the longest match first: a byte trie.
//
// Used by Tokenizer::Encode before anything else happens to the text. Const after filling, any
// number of threads.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>

#include "absl/container/flat_hash_map.h"

namespace lode {

class SpecialTokens {
 public:
  struct Match {
    size_t begin, bytes;
    int32_t id;
  };

  // REQUIRES: not empty. A name given twice keeps its first id.
  void Add(std::string_view name, int32_t id);

  // The first place at or after `from` where a name starts, with the longest name that starts
  // there. Names that `veto` refuses (may be empty) are none.
  using Veto = std::function<bool(const Match&)>;
  std::optional<Match> FindNext(std::string_view text, size_t from, const Veto& veto = {}) const;
  // Id of exactly this name.
  std::optional<int32_t> Find(std::string_view name) const;

 private:
  static uint64_t Edge(uint32_t node, char byte) {
    return static_cast<uint64_t>(node) << 8 | static_cast<uint8_t>(byte);
  }
  std::optional<Match> MatchAt(std::string_view text, size_t at, const Veto& veto) const;

  uint32_t nodes_ = 1;  // node 0 is the root
  absl::flat_hash_map<uint64_t, uint32_t> edges_;
  absl::flat_hash_map<uint32_t, int32_t> ids_;  // node -> token that ends there
  std::array<bool, 256> first_{};               // bytes that start a name: skips most of a text
};

}  // namespace lode
