// GPU worker -> CPU workers and back: one layer's CPU lane. All workers read the same job; each
// computes its own share of the rows of every matrix and writes its part of every result. Buffers
// alternate by layer parity; every publication carries a tag (generation, window, layer). Steps 6
// to 8. Layout of the exchange segment: shared/wire/exchange_layout.h.
#pragma once

#include <cstdint>
#include <type_traits>

#include "shared/base/limits.h"

namespace lode {

// 16 bits generation | 32 bits window | 16 bits layer + 1. Zero is never a tag.
constexpr uint64_t JobTag(uint32_t generation, uint64_t window, uint32_t layer) {
  return (static_cast<uint64_t>(generation & 0xffffu) << 48) | ((window & 0xffffffffull) << 16) |
         (layer + 1);
}
constexpr uint64_t TagWindow(uint64_t tag) { return (tag >> 16) & 0xffffffffull; }

// Which forms of the activations the job carries (bit mask). Quantised forms use ActLayout(hidden,
// block_len).
enum ActForms : uint32_t { kActF32 = 1, kActQ32 = 2, kActQ64 = 4, kActQ256 = 8 };

struct JobExpert {
  uint16_t expert;
  uint16_t reserved;
  RowMask rows;                   // rows of the window routed to it
  uint8_t order[kWindowRowsMax];  // [row]: the expert's place in that row's routing order (result
                                  // index)
};
static_assert(sizeof(JobExpert) == 16);

// Result vectors and hidden vectors are indexed by (row, order): index = row * experts_used +
// order.
struct ExpertJob {
  uint64_t tag;
  uint32_t layer;
  uint32_t n_rows;           // rows of the window (activation slots)
  uint32_t n_experts;        // 0..kJobExpertsMax; 0 = nothing for the CPU lane, acknowledge at once
  uint32_t act_forms;        // ActForms
  uint32_t float_reference;  // 1: float reference mode (activations and hidden vectors stay f32)
  uint32_t isa[kCpuWorkersMax];  // kernel table per worker (Tunables::cpu_isa)
  uint32_t threads;              // active threads per pool, 0 = all
  JobExpert experts[kJobExpertsMax];
};
static_assert(std::is_trivially_copyable_v<ExpertJob>);

// WorkerLine::error_row: kNotFinite: the lowest row; kPeerTimeout: the index of the worker that did
// not deliver.
enum class JobStatus : uint32_t {
  kOk = 0,
  kNotFinite = 1,    // a hidden vector of that row holds a value that is not finite
  kPeerTimeout = 2,  // another worker's share of the hidden vectors did not come in time
  kBadJob = 3,       // refused, nothing was computed
  kAborted = 4,      // the window became void while the job ran
};

}  // namespace lode
