// The tier against its rules: what is in a slot, when an evicted expert stops being planned, when
// an upload may start, when a newcomer is planned, and that the budget holds through shrinks and
// grows.
#include "gpu_worker/expert_tier.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "shared/shm/wait_word.h"
#include "tests/gpu_worker/fake_arenas.h"

namespace lode {
namespace {

constexpr uint32_t kLayers = 3, kExperts = 8;

uint64_t Soon() { return NowNs() + 60'000'000'000ull; }

class TierTest : public ::testing::Test {
 protected:
  explicit TierTest(uint32_t nodes = 2)
      : fake_(FakeShape{}, nodes), arenas_(fake_.layouts(), fake_.data()) {}

  std::unique_ptr<ExpertTier> Make(uint64_t slots, const std::vector<RankedExpert>& ranking = {}) {
    auto tier = ExpertTier::Create(arenas_, slots * arenas_.slot_bytes(0), ranking, nullptr);
    EXPECT_TRUE(tier.ok()) << tier.status();
    return std::move(*tier);
  }
  uint64_t Budget(uint64_t slots) const { return slots * arenas_.slot_bytes(0); }

  // Every planned expert's slot holds exactly its bytes, no slot is used twice, the budget holds.
  void CheckTables(const ExpertTier& tier, uint64_t budget) {
    uint64_t resident = 0;
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      std::set<uint16_t> used;
      for (uint32_t e = 0; e < kExperts; ++e) {
        const uint16_t slot = tier.residency(layer)[e];
        if (slot == kNotResident) continue;
        ++resident;
        EXPECT_TRUE(used.insert(slot).second)
            << "slot " << slot << " of layer " << layer << " twice";
        for (uint32_t m = 0; m < 3; ++m) {
          const std::vector<uint8_t> whole = fake_.Whole(layer, e, m);
          const uint8_t* at =
              tier.slot(layer, slot) + arenas_.shape(layer, static_cast<Matrix>(m)).slot_offset;
          EXPECT_EQ(std::memcmp(at, whole.data(), whole.size()), 0)
              << "layer " << layer << " expert " << e;
        }
      }
    }
    EXPECT_EQ(resident, tier.resident_experts());
    EXPECT_LE(tier.slot_bytes_total(), budget);
    EXPECT_LE(tier.resident_bytes(), tier.slot_bytes_total());
  }
  // One window in which layer 0 routes `rows` rows to each of the given experts.
  static void Route(ExpertTier* tier, uint32_t layer, std::vector<uint16_t> ids, uint32_t rows) {
    for (const uint16_t id : ids) {
      std::vector<RoutedRow> routed(rows);
      for (RoutedRow& r : routed) r.ids[0] = id;
      tier->Count(layer, routed.data(), rows, 1);
    }
  }

  FakeArenas fake_;
  ArenaSet arenas_;
};

class TierNodes : public TierTest, public ::testing::WithParamInterface<uint32_t> {
 protected:
  TierNodes() : TierTest(GetParam()) {}
};

TEST_P(TierNodes, StartPlacementHoldsTheRightBytes) {
  for (uint64_t slots : {0, 1, 7, 24, 1000}) {
    const auto tier = Make(slots);
    CheckTables(*tier, Budget(slots));
    EXPECT_EQ(tier->resident_experts(), std::min<uint64_t>(slots, kLayers * kExperts));
  }
}
INSTANTIATE_TEST_SUITE_P(Splits, TierNodes, ::testing::Values(1u, 2u, 3u));

TEST_F(TierTest, RankingDecidesTheStart) {
  const auto tier = Make(2, {{{2, 5}, 9}, {{1, 7}, 8}, {{0, 0}, 1}});
  EXPECT_EQ(tier->residency(2)[5], 0);
  EXPECT_EQ(tier->residency(1)[7], 0);
  EXPECT_EQ(tier->residency(0)[0], kNotResident);
}

// Three slots: expert 0 of each layer. Expert 5 of layer 0 becomes hot.
TEST_F(TierTest, EvictedAtOncePlannedWhenLanded) {
  const auto tier = Make(3);
  for (int window = 0; window < 4; ++window) {
    const TierStep step = tier->Border(TierPolicy::kDecayedLfu, Budget(3));
    EXPECT_EQ(step.swaps, 0u) << "a round before the fourth window";
    EXPECT_EQ(tier->residency(0)[0], 0);
    Route(tier.get(), 0, {5}, 2);
    tier->WindowDone();
  }
  tier->HoldUploads(true);
  TierStep step = tier->Border(TierPolicy::kDecayedLfu, Budget(3));
  EXPECT_EQ(step.swaps, 1u);
  EXPECT_EQ(tier->residency(0)[0], kNotResident) << "evicted, yet still planned";
  EXPECT_EQ(tier->residency(0)[5], kNotResident) << "planned before its copy";
  tier->WindowDone();
  step = tier->Border(TierPolicy::kDecayedLfu, Budget(3));
  EXPECT_EQ(tier->residency(0)[5], kNotResident);
  tier->HoldUploads(false);
  ASSERT_TRUE(tier->WaitUploads(Soon()));
  EXPECT_EQ(tier->residency(0)[5], kNotResident) << "the table changed inside a window";
  tier->WindowDone();
  step = tier->Border(TierPolicy::kDecayedLfu, Budget(3));
  EXPECT_EQ(tier->residency(0)[5], 0);
  EXPECT_EQ(step.upload_bytes, arenas_.slot_bytes(0));
  CheckTables(*tier, Budget(3));
}

// With windows in flight (a device that runs behind the host), the copy must wait for the last one
// that could read the slot.
TEST_F(TierTest, UploadWaitsForTheLastWindowThatNamedTheSlot) {
  const auto tier = Make(3);
  for (int window = 0; window < 4; ++window) {
    tier->Border(TierPolicy::kDecayedLfu, Budget(3));
    Route(tier.get(), 0, {5}, 2);
    if (window < 2) tier->WindowDone();
  }
  EXPECT_EQ(tier->Border(TierPolicy::kDecayedLfu, Budget(3)).swaps,
            1u);  // windows 3 and 4 still run with the old table
  const std::vector<uint8_t> old = fake_.Whole(0, 0, 0);
  const auto slot_is_old = [&] {
    return std::memcmp(tier->slot(0, 0), old.data(), old.size()) == 0;
  };
  tier->WindowDone();  // window 3
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  ASSERT_TRUE(tier->WaitUploads(Soon()));
  EXPECT_TRUE(slot_is_old()) << "overwritten while window 4 may read it";
  tier->WindowDone();  // window 4
  ASSERT_TRUE(tier->WaitUploads(Soon()));
  EXPECT_FALSE(slot_is_old());
  tier->WindowDone();
  tier->Border(TierPolicy::kDecayedLfu, Budget(3));
  EXPECT_EQ(tier->residency(0)[5], 0);
}

// A round decided while its last window runs does not see what that window routes; a budget that
// changes at the same border makes it void.
TEST_F(TierTest, PlansAheadWhileAWindowRuns) {
  for (const bool resize : {false, true}) {
    const auto tier = Make(3);
    for (int window = 0; window < 4; ++window) {
      tier->Border(TierPolicy::kDecayedLfu, Budget(3));
      if (window == 0) Route(tier.get(), 0, {5}, 4);
      tier->PlanAhead();
      if (window == 3) Route(tier.get(), 0, {6}, 8);  // hotter, but too late
      tier->WindowDone();
    }
    const TierStep step = tier->Border(TierPolicy::kDecayedLfu, Budget(resize ? 2 : 3));
    EXPECT_EQ(step.swaps, 1u);
    tier->WindowDone();
    ASSERT_TRUE(tier->WaitUploads(Soon()));
    tier->Border(TierPolicy::kDecayedLfu, Budget(resize ? 2 : 3));
    EXPECT_EQ(tier->residency(0)[5] != kNotResident, !resize);
    EXPECT_EQ(tier->residency(0)[6] != kNotResident, resize);
    CheckTables(*tier, Budget(resize ? 2 : 3));
    tier->WindowDone();
  }
}

TEST_F(TierTest, StaticPolicyNeverSwaps) {
  const auto tier = Make(3);
  for (int window = 0; window < 20; ++window) {
    EXPECT_EQ(tier->Border(TierPolicy::kStatic, Budget(3)).swaps, 0u);
    Route(tier.get(), 0, {5, 6, 7}, 8);
    tier->WindowDone();
  }
  for (float count : tier->counts()) EXPECT_LE(count, 32 / 0.3f + 32);
}

TEST_F(TierTest, ShrinksAndGrowsAtBorders) {
  const auto tier = Make(12);
  std::mt19937 rng(4);
  uint64_t slots = 12;
  for (int window = 0; window < 300; ++window) {
    if (rng() % 5 == 0) slots = rng() % 27;
    tier->Border(TierPolicy::kDecayedLfu, Budget(slots));
    CheckTables(*tier, Budget(slots));
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      Route(tier.get(), layer,
            {static_cast<uint16_t>(rng() % kExperts), static_cast<uint16_t>(rng() % 3)}, 3);
    }
    tier->WindowDone();
    if (rng() % 2 == 0) {
      ASSERT_TRUE(tier->WaitUploads(Soon()));
    }
  }
  tier->Border(TierPolicy::kStatic, Budget(1000));
  tier->WindowDone();
  ASSERT_TRUE(tier->WaitUploads(Soon()));
  tier->Border(TierPolicy::kStatic, Budget(1000));
  EXPECT_EQ(tier->resident_experts(), kLayers * kExperts);
  CheckTables(*tier, Budget(1000));
}

TEST_F(TierTest, AResizeWaitsForRunningWindows) {
  const auto tier = Make(6);
  tier->Border(TierPolicy::kStatic, Budget(6));
  tier->Border(TierPolicy::kStatic,
               Budget(3));  // the first window is not done: slots must not move
  EXPECT_EQ(tier->resident_experts(), 6u);
  tier->WindowDone();
  tier->WindowDone();
  tier->Border(TierPolicy::kStatic, Budget(3));
  EXPECT_EQ(tier->resident_experts(), 3u);
}

TEST_F(TierTest, ShrinkGivesPagesBack) {
  FakeShape big;
  big.layers = 1, big.experts = 64, big.hidden = 256, big.width = 128;
  FakeArenas fake(big, 1);
  ArenaSet arenas(fake.layouts(), fake.data());
  auto tier = ExpertTier::Create(arenas, 64 * arenas.slot_bytes(0), {}, nullptr);
  ASSERT_TRUE(tier.ok());
  const auto present = [&] {
    std::vector<uint8_t> pages(64 * arenas.slot_bytes(0) / 4096);
    EXPECT_EQ(mincore(const_cast<uint8_t*>((*tier)->slot(0, 0)), pages.size() * 4096, pages.data()),
              0);
    return std::count_if(pages.begin(), pages.end(), [](uint8_t p) { return p & 1; });
  };
  const auto before = present();
  (*tier)->Border(TierPolicy::kStatic, 8 * arenas.slot_bytes(0));
  (*tier)->WindowDone();
  EXPECT_LT(present(), before / 4);
}

TEST_F(TierTest, ProfileRoundTrips) {
  const auto tier = Make(0);
  Route(tier.get(), 1, {4}, 3);
  Route(tier.get(), 2, {6}, 5);
  const std::string path =
      (std::filesystem::temp_directory_path() / fmt::format("lode-profile-{}", getpid())).string();
  ASSERT_TRUE(tier->WriteProfile(path).ok());
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  std::filesystem::remove(path);
  auto ranking = ParseRanking(text.str(), kLayers, kExperts);
  ASSERT_TRUE(ranking.ok()) << ranking.status();
  ASSERT_EQ(ranking->size(), 2u);
  EXPECT_EQ((*ranking)[0].ref, (ExpertRef{2, 6}));
  EXPECT_FALSE(tier->WriteProfile("/nonexistent/folder/profile").ok());
}

}  // namespace
}  // namespace lode
