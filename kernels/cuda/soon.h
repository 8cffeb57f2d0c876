// Weights on their way to the L2 before the launch that reads them: blocks that a launch has beside
// its own ask for them and end at once. Where the window waits anyway, or works in a few
// multiprocessors, the bandwidth costs nothing. A hint: no bit depends on it. Device code.
#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/cuda/platform.h"

namespace lode::cuda {

inline constexpr uint32_t kSoonBlocks =
    64;  // of a launch: one multiprocessor asks for some 60 bytes a clock
inline constexpr uint32_t kSoonPiece = 8 * 1024;  // bytes that a thread asks for at a time

LODE_DEVICE void FetchSoon(const SoonReads& soon, uint32_t block) {
  constexpr uint32_t kUnit = 16;
  for (uint32_t i = 0; i < soon.n; ++i) {
    const size_t bytes = soon.read[i].bytes / kUnit * kUnit;
    const size_t step = size_t{kSoonBlocks} * ThreadCount() * kSoonPiece;
    for (size_t at = (size_t{block} * ThreadCount() + ThreadId()) * kSoonPiece; at < bytes;
         at += step) {
      const size_t left = bytes - at;
      PrefetchBytes(soon.read[i].at + at,
                    static_cast<uint32_t>(left < kSoonPiece ? left : kSoonPiece));
    }
  }
}

}  // namespace lode::cuda
