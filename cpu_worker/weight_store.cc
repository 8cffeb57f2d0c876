// See weight_store.h. Placing memory is in page_placement.cc; this file is about content.
#include "cpu_worker/weight_store.h"

#include <xxhash.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu_worker/page_placement.h"
#include "shared/base/fault.h"
#include "shared/base/log.h"
#include "shared/wire/segment_headers.h"

namespace lode {
namespace {

constexpr auto kProgressPeriod = std::chrono::milliseconds(250);
constexpr uint32_t kReadersMax =
    16;  // enough to fill an NVMe queue or to generate synthetic weights

}  // namespace

StatusOr<std::unique_ptr<WeightStore>> WeightStore::Open(const ModelSource& source, Fd arena,
                                                         const WeightStoreOptions& options) {
  std::unique_ptr<WeightStore> store(new WeightStore(source, options));
  LODE_ASSIGN_OR_RETURN(store->layout_, ComputeArenaLayout(source, options.node, options.n_nodes));
  LODE_ASSIGN_OR_RETURN(store->segment_,
                        Segment::Attach(std::move(arena), fmt::format("arena{}", options.node),
                                        store->layout_.bytes, Segment::Access::kReadWrite));
  return store;
}

Status WeightStore::Load(const ProgressFn& progress, const std::atomic<bool>& stop) {
  LODE_RETURN_IF_ERROR(PlaceMemory(progress, stop));
  LODE_FAULT("cpu_worker.after_populate");
  const Status adoptable = CheckArena(*segment_, layout_, source_.identity());
  if (adoptable.ok()) {
    LODE_RETURN_IF_ERROR(ForEveryExpert(
        "verify", progress, stop, [this](uint32_t l, uint32_t e) { return VerifyExpert(l, e); }));
    if (rejected_ > 0)
      spdlog::warn("{} experts of the adopted arena do not match their hash; they are read again",
                   rejected_.load());
  } else {
    if (segment_->As<ArenaHeader>()->magic != 0)
      spdlog::warn("the arena is not adopted, every expert is read again: {}", Message(adoptable));
    InitArena(*segment_, layout_, source_.identity());
  }
  LODE_RETURN_IF_ERROR(ForEveryExpert("read experts", progress, stop,
                                      [this](uint32_t l, uint32_t e) { return ReadExpert(l, e); }));
  facts_["adopted_experts"] = std::to_string(adopted_.load());
  facts_["rejected_experts"] = std::to_string(rejected_.load());
  return OkStatus();
}

Status WeightStore::PlaceMemory(const ProgressFn& progress, const std::atomic<bool>& stop) {
  PlacementOptions options;
  options.numa_nodes = options_.numa_nodes;
  options.collapse = options_.huge_pages > 0;  // also when the reserved pool had too few
  options.lock = options_.lock_memory;
  LODE_ASSIGN_OR_RETURN(
      const PlacementReport report,
      PlacePages(
          segment_->fd(), segment_->data(), segment_->size(), options,
          [&](uint64_t done, uint64_t total) { progress("populate", done, total); }, stop));
  for (const std::string& warning : report.warnings)
    spdlog::warn("arena {}: {}", options_.node, warning);
  facts_["pages"] = report.pages;
  facts_["numa_verified"] = report.numa;
  facts_["locked"] = report.locked ? "yes" : "no";
  return OkStatus();
}

Status WeightStore::ForEveryExpert(const std::string& phase, const ProgressFn& progress,
                                   const std::atomic<bool>& stop,
                                   const std::function<Status(uint32_t, uint32_t)>& f) {
  const uint64_t total = layout_.layers.size() * layout_.experts;
  std::atomic<uint64_t> next{0}, done_bytes{0};
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::condition_variable finished;
  uint32_t running =
      std::min({std::max(1u, options_.reader_threads), kReadersMax, static_cast<uint32_t>(total)});
  Status first_error;
  std::vector<std::thread> readers;
  const auto body = [&] {
    Status status;
    while (status.ok() && !failed.load(std::memory_order_relaxed) &&
           !stop.load(std::memory_order_relaxed)) {
      const uint64_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= total) break;
      const uint32_t layer = static_cast<uint32_t>(i / layout_.experts);
      status = f(layer, static_cast<uint32_t>(i % layout_.experts));
      done_bytes.fetch_add(layout_.layers[layer].stride, std::memory_order_relaxed);
    }
    std::lock_guard<std::mutex> lock(mutex);
    if (!status.ok() && first_error.ok()) first_error = status;
    if (!status.ok()) failed.store(true, std::memory_order_relaxed);
    if (--running == 0) finished.notify_all();
  };
  const uint32_t count = running;
  for (uint32_t i = 0; i < count; ++i) readers.emplace_back(body);
  {
    std::unique_lock<std::mutex> lock(mutex);
    // Bounded by the readers' own I/O; every wake reports, so that the daemon sees a slow disk as
    // progress and a dead one as none.
    while (!finished.wait_for(lock, kProgressPeriod, [&] { return running == 0; })) {
      lock.unlock();
      progress(phase, done_bytes.load(std::memory_order_relaxed), layout_.bytes);
      lock.lock();
    }
  }
  for (std::thread& t : readers) t.join();
  LODE_RETURN_IF_ERROR(first_error);
  if (stop.load(std::memory_order_relaxed))
    return Error(StatusCode::kCancelled, "asked to end while the arena was in phase '{}'", phase);
  progress(phase, layout_.bytes, layout_.bytes);
  return OkStatus();
}

Status WeightStore::VerifyExpert(uint32_t layer, uint32_t expert) {
  ArenaExpert& entry = Entry(layer, expert);
  // Acquire: pairs with the release in ReadExpert of the process that wrote it. (That process is
  // gone: its exit was seen.)
  if (entry.complete.load(std::memory_order_acquire) != 1) return OkStatus();
  if (HashOf(layer, expert) == entry.hash) {
    adopted_.fetch_add(1, std::memory_order_relaxed);
    return OkStatus();
  }
  spdlog::warn("arena {}: layer {} expert {} does not match its hash", options_.node, layer,
               expert);
  entry.complete.store(0, std::memory_order_relaxed);  // set again with release once it is read
  segment_->As<ArenaHeader>()->experts_complete.fetch_sub(1, std::memory_order_relaxed);
  rejected_.fetch_add(1, std::memory_order_relaxed);
  return OkStatus();
}

Status WeightStore::ReadExpert(uint32_t layer, uint32_t expert) {
  ArenaExpert& entry = Entry(layer, expert);
  if (entry.complete.load(std::memory_order_relaxed) == 1)
    return OkStatus();  // adopted: this process verified it
  LODE_FAULT("cpu_worker.read_expert");
  LODE_ASSIGN_OR_RETURN(const ExpertTensors tensors, FindExperts(source_, layer));
  const LayerExperts& l = layout_.layers[layer];
  uint8_t* out = segment_->data() + layout_.offset(layer, expert);
  const RowRange width = layout_.width_rows(), hidden = layout_.hidden_rows();
  // Paddings count in the hash: zero, also when a rejected expert is read again.
  const uint64_t gate_bytes = uint64_t{width.size()} * l.gate_row_bytes,
                 up_bytes = uint64_t{width.size()} * l.up_row_bytes;
  const uint64_t down_bytes = uint64_t{hidden.size()} * l.down_row_bytes;
  std::memset(out + gate_bytes, 0, l.up_offset - gate_bytes);
  std::memset(out + l.up_offset + up_bytes, 0, l.down_offset - l.up_offset - up_bytes);
  std::memset(out + l.down_offset + down_bytes, 0, l.stride - l.down_offset - down_bytes);
  if (width.size() > 0) {
    LODE_RETURN_IF_ERROR(source_.ReadRows(
        *tensors.gate, tensors.gate_row(expert, width.begin, layout_.width), width.size(), out));
    LODE_RETURN_IF_ERROR(source_.ReadRows(*tensors.up,
                                          tensors.up_row(expert, width.begin, layout_.width),
                                          width.size(), out + l.up_offset));
  }
  if (hidden.size() > 0) {
    LODE_RETURN_IF_ERROR(source_.ReadRows(*tensors.down,
                                          uint64_t{expert} * layout_.hidden + hidden.begin,
                                          hidden.size(), out + l.down_offset));
  }
  entry.hash = HashOf(layer, expert);
  LODE_FAULT("cpu_worker.before_complete_flag");
  entry.complete.store(
      1,
      std::memory_order_release);  // pairs with the acquires in VerifyExpert and in the GPU worker
  segment_->As<ArenaHeader>()->experts_complete.fetch_add(
      1, std::memory_order_relaxed);  // progress only
  return OkStatus();
}

ArenaExpert& WeightStore::Entry(uint32_t layer, uint32_t expert) const {
  return ArenaExperts(segment_->As<ArenaHeader>())[size_t{layer} * layout_.experts + expert];
}
uint64_t WeightStore::HashOf(uint32_t layer, uint32_t expert) const {
  return XXH3_64bits(segment_->data() + layout_.offset(layer, expert),
                     layout_.layers[layer].stride);
}

}  // namespace lode
