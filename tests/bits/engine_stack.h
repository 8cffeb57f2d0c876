// The daemon's engine as loded starts it (supervisor, scheduler, real worker processes) inside a
// test process, with a private folder; without the client API. Answers requests, alone or in
// company. Test's main thread.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "daemon/setup.h"
#include "tests/bits/answers.h"

namespace lode {

struct EngineStackOptions {
  uint32_t cpu_workers = 1;
  uint32_t threads = 2;  // of every pool; tunables may use fewer
};
// For measurements: two threads where the cpu device shares the cores with the CPU workers, all cores
// but two with a card.
uint32_t MeasuredThreads();

class EngineStack {
 public:
  // Ready when it returns. `source` and `tokenizer` outlive it.
  static StatusOr<std::unique_ptr<EngineStack>> Start(const ModelSource& source,
                                                      const Tokenizer& tokenizer,
                                                      const EngineStackOptions& options);
  ~EngineStack();

  // From the next window on, every process uses its best instruction set (a stack starts with
  // scalar).
  Status UseBestIsa(uint32_t cpu_workers);

  Scheduler& scheduler() { return *scheduler_; }
  Supervisor& supervisor() { return *supervisor_; }

  // The answers to `requests`, one after the other. `neighbours` run meanwhile: they have produced
  // a token before the first request is submitted and are cancelled after the last. Adds the
  // requests' lookups to lookups[kLanes].
  StatusOr<BitsAnswer> Answer(const std::vector<Request>& requests,
                              const std::vector<Request>& neighbours, uint64_t* lookups);

 private:
  EngineStack() = default;
  std::string folder_;
  std::unique_ptr<Supervisor> supervisor_;
  std::unique_ptr<Scheduler> scheduler_;
};

}  // namespace lode
