// Slow or stuck? A CPU worker that lets windows time out may have met a bug, may have been stopped,
// or may merely be one of too many processes on a busy machine. Killing it helps in the first two
// cases and makes the third worse. So it is judged by what it did with the processor time it was
// given, not by the clock: whoever took one step of work is alive, whoever had time for thousands
// of steps and took none is stuck, and so is whoever does not even want the processor. While it is
// under suspicion every miss is pulled, and requests go on. Suspicion is a pure state machine;
// SampleProcess looks at /proc. Supervisor thread.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "shared/base/status.h"

namespace lode {

// A process at one moment.
struct ProcessSample {
  uint64_t cpu_ns = 0;        // processor time of all its threads since its start
  bool wants_to_run = false;  // some thread runs, waits for a core, or waits for the disk
};
// Fails when the process is gone.
StatusOr<ProcessSample> SampleProcess(pid_t pid);

class Suspicion {
 public:
  // Computing for this long without finishing one chunk of rows: a chunk takes a millisecond, a
  // tenth of a second with a sanitizer and the scalar table.
  static constexpr uint64_t kComputeNsMax = 2'000'000'000;
  // Neither computing nor waiting for a core although an answer is owed: stopped, or asleep for
  // good.
  static constexpr uint64_t kIdleNsMax = 2'000'000'000;
  // In any case: a machine that gives a process nothing for this long cannot serve with it.
  static constexpr uint64_t kNsMax = 30'000'000'000;
  // Housekeeping of a process that sleeps: threads wake 20 times a second to look at a flag.
  static constexpr uint64_t kIdleCpuNsPerLook = 5'000'000;

  enum class Verdict { kWait, kAlive, kStuck };

  // `progress`: the worker's word in the exchange, any number that grows with its work.
  Suspicion(uint64_t progress, const ProcessSample& sample, uint64_t now_ns)
      : progress_(progress), first_(sample), last_(sample), begin_ns_(now_ns), busy_ns_(now_ns) {}

  // A look, some twenty times a second. `why`: one clause, for kStuck.
  Verdict Judge(uint64_t progress, const ProcessSample& sample, uint64_t now_ns, std::string* why);
  uint64_t begin_ns() const { return begin_ns_; }

 private:
  const uint64_t progress_;
  const ProcessSample first_;
  ProcessSample last_;
  const uint64_t begin_ns_;
  uint64_t busy_ns_;  // when it last wanted the processor
};

// How often the scheduler trusts the CPU lane after it failed. An aborted window costs as long as
// the longest wait; a window that pulls every miss always ends. After two aborted windows in a row
// the next one is pulled, then the lane is tried again; each time it fails again twice as many are
// pulled, up to kPulledMax. Scheduler thread; pure.
class LaneBackoff {
 public:
  static constexpr uint32_t kAbortsMax = 2;
  static constexpr uint32_t kPulledMax = 64;
  static constexpr uint32_t kCalmWindows = 64;  // good windows after which the past is forgotten

  bool PullNext() const { return pulled_left_ > 0; }
  // A window that used the CPU lane was aborted. True when from now on windows are pulled.
  bool Aborted();
  // A window ended well. `pulled`: it did not use the CPU lane.
  void Done(bool pulled);

 private:
  uint32_t aborts_ = 0, pulled_left_ = 0, length_ = 1, calm_ = 0;
};

}  // namespace lode
