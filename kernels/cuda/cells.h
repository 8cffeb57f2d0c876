// Where the cells of a sequence lie. Device code, included by attention.cu and attend.cu.
#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/cuda/platform.h"

namespace lode::cuda {

// First byte of the KV block that holds `position` of the slot's sequence.
LODE_DEVICE uint8_t* CellBlock(const KvCache& cache, uint32_t slot, uint32_t position) {
  const uint32_t block = cache.block_tables[static_cast<size_t>(slot) * cache.blocks_per_sequence +
                                            position / kKvBlockCells];
  return cache.pool + cache.block_bytes * block;
}

}  // namespace lode::cuda
