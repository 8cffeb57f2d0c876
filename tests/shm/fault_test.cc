// Fault points: parsing, counting, scopes, actions in a child process. Labels: unit.
#include "shared/base/fault.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>

namespace lode {
namespace {

TEST(Fault, RefusesBadSpecs) {
  for (const char* bad : {":1", "a:0", "a:x", "a:1:kill:2", "a:1:explode",
                          "a:1:sleep=", "a:1:sleep=99999999", "a,", "scope/", "a:-1"}) {
    EXPECT_FALSE(ArmFaults(bad).ok()) << bad;
  }
  for (const char* good :
       {"", "a", "a:2", "a:kill", "a:3:exit", "cpu1.gen2/a:1:stop", "a,b:2:sleep=10"})
    EXPECT_TRUE(ArmFaults(good).ok()) << good;
  EXPECT_TRUE(ArmFaults("").ok());
}

// Runs three hits of "p" in a child; its wait status.
int StatusOf(const std::string& spec, const std::string& scope = "") {
  const pid_t child = fork();
  if (child == 0) {
    SetFaultScope(scope);
    if (!ArmFaults(spec).ok()) _exit(9);
    for (int i = 0; i < 3; ++i) {
      LODE_FAULT("other");
      LODE_FAULT("p");
    }
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

TEST(Fault, Actions) {
  EXPECT_EQ(StatusOf("q:1:kill"), 0);
  EXPECT_EQ(StatusOf("p:4:kill"), 0);
  EXPECT_EQ(WTERMSIG(StatusOf("p:3:kill")), SIGKILL);
  EXPECT_EQ(WTERMSIG(StatusOf("p")), SIGKILL);
  EXPECT_EQ(WEXITSTATUS(StatusOf("p:2:exit")), 86);
  EXPECT_EQ(WTERMSIG(StatusOf("p:1:abort")), SIGABRT);
  EXPECT_EQ(WEXITSTATUS(StatusOf("cpu1/p:1:exit", "cpu1.gen3")), 86);
  EXPECT_EQ(WEXITSTATUS(StatusOf("cpu1.gen3/p:1:exit", "cpu1.gen3")), 86);
  EXPECT_EQ(StatusOf("cpu1.gen3/p:1:exit", "cpu1.gen4"), 0);
  EXPECT_EQ(StatusOf("cpu1/p:1:exit", "cpu11.gen3"), 0);
  EXPECT_EQ(StatusOf("gpu0/p:1:exit", ""), 0);
}

TEST(Fault, SleepsOnEveryHitFromTheNth) {
  ASSERT_TRUE(ArmFaults("s:2:sleep=20").ok());
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 4; ++i) LODE_FAULT("s");
  const auto took = std::chrono::steady_clock::now() - start;
  ASSERT_TRUE(ArmFaults("").ok());
  EXPECT_GE(took, std::chrono::milliseconds(60));
}

}  // namespace
}  // namespace lode
