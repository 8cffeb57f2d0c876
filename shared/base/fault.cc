// See fault.h. The parsed specs live behind one mutex: fault points are hit a few times per window,
// never in inner loops.
#include "shared/base/fault.h"

#include <signal.h>
#include <unistd.h>

#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

namespace lode {
namespace {

constexpr int kFaultExitCode = 86;  // no other part of Lode exits with it
constexpr uint64_t kHitsMax = 1'000'000'000;
constexpr uint64_t kSleepMsMax = 600'000;

enum class Action { kKill, kExit, kStop, kAbort, kSleep };

struct Spec {
  std::string scope, name;
  uint64_t nth = 1;
  Action action = Action::kKill;
  uint64_t sleep_ms = 0;
  uint64_t hits = 0;
};

struct State {
  std::mutex mutex;
  bool environment_read = false;
  std::string scope;
  std::vector<Spec> specs;
};
State& TheState() {
  static State* state =
      new State();  // never destroyed: threads may hit points while the process ends
  return *state;
}

bool ParseNumber(const std::string& text, uint64_t max, uint64_t* out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return error == std::errc() && end == text.data() + text.size() && *out <= max;
}

bool ParseAction(const std::string& text, Spec* spec) {
  const std::string sleep = "sleep=";
  if (text.rfind(sleep, 0) == 0) {
    spec->action = Action::kSleep;
    return ParseNumber(text.substr(sleep.size()), kSleepMsMax, &spec->sleep_ms);
  }
  const struct {
    const char* word;
    Action action;
  } words[] = {{"kill", Action::kKill},
               {"exit", Action::kExit},
               {"stop", Action::kStop},
               {"abort", Action::kAbort}};
  for (const auto& w : words) {
    if (text == w.word) {
      spec->action = w.action;
      return true;
    }
  }
  return false;
}

std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (size_t end; (end = text.find(separator, begin)) != std::string::npos; begin = end + 1) {
    parts.push_back(text.substr(begin, end - begin));
  }
  parts.push_back(text.substr(begin));
  return parts;
}

StatusOr<Spec> ParseSpec(const std::string& text) {
  Spec spec;
  std::vector<std::string> parts = Split(text, ':');
  const size_t slash = parts[0].find('/');
  if (slash != std::string::npos) spec.scope = parts[0].substr(0, slash);
  spec.name = slash == std::string::npos ? parts[0] : parts[0].substr(slash + 1);
  bool ok = !spec.name.empty() && parts.size() <= 3;
  for (size_t i = 1; ok && i < parts.size(); ++i) {
    ok = (i == 1 && ParseNumber(parts[i], kHitsMax, &spec.nth) && spec.nth > 0) ||
         ParseAction(parts[i], &spec);
  }
  if (!ok)
    return InvalidArgument(
        "fault spec '{}' is not [scope/]name[:n][:kill|exit|stop|abort|sleep=MS]", text);
  return spec;
}

Status ArmLocked(State& state, const std::string& text) {
  state.environment_read = true;
  state.specs.clear();
  if (!text.empty()) {
    for (const std::string& part : Split(text, ',')) {
      LODE_ASSIGN_OR_RETURN(Spec spec, ParseSpec(part));
      state.specs.push_back(std::move(spec));
    }
  }
  fault_internal::maybe_armed.store(!state.specs.empty(), std::memory_order_relaxed);
  return OkStatus();
}

// "cpu1" covers "cpu1.gen2".
bool InScope(const std::string& wanted, const std::string& scope) {
  if (wanted.empty() || wanted == scope) return true;
  return scope.size() > wanted.size() && scope.compare(0, wanted.size(), wanted) == 0 &&
         scope[wanted.size()] == '.';
}

void Act(const Spec& spec) {
  std::fprintf(stderr, "lode[%d] fault point %s, hit %llu\n", static_cast<int>(getpid()),
               spec.name.c_str(), static_cast<unsigned long long>(spec.nth));
  std::fflush(stderr);
  switch (spec.action) {
    case Action::kKill:
      kill(getpid(), SIGKILL);
      return;
    case Action::kExit:
      _exit(kFaultExitCode);
    case Action::kStop:
      kill(getpid(), SIGSTOP);
      return;
    case Action::kAbort:
      std::abort();
    case Action::kSleep:
      std::this_thread::sleep_for(std::chrono::milliseconds(spec.sleep_ms));
      return;
  }
}

}  // namespace

namespace fault_internal {

std::atomic<bool> maybe_armed{true};

void Hit(const char* name) {
  State& state = TheState();
  std::vector<Spec> due;
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    if (!state.environment_read) {
      const char* env = std::getenv("LODE_FAULT");
      const Status status = ArmLocked(state, env != nullptr ? env : "");
      if (!status.ok())
        std::fprintf(stderr, "lode: LODE_FAULT ignored: %s\n", Message(status).c_str());
    }
    for (Spec& spec : state.specs) {
      if (spec.name != name || !InScope(spec.scope, state.scope)) continue;
      ++spec.hits;
      const bool again = spec.action == Action::kSleep && spec.hits > spec.nth;
      if (spec.hits == spec.nth || again) due.push_back(spec);
    }
  }
  for (const Spec& spec : due)
    Act(spec);  // outside the lock: a sleeper must not stop the other points
}

}  // namespace fault_internal

void SetFaultScope(const std::string& scope) {
  State& state = TheState();
  std::lock_guard<std::mutex> lock(state.mutex);
  state.scope = scope;
}

Status ArmFaults(const std::string& spec) {
  State& state = TheState();
  std::lock_guard<std::mutex> lock(state.mutex);
  return ArmLocked(state, spec);
}

}  // namespace lode
