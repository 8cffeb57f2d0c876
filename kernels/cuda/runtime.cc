// See runtime.h.
#include "kernels/cuda/runtime.h"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>

#include "kernels/cuda/launch.h"
#include "shared/base/check.h"

namespace lode::cuda {

bool launches_overlap = false;
#if defined(LODE_TEST_HOOKS)
bool launches_empty = false;
#endif

namespace {

constexpr uint32_t kOverlapCapability = 90;  // programmatic dependent launch
constexpr uint32_t kTensorCapability =
    80;  // products of 16 x 8 x 32 bytes, copies that go on alone

Status Failed(cudaError_t error, const char* what) {
  cudaGetLastError();  // an error that can be cleared must not surface at a later call
  return Internal("{}: {}", what, cudaGetErrorString(error));
}
void Require(cudaError_t error, const char* what) {
  LODE_CHECK(error == cudaSuccess, "the CUDA device failed in {}: {}", what,
             cudaGetErrorString(error));
}

}  // namespace

struct Timer {
  cudaEvent_t start = nullptr, stop = nullptr;
};

StatusOr<CardFacts> OpenCard(int ordinal) {
  // Kernels are loaded now, not at their first launch inside a window.
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  int count = 0;
  // Without a driver a static runtime reports an insufficient driver, not a missing device.
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    cudaGetLastError();
    return Unavailable("no CUDA card can be used here: {}",
                       error == cudaSuccess ? "none is present" : cudaGetErrorString(error));
  }
  if (ordinal < 0 || ordinal >= count)
    return Unavailable("CUDA card {} does not exist: this machine has {}", ordinal, count);
  if (const cudaError_t e = cudaSetDevice(ordinal); e != cudaSuccess)
    return Failed(e, "choosing the CUDA card");
  cudaDeviceProp prop;
  if (const cudaError_t e = cudaGetDeviceProperties(&prop, ordinal); e != cudaSuccess)
    return Failed(e, "asking the CUDA card for its properties");
  CardFacts facts;
  facts.name = prop.name;
  facts.capability = static_cast<uint32_t>(10 * prop.major + prop.minor);
  facts.multiprocessors = static_cast<uint32_t>(prop.multiProcessorCount);
  facts.shared_bytes_per_block = prop.sharedMemPerBlock;
  // Kernels have up to kStaticShared bytes of their own.
  constexpr size_t kStaticShared = 4096;
  multiprocessors = facts.multiprocessors;
  shared_bytes_max = static_cast<uint32_t>(prop.sharedMemPerBlockOptin - kStaticShared);
  const char* overlap = std::getenv("LODE_CUDA_OVERLAP");
  launches_overlap = facts.capability >= kOverlapCapability &&
                     (overlap == nullptr || std::strcmp(overlap, "0") != 0);
  const char* tensor = std::getenv("LODE_CUDA_TENSOR");
  tensor_products =
      facts.capability >= kTensorCapability && (tensor == nullptr || std::strcmp(tensor, "0") != 0);
  size_t free_bytes = 0, total_bytes = 0;
  if (const cudaError_t e = cudaMemGetInfo(&free_bytes, &total_bytes); e != cudaSuccess)
    return Failed(e, "opening the CUDA card");
  facts.total_bytes = total_bytes;
  facts.free_bytes = free_bytes;
  return facts;
}

StatusOr<CUstream_st*> OpenStream() {
  cudaStream_t stream = nullptr;
  const cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (error != cudaSuccess) return Failed(error, "making a CUDA stream");
  return stream;
}
void CloseStream(CUstream_st* stream) {
  if (stream != nullptr) cudaStreamDestroy(stream);
}

StatusOr<void*> AllocateDevice(size_t bytes) {
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, bytes);
  if (error == cudaSuccess) return memory;
  cudaGetLastError();
  return ResourceExhausted("{} bytes of device memory: {}", bytes, cudaGetErrorString(error));
}
void FreeDevice(void* memory) { cudaFree(memory); }
StatusOr<void*> AllocatePinned(size_t bytes) {
  void* memory = nullptr;
  const cudaError_t error = cudaHostAlloc(&memory, bytes, cudaHostAllocMapped);
  if (error == cudaSuccess) return memory;
  cudaGetLastError();
  return ResourceExhausted("{} bytes of pinned host memory: {}", bytes, cudaGetErrorString(error));
}
void FreePinned(void* memory) { cudaFreeHost(memory); }

void CopyAsync(void* to, const void* from, size_t bytes, CUstream_st* stream) {
  Require(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "a copy");
}
void ZeroAsync(void* memory, size_t bytes, CUstream_st* stream) {
  Require(cudaMemsetAsync(memory, 0, bytes, stream), "clearing memory");
}
void Synchronize(CUstream_st* stream) {
  Require(cudaStreamSynchronize(stream), "work enqueued earlier");
}
bool IsCapturing(CUstream_st* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  Require(cudaStreamIsCapturing(stream, &status), "asking a stream for its state");
  return status != cudaStreamCaptureStatusNone;
}
void CheckLaunches(const char* what) { Require(cudaGetLastError(), what); }

Timer* NewTimer() {
  Timer* timer = new Timer;
  Require(cudaEventCreate(&timer->start), "making an event");
  Require(cudaEventCreate(&timer->stop), "making an event");
  return timer;
}
void DeleteTimer(Timer* timer) {
  cudaEventDestroy(timer->start);
  cudaEventDestroy(timer->stop);
  delete timer;
}
void StartTimer(Timer* timer, CUstream_st* stream) {
  Require(cudaEventRecord(timer->start, stream), "recording an event");
}
double StopTimer(Timer* timer, CUstream_st* stream) {
  Require(cudaEventRecord(timer->stop, stream), "recording an event");
  Require(cudaEventSynchronize(timer->stop), "work enqueued earlier");
  float ms = 0;
  Require(cudaEventElapsedTime(&ms, timer->start, timer->stop), "measuring time");
  return ms;
}

}  // namespace lode::cuda
