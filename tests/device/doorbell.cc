// What the doorbell costs, with the product's own kernels: a graph of 48 layers of plan and wait in
// which no layer rings (all experts resident), against the same graph in which every layer rings
// and another process answers at once without computing. Between plan and wait: nothing, or a dozen
// short launches as a layer has them (some 9 us); nothing, or staged pulls that fill the link (half of the
// experts are pulled, the others are resident or on the CPU). Then the stop test: this process
// stops itself right behind the launch; the window must reach its end in shared memory all the
// same, since no host thread takes part in it.
//
//   doorbell [rows]      on a machine with a card; prints "doorbell: PASS" or what failed
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <vector>

#include "gpu_worker/cuda_api.h"
#include "gpu_worker/cuda_lane_kernels.h"
#include "kernels/cuda/runtime.h"
#include "shared/shm/segment.h"
#include "shared/shm/wait_word.h"
#include "shared/wire/exchange_layout.h"

namespace lode {
namespace {

constexpr uint32_t kLayers = 48, kExperts = 512, kUsed = 10, kHidden = 2560, kWidth = 640;
constexpr uint32_t kRepeats = 41, kWarmups = 5;
// Bytes of an expert: pulls of 15 us and of 140 us at 50 GB/s and one row; 0: no pulls.
constexpr uint32_t kPullBytes[] = {0, 153'600, 1'382'400};
constexpr cuda::CopyShape kCopy = {32, 256, 4};
constexpr uint32_t kWork[] = {0, 12};      // launches between plan and wait
constexpr uint64_t kStopNs = 300'000'000;  // how long the process stays stopped

// Between the two processes, beside the exchange.
struct Shared {
  std::atomic<uint32_t> stop, stopped_ok;
  uint64_t done;
  uint64_t not_finite;
  uint64_t expect;  // value of `done` that ends the stop test; 0: no test runs
  cuda::LaneReport report;
};

// One kind of window.
struct Kind {
  bool ring;
  uint32_t pull_bytes, work;
};

class Doorbell {
 public:
  Status Start(uint32_t n_rows) {
    n_rows_ = n_rows;
    const ExchangeShape shape = {kHidden, kWidth, kUsed, 1};
    layout_ = ExchangeLayout{shape};
    LODE_ASSIGN_OR_RETURN(exchange_, Segment::Create("exchange", layout_.bytes()));
    LODE_ASSIGN_OR_RETURN(beside_, Segment::Create("beside", sizeof(Shared)));
    child_ = fork();  // before any CUDA call
    if (child_ == 0) {
      Watch();
      _exit(0);
    }
    LODE_ASSIGN_OR_RETURN(card_, cuda::OpenCard(0));
    std::printf("doorbell on %s, %u rows\n", card_.name.c_str(), n_rows_);
    LODE_RETURN_IF_ERROR(
        cuda::RegisterHost(exchange_->data(), exchange_->size(), false, "exchange"));
    LODE_RETURN_IF_ERROR(cuda::RegisterHost(beside_->data(), beside_->size(), false, "results"));
    LODE_ASSIGN_OR_RETURN(stream_, cuda::OpenStream());
    LODE_ASSIGN_OR_RETURN(copies_, cuda::OpenUrgentStream());
    const size_t pulled = size_t{kWindowRowsMax} * kUsed * kPullBytes[2];
    LODE_ASSIGN_OR_RETURN(arena_, Segment::Create("arena", pulled));
    std::memset(arena_->data(), 1, pulled);
    LODE_RETURN_IF_ERROR(cuda::RegisterHost(arena_->data(), pulled, false, "arena"));
    LODE_ASSIGN_OR_RETURN(c_.staging.base, Device<uint8_t>(pulled));
    c_.staging.experts = kWindowRowsMax * kUsed;
    return Fill();
  }
  ~Doorbell() {
    if (child_ <= 0) return;
    shared()->stop.store(1);
    waitpid(child_, nullptr, 0);
  }

  // Median and spread of one graph in us per layer.
  StatusOr<double> Measure(const Kind& kind, double* spread) {
    SetExperts(kind.ring, kind.pull_bytes);
    LODE_ASSIGN_OR_RETURN(auto graph, Capture(kind));
    std::vector<double> us;
    const uint32_t repeats = kRepeats / (kind.pull_bytes > 0 ? 4 : 1);
    for (uint32_t i = 0; i < kWarmups + repeats; ++i) {
      cuda::StartTimer(timer_, stream_);
      LODE_RETURN_IF_ERROR(Launch(*graph));
      const double ms = cuda::StopTimer(timer_, stream_);
      if (shared()->report.fault.status != 0)
        return Internal("the window failed: detail {}", shared()->report.fault.error.detail);
      if (i >= kWarmups) us.push_back(1e3 * ms / kLayers);
    }
    std::sort(us.begin(), us.end());
    *spread = us[us.size() * 3 / 4] - us[us.size() / 4];
    return us[us.size() / 2];
  }

  // Stops this process right behind the launch; the other one sees the end and wakes us.
  Status StopTest() {
    SetExperts(true, 0);
    LODE_ASSIGN_OR_RETURN(auto graph, Capture({true, 0, 0}));
    shared()->expect = window_->sequence + 1;
    LODE_RETURN_IF_ERROR(Launch(*graph));
    kill(getpid(), SIGSTOP);
    cuda::Synchronize(stream_);
    if (shared()->stopped_ok.load() != 1)
      return Internal("the window did not end while the host was stopped");
    return OkStatus();
  }

 private:
  Shared* shared() const { return beside_->As<Shared>(); }

  // The answering process: acknowledges every tag as soon as it sees it, computes nothing.
  void Watch() {
    Shared* s = shared();
    std::atomic<uint32_t>& stop = s->stop;
    ExchangeHeader* x = exchange_->As<ExchangeHeader>();
    const pid_t parent = getppid();
    uint64_t answered = 0, stopped_at = 0;
    while (stop.load(std::memory_order_relaxed) == 0 && getppid() == parent) {
      const uint64_t tag = x->bell.value.load(std::memory_order_acquire);
      if (tag != answered) {
        answered = tag;
        x->workers[0].progress.fetch_add(1, std::memory_order_relaxed);
        x->workers[0].ack.value.store(tag, std::memory_order_release);
      }
      const uint64_t expect = std::atomic_ref<uint64_t>(s->expect).load();
      if (expect == 0) continue;
      if (stopped_at == 0) stopped_at = NowNs();
      if (NowNs() - stopped_at < kStopNs) continue;
      const bool over = std::atomic_ref<uint64_t>(s->done).load() == expect;
      s->stopped_ok.store(over ? 1 : 2);
      std::atomic_ref<uint64_t>(s->expect).store(0);
      stopped_at = 0;
      kill(parent, SIGCONT);
    }
  }

  template <class T>
  StatusOr<T*> Device(size_t count) {
    LODE_ASSIGN_OR_RETURN(void* memory, cuda::AllocateDevice(count * sizeof(T)));
    cuda::ZeroAsync(memory, count * sizeof(T), stream_);
    return static_cast<T*>(memory);
  }

  Status Fill() {
    timer_ = cuda::NewTimer();
    LODE_ASSIGN_OR_RETURN(void* window, cuda::AllocateZeroedPinned(sizeof(cuda::LaneWindow), "w"));
    window_ = static_cast<cuda::LaneWindow*>(window);
    window_->wait_ns = 2'000'000'000;
    window_->wait_max_ns = 4'000'000'000;
    window_->generation = 1;
    LODE_ASSIGN_OR_RETURN(device_window_, Device<cuda::LaneWindow>(1));
    c_.shape = {kUsed, kHidden, kWidth, 1, kExperts, kLayers};
    LODE_ASSIGN_OR_RETURN(c_.block, Device<cuda::WindowBlock>(1));
    c_.window = device_window_;
    LODE_ASSIGN_OR_RETURN(c_.report, Device<cuda::LaneReport>(1));
    LODE_ASSIGN_OR_RETURN(c_.places, Device<cuda::LayerPlace>(kLayers));
    LODE_ASSIGN_OR_RETURN(residency_, Device<uint16_t>(size_t{kLayers} * kExperts));
    c_.residency = residency_;
    LODE_ASSIGN_OR_RETURN(c_.answered, Device<uint64_t>(1));
    LODE_ASSIGN_OR_RETURN(stamps_, Device<uint64_t>(1));
    LODE_ASSIGN_OR_RETURN(end_arrived_, Device<uint32_t>(1));
    for (cuda::LaneParity& p : c_.parity) {
      LODE_ASSIGN_OR_RETURN(p.lists.list, Device<cuda::ExpertList>(1));
      LODE_ASSIGN_OR_RETURN(p.lists.staged, Device<cuda::ExpertList>(1));
      LODE_ASSIGN_OR_RETURN(p.lists.pieces, Device<cuda::StagedPieces>(1));
      LODE_ASSIGN_OR_RETURN(p.table, Device<const float*>(kJobExpertsMax));
      LODE_ASSIGN_OR_RETURN(p.results, Device<float>(size_t{8} * kUsed * kHidden));
      LODE_ASSIGN_OR_RETURN(p.tag, Device<uint64_t>(1));
    }
    c_.exchange = exchange_->data();
    c_.bell = offsetof(ExchangeHeader, bell);
    c_.abort_window = offsetof(ExchangeHeader, abort_window);
    c_.workers = offsetof(ExchangeHeader, workers);
    c_.worker_stride = sizeof(WorkerLine);
    c_.line_ack = offsetof(WorkerLine, ack);
    c_.line_status = offsetof(WorkerLine, status);
    c_.line_error_row = offsetof(WorkerLine, error_row);
    c_.line_progress = offsetof(WorkerLine, progress);
    for (uint32_t parity = 0; parity < 2; ++parity) {
      c_.jobs[parity] = offsetof(ExchangeHeader, jobs) + parity * sizeof(ExpertJob);
      c_.acts[parity] = layout_.acts_offset(parity);
      c_.results[parity] = layout_.result_offset(parity);
    }
    c_.act_row_bytes = layout_.act_row_bytes();
    // Distinct experts for every row, so that the job is as large as it gets.
    LODE_ASSIGN_OR_RETURN(routed_, Device<RoutedRow>(kWindowRowsMax));
    std::vector<RoutedRow> rows(kWindowRowsMax);
    for (uint32_t r = 0; r < kWindowRowsMax; ++r) {
      for (uint32_t o = 0; o < kUsed; ++o) rows[r].ids[o] = static_cast<uint16_t>(r * kUsed + o);
    }
    cuda::CopyAsync(routed_, rows.data(), rows.size() * sizeof(RoutedRow), stream_);
    act_bytes_ = static_cast<uint32_t>(ActLayout{kHidden, 64}.bytes());
    LODE_ASSIGN_OR_RETURN(acts_, Device<uint8_t>(size_t{act_bytes_} * kWindowRowsMax));
    const cuda::WindowBlock block = {{}, cuda::kAllFinite};
    cuda::CopyAsync(c_.block, &block, sizeof(block), stream_);
    cuda::Synchronize(stream_);
    return OkStatus();
  }

  // Per row the first half of the experts goes to the CPU when the layer rings and is resident
  // otherwise; the second half is pulled, or without pulls goes the way of the first.
  void SetExperts(bool ring, uint32_t pull_bytes) {
    std::vector<uint16_t> table(size_t{kLayers} * kExperts, ring ? kNotResident : 0);
    if (pull_bytes > 0) {
      for (size_t i = 0; i < table.size(); ++i) {
        if (i % kExperts % kUsed >= kUsed / 2) table[i] = kNotResident;
      }
    }
    cuda::CopyAsync(residency_, table.data(), table.size() * sizeof(uint16_t), stream_);
    window_->split = {};
    if (pull_bytes > 0) window_->split.share_256 = ring ? kShareOne / 2 : kShareOne;
    cuda::LayerPlace place = {};
    place.nodes[0] = {arena_->data(), pull_bytes, pull_bytes / 3, pull_bytes / 3 * 2, 0,
                      kWidth,         0,          kHidden};
    const std::vector<cuda::LayerPlace> places(kLayers, place);
    cuda::CopyAsync(const_cast<cuda::LayerPlace*>(c_.places), places.data(),
                    places.size() * sizeof(cuda::LayerPlace), stream_);
    c_.staging.piece_bytes = pull_bytes;
    cuda::Synchronize(stream_);
  }

  // As CudaLanes records a layer: strict order where a branch splits off or comes back.
  void EnqueueLayer(const Kind& kind, uint32_t layer) {
    const cuda::ActForm form = {acts_, act_bytes_, act_bytes_,
                                static_cast<uint32_t>(layout_.form_offset(2))};
    cuda::LaunchPlan(stream_, c_, layer, n_rows_, cuda::IdsOf(routed_), &form, 1);
    const bool pulls = kind.pull_bytes > 0;
    const bool overlap = cuda::launches_overlap;
    if (pulls) {
      const auto copy = [&](cuda::StagedPart part, uint32_t bytes) {
        cuda::LaunchStagedCopy(copies_, c_, layer, part, bytes, kCopy);
      };
      cuda::Follow(stream_, copies_);
      cuda::SetLaunchOverlap(false);
      copy(cuda::StagedPart::kGateUp, kind.pull_bytes / 3 * 2);
      cuda::SetLaunchOverlap(overlap);
      copy(cuda::StagedPart::kDown, kind.pull_bytes / 3);
    }
    for (uint32_t i = 0; i < kind.work; ++i) cuda::LaunchStamp(stream_, stamps_, 0);
    if (pulls) cuda::Follow(copies_, stream_);
    cuda::SetLaunchOverlap(overlap && !pulls);
    cuda::LaunchWait(stream_, c_, layer);
    cuda::SetLaunchOverlap(overlap);
  }

  StatusOr<std::unique_ptr<cuda::Graph>> Capture(const Kind& kind) {
    return cuda::Graph::Capture(stream_, [=, this] {
      cuda::CopyAsync(device_window_, window_, sizeof(cuda::LaneWindow), stream_);
      cuda::LaunchBegin(stream_, c_);
      for (uint32_t layer = 0; layer < kLayers; ++layer) EnqueueLayer(kind, layer);
      cuda::EndCopies end = {};
      end.block = c_.block;
      end.report = c_.report;
      end.host_report = &shared()->report;
      end.window = device_window_;
      end.arrived = end_arrived_;
      end.host_not_finite = &shared()->not_finite;
      end.done = &shared()->done;
      cuda::LaunchEnd(stream_, end, 0);
    });
  }

  Status Launch(cuda::Graph& graph) {
    ++window_->sequence;
    ++window_->window;
    return graph.Launch(stream_);
  }

  uint32_t n_rows_ = 1;
  ExchangeLayout layout_ = {};
  std::unique_ptr<Segment> exchange_, beside_, arena_;
  pid_t child_ = -1;
  cuda::CardFacts card_;
  CUstream_st *stream_ = nullptr, *copies_ = nullptr;
  cuda::Timer* timer_ = nullptr;
  cuda::LaneConstants c_ = {};
  cuda::LaneWindow *window_ = nullptr, *device_window_ = nullptr;
  uint16_t* residency_ = nullptr;
  RoutedRow* routed_ = nullptr;
  uint8_t* acts_ = nullptr;
  uint32_t act_bytes_ = 0;
  uint32_t* end_arrived_ = nullptr;
  uint64_t* stamps_ = nullptr;
};

Status Main(uint32_t n_rows) {
  Doorbell bench;
  LODE_RETURN_IF_ERROR(bench.Start(n_rows));
  for (const uint32_t work : kWork) {
    for (const uint32_t pull_bytes : kPullBytes) {
      double spread = 0;
      LODE_ASSIGN_OR_RETURN(const double quiet,
                            bench.Measure({false, pull_bytes, work}, &spread));
      std::printf(
          "%u rows, %u layers, %2u launches and pulls of %4.1f MB between: %.2f us "
          "(quartiles %.2f) without a bell",
          n_rows, kLayers, work, n_rows * kUsed / 2 * pull_bytes / 1e6, quiet, spread);
      LODE_ASSIGN_OR_RETURN(const double ring,
                            bench.Measure({true, pull_bytes, work}, &spread));
      std::printf("; with one %.2f (%.2f): %.2f\n", ring, spread, ring - quiet);
    }
  }
  LODE_RETURN_IF_ERROR(bench.StopTest());
  std::printf("stopped host: the window reached its end in shared memory\n");
  return OkStatus();
}

}  // namespace
}  // namespace lode

int main(int argc, char** argv) {
  const uint32_t rows = argc > 1 ? static_cast<uint32_t>(std::strtoul(argv[1], nullptr, 10)) : 1;
  const lode::Status status = lode::Main(rows == 0 || rows > lode::kWindowRowsMax ? 1 : rows);
  std::printf("doorbell: %s\n", status.ok() ? "PASS" : lode::Message(status).c_str());
  return status.ok() ? 0 : 1;
}
