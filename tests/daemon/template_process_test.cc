// The walls around the template helper, seen from inside, and what happens when a helper dies or
// talks nonsense.

#include <gmock/gmock.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "daemon/chat_template.h"
#include "nlohmann/json.hpp"
#include "shared/base/check.h"

namespace lode {
namespace {

using ::testing::HasSubstr;

std::unique_ptr<ChatTemplate> Probe() {
  ChatTemplateOptions options;
  options.script_path = LODE_SOURCE_DIR "/tests/daemon/confinement_probe.py";
  options.deadline = std::chrono::seconds(20);
  options.start_timeout = std::chrono::seconds(60);
  auto made = ChatTemplate::Create("unused", options);
  LODE_CHECK(made.ok(), "{}", Message(made.status()));
  return *std::move(made);
}

StatusOr<std::string> Ask(ChatTemplate* t, std::string wish) {
  ChatRequest request;
  request.messages.resize(1);
  request.messages[0].content = std::move(wish);
  auto rendered = t->Render(request);
  if (!rendered.ok()) return rendered.status();
  return std::move(rendered->text);
}

TEST(TemplateProcess, IsConfined) {
  // A descriptor without close-on-exec, a variable: neither may reach the helper.
  int leaked = dup(0);
  ASSERT_GE(leaked, 0);
  setenv("LODE_SECRET", "1", 1);
  auto t = Probe();
  auto text = Ask(t.get(), "probe");
  close(leaked);
  ASSERT_TRUE(text.ok()) << text.status();
  nlohmann::json seen = nlohmann::json::parse(*text);
  for (const char* refused : {"fork", "socket", "write", "unlink", "kill"}) {
    EXPECT_EQ(seen[refused], "EPERM") << refused;
  }
  EXPECT_EQ(seen["read"], "allowed");
  EXPECT_EQ(seen["descriptors"], 3);
  EXPECT_TRUE(seen["environment"].empty()) << seen["environment"];
  EXPECT_EQ(seen["no_new_privs"], "1");
  EXPECT_EQ(seen["seccomp"], "2");
  EXPECT_EQ(seen["limits"]["RLIMIT_AS"], ChatTemplateOptions{}.memory_bytes);
  EXPECT_EQ(seen["limits"]["RLIMIT_CPU"], 3600);
  EXPECT_EQ(seen["limits"]["RLIMIT_NOFILE"], 16);
  for (const char* zero : {"RLIMIT_FSIZE", "RLIMIT_NPROC", "RLIMIT_CORE"}) {
    EXPECT_EQ(seen["limits"][zero], 0) << zero;
  }
}

TEST(TemplateProcess, DeathIsReportedAndRepaired) {
  auto t = Probe();
  auto died = Ask(t.get(), "die");
  EXPECT_TRUE(absl::IsUnavailable(died.status()));
  EXPECT_THAT(Message(died.status()), HasSubstr("ended with status 3"));
  EXPECT_EQ(*Ask(t.get(), "hello"), "hello");
  EXPECT_EQ(t->helper_starts(), 2u);
}

TEST(TemplateProcess, DeathBetweenRequestsIsNotSeen) {
  auto t = Probe();
  EXPECT_EQ(*Ask(t.get(), "last words"), "last words");
  std::this_thread::sleep_for(std::chrono::seconds(1));  // it ends right after its answer
  EXPECT_EQ(*Ask(t.get(), "hello"), "hello");
  EXPECT_EQ(t->helper_starts(), 2u);
}

TEST(TemplateProcess, NonsenseIsRefused) {
  auto t = Probe();
  EXPECT_TRUE(absl::IsUnavailable(Ask(t.get(), "nonsense").status()));
  EXPECT_TRUE(absl::IsUnavailable(Ask(t.get(), "huge").status()));
  EXPECT_EQ(*Ask(t.get(), "hello"), "hello");
}

// The thread that first used the template ends; the helper must not end with it.
TEST(TemplateProcess, OutlivesTheCallersThread) {
  std::unique_ptr<ChatTemplate> t;
  std::thread([&] { t = Probe(); }).join();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  EXPECT_EQ(*Ask(t.get(), "hello"), "hello");
  EXPECT_EQ(t->helper_starts(), 1u);
}

}  // namespace
}  // namespace lode
