// When a worker that ended is started again, and when the engine gives up: a pure state machine,
// one per worker.
//
// A worker that was serving comes back at once; one that keeps ending waits longer each time, so a
// crash loop costs little. A worker that cannot load says why. A reason that will not go away by
// itself (a bad model, a wrong option, too little memory) is final at once when the worker has
// never served; any other when it is given three times. Supervisor thread; no clock, times are
// given.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "shared/base/status.h"

namespace lode {

// Errors of loading that another try meets again: they are about the model, the options, the
// machine's limits. The others (a disk, a peer, an end without words) may pass.
inline bool IsPermanent(StatusCode code) {
  switch (code) {
    case StatusCode::kInvalidArgument:
    case StatusCode::kNotFound:
    case StatusCode::kPermissionDenied:
    case StatusCode::kResourceExhausted:
    case StatusCode::kFailedPrecondition:
    case StatusCode::kOutOfRange:
    case StatusCode::kUnimplemented:
      return true;
    default:
      return false;
  }
}

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
  // numbers that change. `permanent`: the reason will not go away (IsPermanent).
  Decision Ended(uint64_t served_ns, const std::string& text, bool permanent = false) {
    served_ |= served_ns > 0;
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
    // What has served may do so again, whatever the reason looks like: files come back, memory is
    // freed.
    decision.give_up =
        (permanent && !served_) || same_ >= kSameLoadFailuresMax || failures_ >= kFailuresMax;
    const uint32_t again = failures_ - 1;
    if (again > 0 || served_ns == 0) {
      decision.delay_ns = std::min(kLongestDelayNs, kFirstDelayNs << std::min(again, 10u));
    }
    return decision;
  }

 private:
  bool served_ = false;  // ever
  uint32_t failures_ = 0, same_ = 0;
  uint32_t stuck_ = 0;  // since the last stable time
  std::string last_text_;
};

}  // namespace lode
