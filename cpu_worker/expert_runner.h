// One layer's CPU lane on one node: the routed experts of a job, the rows of their matrices that
// this worker owns, for every row of the window. Step 7 of the life of a token.
//
//   1. gate and up, own rows: g = W_gate x, u = W_up x, h = silu(g) * u in fp32 -> hidden exchange,
//   own part; flag per expert
//   2. per expert: wait for the other workers' parts, quantise the whole hidden vectors again for
//   the down format
//   3. down, own rows: y = W_down h -> result vectors, own part
//
// All experts' chunks of 1 and 3 lie in one list (job_chunks.h) that the threads work off in one
// phase of the pool; 2 is done by the thread that ends an expert's 1, or by the first that needs
// it. Nothing waits for all threads before the end.
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

  // Where the thread reads next, or null; claims that chunk.
  using NextRowFn = std::function<const uint8_t*()>;

  void Prepare(const ExpertJob& job);
  void CollectVectors(const ExpertJob& job);
  void DoChunk(const ExpertJob& job, const KernelTable& table, uint32_t chunk, uint32_t thread,
               NodePool::Next* next);
  void GateUpChunk(const ExpertJob& job, const KernelTable& table, uint32_t entry, RowRange rows,
                   uint32_t thread, const NextRowFn& next_row);
  void EndGateUp(const ExpertJob& job, const KernelTable& table, uint32_t entry, uint32_t thread);
  // True once the expert's hidden vectors are quantised; false: the job has ended otherwise.
  bool EnsureQuantised(const ExpertJob& job, const KernelTable& table, uint32_t entry,
                       uint32_t thread);
  void RequantiseVector(const ExpertJob& job, const KernelTable& table, uint32_t v);
  void DownChunk(const ExpertJob& job, const KernelTable& table, uint32_t entry, RowRange rows,
                 const NextRowFn& next_row);
  const uint8_t* FirstRow(const ExpertJob& job, const JobChunk& chunk) const;
  void PrefetchStart(const ExpertJob& job, const JobChunk& chunk) const;

  // Until `done`, which another thread of this worker brings about; false: the job has ended.
  template <class Done>
  bool WaitForThreads(const Done& done);
  bool WaitForPeer(const ExpertJob& job, uint32_t entry, uint32_t peer);
  bool Aborted(const ExpertJob& job) const;
  void Fail(JobStatus status, uint32_t detail);
  bool HasEnded() const;
  void SetHiddenReady(const ExpertJob& job, uint32_t entry);
  bool IsHiddenReady(const ExpertJob& job, uint32_t entry, uint32_t worker) const;
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
  const ExpertRunnerOptions options_;
  // Loop thread before the phase, read by the pool inside it.
  std::vector<Vector> vectors_;         // by entry, rows ascending
  std::vector<uint32_t> first_vector_;  // [entry], and one more: the end
  ActLayout down_act_;
  size_t quantised_stride_;  // bytes of one quantised hidden vector, largest form
  struct Free {
    void operator()(uint8_t* p) const { std::free(p); }
  };
  std::unique_ptr<uint8_t[], Free> quantised_;  // [vectors], each on a 64-byte border
  JobChunks chunks_;
  uint64_t serial_ = 0;  // of the job
  // Pool threads, atomically. Lines that the loop need not write between two jobs, as far as
  // possible: all threads would fetch them at once.
  struct alignas(64) ExpertState {
    std::atomic<uint32_t> gate_up_done{0};  // chunks; back to 0 with the last one
    // 2 x serial: a thread quantises the hidden vectors; 2 x serial + 1: they are quantised.
    std::atomic<uint64_t> hidden{0};
  };
  std::unique_ptr<ExpertState[]> experts_;  // [entry]
  alignas(64) std::atomic<uint64_t> failure_{
      0};  // 0, or JobStatus << 32 | detail; the first one wins, kNotFinite keeps the lowest row
  alignas(64) std::atomic<uint32_t> flagged_{0}, quantised_experts_{0};  // experts; back to 0 alike
  // [thread], each its own.
  struct alignas(64) ThreadState {
    uint64_t tag = 0;  // of the last job that it took part in
  };
  std::unique_ptr<ThreadState[]> threads_;
  std::vector<std::unique_ptr<float[]>> gate_scratch_;  // [thread] kWindowRowsMax x own width rows
};

}  // namespace lode
