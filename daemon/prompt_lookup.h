// Drafts for free: when the end of a sequence repeats something it said before (code, quotations,
// lists), what followed then is a guess at what follows now. The longest suffix of the tokens that
// occurred earlier wins, the latest occurrence on ties. Behind step 3 of the life of a token.
//
// Cost is bounded: tokens enter an index of short grams once, a search follows at most kTries
// occurrences and compares at most kMatchMax tokens of each, and at most kIndexPerCall tokens of a
// long prompt are indexed per call. Scheduler thread only; one per sequence.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace lode {

class PromptLookup {
 public:
  static constexpr uint32_t kGram = 3;       // shortest match in tokens: two repeat by chance too often
  static constexpr uint32_t kMatchMax = 32;  // a longer match says nothing more
  static constexpr uint32_t kTries = 16;     // occurrences looked at, the latest first
  static constexpr uint32_t kIndexPerCall = 16384;  // tokens, about a millisecond

  // Takes in tokens that were appended since the last call. `tokens` only ever grows.
  void Extend(std::span<const int32_t> tokens);

  struct Match {
    uint32_t length = 0;  // tokens of the suffix that occurred before, <= kMatchMax; 0: none
    uint32_t from = 0;    // position behind the occurrence: where the guesses start
    uint32_t n = 0;       // guesses there, <= wanted
  };
  // The guesses are tokens[from, from + n).
  Match Find(std::span<const int32_t> tokens, uint32_t wanted) const;

 private:
  static constexpr uint32_t kNone = 0xffffffffu;
  static uint64_t KeyAt(std::span<const int32_t> tokens, uint32_t end);
  std::unordered_map<uint64_t, uint32_t> last_;  // gram -> end of its latest occurrence
  std::vector<uint32_t> before_;  // [end]: end of the occurrence before that one, or kNone
};

}  // namespace lode
