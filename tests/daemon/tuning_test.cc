// Options changed while the daemon runs: all of a request's changes or none, the bounds of the
// start, and the choices of the start where an option says "choose".
#include "daemon/tuning.h"

#include <gtest/gtest.h>

#include <vector>

namespace lode {
namespace {

class TuningTest : public testing::Test {
 protected:
  std::string Error(const std::map<std::string, std::string>& changes) {
    return Message(tuning_.Tune(changes).status());
  }

  std::vector<TunablesChange> applied_;
  Status answer_;  // of the scheduler
  Tuning tuning_{[] {
                   Options options;
                   options.model = "synth:layers=4";
                   return options;
                 }(),
                 {12'345, 0.2f},
                 [this](const TunablesChange& change) {
                   applied_.push_back(change);
                   return answer_;
                 }};
};

TEST_F(TuningTest, ShowsWithoutChanging) {
  const auto values = tuning_.Tune({});
  ASSERT_TRUE(values.ok()) << values.status();
  EXPECT_EQ(values->at("tier_policy"), "decayed_lfu");
  EXPECT_EQ(values->at("prompt_rows"), "8");
  EXPECT_FALSE(values->contains("cpu_workers"));  // needs a restart
  EXPECT_TRUE(applied_.empty());
}

TEST_F(TuningTest, ChangesReachTheScheduler) {
  const auto values = tuning_.Tune({{"pull_share", "0.5"}, {"vram_budget", "2KiB"}});
  ASSERT_TRUE(values.ok()) << values.status();
  ASSERT_EQ(applied_.size(), 1u);
  EXPECT_EQ(applied_[0].pull_share, 0.5f);
  EXPECT_EQ(applied_[0].vram_budget_bytes, 2048u);
  EXPECT_EQ(applied_[0].tier_policy, TierPolicy::kDecayedLfu);
  EXPECT_EQ(values->at("pull_share"), "0.5");
  // The next change keeps the earlier ones, and "choose" means what the start chose.
  ASSERT_TRUE(
      tuning_.Tune({{"pull_share", "-1"}, {"tier_policy", "static"}, {"prompt_rows", "3"}}).ok());
  EXPECT_EQ(applied_[1].pull_share, 0.2f);
  EXPECT_EQ(applied_[1].vram_budget_bytes, 2048u);
  EXPECT_EQ(applied_[1].tier_policy, TierPolicy::kStatic);
  EXPECT_EQ(applied_[1].prompt_rows, 3u);
  ASSERT_TRUE(tuning_.Tune({{"vram_budget", "0"}}).ok());
  EXPECT_EQ(applied_[2].vram_budget_bytes, 12'345u);
}

TEST_F(TuningTest, WrongChangesChangeNothing) {
  EXPECT_NE(Error({{"pull_share", "0.5"}, {"cpu_workers", "2"}}).find("'cpu_workers' cannot be"),
            std::string::npos);
  EXPECT_NE(Error({{"cpu_workers", "2"}}).find("vram_budget"), std::string::npos);  // what can
  EXPECT_NE(Error({{"pull_share", "2"}}).find("pull_share"), std::string::npos);
  EXPECT_NE(Error({{"prompt_rows", "9"}}).find("prompt_rows"), std::string::npos);
  EXPECT_NE(Error({{"tier_policy", "magic"}}).find("tier_policy"), std::string::npos);
  EXPECT_NE(Error({{"nonsense", "1"}}).find("'nonsense'"), std::string::npos);
  EXPECT_TRUE(applied_.empty());
  answer_ = Unavailable("the engine is over");
  EXPECT_EQ(Error({{"pull_share", "0.5"}}), "the engine is over");
  answer_ = OkStatus();
  EXPECT_EQ(tuning_.Tune({})->at("pull_share"), "-1");  // refused is not remembered
}

TEST(ChosenSplit, AutoIsBalancedOnCudaUnlessAShareIsGiven) {
  Options options;
  EXPECT_EQ(options.split_policy, "auto");
  EXPECT_EQ(ChosenSplit(options, /*cuda=*/true), SplitPolicy::kBalanced);
  EXPECT_EQ(ChosenSplit(options, /*cuda=*/false), SplitPolicy::kFixed);
  options.pull_share = 0.4;
  EXPECT_EQ(ChosenSplit(options, true), SplitPolicy::kFixed);
  options.split_policy = "balanced";
  EXPECT_EQ(ChosenSplit(options, true), SplitPolicy::kBalanced);
  options.split_policy = "fixed";
  options.pull_share = -1;
  EXPECT_EQ(ChosenSplit(options, true), SplitPolicy::kFixed);
}

}  // namespace
}  // namespace lode
