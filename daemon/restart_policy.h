// When a worker that ended is started again, and when the engine gives up: a pure state machine,
// one per worker.
//
// A worker that was serving comes back at once; one that keeps ending waits longer each time, so a
// crash loop costs little. A worker that cannot load says why, and the same reason three times is
// final: it will not go away by itself. Supervisor thread; no clock, times are given.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

namespace lode {

class RestartPolicy {
 public:
  static constexpr uint32_t kSameLoadFailuresMax = 3;
  static constexpr uint32_t kFailuresMax = 12;  // of any kind without a stable time between
  static constexpr uint64_t kStableNs =
      60'000'000'000;  // served this long: earlier ends are forgotten
  static constexpr uint64_t kFirstDelayNs = 50'000'000, kLongestDelayNs = 5'000'000'000;

  struct Decision {
    bool give_up = false;
    uint64_t delay_ns = 0;  // until the next start
  };

  // We ended it because it was stuck: it waits like after any other end, but no number of such ends
  // makes the engine give up. Requests go on without it, and the machine may be what is wrong.
  Decision EndedStuck() {
    const uint32_t again = std::min(stuck_++, 10u);
    return {false, std::min(kLongestDelayNs, kFirstDelayNs << again)};
  }

  // The process ended. `served_ns`: how long it had been ready, 0 = never. `text`: why, without
  // numbers that change.
  Decision Ended(uint64_t served_ns, const std::string& text) {
    if (served_ns >= kStableNs) failures_ = same_ = stuck_ = 0;
    ++failures_;
    if (served_ns > 0) {
      same_ = 0;
      last_text_.clear();
    } else {
      same_ = text == last_text_ ? same_ + 1 : 1;
      last_text_ = text;
    }
    Decision decision;
    decision.give_up = same_ >= kSameLoadFailuresMax || failures_ >= kFailuresMax;
    const uint32_t again = failures_ - 1;
    if (again > 0 || served_ns == 0) {
      decision.delay_ns = std::min(kLongestDelayNs, kFirstDelayNs << std::min(again, 10u));
    }
    return decision;
  }

 private:
  uint32_t failures_ = 0, same_ = 0;
  uint32_t stuck_ = 0;  // since the last stable time
  std::string last_text_;
};

}  // namespace lode
