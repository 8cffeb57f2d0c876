// What host code needs of the CUDA runtime, without its headers: cards, streams, memory, copies.
// Two implementations: runtime.cc on CUDA, emulated/runtime.cc on host memory for tests. Functions
// of start-up return a Status. Those of a running window do not: a card that fails there has lost
// its context, so they end the process with the error's text (docs/design/failure-model.md).
// Thread: any; a stream belongs to one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "shared/base/status.h"

struct CUstream_st;

namespace lode::cuda {

struct CardFacts {
  std::string name;
  uint32_t capability = 0;  // 10 * major + minor
  uint32_t multiprocessors = 0;
  uint64_t shared_bytes_per_block = 0;
  uint64_t total_bytes = 0, free_bytes = 0;
};
// Unavailable when there is no driver or no card with this number; makes it the thread's current
// card and loads all kernels.
StatusOr<CardFacts> OpenCard(int ordinal);

// Set by OpenCard: a launch may start while the one ahead of it still runs (compute capability 9.0
// and newer, unless LODE_CUDA_OVERLAP=0 is in the environment). Benches change it.
extern bool launches_overlap;
#if defined(LODE_TEST_HOOKS)
extern bool launches_empty;  // platform.h
#endif

StatusOr<CUstream_st*> OpenStream();
void CloseStream(CUstream_st* stream);
StatusOr<void*> AllocateDevice(size_t bytes);
void FreeDevice(void* memory);
StatusOr<void*> AllocatePinned(size_t bytes);  // host memory, readable by the card
void FreePinned(void* memory);

void CopyAsync(void* to, const void* from, size_t bytes, CUstream_st* stream);
void ZeroAsync(void* memory, size_t bytes, CUstream_st* stream);
void Synchronize(CUstream_st* stream);
bool IsCapturing(CUstream_st* stream);
// Ends the process when a launch since the last call was refused. `what` names the operation.
void CheckLaunches(const char* what);

// ---- time, for tests and benches
struct Timer;
Timer* NewTimer();
void DeleteTimer(Timer* timer);
void StartTimer(Timer* timer, CUstream_st* stream);
double StopTimer(Timer* timer, CUstream_st* stream);  // waits; milliseconds

}  // namespace lode::cuda
