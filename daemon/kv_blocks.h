// Which KV blocks of the device are free. Blocks are fixed pieces of kKvBlockCells cells; a
// sequence gets all it may ever need when it is admitted, so a running sequence never waits for
// memory. Scheduler thread only.
#pragma once

#include <cstdint>
#include <vector>

namespace lode {

class KvBlocks {
 public:
  explicit KvBlocks(uint32_t blocks);

  // Blocks for `tokens` cells.
  static uint32_t BlocksFor(uint64_t tokens);

  // Takes `count` blocks into `out`, lowest ids first as far as they are free. False (nothing
  // taken) when there are fewer.
  bool Take(uint32_t count, std::vector<uint32_t>* out);
  // Gives them back and clears the list. A block that is not taken is a LODE_CHECK.
  void Give(std::vector<uint32_t>* blocks);

  uint32_t total() const { return static_cast<uint32_t>(taken_.size()); }
  uint32_t free() const { return static_cast<uint32_t>(free_.size()); }

 private:
  std::vector<uint32_t> free_;  // a stack, lowest id on top at start
  std::vector<bool> taken_;     // [block], finds a block given twice
};

}  // namespace lode
