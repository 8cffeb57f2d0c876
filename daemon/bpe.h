// Byte-pair merging: turns the bytes of one word into token ids.
//
// Called by Tokenizer::Encode for every word. The pair of neighbours with the lowest rank is merged
// first, the leftmost of equal pairs before the others, until no neighbours have a rank. Stale
// candidates are recognised when they come up. Where candidates wait depends on the word: in a heap
// for words as people write them; in one list per rank for long ones (one letter a million times),
// where a heap misses the cache at every step and a list is read from left to right. Const after
// filling, any number of threads, each with its own scratch.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
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
  // Candidates of one rank, which are one pair of ids at different places.
  struct RankList {
    int32_t left_id, right_id, result;
    std::vector<uint32_t> lefts;  // places; [next..) are still to be looked at
    size_t next;
    bool queued;  // its rank waits in Scratch::ranks
  };
  // Reused between words so that encoding allocates only when a longer word comes.
  struct Scratch {
    std::vector<Symbol> symbols;
    std::vector<Candidate> heap;
    // Long words only; released after each.
    absl::flat_hash_map<uint32_t, RankList> lists;  // by rank
    std::vector<uint32_t> ranks;                    // heap, lowest first
  };
  // Words above this many bytes take the lists.
  static constexpr size_t kLongWordBytes = 512;

  void Reserve(size_t merges) { merges_.reserve(merges); }
  void SetByte(uint8_t byte, int32_t id) { byte_ids_[byte] = id; }
  // A pair listed twice keeps its first, lower rank.
  void Add(int32_t left, int32_t right, uint32_t rank, int32_t result);

  // Appends the ids of `word` to `out`. REQUIRES: SetByte for all 256 values; word shorter than
  // 2^31. `stop` (may be empty) is asked now and then inside long words; true ends with false and
  // `out` untouched.
  bool Encode(std::string_view word, Scratch* scratch, const std::function<bool()>& stop,
              std::vector<int32_t>* out) const;

 private:
  struct Merge {
    uint32_t rank;
    int32_t result;
  };
  const Merge* Find(int32_t left, int32_t right) const;
  void Propose(uint32_t left, Scratch* scratch) const;
  bool MergeByHeap(Scratch* scratch, const std::function<bool()>& stop) const;
  bool MergeByLists(Scratch* scratch, const std::function<bool()>& stop) const;
  uint32_t ProposeToList(uint32_t left, Scratch* scratch) const;

  std::array<int32_t, 256> byte_ids_{};
  absl::flat_hash_map<uint64_t, Merge> merges_;
};

}  // namespace lode
