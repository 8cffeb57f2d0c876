// See daemon/window_runner.h.
#include "daemon/window_runner.h"

#include "shared/base/log.h"
#include "shared/wire/expert_job.h"

namespace lode {
namespace {

// How long the wait sleeps before it looks at the worker's life, and at requests that are over,
// again. Short enough not to add to a restart.
constexpr uint64_t kLookNs = 20'000'000;

// Changes whenever anybody does anything for a window.
uint64_t ProgressSignature(const GpuLink& link) {
  const ExchangeHeader& x = *link.exchange;
  // Relaxed throughout: the words are only compared with their earlier selves.
  uint64_t sum = x.bell.value.load(std::memory_order_relaxed) * 31 +
                 x.window_epoch.value.load(std::memory_order_relaxed);
  sum = sum * 31 + x.gpu_heartbeat.load(std::memory_order_relaxed);
  for (uint32_t i = 0; i < link.n_cpu_workers; ++i) {
    sum = sum * 31 + x.workers[i].ack.value.load(std::memory_order_relaxed);
    sum = sum * 31 + x.workers[i].progress.load(std::memory_order_relaxed);
  }
  sum = sum * 31 + link.window->plans.tail.value.load(std::memory_order_relaxed);
  return sum * 31 + link.window->results.head.value.load(std::memory_order_relaxed);
}

}  // namespace

StallReport DescribeStall(const GpuLink& link, uint64_t window) {
  StallReport report;
  // Acquire: pairs with the publishers; this is a look at a standing picture.
  const auto load = [](const auto& word) { return word.load(std::memory_order_acquire); };
  const uint64_t published = load(link.window->plans.head.value),
                 taken = load(link.window->plans.tail.value);
  if (published == load(link.window->results.head.value)) {
    report.text = "no window is under way";
    return report;
  }
  if (published != taken) {
    report.text = fmt::format(
        "window {} lies in the plan ring; the GPU worker (generation {}) has not taken it", window,
        link.generation);
    return report;
  }
  const uint64_t bell = load(link.exchange->bell.value);
  if (TagWindow(bell) != (window & 0xffffffffu) || bell >> 48 != (link.generation & 0xffffu)) {
    report.text =
        fmt::format("the GPU worker (generation {}) took window {} and has rung for no layer of it",
                    link.generation, window);
    return report;
  }
  const uint64_t layer = (bell & 0xffff) - 1;
  report.text = fmt::format("window {} stands at layer {}", window, layer);
  for (uint32_t i = 0; i < link.n_cpu_workers; ++i) {
    const WorkerLine& line = link.exchange->workers[i];
    const uint64_t ack = load(line.ack.value);
    report.text += fmt::format("; cpu{} {} (tag {:#x}, status {}, progress {})", i,
                               ack == bell ? "has answered" : "owes the answer", ack,
                               load(line.status), load(line.progress));
    if (ack != bell && report.stuck_cpu < 0 && load(line.ready))
      report.stuck_cpu = static_cast<int>(i);
  }
  if (report.stuck_cpu < 0)
    report.text += "; every CPU worker has answered, the GPU worker does not go on";
  return report;
}

bool WindowRunner::Publish(const GpuLink& link, const WindowPlan& plan, std::string* why) {
  if (link.window->plans.TryPush(plan)) return true;
  // One window is in flight at a time and the ring holds four: the worker broke its counters.
  *why = "the GPU worker's plan ring is full though no window is under way";
  fleet_->RestartGpu(*why);
  return false;
}

void WindowRunner::HandleStall(const GpuLink& link, const WindowPlan& plan) {
  ++stalls_;
  const StallReport report = DescribeStall(link, plan.window);
  const std::string why = fmt::format("no progress for {:.1f} s: {}",
                                      static_cast<double>(config_.watchdog_ns) / 1e9, report.text);
  spdlog::error("stall report: {}", why);
  if (report.stuck_cpu >= 0)
    fleet_->RestartCpu(static_cast<uint32_t>(report.stuck_cpu), why);
  else
    fleet_->RestartGpu(why);
}

RunOutcome WindowRunner::Run(const std::shared_ptr<const GpuLink>& link, WindowPlan* plan,
                             WindowResult* result, std::string* why) {
  plan->window = ++window_;
  plan->generation = link->generation;
  plan->device = 0;
  fleet_->NoteWindow(plan->window);
  // After NoteWindow: a CPU worker that ends now either shows here, or its end voids this window.
  if (!fleet_->cpu_lane_up()) plan->flags |= kCpuLaneDown;
  if (!Publish(*link, *plan, why)) return RunOutcome::kWorkerLost;

  NoteProgress();
  uint64_t moved_ns = NowNs(), signature = ProgressSignature(*link);
  for (;;) {
    const uint64_t now = NowNs();
    if (link->window->results.Pop(result, WaitBudget{config_.spin_ns, now + kLookNs})) {
      NoteProgress();
      if (result->window == plan->window && result->generation == plan->generation &&
          result->n_rows == plan->n_rows) {
        return RunOutcome::kResult;
      }
      *why = fmt::format(
          "the GPU worker answered window {} of generation {} with {} rows instead of window {}, "
          "{}, {}",
          result->window, result->generation, result->n_rows, plan->window, plan->generation,
          plan->n_rows);
      fleet_->RestartGpu(*why);
      return RunOutcome::kWorkerLost;
    }
    if (fleet_->gpu() != link || !fleet_->failure().ok()) {
      *why = fleet_->last_gpu_end();
      return RunOutcome::kWorkerLost;
    }
    if (stop_->load(std::memory_order_relaxed)) return RunOutcome::kStopped;
    if (config_.on_wait) config_.on_wait();
    const uint64_t seen = ProgressSignature(*link);
    if (seen != signature) {
      signature = seen;
      moved_ns = NowNs();
      NoteProgress();
    } else if (NowNs() - moved_ns > config_.watchdog_ns) {
      HandleStall(*link, *plan);
      moved_ns = NowNs();  // the restart gets the same time again
    }
  }
}

}  // namespace lode
