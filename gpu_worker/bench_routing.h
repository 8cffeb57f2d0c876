// Routing for benchmarks: ids that behave like a trained router's where a synthetic model's random
// router does not. Speed depends on how often a window's rows agree and on how much of the choice a
// few experts get; the generator's four numbers are fitted to published figures of the flagship:
//
//   distinct experts of 2, 3, 4 rows, relative to one row      1.75  2.4  3.05
//   lookups that the most popular 11 %, 16 % of experts get    0.38  0.50
//
// The expert of rank x (0 most popular, 1 least) has density b (1 - x)^(b - 1), so the top x get
// 1 - (1 - x)^b; row k of a window takes an id from an earlier row with probability repeat[k]. No
// locality in time, so a tier that learns gains nothing here over the start placement. Rank = id: the
// start placement without a profile holds the lowest ids. Pure, deterministic by seed. Used by the
// cuda engine when LODE_BENCH_ROUTING is set in builds with test hooks, and by a test.
#pragma once

#include <cmath>
#include <cstdint>

#include "shared/base/limits.h"

namespace lode {

class BenchRouting {
 public:
  static constexpr double kConcentration = 4.1;
  // Of rows 0, 1, 2 and all later ones.
  static constexpr double kRepeat[] = {0, 0.214, 0.293, 0.27};

  BenchRouting(uint32_t experts, uint32_t used, uint64_t seed)
      : experts_(experts), used_(used), state_(seed * 2 + 1) {}

  // ids[row * stride + order]: distinct within a row.
  void Draw(uint32_t n_rows, uint32_t stride, uint16_t* ids) {
    for (uint32_t row = 0; row < n_rows; ++row) {
      const double repeat = kRepeat[row < 3 ? row : 3];
      for (uint32_t o = 0; o < used_; ++o) {
        uint16_t id = 0;
        do {
          id = Uniform() < repeat ? ids[Below(row) * stride + Below(used_)] : Popular();
        } while (Taken(ids + row * stride, o, id));
        ids[row * stride + o] = id;
      }
    }
  }

 private:
  static bool Taken(const uint16_t* row, uint32_t n, uint16_t id) {
    for (uint32_t o = 0; o < n; ++o) {
      if (row[o] == id) return true;
    }
    return false;
  }
  // splitmix64
  uint64_t Next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  double Uniform() { return static_cast<double>(Next() >> 11) * 0x1p-53; }
  uint32_t Below(uint32_t n) { return static_cast<uint32_t>(Next() % n); }
  uint16_t Popular() {
    const double rank = 1 - std::pow(1 - Uniform(), 1 / kConcentration);
    const auto id = static_cast<uint32_t>(rank * experts_);
    return static_cast<uint16_t>(id < experts_ ? id : experts_ - 1);
  }

  const uint32_t experts_, used_;
  uint64_t state_;
};

}  // namespace lode
