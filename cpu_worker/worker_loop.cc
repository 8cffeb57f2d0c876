// See worker_loop.h.
#include "cpu_worker/worker_loop.h"

#include "cpu_worker/job_check.h"
#include "shared/base/fault.h"
#include "shared/base/log.h"

namespace lode {
namespace {

// While a GPU rings the bell we poll; every this long we look whether the window is still open. Far
// below a layer's time it would be waste, far above it the worker would spin into the pause between
// windows.
constexpr uint64_t kPollSliceNs = 200'000;
// A window that rings nothing for this long belongs to a GPU worker that hangs or died: look every
// millisecond instead of burning the cores that its successor needs to load.
constexpr uint64_t kQuietNs = 100'000'000;
constexpr uint64_t kQuietPollNs = 1'000'000;
constexpr double kNsPerSecond = 1e9;

ExpertRunnerOptions RunnerOptions(const WorkerLoopOptions& options, const std::atomic<bool>& stop) {
  ExpertRunnerOptions result = options.runner;
  result.me = options.me;
  result.stop = &stop;
  return result;
}

}  // namespace

WorkerLoop::WorkerLoop(const ArenaLayout& layout, const uint8_t* arena, uint8_t* exchange,
                       NodePool* pool, const WorkerLoopOptions& options,
                       const std::atomic<bool>& stop)
    : layout_(layout),
      header_(reinterpret_cast<ExchangeHeader*>(exchange)),
      pool_(pool),
      options_(options),
      stop_(stop),
      line_(header_->workers[options.me]),
      runner_(layout, arena, exchange, pool, RunnerOptions(options, stop)) {
  n_tables_ = static_cast<uint32_t>(IsaChoices(&tables_));
}

void WorkerLoop::Announce() {
  // A predecessor that was killed left jobs unanswered; their windows were aborted.
  answered_ = header_->bell.value.load(
      std::memory_order_acquire);  // pairs with the GPU worker's release of the bell
  line_.generation.store(options_.generation, std::memory_order_relaxed);
  line_.progress.fetch_add(1, std::memory_order_relaxed);
  line_.ready.store(
      1, std::memory_order_release);  // pairs with the acquire of whoever starts to send jobs
}

void WorkerLoop::Run() {
  while (!stop_.load(std::memory_order_relaxed)) {
    if (PollBell()) continue;
    const uint64_t epoch = header_->window_epoch.value.load(
        std::memory_order_acquire);  // pairs with the GPU worker's Publish
    if ((epoch & 1) != 0) {
      pool_->SetAwake(true);
      ServeOpenWindow(epoch);
      pool_->SetAwake(false);
    } else {
      WaitChange(header_->window_epoch, epoch, {0, NowNs() + kWaitSliceNs});
    }
  }
  line_.ready.store(0, std::memory_order_relaxed);
}

void WorkerLoop::ServeOpenWindow(uint64_t epoch) {
  uint64_t last_ring = NowNs();
  while (!stop_.load(std::memory_order_relaxed)) {
    const uint64_t now = NowNs();
    if (options_.bell_never_wakes) {
      const bool quiet = now - last_ring > kQuietNs;
      WaitChange(header_->bell, answered_,
                 {quiet ? 0 : kPollSliceNs, now + (quiet ? kQuietPollNs : kPollSliceNs)});
    } else {
      // Asleep at the end of a window we notice it one slice late, which costs nothing: the next
      // job's ring wakes us as well.
      WaitChange(header_->bell, answered_, {options_.spin_ns, now + kWaitSliceNs});
    }
    if (PollBell()) {
      last_ring = NowNs();
      continue;
    }
    if (header_->window_epoch.value.load(std::memory_order_relaxed) != epoch)
      return;  // no data hangs on it
  }
}

bool WorkerLoop::PollBell() {
  // Acquire: pairs with the GPU worker's release of the bell; the job and its activations are
  // complete.
  const uint64_t tag = header_->bell.value.load(std::memory_order_acquire);
  if (tag == answered_) return false;
  answered_ = tag;
  Answer(tag);
  return true;
}

void WorkerLoop::Answer(uint64_t tag) {
  LODE_FAULT("cpu_worker.after_bell");
  const uint64_t start = NowNs();
  if (options_.runner.trace != nullptr) options_.runner.trace->bell_ns = start;
  const ExpertJob& shared =
      header_->jobs[((tag & 0xffff) - 1) & 1];  // by layer parity: in range for any tag
  const char* wrong =
      CopyJob(shared, &job_)
          ? CheckJob(job_, tag, {&layout_, options_.runner.shape, options_.me, tables_, n_tables_})
          : "its number of experts is out of range";
  if (wrong != nullptr) {
    // The slot was written anew while we read: the answer to this tag is wanted by nobody, the next
    // poll takes the newer job.
    if (header_->bell.value.load(std::memory_order_acquire) != tag) return;
    spdlog::error("job {:#x} is refused: {}", tag, wrong);
    Acknowledge(tag, JobStatus::kBadJob, 0);
    return;
  }
  ExpertRunner::Outcome outcome;
  if (job_.n_experts > 0) outcome = runner_.Run(job_, *tables_[job_.isa[options_.me]].table);
  line_.bytes.fetch_add(outcome.bytes, std::memory_order_relaxed);      // statistics
  line_.busy_ns.fetch_add(NowNs() - start, std::memory_order_relaxed);  // statistics
  LODE_FAULT("cpu_worker.before_ack");
  Acknowledge(tag, outcome.status, outcome.error_row);
  LODE_FAULT("cpu_worker.after_ack");
}

void WorkerLoop::Acknowledge(uint64_t tag, JobStatus status, uint32_t error_row) {
  jobs_by_status_[static_cast<uint32_t>(status)].fetch_add(1, std::memory_order_relaxed);
  line_.status.store(static_cast<uint32_t>(status),
                     std::memory_order_relaxed);                // published by the ack
  line_.error_row.store(error_row, std::memory_order_relaxed);  // likewise
  line_.progress.fetch_add(1, std::memory_order_relaxed);
  Publish(line_.ack, tag);  // release: pairs with the GPU worker's acquire; results, status and
                            // error_row are complete
}

std::map<std::string, double> WorkerLoop::Statistics() const {
  const auto jobs = [this](JobStatus s) {
    return static_cast<double>(
        jobs_by_status_[static_cast<uint32_t>(s)].load(std::memory_order_relaxed));
  };
  return {{"jobs_ok", jobs(JobStatus::kOk)},
          {"jobs_not_finite", jobs(JobStatus::kNotFinite)},
          {"jobs_peer_timeout", jobs(JobStatus::kPeerTimeout)},
          {"jobs_bad", jobs(JobStatus::kBadJob)},
          {"jobs_aborted", jobs(JobStatus::kAborted)},
          {"busy_seconds",
           static_cast<double>(line_.busy_ns.load(std::memory_order_relaxed)) / kNsPerSecond},
          {"weight_bytes", static_cast<double>(line_.bytes.load(std::memory_order_relaxed))},
          {"threads", static_cast<double>(pool_->threads())}};
}

}  // namespace lode
