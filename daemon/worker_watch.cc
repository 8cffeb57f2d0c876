// See worker_watch.h.
#include "daemon/worker_watch.h"

#include <dirent.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <memory>

namespace lode {
namespace {

constexpr uint64_t kNsPerSecond = 1'000'000'000;

// The state letter of a thread: the first one behind the name in parentheses, which may itself hold
// anything. 0 when the thread is gone.
char StateOf(const std::string& stat_path) {
  std::ifstream file(stat_path);
  std::string line;
  if (!std::getline(file, line)) return 0;
  const size_t name_end = line.rfind(')');
  return name_end != std::string::npos && name_end + 2 < line.size() ? line[name_end + 2] : 0;
}

}  // namespace

StatusOr<ProcessSample> SampleProcess(pid_t pid) {
  ProcessSample sample;
  clockid_t clock = 0;
  timespec cpu = {};
  // Processor time of another process of the same user, to the nanosecond.
  if (clock_getcpuclockid(pid, &clock) != 0 || clock_gettime(clock, &cpu) != 0)
    return NotFound("process {} is gone", pid);
  sample.cpu_ns =
      static_cast<uint64_t>(cpu.tv_sec) * kNsPerSecond + static_cast<uint64_t>(cpu.tv_nsec);
  const std::string folder = fmt::format("/proc/{}/task", pid);
  struct Close {
    void operator()(DIR* d) const { closedir(d); }
  };
  const std::unique_ptr<DIR, Close> threads(opendir(folder.c_str()));
  if (threads == nullptr) return NotFound("process {} is gone", pid);
  while (const dirent* entry = readdir(threads.get())) {
    if (entry->d_name[0] == '.') continue;
    const char state = StateOf(folder + "/" + entry->d_name + "/stat");
    sample.wants_to_run |= state == 'R' || state == 'D';
  }
  return sample;
}

Suspicion::Verdict Suspicion::Judge(uint64_t progress, const ProcessSample& sample, uint64_t now_ns,
                                    std::string* why) {
  const auto seconds = [](uint64_t ns) { return static_cast<double>(ns) / kNsPerSecond; };
  if (progress != progress_) return Verdict::kAlive;
  if (sample.wants_to_run || sample.cpu_ns - last_.cpu_ns > kIdleCpuNsPerLook) busy_ns_ = now_ns;
  last_ = sample;
  const uint64_t computed_ns = sample.cpu_ns - first_.cpu_ns;
  if (computed_ns >= kComputeNsMax) {
    *why = fmt::format("it computed for {:.1f} s without a step of its job", seconds(computed_ns));
    return Verdict::kStuck;
  }
  if (now_ns - busy_ns_ >= kIdleNsMax) {
    *why = fmt::format("it owes an answer and does not run (stopped, or asleep) for {:.1f} s",
                       seconds(now_ns - busy_ns_));
    return Verdict::kStuck;
  }
  if (now_ns - begin_ns_ >= kNsMax) {
    *why = fmt::format("no step of its job in {:.0f} s, of which it computed {:.1f} s",
                       seconds(now_ns - begin_ns_), seconds(computed_ns));
    return Verdict::kStuck;
  }
  return Verdict::kWait;
}

bool LaneBackoff::Aborted() {
  calm_ = 0;
  if (++aborts_ < kAbortsMax) return false;
  aborts_ = 0;
  pulled_left_ = length_;
  length_ = std::min(kPulledMax, length_ * 2);
  return true;
}

void LaneBackoff::Done(bool pulled) {
  if (pulled) {
    if (pulled_left_ > 0) --pulled_left_;
    return;
  }
  aborts_ = 0;
  if (++calm_ >= kCalmWindows) length_ = 1;
}

}  // namespace lode
