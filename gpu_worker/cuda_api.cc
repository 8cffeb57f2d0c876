// See cuda_api.h. Every call of the runtime goes through Result, which names the call and clears
// the runtime's own error word, so that no later call reports a stranger's failure.
#include "gpu_worker/cuda_api.h"

#include <cuda_runtime_api.h>
#include <nvtx3/nvToolsExt.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/cuda/runtime.h"
#include "shared/base/check.h"

namespace lode::cuda {
namespace {

// One registration of 512 GiB or more fails on some drivers.
constexpr size_t kRegisterPieceBytes = size_t{64} << 30;

// Where one registered piece ends and the next one of the same memory begins. Written while loading,
// read by the upload thread afterwards.
std::vector<const uint8_t*>& Borders() {
  static std::vector<const uint8_t*> borders;
  return borders;
}

Status Result(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return OkStatus();
  cudaGetLastError();
  return Internal("{}: {} ({})", what, cudaGetErrorString(error), cudaGetErrorName(error));
}

}  // namespace

StatusOr<void*> AllocateZeroedPinned(size_t bytes, const std::string& what) {
  StatusOr<void*> memory = AllocatePinned(std::max<size_t>(bytes, 1));
  if (!memory.ok()) return ResourceExhausted("{}: {}", what, Message(memory.status()));
  void* device = nullptr;
  LODE_RETURN_IF_ERROR(Result(cudaHostGetDevicePointer(&device, *memory, 0), "device pointer"));
  if (device != *memory)
    return FailedPrecondition("this card sees pinned memory at another address than the host");
  std::memset(*memory, 0, bytes);
  return *memory;
}

// The attribute says what the driver believes; one page, mapped like an arena, proves it.
bool RegistersReadOnly(int ordinal) {
  int supported = 0;
  if (cudaDeviceGetAttribute(&supported, cudaDevAttrHostRegisterReadOnlySupported, ordinal) !=
          cudaSuccess ||
      supported == 0) {
    cudaGetLastError();
    return false;
  }
  constexpr size_t kBytes = 4096;
  const int fd = memfd_create("lode-probe", MFD_CLOEXEC);
  if (fd < 0) return false;
  void* page = ftruncate(fd, kBytes) == 0
                   ? mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, fd, 0)
                   : MAP_FAILED;
  close(fd);
  if (page == MAP_FAILED) return false;
  const bool registers = RegisterHost(page, kBytes, true, "a probe page").ok();
  if (registers) UnregisterHost(page, kBytes);
  munmap(page, kBytes);
  return registers;
}

Status RegisterHost(void* memory, size_t bytes, bool read_only, const std::string& what) {
  uint8_t* const first = static_cast<uint8_t*>(memory);
  const unsigned int flags = cudaHostRegisterMapped | cudaHostRegisterPortable |
                             (read_only ? cudaHostRegisterReadOnly : 0u);
  for (size_t at = 0; at < bytes; at += kRegisterPieceBytes) {
    const size_t piece = std::min(kRegisterPieceBytes, bytes - at);
    Status status = Result(
        cudaHostRegister(first + at, piece, flags),
        fmt::format("registering {} bytes of {} with the driver (memlock limit? ulimit -l)", piece,
                    what));
    void* device = nullptr;
    if (status.ok()) {
      status = Result(cudaHostGetDevicePointer(&device, first + at, 0), "device pointer of " + what);
    }
    if (status.ok() && device != first + at) {
      status = FailedPrecondition("this card sees {} at another address than the host", what);
    }
    if (!status.ok()) {
      UnregisterHost(memory, at);
      return status;
    }
    if (at > 0) Borders().push_back(first + at);
  }
  return OkStatus();
}

void CopyRegistered(void* device, const void* from, size_t bytes, CUstream_st* stream) {
  uint8_t* to = static_cast<uint8_t*>(device);
  const uint8_t* at = static_cast<const uint8_t*>(from);
  const uint8_t* const end = at + bytes;
  for (const uint8_t* border : Borders()) {
    if (border <= at || border >= end) continue;
    const size_t part = static_cast<size_t>(border - at);
    CopyAsync(to, at, part, stream);
    to += part;
    at = border;
  }
  CopyAsync(to, at, static_cast<size_t>(end - at), stream);
}

void UnregisterHost(void* memory, size_t bytes) {
  for (size_t at = 0; at < bytes; at += kRegisterPieceBytes)
    if (cudaHostUnregister(static_cast<uint8_t*>(memory) + at) != cudaSuccess) cudaGetLastError();
}

StatusOr<CUstream_st*> OpenUrgentStream() {
  int least = 0, most = 0;
  LODE_RETURN_IF_ERROR(
      Result(cudaDeviceGetStreamPriorityRange(&least, &most), "the priorities of streams"));
  cudaStream_t stream = nullptr;
  LODE_RETURN_IF_ERROR(Result(
      cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, most), "making a CUDA stream"));
  return stream;
}

void Follow(CUstream_st* from, CUstream_st* to) {
  // An event may be recorded anew while a wait on its last recording is still enqueued.
  static thread_local cudaEvent_t event = nullptr;
  Status status = event != nullptr
                      ? OkStatus()
                      : Result(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event");
  if (status.ok()) status = Result(cudaEventRecord(event, from), "event");
  if (status.ok()) status = Result(cudaStreamWaitEvent(to, event, 0), "order of streams");
  LODE_CHECK(status.ok(), "{}", Message(status));
}

StatusOr<MemoryInfo> DeviceMemory() {
  size_t free_bytes = 0, total_bytes = 0;
  LODE_RETURN_IF_ERROR(Result(cudaMemGetInfo(&free_bytes, &total_bytes), "free device memory"));
  return MemoryInfo{free_bytes, total_bytes};
}

Status WaitAsleep(CUstream_st* stream) {
  // An event made for blocking lets the driver sleep; a stream's own wait would spin.
  static thread_local cudaEvent_t event = nullptr;
  if (event == nullptr) {
    LODE_RETURN_IF_ERROR(Result(
        cudaEventCreateWithFlags(&event, cudaEventBlockingSync | cudaEventDisableTiming), "event"));
  }
  LODE_RETURN_IF_ERROR(Result(cudaEventRecord(event, stream), "event"));
  return Result(cudaEventSynchronize(event), "waiting for the device");
}

Status Look(CUstream_st* stream) {
  const cudaError_t error = cudaStreamQuery(stream);
  if (error == cudaErrorNotReady) {
    cudaGetLastError();
    return OkStatus();
  }
  return Result(error, "the device");
}

namespace {

class RuntimeGraph final : public Graph {
 public:
  ~RuntimeGraph() override {
    if (exec_ != nullptr) cudaGraphExecDestroy(exec_);
    if (graph_ != nullptr) cudaGraphDestroy(graph_);
  }
  Status Make(CUstream_st* stream, const std::function<void()>& enqueue) {
    LODE_RETURN_IF_ERROR(Result(
        cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "starting a capture"));
    enqueue();
    LODE_RETURN_IF_ERROR(
        Result(cudaStreamEndCapture(stream, &graph_), "ending the capture of a window"));
    LODE_RETURN_IF_ERROR(Result(cudaGraphInstantiate(&exec_, graph_, 0), "making a graph"));
    LODE_RETURN_IF_ERROR(Result(cudaGraphUpload(exec_, stream), "uploading a graph"));
    LODE_RETURN_IF_ERROR(Result(cudaGraphGetNodes(graph_, nullptr, &nodes_), "graph nodes"));
    return Result(cudaStreamSynchronize(stream), "uploading a graph");
  }
  Status Launch(CUstream_st* stream) override {
    return Result(cudaGraphLaunch(exec_, stream), "launching a window");
  }
  size_t nodes() const override { return nodes_; }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t exec_ = nullptr;
  size_t nodes_ = 0;
};

}  // namespace

StatusOr<std::unique_ptr<Graph>> Graph::Capture(CUstream_st* stream,
                                                const std::function<void()>& enqueue) {
  auto graph = std::make_unique<RuntimeGraph>();
  LODE_RETURN_IF_ERROR(graph->Make(stream, enqueue));
  return std::unique_ptr<Graph>(std::move(graph));
}

Range::Range(const char* name) { nvtxRangePushA(name); }
Range::~Range() { nvtxRangePop(); }

}  // namespace lode::cuda
