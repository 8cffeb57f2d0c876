// The exchange segment: GPU worker <-> CPU workers. Header, one line per worker, two jobs, two sets of activations, hidden
// vectors and results. Offsets are a pure function of the shape, computed alike by every process and pinned by the layout hash.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "kernels/kernel_table.h"
#include "shared/shm/wait_word.h"
#include "shared/wire/expert_job.h"

namespace lode {

inline constexpr uint64_t kExchangeMagic = 0x4c4f444558434801ull;  // "LODEXCH" 1

struct ExchangeShape {
  uint32_t hidden, expert_width, experts_used, n_workers;
  bool operator==(const ExchangeShape&) const = default;
};

// One CPU worker's line. Writer: that worker; readers: GPU worker, daemon, peers.
struct alignas(64) WorkerLine {
  WaitWord ack;                        // tag of the last finished job (release; pairs with the GPU worker's acquire)
  std::atomic<uint32_t> status;        // JobStatus of that job, stored before `ack`
  std::atomic<uint32_t> error_row;
  std::atomic<uint64_t> progress;      // grows while the worker computes: a bounded wait restarts its clock on a change
  std::atomic<uint64_t> busy_ns;       // total time spent in jobs
  std::atomic<uint64_t> bytes;         // total weight bytes read
  std::atomic<uint32_t> generation;    // of the process that owns the line now
  std::atomic<uint32_t> ready;         // 1 once its arena is complete
};

struct ExchangeHeader {
  uint64_t magic;
  uint64_t layout_hash;
  ExchangeShape shape;
  uint32_t device;
  // Writer: GPU worker. Tag of the newest job (release after the job's bytes; pairs with the workers' acquire).
  alignas(64) WaitWord bell;
  // Writer: GPU worker. Odd while a window runs: pools spin; even: they sleep.
  alignas(64) WaitWord window_epoch;
  // Writer: daemon. Windows <= this number are void: every wait ends at once.
  alignas(64) std::atomic<uint64_t> abort_window;
  // Writer: GPU worker. Grows with every layer and every look at the plan ring; a watchdog compares it with its earlier self.
  alignas(64) std::atomic<uint64_t> gpu_heartbeat;
  alignas(64) WorkerLine workers[kCpuWorkersMax];
  // [parity][worker][job expert]: tag, set (release) when that worker's rows of the expert's hidden vectors are written.
  alignas(64) std::atomic<uint64_t> hidden_ready[2][kCpuWorkersMax][kJobExpertsMax];
  alignas(64) ExpertJob jobs[2];       // by layer parity
};

struct ExchangeLayout {
  ExchangeShape shape;
  // Activation area of one parity: rows x [f32 | q32 | q64 | q256], each form at a fixed offset of a row's slot.
  static constexpr uint32_t kForms = 4;
  constexpr size_t form_offset(uint32_t form) const {  // form = 0 f32, 1 q32, 2 q64, 3 q256
    size_t offset = 0;
    if (form > 0) offset += Align(shape.hidden * sizeof(float));
    if (form > 1) offset += ActLayout{shape.hidden, 32}.bytes();
    if (form > 2) offset += ActLayout{shape.hidden, 64}.bytes();
    if (form > 3) offset += shape.hidden % 256 ? 0 : ActLayout{shape.hidden, 256}.bytes();
    return offset;
  }
  constexpr size_t act_row_bytes() const { return Align(form_offset(4)); }
  constexpr size_t vectors() const { return static_cast<size_t>(kWindowRowsMax) * shape.experts_used; }
  constexpr size_t acts_offset(uint32_t parity) const { return Align(sizeof(ExchangeHeader)) + parity * kWindowRowsMax * act_row_bytes(); }
  constexpr size_t hidden_offset(uint32_t parity) const { return acts_offset(2) + parity * Align(vectors() * shape.expert_width * sizeof(float)); }
  constexpr size_t result_offset(uint32_t parity) const { return hidden_offset(2) + parity * Align(vectors() * shape.hidden * sizeof(float)); }
  constexpr size_t bytes() const { return result_offset(2); }
  static constexpr size_t Align(size_t n) { return (n + 255) / 256 * 256; }
};

}  // namespace lode
