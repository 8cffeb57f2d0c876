// The kernels of every computed format, by number, and how products are cut into blocks of threads.
// See launch.h. Host code; compiled for the card and for the emulated device alike.
#include <algorithm>

#include "kernels/cuda/launch.h"

namespace lode::cuda {

// A computed format without kernels of its own does not link.
#define LODE_X(name) extern const FormatKernels kKernelsOf##name;
LODE_COMPUTED_FORMATS(LODE_X)
#undef LODE_X

const FormatKernels& KernelsOf(Format format) {
#define LODE_X(name) &kKernelsOf##name,
  static constexpr const FormatKernels* kTable[] = {LODE_COMPUTED_FORMATS(LODE_X)};
#undef LODE_X
  return *kTable[static_cast<uint32_t>(format)];
}

uint32_t shared_bytes_max = 48 * 1024;
uint32_t multiprocessors = 1;
bool tensor_products = false;

namespace {

constexpr uint32_t kStagedTileMax = 8;  // rows of a tile that is copied to shared memory
constexpr uint32_t kTileRowsMax = 16, kGroupRows = 4, kThreadsMax = 512, kWarp = 32;
constexpr uint32_t kTileUnits = 320;  // (4 rows, 32 columns) that a block's threads share well
constexpr uint32_t kWaves = 3;        // blocks of threads per multiprocessor that hide latency
constexpr uint32_t kFloatThreads = 256;

}  // namespace

bool ShapeIsValid(const ProductShape& shape, uint32_t n_acts) {
  return shape.tile_rows > 0 && shape.tile_rows <= kTileRowsMax && shape.threads % kWarp == 0 &&
         shape.threads <= kThreadsMax && shape.threads >= shape.tile_rows * n_acts;
}

ProductShape ChooseShape(Format format, uint32_t rows, uint32_t columns, uint32_t n_acts,
                         uint32_t n_multiprocessors) {
  if (Info(format).act_block_len == 0) return {kGroupRows, kFloatThreads};
  // The largest tile that still gives every multiprocessor several blocks.
  uint32_t tile = format == Format::kQ8_0 ? kStagedTileMax : kTileRowsMax;
  while (tile > kGroupRows && rows / tile < kWaves * n_multiprocessors) tile /= 2;
  // As many threads as there are units, in rounds of equal length.
  const uint32_t units = tile / kGroupRows * (columns / 32);
  const uint32_t rounds = (units + kTileUnits - 1) / kTileUnits;
  const uint32_t threads = std::max((units + rounds - 1) / rounds, tile * n_acts);
  return {tile, (threads + kWarp - 1) / kWarp * kWarp};
}

}  // namespace lode::cuda
