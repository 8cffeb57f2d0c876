// The driver calls of the engine that the device itself (kernels/cuda/runtime.h) has no need of:
// registered host memory, graphs, the state of a stream, ranges for profilers. Two implementations:
// cuda_api.cc on the CUDA runtime, cuda_api_emulated.cc for tests of the whole engine without a
// card. Plain C++ header. Thread: as the caller's; nothing here is called by two threads for one
// object.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "shared/base/status.h"

struct CUstream_st;

namespace lode::cuda {

// Pinned memory of runtime.h, zeroed; host and device use one address.
StatusOr<void*> AllocateZeroedPinned(size_t bytes, const std::string& what);

// Whether this card registers memory that is mapped read-only.
bool RegistersReadOnly(int ordinal);
// Makes mapped memory of this process readable (and writable, unless read_only) by the device at the
// host's own addresses. In pieces; undone by UnregisterHost.
Status RegisterHost(void* memory, size_t bytes, bool read_only, const std::string& what);
void UnregisterHost(void* memory, size_t bytes);
// Copies from registered memory to the device; a copy that crosses the border of two pieces, which
// the driver refuses, is made in two. REQUIRES: registration is over.
void CopyRegistered(void* device, const void* from, size_t bytes, CUstream_st* stream);

// A stream whose kernels are placed on the multiprocessors before waiting ones of other streams.
StatusOr<CUstream_st*> OpenUrgentStream();
// What is enqueued on `to` from now on comes after everything on `from` so far; also in a capture,
// where it splits off a branch or brings two together.
void Follow(CUstream_st* from, CUstream_st* to);

struct MemoryInfo {
  uint64_t free_bytes, total_bytes;
};
StatusOr<MemoryInfo> DeviceMemory();

// Waits for what was enqueued, without burning the core.
Status WaitAsleep(CUstream_st* stream);
// Ok while the stream's work runs or when it is done; otherwise what the device reports.
Status Look(CUstream_st* stream);

// Launches once enqueued, replayed as one.
class Graph {
 public:
  virtual ~Graph() = default;
  // `enqueue` only enqueues on `stream`.
  static StatusOr<std::unique_ptr<Graph>> Capture(CUstream_st* stream,
                                                  const std::function<void()>& enqueue);
  virtual Status Launch(CUstream_st* stream) = 0;
  virtual size_t nodes() const = 0;
};

// A named range in profilers (NVTX); nothing when none listens. Nested, per thread.
class Range {
 public:
  explicit Range(const char* name);
  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
};

}  // namespace lode::cuda
