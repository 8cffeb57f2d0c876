// See bpe.h. Symbols form a doubly linked list over an array, as merging only ever removes the
// right one of two.

#include "daemon/bpe.h"

#include <algorithm>

namespace lode {
namespace {

constexpr uint32_t kNone = UINT32_MAX;

uint64_t Key(int32_t left, int32_t right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

// std heaps put the largest on top; the lowest rank, then the leftmost, must come first.
bool Later(const BpeMerges::Candidate& a, const BpeMerges::Candidate& b) {
  return a.rank != b.rank ? a.rank > b.rank : a.left > b.left;
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

void BpeMerges::Encode(std::string_view word, Scratch* scratch, std::vector<int32_t>* out) const {
  if (word.empty()) return;
  auto& symbols = scratch->symbols;
  auto& heap = scratch->heap;
  symbols.clear();
  heap.clear();
  uint32_t n = static_cast<uint32_t>(word.size());
  for (uint32_t i = 0; i < n; ++i) {
    symbols.push_back({byte_ids_[static_cast<uint8_t>(word[i])], i == 0 ? kNone : i - 1,
                       i + 1 == n ? kNone : i + 1});
  }
  for (uint32_t i = 0; i + 1 < n; ++i) Propose(i, scratch);
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), Later);
    Candidate top = heap.back();
    heap.pop_back();
    Symbol& left = symbols[top.left];
    // Stale when either side was merged meanwhile: then its id, or its neighbour's, is another one.
    if (left.id != top.left_id || left.next == kNone) continue;
    Symbol& right = symbols[left.next];
    if (right.id != top.right_id) continue;
    left.id = Find(top.left_id, top.right_id)->result;
    right.id = -1;
    left.next = right.next;
    if (left.next != kNone) symbols[left.next].previous = top.left;
    Propose(left.previous, scratch);
    Propose(top.left, scratch);
  }
  for (uint32_t i = 0; i != kNone; i = symbols[i].next) out->push_back(symbols[i].id);
}

}  // namespace lode
