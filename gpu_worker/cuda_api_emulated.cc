// cuda_api.h without a card: device memory is host memory, streams do everything at once, a graph
// enqueues again. For tests of the whole engine (kernels/cuda/platform.h says how kernels run).
#include <cstring>

#include "gpu_worker/cuda_api.h"
#include "kernels/cuda/runtime.h"

namespace lode::cuda {
namespace {

constexpr uint64_t kEmulatedBytes = uint64_t{2} << 30;  // of a card that does not exist

class EmulatedGraph final : public Graph {
 public:
  explicit EmulatedGraph(const std::function<void()>& enqueue) : enqueue_(enqueue) {}
  Status Launch(CUstream_st*) override {
    enqueue_();
    return OkStatus();
  }
  size_t nodes() const override { return 0; }

 private:
  const std::function<void()> enqueue_;
};

}  // namespace

StatusOr<void*> AllocateZeroedPinned(size_t bytes, const std::string&) {
  LODE_ASSIGN_OR_RETURN(void* memory, AllocatePinned(bytes));
  std::memset(memory, 0, bytes);
  return memory;
}
bool RegistersReadOnly(int) { return true; }
Status RegisterHost(void*, size_t, bool, const std::string&) { return OkStatus(); }
void UnregisterHost(void*, size_t) {}
void CopyRegistered(void* device, const void* from, size_t bytes, CUstream_st*) {
  std::memcpy(device, from, bytes);
}
StatusOr<CUstream_st*> OpenUrgentStream() { return static_cast<CUstream_st*>(nullptr); }
void Follow(CUstream_st*, CUstream_st*) {}
StatusOr<MemoryInfo> DeviceMemory() { return MemoryInfo{kEmulatedBytes, kEmulatedBytes}; }
Status WaitAsleep(CUstream_st*) { return OkStatus(); }
Status Look(CUstream_st*) { return OkStatus(); }

StatusOr<std::unique_ptr<Graph>> Graph::Capture(CUstream_st*,
                                                const std::function<void()>& enqueue) {
  return std::unique_ptr<Graph>(std::make_unique<EmulatedGraph>(enqueue));
}

Range::Range(const char*) {}
Range::~Range() = default;

}  // namespace lode::cuda
