// The runtime of the emulated device: host memory, everything done at once. See ../runtime.h.
#include "kernels/cuda/runtime.h"

#include <chrono>
#include <cstdlib>
#include <cstring>

#include "kernels/cuda/launch.h"

namespace lode::cuda {
namespace {

constexpr size_t kAlignment = 256;  // bytes, as cudaMalloc gives
constexpr uint64_t kCardBytes = uint64_t{8} << 30;

double NowMs() {
  return std::chrono::duration<double, std::milli>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}
StatusOr<void*> AllocateAligned(size_t bytes) {
  void* memory = std::aligned_alloc(kAlignment, (bytes + kAlignment) / kAlignment * kAlignment);
  if (memory == nullptr) return ResourceExhausted("no memory for {} bytes", bytes);
  std::memset(memory, 0xa5, bytes);  // a card's memory holds anything
  return memory;
}

}  // namespace

#if defined(LODE_TEST_HOOKS)
bool launches_empty = false;  // means nothing here
#endif

struct Timer {
  double start = 0;
};

StatusOr<CardFacts> OpenCard(int ordinal) {
  if (ordinal != 0)
    return Unavailable("CUDA card {} does not exist: one card is emulated", ordinal);
  CardFacts facts;
  facts.name = "emulated card";
  facts.capability = 75;
  facts.multiprocessors = 4;
  facts.shared_bytes_per_block = 48 * 1024;
  shared_bytes_max = 128 * 1024;
  multiprocessors = facts.multiprocessors;
  tensor_products = true;
  facts.total_bytes = facts.free_bytes = kCardBytes;
  return facts;
}
StatusOr<CUstream_st*> OpenStream() { return static_cast<CUstream_st*>(nullptr); }
void CloseStream(CUstream_st*) {}
StatusOr<void*> AllocateDevice(size_t bytes) { return AllocateAligned(bytes); }
void FreeDevice(void* memory) { std::free(memory); }
StatusOr<void*> AllocatePinned(size_t bytes) { return AllocateAligned(bytes); }
void FreePinned(void* memory) { std::free(memory); }
void CopyAsync(void* to, const void* from, size_t bytes, CUstream_st*) {
  std::memcpy(to, from, bytes);
}
void ZeroAsync(void* memory, size_t bytes, CUstream_st*) { std::memset(memory, 0, bytes); }
void Synchronize(CUstream_st*) {}
bool IsCapturing(CUstream_st*) { return false; }
void CheckLaunches(const char*) {}
Timer* NewTimer() { return new Timer; }
void DeleteTimer(Timer* timer) { delete timer; }
void StartTimer(Timer* timer, CUstream_st*) { timer->start = NowMs(); }
double StopTimer(Timer* timer, CUstream_st*) { return NowMs() - timer->start; }

}  // namespace lode::cuda
