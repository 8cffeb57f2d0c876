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
  // What lies between a quarter and three quarters of all weight.
  double below = 0, taken = 0;
  cell->ns = cell->lookups = cell->misses = 0;
  for (uint32_t i = 0; i < cell->n; ++i) {
    const double end = below + order[i].weight;
    const double part = std::max(0.0, std::min(end, 0.75 * all) - std::max(below, 0.25 * all));
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

uint32_t Explorer::Try(uint32_t near, uint32_t max, const PolicyConstants& constants) {
  since_ = 0;
  if (++tries_ % constants.far_every != 0) return std::min(near, max);
  // A depth as often as its cost needs to be believed, before the next one's turn.
  if (far_times_ % kTrust == 0) far_ = far_ % max + 1;
  ++far_times_;
  return std::min(far_, max);
}

uint32_t Explorer::Adjust(uint32_t best, uint32_t max, const PolicyConstants& constants) {
  if (max == 0) return 0;
  if (idle_ != (best == 0)) {
    idle_ = best == 0;
    since_ = wait_ = 0;
  }
  ++since_;
  if (idle_) {
    const uint32_t wait = wait_ != 0 ? wait_ : constants.explore_first;
    if (since_ < wait) return 0;
    wait_ = std::min(2 * wait, constants.explore_every);
    return Try(1, max, constants);
  }
  if (since_ < constants.probe_every) return best;
  up_ = !up_;
  return Try(up_ ? best + 1 : best - 1, max, constants);
}

}  // namespace lode
