// The policy as a pure function, and in simulation: over window costs and acceptances as they were
// recorded on real machines it must find the best number of drafts, and where drafting loses it
// must cost no more than its exploration.
#include "daemon/draft_policy.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <random>

namespace lode {
namespace {

using Costs = std::array<double, kWindowRowsMax + 1>;  // [rows] ns

// A machine and a text: what windows and guesses cost, how often a draft holds at each depth.
struct World {
  const char* name;
  Costs window;
  double guess;   // per depth
  double follow;  // when nothing is guessed
  double holds[kDraftsMax];
  double noise = 0.05;  // relative standard deviation of a window's time
};

Costs Line(double first, double step) {
  Costs c = {};
  for (uint32_t r = 1; r <= kWindowRowsMax; ++r) c[r] = first * (1 + step * (r - 1));
  return c;
}
Costs Table(std::initializer_list<double> values) {
  Costs c = {};
  uint32_t r = 1;
  for (const double v : values) c[r++] = v * 1e6;
  return c;
}

struct Score {
  double seconds = 0, tokens = 0;
  double rate() const { return tokens / seconds; }
};

// `fixed` < 0: the policy decides; else that many drafts, always.
Score Simulate(const World& world, int fixed, uint32_t windows, uint32_t seed) {
  const PolicyConstants k;
  WindowCosts costs(k);
  Acceptance mine(k), all(k);
  Explorer explorer;
  std::mt19937 random(seed);
  std::normal_distribution<double> noise(1, world.noise);
  std::uniform_real_distribution<double> uniform;
  Score score;
  uint32_t available = 0;  // guesses made behind the window before
  bool explore = false;
  for (uint32_t w = 0; w < windows; ++w) {
    uint32_t take = available;
    if (fixed < 0 && !explore) {
      DraftOffer offer;
      offer.n = available;
      for (uint32_t i = 0; i < available; ++i)
        offer.holds[i] = mine.Holds(DraftClass::kHead, i + 1, &all);
      take = ChooseDrafts(costs, k, 1, 1, kWindowRowsMax - 1, std::span(&offer, 1))[0];
    }
    uint32_t held = 0;
    while (held < take && uniform(random) < world.holds[held]) ++held;
    uint32_t ask = static_cast<uint32_t>(std::max(fixed, 0));
    if (fixed < 0) {
      const uint32_t best = ChooseDepth(costs, k, mine, all, 1, kDraftsMax);
      ask = explorer.Adjust(best, kDraftsMax, k);
      explore = ask > best;
    }
    const double window = world.window[1 + take] * std::max(0.5, noise(random));
    const double drafting = ask == 0 ? world.follow : world.guess * ask;
    score.tokens += 1 + held;
    score.seconds += window + drafting;
    costs.ObserveWindow(1 + take, static_cast<uint64_t>(window), 0, 0);
    costs.ObserveDrafting(ask, static_cast<uint64_t>(drafting));
    mine.Observe(DraftClass::kHead, take, held);
    all.Observe(DraftClass::kHead, take, held);
    if (ask > 0) {
      mine.ObserveGuesses(ask, ask);
      all.ObserveGuesses(ask, ask);
    }
    available = ask;
  }
  return score;
}

// Costs: `published` and its continuation; the others measured on this project's machines.
const World kWorlds[] = {
    {"published shape, code", Line(10e6, 0.35), 0.6e6, 0.3e6, {.90, .90, .91, .92, .92, .92, .92}},
    {"published shape, chat", Line(10e6, 0.35), 0.6e6, 0.3e6, {.84, .84, .84, .84, .84, .84, .84}},
    {"cheap rows", Line(10e6, 0.08), 0.3e6, 0.15e6, {.87, .87, .87, .87, .87, .87, .87}},
    {"knee at four rows",
     Table({10, 10.5, 11, 11.5, 18, 19, 20, 21}),
     0.4e6,
     0.2e6,
     {.87, .87, .87, .87, .87, .87, .87}},
    {"half hold", Line(10e6, 0.2), 0.5e6, 0.25e6, {.5, .5, .5, .5, .5, .5, .5}},
    {"rows cost as much as windows", Line(10e6, 0.95), 0.6e6, 0.3e6, {.7, .7, .7, .7, .7, .7, .7}},
    {"nothing holds", Line(10e6, 0.35), 0.6e6, 0.3e6, {.02, .02, .02, .02, .02, .02, .02}},
};

TEST(DraftPolicy, FindsTheBestNumberOfDrafts) {
  constexpr uint32_t kWindows = 4000;
  for (const World& world : kWorlds) {
    double best = 0;
    int best_fixed = 0;
    for (int fixed = 0; fixed <= static_cast<int>(kDraftsMax); ++fixed) {
      const double rate = Simulate(world, fixed, kWindows, 1).rate();
      if (rate > best) {
        best = rate;
        best_fixed = fixed;
      }
    }
    const double policy = Simulate(world, -1, kWindows, 2).rate();
    std::printf("figure: draft policy, %-30s best %d drafts, policy reaches %.3f of it\n",
                world.name, best_fixed, policy / best);
    EXPECT_GE(policy, 0.96 * best) << world.name;
  }
}

TEST(DraftPolicy, WhereDraftingLosesItCostsItsExplorationOnly) {
  const PolicyConstants k;
  for (const World& world : kWorlds) {
    const Score none = Simulate(world, 0, 4000, 3), policy = Simulate(world, -1, 4000, 4);
    // One window in explore_every verifies and guesses one draft; a twentieth of that for luck.
    const double exploration = (world.window[2] - world.window[1] + world.guess - world.follow) /
                               world.window[1] / k.explore_every;
    EXPECT_GE(policy.rate(), none.rate() * (1 - exploration - 0.01)) << world.name;
  }
}

TEST(DraftPolicy, LearnsThatTheTextChanged) {
  // The same sequence: nothing holds for a while, then nearly everything does.
  const PolicyConstants k;
  WindowCosts costs(k);
  Acceptance mine(k), all(k);
  Explorer explorer;
  uint32_t available = 0;
  bool explore = false;
  const auto run = [&](uint32_t windows, bool good) {
    uint32_t drafted = 0;
    for (uint32_t w = 0; w < windows; ++w) {
      DraftOffer offer;
      offer.n = available;
      for (uint32_t i = 0; i < available; ++i)
        offer.holds[i] = mine.Holds(DraftClass::kHead, i + 1, &all);
      const uint32_t take =
          explore ? available
                  : ChooseDrafts(costs, k, 1, 1, kWindowRowsMax - 1, std::span(&offer, 1))[0];
      drafted += take;
      mine.Observe(DraftClass::kHead, take, good ? take : 0);
      all.Observe(DraftClass::kHead, take, good ? take : 0);
      costs.ObserveWindow(1 + take, static_cast<uint64_t>(1e6 * (1 + 0.35 * take)), 0, 0);
      const uint32_t best = ChooseDepth(costs, k, mine, all, 1, kDraftsMax);
      available = explorer.Adjust(best, kDraftsMax, k);
      explore = available > best;
      costs.ObserveDrafting(available, static_cast<uint64_t>(6e4 * available));
    }
    return static_cast<double>(drafted) / windows;
  };
  run(300, false);
  EXPECT_LT(run(300, false), 0.05);
  run(1500, true);
  EXPECT_GT(run(300, true), 2.5);
}

// The tier is taken away: windows get slower, every row dearer, all pairs miss, and the first
// windows are slower still. What was learned before, and in that moment, must not stand in the way
// for long.
TEST(DraftPolicy, LearnsThatTheTierChanged) {
  constexpr double kHolds = 0.87;
  constexpr uint32_t kBefore = 1000, kShock = 10, kSettle = 300, kAfter = 1500;
  const PolicyConstants k;
  const Costs resident = Line(17e6, 0.06), missing = Line(20e6, 0.3);
  WindowCosts costs(k);
  Acceptance mine(k), all(k);
  Explorer explorer;
  std::mt19937 random(5);
  std::normal_distribution<double> noise(1, 0.05);
  std::uniform_real_distribution<double> uniform;
  uint32_t available = 0;
  bool explore = false;
  Score late;
  for (uint32_t w = 0; w < kBefore + kSettle + kAfter; ++w) {
    DraftOffer offer;
    offer.n = available;
    for (uint32_t i = 0; i < available; ++i)
      offer.holds[i] = mine.Holds(DraftClass::kHead, i + 1, &all);
    const uint32_t take =
        explore ? available
                : ChooseDrafts(costs, k, 1, 1, kWindowRowsMax - 1, std::span(&offer, 1))[0];
    uint32_t held = 0;
    while (held < take && uniform(random) < kHolds) ++held;
    const bool after = w >= kBefore;
    double window = (after ? missing : resident)[1 + take] * std::max(0.5, noise(random));
    if (after && w < kBefore + kShock) window *= 1 + take;
    const uint64_t lookups = 480 * (1 + take) * 3 / 4;
    costs.ObserveWindow(1 + take, static_cast<uint64_t>(window), lookups, after ? lookups : 0);
    mine.Observe(DraftClass::kHead, take, held);
    all.Observe(DraftClass::kHead, take, held);
    if (w >= kBefore + kSettle) {
      late.tokens += 1 + held;
      late.seconds += window;
    }
    const uint32_t best = ChooseDepth(costs, k, mine, all, 1, kDraftsMax);
    available = explorer.Adjust(best, kDraftsMax, k);
    explore = available > best;
    costs.ObserveDrafting(available, 0);
  }
  double fastest = 0;
  for (uint32_t n = 0; n <= kDraftsMax; ++n) {
    double tokens = 1, reach = 1;
    for (uint32_t i = 0; i < n; ++i) tokens += reach *= kHolds;
    fastest = std::max(fastest, tokens / missing[1 + n]);
  }
  std::printf("figure: draft policy after a change of tier: %.3f of the best\n",
              late.rate() / fastest);
  EXPECT_GE(late.rate(), 0.96 * fastest);
}

TEST(DraftPolicy, IdleTriesComeSoonerAtFirst) {
  const PolicyConstants k;
  IdleExplorer explorer;
  std::vector<uint32_t> distances;
  for (uint32_t w = 1, last = 0; w <= 300; ++w) {
    if (!explorer.Due(k)) {
      explorer.Declined();
      continue;
    }
    distances.push_back(w - last);
    last = w;
    explorer.Explored(k);
  }
  EXPECT_EQ(distances, (std::vector<uint32_t>{8, 16, 32, 64, 64, 64}));
}

TEST(DraftPolicy, SharesTheRoomByGain) {
  WindowCosts costs;  // nothing measured: the start shape
  PolicyConstants k;
  DraftOffer sure, unsure;
  sure.n = unsure.n = 7;
  for (uint32_t i = 0; i < kDraftsMax; ++i) {
    sure.holds[i] = 0.95;
    unsure.holds[i] = 0.5;
  }
  const DraftOffer offers[] = {unsure, sure};
  const std::vector<uint32_t> taken = ChooseDrafts(costs, k, 2, 2, 6, offers);
  EXPECT_GT(taken[1], taken[0]);
  EXPECT_LE(taken[0] + taken[1], 6u);
  EXPECT_EQ(ChooseDrafts(costs, k, 2, 2, 0, offers), (std::vector<uint32_t>{0, 0}));
  EXPECT_EQ(ChooseDrafts(costs, k, 1, 1, 7, {}), std::vector<uint32_t>{});
  const DraftOffer hopeless[] = {{.n = 3, .holds = {0.05, 0.05, 0.05}}};
  EXPECT_EQ(ChooseDrafts(costs, k, 1, 1, 7, hopeless), std::vector<uint32_t>{0});
}

TEST(DraftPolicy, CostsFollowThePresentShareOfMisses) {
  WindowCosts costs;
  std::mt19937 random(9);
  // 2 ms of dense work and 20 us per miss, 100 lookups in a window of one row.
  const auto window = [&](uint32_t rows, double share) {
    const auto lookups = static_cast<uint64_t>(100 * (0.25 + 0.75 * rows));
    const auto misses = static_cast<uint64_t>(share * static_cast<double>(lookups)) + random() % 5;
    costs.ObserveWindow(rows, 2'000'000 + 20'000 * misses, lookups, misses);
  };
  for (int i = 0; i < 200; ++i) window(i % 8 == 0 ? 2 : 1, 0.5);
  const double then = costs.Window(2);
  for (int i = 0; i < 60; ++i)
    window(1, 0.1);  // the cache has warmed; two rows were not tried again
  const double now = costs.Window(2), truth = 2e6 + 20e3 * 0.1 * 175;
  EXPECT_NEAR(then, 2e6 + 20e3 * 0.5 * 175, 0.1 * then);
  EXPECT_NEAR(now, truth, 0.15 * truth);
}

TEST(DraftPolicy, UnmeasuredRowCountsLieBetweenTheirNeighbours) {
  WindowCosts costs;
  EXPECT_DOUBLE_EQ(costs.Window(2) / costs.Window(1), 1.35);
  EXPECT_DOUBLE_EQ(costs.Window(4) / costs.Window(1), 2.05);
  for (int i = 0; i < 10; ++i) {
    costs.ObserveWindow(1, 1'000'000, 0, 0);
    costs.ObserveWindow(5, 3'000'000, 0, 0);
  }
  EXPECT_NEAR(costs.Window(3), 2e6, 1);
  EXPECT_GT(costs.Window(8), 3e6);
  EXPECT_NEAR(costs.Window(2.5), (costs.Window(2) + costs.Window(3)) / 2, 1);
  // One window that lost its core for a second is not believed.
  costs.ObserveWindow(1, 1'000'000'000, 0, 0);
  EXPECT_LT(costs.Window(1), 1.5e6);
}

TEST(DraftPolicy, AcceptanceStartsNeutralAndForgets) {
  Acceptance all, one;
  EXPECT_DOUBLE_EQ(all.Holds(DraftClass::kHead, 1, nullptr), PolicyConstants().start_acceptance);
  for (int i = 0; i < 200; ++i) all.Observe(DraftClass::kHead, 3, 1);
  EXPECT_GT(all.Holds(DraftClass::kHead, 1, nullptr), 0.95);
  EXPECT_LT(all.Holds(DraftClass::kHead, 2, nullptr), 0.1);
  // Depth 3 was never reached: the second did not hold.
  EXPECT_DOUBLE_EQ(all.Holds(DraftClass::kHead, 3, nullptr), PolicyConstants().start_acceptance);
  EXPECT_DOUBLE_EQ(one.Holds(DraftClass::kHead, 1, &all), all.Holds(DraftClass::kHead, 1, nullptr));
  EXPECT_DOUBLE_EQ(all.Holds(DraftClass::kLookupLong, 1, nullptr),
                   PolicyConstants().start_acceptance);
  for (int i = 0; i < 200; ++i) all.Observe(DraftClass::kHead, 3, 3);
  EXPECT_GT(all.Holds(DraftClass::kHead, 3, nullptr), 0.9);
  all.ObserveGuesses(4, 2);
  EXPECT_LT(all.Guessed(3, nullptr), all.Guessed(2, nullptr));
}

}  // namespace
}  // namespace lode
