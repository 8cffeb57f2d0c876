// Activation rows as the matrix product wants them: prepared once per call for up to kPanelCols
// columns, used for all weight rows. Holds columns in the order in which a format's decoder
// delivers weights, the value each integer sum starts from (so that offsets and the bias of signed
// codes cost nothing per weight row), and sums for minima. Lives on the stack of the calling
// compute thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/decode/decode.h"
#include "kernels/kernel_table.h"

namespace lode {
namespace {

constexpr uint32_t kPanelCols = 4096;  // 5.6 KB a row, eight rows: what the first-level cache holds
constexpr uint32_t kGroupMin = 16;     // smallest group of weights with its own sum
constexpr uint32_t kMinGroup = 32;     // groups with minima have 32 weights

struct ActPanel {
  const int8_t* y;                                    // columns of the panel, arranged
  const float* d;                                     // scales by block
  alignas(64) int32_t start[kPanelCols / kGroupMin];  // by group
  // Block minima: float(sum(y)) by block, as bits. Group minima: int16 pairs of group sums, four
  // words a block, groups (4 j, 4 j + 2) and (4 j + 1, 4 j + 3).
  alignas(64) int32_t mins[kPanelCols / kMinGroup];
  alignas(64) int8_t arranged[kPanelCols];
};

// What an integer sum over a group starts from: minus what offset or bias add to it.
template <class S, class F>
constexpr int32_t kBiasOf = F::kSigned ? S::kSignedBias : F::kOffset;

// sum(y) of n columns from `first`, both multiples of 16.
inline int32_t ActSum(const int16_t* sum16, size_t first, uint32_t n) {
  int32_t sum = 0;
  for (uint32_t i = 0; i < n / 16; ++i) sum += sum16[first / 16 + i];
  return sum;
}

inline int32_t PairOf(int32_t low, int32_t high) {
  return static_cast<int32_t>(static_cast<uint32_t>(high) << 16 |
                              (static_cast<uint32_t>(low) & 0xffffu));
}

template <class F>
inline void PrepareMins(const int16_t* sum16, uint32_t n, int32_t* mins) {
  if constexpr (F::kMins == decode::kBlockMins) {
    for (uint32_t b = 0; b < n / F::kBlock; ++b) {
      const float sum = static_cast<float>(ActSum(sum16, b * F::kBlock, F::kBlock));
      std::memcpy(&mins[b], &sum, sizeof(sum));
    }
  } else if constexpr (F::kMins == decode::kGroupMins) {
    static_assert(F::kGroup == kMinGroup && F::kBlock == 256);
    for (uint32_t i = 0; i < n / 64; ++i) {  // pair i of groups 4 j + i % 2 and 2 further
      const uint32_t low = (i / 2 * 4 + i % 2) * kMinGroup;
      mins[i] =
          PairOf(ActSum(sum16, low, kMinGroup), ActSum(sum16, low + 2 * kMinGroup, kMinGroup));
    }
  }
}

// Columns [first, first + n) of `act`: whole blocks, n at most kPanelCols.
template <class S, class F>
inline void PreparePanel(const ActRow& act, size_t first, uint32_t n, ActPanel* panel) {
  panel->y = act.q + first;
  panel->d = act.d + first / F::kBlock;
  if constexpr (kBiasOf<S, F> != 0) {
    for (uint32_t g = 0; g < n / F::kGroup; ++g) {
      const int32_t bias = -kBiasOf<S, F> * ActSum(act.sum16, first + g * F::kGroup, F::kGroup);
      panel->start[g] = F::kGroupScales ? S::ScaledStart(bias) : bias;
    }
  }
  PrepareMins<F>(act.sum16 + first / 16, n, panel->mins);
  if constexpr (F::template kArrange<S>) {
    constexpr uint32_t kUnit = F::kBlock * F::kUnit;
    uint32_t i = 0;
    for (; i + kUnit <= n; i += kUnit)
      F::template Arrange<S, F::kUnit>(panel->y + i, panel->arranged + i);
    for (; i < n; i += F::kBlock) F::template Arrange<S, 1>(panel->y + i, panel->arranged + i);
    panel->y = panel->arranged;
  }
}

}  // namespace
}  // namespace lode
