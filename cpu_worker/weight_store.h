// The arena of one CPU worker: this node's rows of every expert in GGUF block bytes, in a memfd
// that outlives the process. Filled from the model once; a later process that gets the same memfd
// adopts what is there after checking every byte by hash, and reads only what fails. Immutable
// while it serves: peers and the GPU worker read it at any time. Order of placing memory: node
// policy, populate, huge pages, verify, lock; each step works only after the one before it. Thread:
// Load runs on the calling thread and starts its own readers; afterwards everything is const.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "shared/base/status.h"
#include "shared/model/model_source.h"
#include "shared/shm/segment.h"
#include "shared/wire/arena_layout.h"

namespace lode {

struct WeightStoreOptions {
  uint32_t node = 0, n_nodes = 1;    // split
  std::vector<uint32_t> numa_nodes;  // where the pages belong; empty: no policy
  uint32_t huge_pages = 1;           // LoadPlan::huge_pages
  bool lock_memory = false;
  uint32_t reader_threads = 1;
};

class WeightStore {
 public:
  using ProgressFn =
      std::function<void(const std::string& phase, uint64_t done_bytes, uint64_t total_bytes)>;

  // Maps the arena. `source` must outlive the store. Fails when the memfd is too small for the
  // layout or not sealed.
  static StatusOr<std::unique_ptr<WeightStore>> Open(const ModelSource& source, Fd arena,
                                                     const WeightStoreOptions& options);

  // Places memory, adopts or reads every expert. Returns Cancelled soon after `stop` becomes true;
  // what is complete by then stays complete for the next process. `progress` is called from this
  // thread, a few times a second.
  Status Load(const ProgressFn& progress, const std::atomic<bool>& stop);

  const ArenaLayout& layout() const { return layout_; }
  const uint8_t* data() const { return segment_->data(); }
  uint64_t bytes() const { return layout_.bytes; }
  // After Load: for the log and the Ready message.
  uint32_t adopted_experts() const { return adopted_; }  // taken over as they were
  uint32_t rejected_experts() const {
    return rejected_;
  }  // complete by their flag, but the hash did not match: read again
  const std::map<std::string, std::string>& facts() const { return facts_; }

 private:
  WeightStore(const ModelSource& source, const WeightStoreOptions& options)
      : source_(source), options_(options) {}

  Status PlaceMemory(const ProgressFn& progress, const std::atomic<bool>& stop);
  // Runs f(layer, expert) for every expert on the reader threads, with progress; the first error
  // ends it.
  Status ForEveryExpert(const std::string& phase, const ProgressFn& progress,
                        const std::atomic<bool>& stop,
                        const std::function<Status(uint32_t layer, uint32_t expert)>& f);
  Status VerifyExpert(uint32_t layer, uint32_t expert);
  Status ReadExpert(uint32_t layer, uint32_t expert);
  ArenaExpert& Entry(uint32_t layer, uint32_t expert) const;
  uint64_t HashOf(uint32_t layer, uint32_t expert) const;

  const ModelSource& source_;
  const WeightStoreOptions options_;
  ArenaLayout layout_;
  std::unique_ptr<Segment> segment_;
  std::atomic<uint32_t> adopted_{0}, rejected_{0};
  std::map<std::string, std::string> facts_;
};

}  // namespace lode
