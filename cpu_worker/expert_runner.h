// One layer's CPU lane on one node: the routed experts of a job, the rows of their matrices that
// this worker owns, for every row of the window. Step 7 of the life of a token.
//
//   1. gate and up, own rows: g = W_gate x, u = W_up x, h = silu(g) * u in fp32 -> hidden exchange,
//   own part; flag per expert
//   2. per (row, expert): wait for the other workers' parts, quantise the whole hidden vector again
//   for the down format
//   3. down, own rows: y = W_down h -> result vectors, own part
//
// Every number has one owner and one order of operations, so neither workers nor threads nor chunk
// borders can change a bit. Bytes: every weight byte of the job is read once (rows of one expert
// share a decode); at 40-80 GB/s of a node this bounds it. Thread: the worker loop's; fans out
// through the NodePool. Memory is allocated at construction only.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#include "cpu_worker/job_chunks.h"
#include "cpu_worker/lane_trace.h"
#include "kernels/kernel_table.h"
#include "shared/pool/node_pool.h"
#include "shared/wire/arena_layout.h"
#include "shared/wire/exchange_layout.h"

namespace lode {

struct ExpertRunnerOptions {
  ExchangeShape shape =
      {};  // as computed from the model; the segment's own copy was compared with it on attach
  uint32_t me = 0;  // worker index
  // Bounded wait for a peer's hidden vectors: without progress of that peer, and in all. Shorter
  // than the GPU worker's own wait for us, so that the first report names the worker that is really
  // stuck.
  uint64_t wait_ns = 150'000'000;
  uint64_t wait_max_ns = 375'000'000;
  const std::atomic<bool>* stop = nullptr;  // ends waits at once when it becomes true
  LaneTrace* trace = nullptr;               // benchmarks: filled per job, cleared by its owner
  ChunkRule chunks = {};
  bool flow = true, prefetch_first = true;
  uint32_t progress_every = 8;
  const KernelTable* table = nullptr;  // EXPERIMENT
};

class ExpertRunner {
 public:
  struct Outcome {
    JobStatus status = JobStatus::kOk;
    uint32_t error_row = 0;  // see JobStatus
    uint64_t bytes = 0;      // weight bytes read
  };

  // `arena`: data of this node's complete arena. `exchange`: the checked exchange segment. All
  // outlive the runner.
  ExpertRunner(const ArenaLayout& layout, const uint8_t* arena, uint8_t* exchange, NodePool* pool,
               const ExpertRunnerOptions& options);

  // `job` has passed CheckJob; `table` is the kernel table it names for this worker.
  Outcome Run(const ExpertJob& job, const KernelTable& table);

 private:
  // A hidden vector of the job: expert entry, row, and place in the exchange.
  struct Vector {
    uint16_t entry, row, index;
  };

  void CollectVectors(const ExpertJob& job);
  void GateUp(const ExpertJob& job, const KernelTable& table);
  // Where the thread reads next, or null; claims that chunk.
  using NextRowFn = std::function<const uint8_t*()>;
  void GateUpChunk(const ExpertJob& job, const KernelTable& table, uint32_t entry, RowRange rows,
                   uint32_t thread, const NextRowFn& next_row);
  void Requantise(const ExpertJob& job, const KernelTable& table);
  void RequantiseVector(const ExpertJob& job, const KernelTable& table, uint32_t v);
  void Down(const ExpertJob& job, const KernelTable& table);
  void DownChunk(const ExpertJob& job, const KernelTable& table, uint32_t entry, RowRange rows,
                 const NextRowFn& next_row);

  void Flow(const ExpertJob& job, const KernelTable& table);
  void FlowChunk(const ExpertJob& job, const KernelTable& table, uint32_t chunk, uint32_t thread,
                 NodePool::Next& next);
  void EndGateUp(const ExpertJob& job, const KernelTable& table, uint32_t entry, uint32_t thread);
  bool PeersAreThere(const ExpertJob& job, uint32_t entry) const;
  bool EnsureQuantised(const ExpertJob& job, const KernelTable& table, uint32_t entry,
                       uint32_t thread);
  template <class Done>
  bool WaitForOwn(const Done& done);
  bool HasEnded() const;
  const uint8_t* FirstRow(const ExpertJob& job, const JobChunk& chunk) const;
  void PrefetchStart(const ExpertJob& job, const JobChunk& chunk, uint32_t thread);

  bool WaitForPeer(const ExpertJob& job, uint32_t entry, uint32_t peer);
  bool Aborted(const ExpertJob& job) const;
  void Fail(JobStatus status, uint32_t detail);
  void SetHiddenReady(const ExpertJob& job, uint32_t entry);
  void AddProgress();

  const uint8_t* ActOf(const ExpertJob& job, uint32_t row) const;
  float* Hidden(const ExpertJob& job, uint32_t index) const;
  float* Result(const ExpertJob& job, uint32_t index) const;
  ActRow ActRowOf(const ExpertJob& job, uint32_t row, Format format) const;

  // Const after construction.
  const ArenaLayout& layout_;
  const uint8_t* const arena_;
  ExchangeHeader* const header_;
  uint8_t* const exchange_;
  const ExchangeLayout exchange_layout_;
  NodePool* const pool_;
  ExpertRunnerOptions options_;
  // Loop thread between phases, read by the pool inside them.
  std::vector<Vector> vectors_;         // by entry, rows ascending
  std::vector<uint32_t> first_vector_;  // [entry], and one more: the end
  ActLayout down_act_;
  size_t quantised_stride_;  // bytes of one quantised hidden vector, largest form
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  std::unique_ptr<uint8_t[], Free> quantised_;  // [vectors], each on a 64-byte border
  // Pool threads, atomically.
  std::unique_ptr<std::atomic<uint32_t>[]> gate_up_left_;  // [entry] chunks not done
  std::atomic<uint64_t> failure_{
      0};  // 0, or JobStatus << 32 | detail; the first one wins, kNotFinite keeps the lowest row
  std::vector<JobChunk> chunks_;
  // [entry] where its hidden vectors stand.
  enum HiddenState : uint32_t { kMissing, kTaken, kQuantised };
  struct alignas(64) ExpertState {
    std::atomic<uint32_t> gate_up_left, hidden;
  };
  std::unique_ptr<ExpertState[]> experts_;
  std::atomic<uint32_t> flagged_{0}, quantised_count_{0};  // experts
  struct alignas(64) ThreadState {
    uint64_t tag = 0;  // of the last job that the thread began
  };
  std::vector<ThreadState> thread_states_;
  std::vector<std::unique_ptr<float[]>> gate_scratch_;  // [thread] kWindowRowsMax x own width rows
};

}  // namespace lode
