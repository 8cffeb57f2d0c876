// Slow or stuck: the rule on invented samples, the samples on real processes (one that computes,
// one that sleeps, one that was stopped, one that cannot get a core), and how long the CPU lane is
// left alone after it failed. Labels: unit.
#include "daemon/worker_watch.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/restart_policy.h"
#include "shared/shm/wait_word.h"

namespace lode {
namespace {

using Verdict = Suspicion::Verdict;
constexpr uint64_t kMs = 1'000'000;
constexpr uint64_t kLook = 50 * kMs;

// Looks every 50 ms at a process that gets `cpu_ns` of every look's time and steps at `step_at`.
// Returns the verdict and the time it took.
std::pair<Verdict, uint64_t> Watch(uint64_t cpu_ns, bool wants, uint64_t step_at = UINT64_MAX,
                                   std::string* why = nullptr) {
  Suspicion suspicion(7, {100, wants}, 0);
  std::string text;
  for (uint64_t now = kLook, cpu = 100 + cpu_ns;; now += kLook, cpu += cpu_ns) {
    const Verdict verdict = suspicion.Judge(now >= step_at ? 8 : 7, {cpu, wants}, now, &text);
    if (why != nullptr) *why = text;
    if (verdict != Verdict::kWait) return {verdict, now};
  }
}

TEST(Suspicion, OneStepIsEnough) {
  for (const uint64_t cpu : {uint64_t{0}, 1 * kMs, kLook}) {
    EXPECT_EQ(Watch(cpu, true, 500 * kMs), std::make_pair(Verdict::kAlive, 500 * kMs));
    EXPECT_EQ(Watch(cpu, false, 500 * kMs), std::make_pair(Verdict::kAlive, 500 * kMs));
  }
}

// A core for itself and no step: an endless loop, seen after the processor time of 2 s, whatever
// the clock says.
TEST(Suspicion, ComputingWithoutAStepIsStuck) {
  std::string why;
  EXPECT_EQ(Watch(kLook, true, UINT64_MAX, &why), std::make_pair(Verdict::kStuck, 2000 * kMs));
  EXPECT_NE(why.find("computed for 2.0 s"), std::string::npos) << why;
  EXPECT_EQ(Watch(4 * kLook, true).second, 500 * kMs) << "four threads";
  EXPECT_EQ(Watch(kLook / 10, true).second, 20000 * kMs) << "a tenth of a core";
}

// Runnable, but the machine gives it next to nothing: not its fault, until the machine is hopeless.
TEST(Suspicion, StarvedIsNotStuck) {
  std::string why;
  EXPECT_EQ(Watch(0, true, 20000 * kMs).first, Verdict::kAlive);
  EXPECT_EQ(Watch(kLook / 100, true, UINT64_MAX, &why),
            std::make_pair(Verdict::kStuck, Suspicion::kNsMax));
  EXPECT_NE(why.find("in 30 s"), std::string::npos) << why;
}

TEST(Suspicion, NotWantingTheProcessorIsStuck) {
  std::string why;
  EXPECT_EQ(Watch(0, false, UINT64_MAX, &why), std::make_pair(Verdict::kStuck, 2000 * kMs));
  EXPECT_NE(why.find("does not run"), std::string::npos) << why;
  // Threads that wake twenty times a second to look at a flag do not work.
  EXPECT_EQ(Watch(kMs, false).first, Verdict::kStuck);
}

// A child that runs `body` until it is killed.
template <class F>
pid_t Child(F body) {
  const pid_t pid = fork();
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    body();
    _exit(0);
  }
  return pid;
}
void Burn() {
  for (;;) asm volatile("");
}
bool Eventually(const std::function<bool()>& holds) {
  for (int i = 0; i < 400; ++i, usleep(25'000)) {
    if (holds()) return true;
  }
  return false;
}

TEST(SampleProcess, TellsWorkFromSleep) {
  const pid_t burner = Child(Burn), sleeper = Child([] { pause(); });
  const auto sample = [](pid_t pid) { return SampleProcess(pid).value_or(ProcessSample{}); };
  const uint64_t before = sample(burner).cpu_ns;
  EXPECT_TRUE(Eventually([&] { return sample(burner).cpu_ns > before + 20 * kMs; }));
  EXPECT_TRUE(sample(burner).wants_to_run);
  EXPECT_TRUE(Eventually([&] { return !sample(sleeper).wants_to_run; }));
  // Stopped: it wants nothing and gets nothing.
  kill(burner, SIGSTOP);
  EXPECT_TRUE(Eventually([&] { return !sample(burner).wants_to_run; }));
  const uint64_t stopped = sample(burner).cpu_ns;
  usleep(50'000);
  EXPECT_EQ(sample(burner).cpu_ns, stopped);
  kill(burner, SIGCONT);
  EXPECT_TRUE(Eventually([&] { return sample(burner).cpu_ns > stopped; }));
  for (const pid_t pid : {burner, sleeper}) {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    EXPECT_FALSE(SampleProcess(pid).ok());
  }
}

TEST(LaneBackoff, TwoAbortsThenPullsThatGrow) {
  LaneBackoff lane;
  EXPECT_FALSE(lane.PullNext());
  EXPECT_FALSE(lane.Aborted());
  lane.Done(false);  // a good one between: not in a row
  EXPECT_FALSE(lane.Aborted());
  EXPECT_FALSE(lane.PullNext());
  uint32_t pulled = 1;
  for (int round = 0; round < 9; ++round) {
    if (round > 0) {
      EXPECT_FALSE(lane.Aborted());
    }
    EXPECT_TRUE(lane.Aborted());
    for (uint32_t i = 0; i < pulled; ++i) {
      ASSERT_TRUE(lane.PullNext()) << "round " << round << " window " << i;
      lane.Done(true);
    }
    EXPECT_FALSE(lane.PullNext());
    pulled = std::min(LaneBackoff::kPulledMax, pulled * 2);
  }
  // A calm time, and the past is forgotten.
  for (uint32_t i = 0; i < LaneBackoff::kCalmWindows; ++i) lane.Done(false);
  lane.Aborted();
  EXPECT_TRUE(lane.Aborted());
  lane.Done(true);
  EXPECT_FALSE(lane.PullNext());
}

// Ends that we made because a worker was stuck never add up to the end of the engine; others do.
TEST(RestartPolicy, StuckWorkersDoNotEndTheEngine) {
  RestartPolicy stuck, crashing;
  uint64_t delay = 0;
  for (int i = 0; i < 100; ++i) {
    const RestartPolicy::Decision decision = stuck.EndedStuck();
    EXPECT_FALSE(decision.give_up) << i;
    EXPECT_GE(decision.delay_ns, delay);
    delay = decision.delay_ns;
  }
  EXPECT_EQ(delay, RestartPolicy::kLongestDelayNs);
  int ends = 1;
  while (!crashing.Ended(1000, "crash").give_up) ++ends;
  EXPECT_EQ(ends, static_cast<int>(RestartPolicy::kFailuresMax));
}

}  // namespace
}  // namespace lode
