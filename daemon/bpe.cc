// See bpe.h. Symbols form a doubly linked list over an array, as merging only ever removes the
// right one of two.

#include "daemon/bpe.h"

#include <algorithm>
#include <functional>

namespace lode {
namespace {

constexpr uint32_t kNone = UINT32_MAX;
constexpr uint32_t kStepsPerLook = 1 << 16;  // at the stop function: a few milliseconds

uint64_t Key(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

// std heaps put the largest on top; the lowest rank, then the leftmost, must come first.
bool Later(const BpeMerges::Candidate& a, const BpeMerges::Candidate& b) {
  return a.rank != b.rank ? a.rank > b.rank : a.left > b.left;
}

// Merges the pair at `left` when it still is (left_id, right_id).
bool MergeAt(uint32_t left, int32_t left_id, int32_t right_id, int32_t result,
             std::vector<BpeMerges::Symbol>* symbols) {
  BpeMerges::Symbol& a = (*symbols)[left];
  // Stale when either side was merged meanwhile: then its id, or its neighbour's, is another one.
  if (a.id != left_id || a.next == kNone) return false;
  BpeMerges::Symbol& b = (*symbols)[a.next];
  if (b.id != right_id) return false;
  a.id = result;
  b.id = -1;
  a.next = b.next;
  if (a.next != kNone) (*symbols)[a.next].previous = left;
  return true;
}

}  // namespace

void BpeMerges::Add(int32_t left, int32_t right, uint32_t rank, int32_t result) {
  merges_.try_emplace(Key(left, right), Merge{rank, result});
}

const BpeMerges::Merge* BpeMerges::Find(int32_t left, int32_t right) const {
  auto it = merges_.find(Key(left, right));
  return it == merges_.end() ? nullptr : &it->second;
}

void BpeMerges::Propose(uint32_t left, Scratch* scratch) const {
  if (left == kNone) return;
  const Symbol& a = scratch->symbols[left];
  if (a.next == kNone) return;
  const Symbol& b = scratch->symbols[a.next];
  if (const Merge* merge = Find(a.id, b.id)) {
    scratch->heap.push_back({merge->rank, left, a.id, b.id});
    std::push_heap(scratch->heap.begin(), scratch->heap.end(), Later);
  }
}

bool BpeMerges::MergeByHeap(Scratch* scratch, const std::function<bool()>& stop) const {
  uint32_t steps = 0;
  auto& heap = scratch->heap;
  heap.clear();
  for (uint32_t i = 0; i != kNone; i = scratch->symbols[i].next) Propose(i, scratch);
  while (!heap.empty()) {
    if (++steps % kStepsPerLook == 0 && stop && stop()) return false;
    std::pop_heap(heap.begin(), heap.end(), Later);
    const Candidate top = heap.back();
    heap.pop_back();
    const int32_t result = Find(top.left_id, top.right_id)->result;
    if (!MergeAt(top.left, top.left_id, top.right_id, result, &scratch->symbols)) continue;
    Propose(scratch->symbols[top.left].previous, scratch);
    Propose(top.left, scratch);
  }
  return true;
}

// The rank that was proposed, kNone without one.
uint32_t BpeMerges::ProposeToList(uint32_t left, Scratch* scratch) const {
  if (left == kNone) return kNone;
  const Symbol& a = scratch->symbols[left];
  if (a.next == kNone) return kNone;
  const int32_t right_id = scratch->symbols[a.next].id;
  const Merge* merge = Find(a.id, right_id);
  if (merge == nullptr) return kNone;
  RankList& list =
      scratch->lists.try_emplace(merge->rank, RankList{a.id, right_id, merge->result, {}, 0, false})
          .first->second;
  list.lefts.push_back(left);
  if (!list.queued) {
    list.queued = true;
    scratch->ranks.push_back(merge->rank);
    std::push_heap(scratch->ranks.begin(), scratch->ranks.end(), std::greater<>());
  }
  return merge->rank;
}

// A merge makes a longer token, so it never proposes its own pair again. Trained merges never give
// a pair with the new token a lower rank either, since the token must be there first; a file may
// (it is untrusted), and such pairs go first. Sorting again and again after many such detours would
// be quadratic: then the heap takes over from where the word stands, with the same result.
bool BpeMerges::MergeByLists(Scratch* scratch, const std::function<bool()>& stop) const {
  constexpr uint32_t kDetoursMax = 16;
  uint32_t steps = 0, detours = 0;
  const auto stopped = [&] { return ++steps % kStepsPerLook == 0 && stop && stop(); };
  auto& ranks = scratch->ranks;
  for (uint32_t i = 0; i + 1 < scratch->symbols.size(); ++i) {
    ProposeToList(i, scratch);
    if (stopped()) return false;
  }
  while (!ranks.empty()) {
    if (detours > kDetoursMax) return MergeByHeap(scratch, stop);
    std::pop_heap(ranks.begin(), ranks.end(), std::greater<>());
    const uint32_t rank = ranks.back();
    ranks.pop_back();
    // Out of the map while it is worked off: proposals may move the map's entries.
    RankList list = std::move(scratch->lists[rank]);
    scratch->lists.erase(rank);
    if (!std::is_sorted(list.lefts.begin() + static_cast<ptrdiff_t>(list.next), list.lefts.end()))
      std::sort(list.lefts.begin() + static_cast<ptrdiff_t>(list.next), list.lefts.end());
    uint32_t lowest = kNone;
    while (list.next < list.lefts.size() && lowest > rank) {
      if (stopped()) return false;
      const uint32_t left = list.lefts[list.next++];
      if (!MergeAt(left, list.left_id, list.right_id, list.result, &scratch->symbols)) continue;
      const uint32_t before = ProposeToList(scratch->symbols[left].previous, scratch);
      const uint32_t after = ProposeToList(left, scratch);
      lowest = std::min({lowest, before, after});
    }
    if (list.next == list.lefts.size()) continue;
    ++detours;
    ranks.push_back(rank);  // the lower rank first, then the rest of this one
    std::push_heap(ranks.begin(), ranks.end(), std::greater<>());
    scratch->lists[rank] = std::move(list);
  }
  return true;
}

bool BpeMerges::Encode(std::string_view word, Scratch* scratch, const std::function<bool()>& stop,
                       std::vector<int32_t>* out) const {
  if (word.empty()) return true;
  auto& symbols = scratch->symbols;
  symbols.clear();
  const uint32_t n = static_cast<uint32_t>(word.size());
  for (uint32_t i = 0; i < n; ++i) {
    symbols.push_back({byte_ids_[static_cast<uint8_t>(word[i])], i == 0 ? kNone : i - 1,
                       i + 1 == n ? kNone : i + 1});
  }
  bool done = true;
  if (n <= kLongWordBytes) {
    done = MergeByHeap(scratch, stop);
  } else {
    done = MergeByLists(scratch, stop);
    scratch->lists = {};
    scratch->ranks = {};
    scratch->heap = {};
  }
  for (uint32_t i = 0; done && i != kNone; i = symbols[i].next) out->push_back(symbols[i].id);
  return done;
}

}  // namespace lode
