// See daemon/kv_blocks.h.
#include "daemon/kv_blocks.h"

#include "shared/base/check.h"
#include "shared/base/limits.h"

namespace lode {

KvBlocks::KvBlocks(uint32_t blocks) : taken_(blocks, false) {
  for (uint32_t i = blocks; i > 0; --i) free_.push_back(i - 1);
}

uint32_t KvBlocks::BlocksFor(uint64_t tokens) {
  return static_cast<uint32_t>((tokens + kKvBlockCells - 1) / kKvBlockCells);
}

bool KvBlocks::Take(uint32_t count, std::vector<uint32_t>* out) {
  if (count > free_.size()) return false;
  for (uint32_t i = 0; i < count; ++i) {
    out->push_back(free_.back());
    taken_[free_.back()] = true;
    free_.pop_back();
  }
  return true;
}

void KvBlocks::Give(std::vector<uint32_t>* blocks) {
  for (auto it = blocks->rbegin(); it != blocks->rend(); ++it) {
    LODE_CHECK(*it < taken_.size() && taken_[*it], "KV block {} given back but not taken", *it);
    taken_[*it] = false;
    free_.push_back(*it);
  }
  blocks->clear();
}

}  // namespace lode
