// See daemon/draft_policy.h.
#include "daemon/draft_policy.h"

#include <algorithm>
#include <cmath>

namespace lode {
namespace {

// A cost of fewer windows is not believed over the neighbours'.
constexpr uint32_t kTrust = 2;
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

void WindowCosts::DropOld(Cell* cell) const {
  const auto from = [&](uint32_t i) -> Seen& {  // i-th oldest
    return cell->seen[(cell->next + kCostWindows - cell->n + i) % kCostWindows];
  };
  while (cell->n > 0 && windows_ - from(0).window > k_.cost_age_max) --cell->n;
}

void WindowCosts::Add(Cell* cell, double ns, double lookups, double misses) const {
  DropOld(cell);
  cell->seen[cell->next] = {ns, lookups, misses, windows_};
  cell->next = (cell->next + 1) % kCostWindows;
  cell->n = std::min(cell->n + 1, kCostWindows);
  struct Weighed {
    double weight;
    const Seen* seen;
  };
  std::array<Weighed, kCostWindows> order;
  double all = 0;
  for (uint32_t i = 0; i < cell->n; ++i) {
    const Seen& seen = cell->seen[(cell->next + kCostWindows - 1 - i) % kCostWindows];
    const double weight =
        std::exp2(-static_cast<double>(windows_ - seen.window) / k_.cost_half_life);
    order[i] = {weight, &seen};
    all += weight;
  }
  std::sort(order.begin(), order.begin() + cell->n,
            [](const Weighed& a, const Weighed& b) { return a.seen->ns < b.seen->ns; });
  // What lies between a quarter and three quarters of all weight; of few windows, below the half.
  const double first = cell->n < k_.few_windows ? 0 : 0.25 * all, last = first + 0.5 * all;
  double below = 0, taken = 0;
  cell->ns = cell->lookups = cell->misses = 0;
  for (uint32_t i = 0; i < cell->n; ++i) {
    const double end = below + order[i].weight;
    const double part = std::max(0.0, std::min(end, last) - std::max(below, first));
    cell->ns += part * order[i].seen->ns;
    cell->lookups += part * order[i].seen->lookups;
    cell->misses += part * order[i].seen->misses;
    taken += part;
    below = end;
  }
  cell->ns /= taken;
  cell->lookups /= taken;
  cell->misses /= taken;
}

void WindowCosts::ObserveWindow(uint32_t rows, uint64_t ns, uint64_t lookups, uint64_t misses) {
  if (rows == 0 || rows > kWindowRowsMax) return;
  ++windows_;
  Cell& cell = cells_[rows];
  DropOld(&cell);
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

bool WindowCosts::Known(uint32_t rows) const {
  const Cell& cell = cells_[rows];
  if (cell.n < kTrust) return false;
  const Seen& newest = cell.seen[(cell.next + kCostWindows - 1) % kCostWindows];
  return windows_ - newest.window <= k_.cost_age_max;
}

// What was measured; between two measured row counts the line between them; else the start shape
// through the nearest measured one.
double WindowCosts::Rows(uint32_t rows) const {
  rows = std::clamp(rows, 1u, kWindowRowsMax);
  if (Known(rows)) return AtPresentMisses(cells_[rows]);
  uint32_t below = rows, above = rows;
  while (below > 0 && !Known(below)) --below;
  while (above <= kWindowRowsMax && !Known(above)) ++above;
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

void Acceptance::Observe(DraftClass c, uint32_t offered, uint32_t held, Acceptance* all) {
  // What this text's rate was before: all sequences learn how a depth differs from its text's rate,
  // or depths that only easy texts reach would look easy.
  const double usual = Overall(c, all);
  Add(c, offered, held, usual);
  if (all != nullptr) all->Add(c, offered, held, usual);
}

void Acceptance::Add(DraftClass c, uint32_t offered, uint32_t held, double usual) {
  if (offered == 0) return;
  Rates& rates = holds_[static_cast<uint32_t>(c)];
  rates.all.hits *= k_.acceptance_decay;
  rates.all.trials *= k_.acceptance_decay;
  for (uint32_t depth = 1; depth <= std::min({offered, held + 1, kDraftsMax}); ++depth) {
    const bool hit = depth <= held;
    rates.all.Add(hit, 1);
    rates.depth[depth].Add(hit, k_.acceptance_decay);
    Rate& expected = rates.usual[depth];
    expected.hits = expected.hits * k_.acceptance_decay + usual;
    expected.trials = rates.depth[depth].trials;
  }
}

double Acceptance::Overall(DraftClass c, const Acceptance* prior) const {
  const double start = prior != nullptr ? prior->Overall(c, nullptr) : k_.start_acceptance;
  return holds_[static_cast<uint32_t>(c)].all.Of(start, k_.start_trials);
}

void Acceptance::ObserveGuesses(uint32_t wanted, uint32_t given) {
  for (uint32_t depth = 1; depth <= std::min({wanted, given + 1, kDraftsMax}); ++depth)
    guessed_[depth].Add(depth <= given, k_.acceptance_decay);
}

double Acceptance::Holds(DraftClass c, uint32_t depth, const Acceptance* prior) const {
  double start = Overall(c, prior);
  if (prior != nullptr) {
    const Rates& all = prior->holds_[static_cast<uint32_t>(c)];
    const Rate& seen = all.depth[depth];
    start += (seen.hits - all.usual[depth].hits) / (seen.trials + k_.depth_trials);
  }
  start = std::clamp(start, 0.0, 1.0);
  return holds_[static_cast<uint32_t>(c)].depth[depth].Of(start, k_.depth_trials);
}

double Acceptance::Guessed(uint32_t depth, const Acceptance* prior) const {
  const double start = prior != nullptr ? prior->Guessed(depth, nullptr) : 1;
  return guessed_[depth].Of(start, depth > 1 ? k_.depth_trials : k_.start_trials);
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

Losses DraftLosses(const WindowCosts& costs, uint32_t base_rows, double base_tokens, uint32_t taken,
                   const DraftOffer& offer) {
  Losses times, tokens, losses;
  double reach = 1, given = base_tokens;
  for (uint32_t n = 0; n <= kDraftsMax; ++n) {
    if (n > 0 && n <= offer.n) given += reach *= offer.holds[n - 1];
    times[n] = costs.Window(base_rows + n);
    tokens[n] = given;
  }
  for (uint32_t n = 0; n <= kDraftsMax; ++n)
    losses[n] = times[n] / times[taken] - tokens[n] / tokens[taken];
  return losses;
}

DepthChoice ChooseDepth(const WindowCosts& costs, const PolicyConstants& constants,
                        const Acceptance& acceptance, const Acceptance& prior, uint32_t sequences,
                        uint32_t max) {
  const double n = std::max(1u, sequences);
  DepthChoice choice;
  Losses times, tokens;
  double rows = 1, given = 1, held = 1;
  times[0] = costs.Window(n) + costs.Drafting(0);
  tokens[0] = 1;
  double best_rate = constants.advantage_min * tokens[0] / times[0];
  for (uint32_t depth = 1; depth <= kDraftsMax; ++depth) {
    const double guessed = acceptance.Guessed(depth, &prior);
    given *= guessed;
    held *= guessed * acceptance.Holds(DraftClass::kHead, depth, &prior);
    rows += given;
    times[depth] = costs.Window(n * rows) + costs.Drafting(rows - 1);
    // A guess that finds no row is thrown away: dear, and worth nothing.
    tokens[depth] = tokens[depth - 1] + (n * rows <= kWindowRowsMax ? held : 0);
    const double rate = tokens[depth] / times[depth];
    if (depth > max || n * rows > kWindowRowsMax || rate <= best_rate) continue;
    best_rate = rate;
    choice.best = depth;
  }
  for (uint32_t depth = 0; depth <= kDraftsMax; ++depth)
    choice.losses[depth] = times[depth] / times[choice.best] - tokens[depth] / tokens[choice.best];
  return choice;
}

uint32_t Explorer::Due(uint32_t best, uint32_t max, const Losses& losses,
                       const PolicyConstants& constants) {
  uint32_t due = best;
  double most = 1;
  for (uint32_t n = 0; n <= max; ++n) {
    if (n == best) continue;
    // Every number has its part of the share, and is tried kTrust times running.
    const double share =
        std::max(constants.try_share_last, constants.try_share_first / (1 + tries_[n]));
    const double distance =
        std::max<double>(constants.try_distance_min, losses[n] * kTrust * kDraftsMax / share);
    if (unused_[n] < most * distance) continue;
    most = unused_[n] / distance;
    due = n;
  }
  return due;
}

uint32_t Explorer::Adjust(uint32_t best, uint32_t max, const Losses& losses,
                          const PolicyConstants& constants) {
  if (max == 0) return 0;
  if (idle_ != (best == 0)) {
    idle_ = best == 0;
    idle_since_ = idle_wait_ = again_ = 0;
  }
  ++idle_since_;
  for (uint32_t& unused : unused_) ++unused;
  const uint32_t wait = idle_wait_ != 0 ? idle_wait_ : constants.explore_first;
  uint32_t take = best;
  if (idle_ && idle_since_ >= wait) {
    idle_since_ = 0;
    idle_wait_ = std::min(2 * wait, constants.explore_every);
    take = 1;
  } else if (again_ > 0) {
    --again_;
    take = std::min(again_drafts_, max);
  } else {
    take = Due(best, max, losses, constants);
    if (take != best) {
      ++tries_[take];
      again_ = kTrust - 1;
      again_drafts_ = take;
    }
  }
  unused_[take] = 0;
  return take;
}

}  // namespace lode
