// Byte-pair merging: turns the bytes of one word into token ids.
//
// Called by Tokenizer::Encode for every word. The pair of neighbours with the lowest rank is merged
// first, the leftmost of equal pairs before the others, until no neighbours have a rank. Candidates
// wait in a heap and stale ones are recognised when they come up, so a word of n bytes costs O(n
// log n) also when it is one letter a million times. Const after filling, any number of threads,
// each with its own scratch.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace lode {

class BpeMerges {
 public:
  struct Symbol {
    int32_t id;  // -1: merged into its left neighbour
    uint32_t previous, next;
  };
  struct Candidate {
    uint32_t rank, left;
    int32_t left_id, right_id;
  };
  // Reused between words so that encoding allocates only when a longer word comes.
  struct Scratch {
    std::vector<Symbol> symbols;
    std::vector<Candidate> heap;
  };

  void Reserve(size_t merges) { merges_.reserve(merges); }
  void SetByte(uint8_t byte, int32_t id) { byte_ids_[byte] = id; }
  // A pair listed twice keeps its first, lower rank.
  void Add(int32_t left, int32_t right, uint32_t rank, int32_t result);

  // Appends the ids of `word` to `out`. REQUIRES: SetByte for all 256 values; word shorter than
  // 2^31.
  void Encode(std::string_view word, Scratch* scratch, std::vector<int32_t>* out) const;

 private:
  struct Merge {
    uint32_t rank;
    int32_t result;
  };
  const Merge* Find(int32_t left, int32_t right) const;
  void Propose(uint32_t left, Scratch* scratch) const;

  std::array<int32_t, 256> byte_ids_{};
  absl::flat_hash_map<uint64_t, Merge> merges_;
};

}  // namespace lode
