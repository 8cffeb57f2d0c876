// How many drafts a window should verify, and how many to guess for the next one: learned numbers
// and pure functions over them. The question is always the same: which number of rows gives the
// most committed tokens per second, when a row costs what windows of that many rows were seen to
// cost under the present share of expert misses, and a draft holds as often as drafts of its source
// and depth were seen to hold. No clock, no randomness, no engine: tests and simulations call the
// same code. Step 3 of the life of a token; scheduler thread. Reasons and figures:
// docs/design/drafts.md.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "daemon/draft_source.h"
#include "shared/base/limits.h"

namespace lode {

// Where a draft comes from. Lookups with a short and a long match hold at very different rates, so
// they are learned apart; outside they are one source.
enum class DraftClass : uint32_t { kHead = 0, kLookupShort = 1, kLookupLong = 2 };
inline constexpr uint32_t kDraftClasses = 3;
inline constexpr uint32_t kLookupLongMin = 8;  // matched tokens
// Windows whose times a cost remembers: about a second of decoding.
inline constexpr uint32_t kCostWindows = 32;
constexpr DraftSource SourceOf(DraftClass c) {
  return c == DraftClass::kHead ? DraftSource::kHead : DraftSource::kLookup;
}

struct PolicyConstants {
  // Before anything was measured: what a window of 1, 2, 3, ... rows costs in windows of one row
  // (published figures for 1 to 4, continued by their step).
  double start_cost_first = 1.0, start_cost_step = 0.35;
  // Before anything was measured: cost of one guess of the head in windows of one row (one layer of
  // many and the output matrix).
  double start_guess_cost = 0.06;
  // A cost is the mean of the middle half of the last windows (at most kCostWindows): one that lost
  // its core says nothing about rows. A window weighs half after so many others, and is dropped
  // after cost_age_max; a row count not met for so long is not known any more: what was learned
  // under another tier, split or load would stand in the way for minutes otherwise.
  double cost_half_life = 128;
  uint32_t cost_age_max = 256;
  // Of fewer windows than this the mean of the faster half is taken: a core that is lost makes a
  // window slower, never faster, and a number that looks a little too good is tried and known soon,
  // one that looks too bad is not.
  uint32_t few_windows = 4;
  // A window that takes this many times its cost says nothing about misses either.
  double outlier = 2.0;
  // Neutral acceptance before anything was offered, and how many trials it weighs (of a sequence:
  // what all sequences have). How many trials the rate over all depths weighs at one depth: rates
  // given those before differ little by depth, and deep ones are reached seldom.
  double start_acceptance = 0.6, start_trials = 8, depth_trials = 48;
  // Trials count this much less with every later window that offered some: the last 70 or so
  // matter.
  double acceptance_decay = 0.985;
  // Where no draft pays, every n-th window of a sequence tries one: acceptance may have changed.
  // Costs at most (cost of that window - 1) / n. At first, and when drafts have just ceased to pay,
  // sooner: the distance begins at explore_first and doubles.
  uint32_t explore_first = 8, explore_every = 64;
  // Every other number of drafts is tried (kTrust windows running: a single one is not believed)
  // when it has not been used for so long that trying it at that distance would cost its part of
  // this share of all windows: numbers that promise nearly as much as the best come every
  // try_distance_min windows, dear ones seldom. The share is divided by one more than how often the
  // sequence has tried the number, down to the second: what was tried often is known.
  double try_share_first = 0.015, try_share_last = 0.003;
  uint32_t try_distance_min = 8;
  // Another number of rows must promise this much more than none at all: noise is no reason to
  // draft.
  double advantage_min = 1.01;
};

// What windows cost. Times in ns, row counts 1..kWindowRowsMax.
class WindowCosts {
 public:
  explicit WindowCosts(const PolicyConstants& constants = {}) : k_(constants) {}
  // A finished window of decode and draft rows only: time without drafting, routed pairs and how
  // many of them missed.
  void ObserveWindow(uint32_t rows, uint64_t ns, uint64_t lookups, uint64_t misses);
  // Drafting behind a window: how deep the head guessed; 0: it only followed.
  void ObserveDrafting(uint32_t depth, uint64_t ns);

  // Expected time of a window with `rows` rows (fractions interpolate) at the present miss share.
  double Window(double rows) const;
  // Expected time of guessing `depth` drafts; fractions interpolate, 0: only following.
  double Drafting(double depth) const;
  // Misses / lookups of the last windows; 0 before the first.
  double miss_share() const { return miss_share_; }

 private:
  struct Seen {
    double ns, lookups, misses;
    uint64_t window;  // windows_ then
  };
  struct Cell {
    uint32_t n = 0, next = 0;  // of `seen`, a ring
    std::array<Seen, kCostWindows> seen;
    double ns = 0, lookups = 0, misses = 0;  // the cost
  };
  void Add(Cell* cell, double ns, double lookups, double misses) const;
  void DropOld(Cell* cell) const;
  bool Known(uint32_t rows) const;
  double AtPresentMisses(const Cell& cell) const;
  double Rows(uint32_t rows) const;
  double Depth(uint32_t depth) const;
  double Shape(uint32_t rows) const {
    return k_.start_cost_first + k_.start_cost_step * (rows - 1);
  }

  PolicyConstants k_;
  std::array<Cell, kWindowRowsMax + 1> cells_ = {};  // [rows]
  std::array<Cell, kDraftsMax + 1> depths_ = {};     // [depth]
  double miss_share_ = 0;
  uint64_t windows_ = 0;
  // Time per miss: regression of time on misses, each against its own row count's mean.
  double sum_mm_ = 0, sum_mt_ = 0;
};

// How often drafts hold, by class and depth (1..kDraftsMax), each given that the one before held;
// and how often the head, asked for a depth, is sure enough to guess it. One of each sequence and
// one of all. A text has a rate of its own over all depths, learned quickly; a depth is better or
// worse than that by a little, learned slowly and by all sequences together.
class Acceptance {
 public:
  explicit Acceptance(const PolicyConstants& constants = {}) : k_(constants) {}
  // `held` of `offered` drafts counted; the next one, if there was one, did not. `all`: learns as
  // well, null when this is the one of all.
  void Observe(DraftClass c, uint32_t offered, uint32_t held, Acceptance* all);
  // The head was asked for `wanted` guesses and gave `given`.
  void ObserveGuesses(uint32_t wanted, uint32_t given);
  // Probability that the draft at `depth` holds, given those before. `prior`: of all sequences, to
  // believe before there are trials; null: the neutral start.
  double Holds(DraftClass c, uint32_t depth, const Acceptance* prior) const;
  double Guessed(uint32_t depth, const Acceptance* prior) const;

 private:
  struct Rate {
    double hits = 0, trials = 0;
    void Add(bool hit, double decay) {
      hits = hits * decay + (hit ? 1 : 0);
      trials = trials * decay + 1;
    }
    double Of(double prior, double weight) const {
      return (hits + prior * weight) / (trials + weight);
    }
  };
  struct Rates {
    Rate all;                                     // over all depths
    std::array<Rate, kDraftsMax + 1> depth = {};  // [depth]
    std::array<Rate, kDraftsMax + 1> usual = {};  // [depth] hits: what `all` said of those trials
  };
  void Add(DraftClass c, uint32_t offered, uint32_t held, double usual);
  double Overall(DraftClass c, const Acceptance* prior) const;
  PolicyConstants k_;
  std::array<Rates, kDraftClasses> holds_ = {};
  std::array<Rate, kDraftsMax + 1> guessed_ = {};
};

// Drafts that a sequence could verify: probability of each to hold, given those before.
struct DraftOffer {
  uint32_t n = 0;
  double holds[kDraftsMax] = {};
};
// How many drafts of each offer to verify, such that tokens per second of the whole window are
// highest. `base_rows`: rows the window has anyway, `base_tokens`: tokens they give; `room`: rows
// left. Greedy by gain, which is optimal for each number of rows, since gains fall with depth.
std::vector<uint32_t> ChooseDrafts(const WindowCosts& costs, const PolicyConstants& constants,
                                   uint32_t base_rows, uint32_t base_tokens, uint32_t room,
                                   std::span<const DraftOffer> offers);

// What windows with 0, 1, ... drafts lose against those with the best number, in windows of that
// one: the time they take longer less what their further tokens are worth. What a try costs.
using Losses = std::array<double, kDraftsMax + 1>;
// Of an offer, `taken` of which are to be verified, with everything else in the window as it is:
// `base_rows` rows that give `base_tokens` tokens without it.
Losses DraftLosses(const WindowCosts& costs, uint32_t base_rows, double base_tokens, uint32_t taken,
                   const DraftOffer& offer);

// How many guesses to ask the head for, with `sequences` like this one decoding: the depth with the
// most tokens per second, drafting included. `acceptance`: of the sequence, `prior`: of all.
struct DepthChoice {
  uint32_t best = 0;
  Losses losses = {};
};
DepthChoice ChooseDepth(const WindowCosts& costs, const PolicyConstants& constants,
                        const Acceptance& acceptance, const Acceptance& prior, uint32_t sequences,
                        uint32_t max);

// Exploration of one sequence, window by window: turns the best number of drafts into the one to
// try. The same for guesses that are asked for and for drafts that are there anyway.
class Explorer {
 public:
  // best <= max. Where none pays (best 0) one draft is tried after explore_first windows, then
  // after twice as many, up to explore_every; everywhere the other numbers, the dearer the more
  // seldom.
  uint32_t Adjust(uint32_t best, uint32_t max, const Losses& losses,
                  const PolicyConstants& constants);

 private:
  // The number whose turn is most overdue, or best.
  uint32_t Due(uint32_t best, uint32_t max, const Losses& losses, const PolicyConstants& constants);
  uint32_t idle_since_ = 0;  // windows since the last try of one draft
  uint32_t idle_wait_ = 0;   // before the next; 0: explore_first
  bool idle_ = true;
  // [drafts]: windows since that number was last used, and how often it was tried.
  std::array<uint32_t, kDraftsMax + 1> unused_ = {}, tries_ = {};
  uint32_t again_ = 0, again_drafts_ = 0;  // windows left of a try, and of how many drafts
};

}  // namespace lode
