// See daemon/draft_policy.h.
#include "daemon/draft_policy.h"

#include <algorithm>
#include <cmath>

namespace lode {
namespace {

// A mean of fewer observations is not believed over the neighbours' means.
constexpr double kTrust = 2;
// Before any window was seen every time is in this unit; only ratios matter.
constexpr double kUnitNs = 1e6;
// The correction for the present share of misses may at most halve or double what was measured.
constexpr double kCorrectionMax = 2;
// Weight of one window in the miss share: some 16 windows.
constexpr double kMissWeight = 1.0 / 16;
// Forgetting of the regression of time on misses: some hundred windows.
constexpr double kSlopeDecay = 0.99;

double Interpolate(double x, double max, const auto& at) {
  const double clamped = std::clamp(x, 0.0, max);
  const auto low = static_cast<uint32_t>(clamped);
  const double part = clamped - low;
  return part == 0 ? at(low) : at(low) * (1 - part) + at(low + 1) * part;
}

}  // namespace

// ---- costs

void WindowCosts::Add(Cell* cell, double ns, double lookups, double misses) const {
  if (cell->n > kTrust) ns = std::min(ns, k_.outlier * cell->ns);
  const double age = cell->n > 0 ? static_cast<double>(windows_ - cell->seen) : 0;
  cell->n = std::min(cell->n + 1, 1 / k_.cost_weight);
  const double weight = std::max(1 / cell->n, std::min(0.5, (age - 1) * k_.age_weight));
  cell->ns += (ns - cell->ns) * weight;
  cell->lookups += (lookups - cell->lookups) * weight;
  cell->misses += (misses - cell->misses) * weight;
  cell->seen = windows_;
}

void WindowCosts::ObserveWindow(uint32_t rows, uint64_t ns, uint64_t lookups, uint64_t misses) {
  if (rows == 0 || rows > kWindowRowsMax) return;
  ++windows_;
  Cell& cell = cells_[rows];
  if (windows_ - cell.seen > k_.stale_after) cell = {};
  const double time = static_cast<double>(ns), missed = static_cast<double>(misses);
  if (lookups > 0) {
    const double share = missed / static_cast<double>(lookups);
    miss_share_ +=
        (share - miss_share_) * (cells_[rows].n == 0 && miss_share_ == 0 ? 1 : kMissWeight);
  }
  if (cell.n > kTrust && time < k_.outlier * cell.ns) {
    const double dm = missed - cell.misses, dt = time - cell.ns;
    sum_mm_ = sum_mm_ * kSlopeDecay + dm * dm;
    sum_mt_ = sum_mt_ * kSlopeDecay + dm * dt;
  }
  Add(&cell, time, static_cast<double>(lookups), missed);
}

void WindowCosts::ObserveDrafting(uint32_t depth, uint64_t ns) {
  if (depth <= kDraftsMax) Add(&depths_[depth], static_cast<double>(ns), 0, 0);
}

double WindowCosts::AtPresentMisses(const Cell& cell) const {
  const double slope = sum_mm_ > 0 ? std::max(0.0, sum_mt_ / sum_mm_) : 0;
  const double corrected = cell.ns + slope * (miss_share_ * cell.lookups - cell.misses);
  return std::clamp(corrected, cell.ns / kCorrectionMax, cell.ns * kCorrectionMax);
}

// What was measured; between two measured row counts the line between them; else the start shape
// through the nearest measured one.
double WindowCosts::Rows(uint32_t rows) const {
  rows = std::clamp(rows, 1u, kWindowRowsMax);
  const auto known = [&](uint32_t r) { return cells_[r].n >= kTrust; };
  if (known(rows)) return AtPresentMisses(cells_[rows]);
  uint32_t below = rows, above = rows;
  while (below > 0 && !known(below)) --below;
  while (above <= kWindowRowsMax && !known(above)) ++above;
  const bool has_above = above <= kWindowRowsMax;
  if (below > 0 && has_above) {
    const double low = AtPresentMisses(cells_[below]), high = AtPresentMisses(cells_[above]);
    return low + (high - low) * (rows - below) / (above - below);
  }
  if (below == 0 && !has_above) return Shape(rows) * kUnitNs;
  const uint32_t near = below > 0 ? below : above;
  return AtPresentMisses(cells_[near]) * Shape(rows) / Shape(near);
}

double WindowCosts::Window(double rows) const {
  return Interpolate(std::max(rows, 1.0), kWindowRowsMax, [&](uint32_t r) { return Rows(r); });
}

double WindowCosts::Depth(uint32_t depth) const {
  const auto known = [&](uint32_t d) { return depths_[d].n >= kTrust; };
  if (known(depth)) return depths_[depth].ns;
  // Guesses cost about the same each; following alone costs no output matrix.
  for (uint32_t distance = 1; distance <= kDraftsMax; ++distance) {
    for (const uint32_t d : {depth - distance, depth + distance}) {  // wraps around below zero
      if (d >= 1 && d <= kDraftsMax && known(d))
        return depths_[d].ns * std::max(0.5, 1.0 * depth) / d;
    }
  }
  return k_.start_guess_cost * Rows(1) * std::max(0.5, 1.0 * depth);
}

double WindowCosts::Drafting(double depth) const {
  return Interpolate(depth, kDraftsMax, [&](uint32_t d) { return Depth(d); });
}

// ---- acceptance

void Acceptance::Observe(DraftClass c, uint32_t offered, uint32_t held) {
  auto& rates = holds_[static_cast<uint32_t>(c)];
  for (uint32_t depth = 1; depth <= std::min({offered, held + 1, kDraftsMax}); ++depth)
    rates[depth].Add(depth <= held, k_.acceptance_decay);
}

void Acceptance::ObserveGuesses(uint32_t wanted, uint32_t given) {
  for (uint32_t depth = 1; depth <= std::min({wanted, given + 1, kDraftsMax}); ++depth)
    guessed_[depth].Add(depth <= given, k_.acceptance_decay);
}

double Acceptance::Holds(DraftClass c, uint32_t depth, const Acceptance* prior) const {
  const double start = prior != nullptr ? prior->Holds(c, depth, nullptr) : k_.start_acceptance;
  return holds_[static_cast<uint32_t>(c)][depth].Of(start, k_.start_trials);
}

double Acceptance::Guessed(uint32_t depth, const Acceptance* prior) const {
  const double start = prior != nullptr ? prior->Guessed(depth, nullptr) : 1;
  return guessed_[depth].Of(start, k_.start_trials);
}

// ---- choices

std::vector<uint32_t> ChooseDrafts(const WindowCosts& costs, const PolicyConstants& constants,
                                   uint32_t base_rows, uint32_t base_tokens, uint32_t room,
                                   std::span<const DraftOffer> offers) {
  std::vector<uint32_t> taken(offers.size(), 0), best = taken;
  std::vector<double> reach(offers.size(),
                            1);  // probability that all taken drafts of the offer hold
  double tokens = base_tokens;
  const double none = tokens / costs.Window(base_rows);
  double best_rate = none * constants.advantage_min;
  for (uint32_t extra = 1; extra <= room; ++extra) {
    size_t next = offers.size();
    double gain = 0;
    for (size_t i = 0; i < offers.size(); ++i) {
      if (taken[i] >= offers[i].n) continue;
      const double g = reach[i] * offers[i].holds[taken[i]];
      if (g > gain) {
        gain = g;
        next = i;
      }
    }
    if (next == offers.size()) break;
    reach[next] = gain;
    ++taken[next];
    tokens += gain;
    const double rate = tokens / costs.Window(base_rows + extra);
    if (rate > best_rate) {
      best_rate = rate;
      best = taken;
    }
  }
  return best;
}

uint32_t ChooseDepth(const WindowCosts& costs, const PolicyConstants& constants,
                     const Acceptance& acceptance, const Acceptance& prior, uint32_t sequences,
                     uint32_t max) {
  const double n = std::max(1u, sequences);
  uint32_t best = 0;
  double best_rate = constants.advantage_min * n / (costs.Window(n) + costs.Drafting(0));
  double tokens = 1, rows = 1, given = 1, held = 1;
  for (uint32_t depth = 1; depth <= std::min(max, kDraftsMax); ++depth) {
    given *= acceptance.Guessed(depth, &prior);
    held *= acceptance.Guessed(depth, &prior) * acceptance.Holds(DraftClass::kHead, depth, &prior);
    rows += given;
    tokens += held;
    if (n * rows > kWindowRowsMax) break;
    const double rate = n * tokens / (costs.Window(n * rows) + costs.Drafting(rows - 1));
    if (rate <= best_rate) continue;
    best_rate = rate;
    best = depth;
  }
  return best;
}

uint32_t Explorer::Adjust(uint32_t best, uint32_t max, const PolicyConstants& constants) {
  if (max == 0) return 0;
  if (best == 0) {
    busy_ = 0;
    if (!idle_.Due(constants)) {
      idle_.Declined();
      return 0;
    }
    idle_.Explored(constants);
    return 1;
  }
  idle_ = {};
  if (++busy_ < constants.probe_every) return best;
  busy_ = 0;
  up_ = !up_;
  return up_ ? std::min(best + 1, max) : best - 1;
}

}  // namespace lode
