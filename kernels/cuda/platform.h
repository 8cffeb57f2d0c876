// Everything that the kernels take from CUDA, one thin function each, so that a kernel is plain
// C++: nvcc compiles it for a card, and any C++ compiler for the emulated device of the tests
// (LODE_CUDA_EMULATED, emulated/block.h), where each thread of a block is a fiber and a missing
// barrier is a reported hang or a changed bit. Kernels use nothing of CUDA that is not here.
// Included by kernels/cuda sources only; device code.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/canonical.h"

#if defined(LODE_CUDA_EMULATED)
#include "kernels/cuda/emulated/block.h"
#elif defined(__CUDACC__)
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define LODE_DEVICE static __device__ __forceinline__
// A kernel whose blocks have at most `threads` threads.
#define LODE_KERNEL(threads) static __global__ void __launch_bounds__(threads)
// The same, with registers for at least `blocks` such blocks on a multiprocessor.
#define LODE_KERNEL_FITTING(threads, blocks) \
  static __global__ void __launch_bounds__(threads, blocks)
// A read-only table in device memory.
#define LODE_DEVICE_TABLE static __device__ const
// Memory of the block, uninitialised.
#define LODE_SHARED __shared__
#define LODE_UNROLL _Pragma("unroll")
#define LODE_NO_UNROLL _Pragma("unroll 1")

namespace lode::cuda {

using Stream = cudaStream_t;
struct Word2 {
  uint32_t x, y;
};
using Word4 = uint4;

// ---- where this thread is
LODE_DEVICE uint32_t ThreadId() { return threadIdx.x; }
LODE_DEVICE uint32_t ThreadCount() { return blockDim.x; }
LODE_DEVICE uint32_t BlockX() { return blockIdx.x; }
LODE_DEVICE uint32_t BlockY() { return blockIdx.y; }
LODE_DEVICE uint32_t BlockZ() { return blockIdx.z; }
LODE_DEVICE uint32_t GridX() { return gridDim.x; }
LODE_DEVICE uint32_t GridY() { return gridDim.y; }
LODE_DEVICE uint32_t GridZ() { return gridDim.z; }

// ---- barriers: every thread of the block, or of the warp, comes here
LODE_DEVICE void SyncBlock() { __syncthreads(); }
LODE_DEVICE void SyncWarp() { __syncwarp(); }
LODE_DEVICE void FenceDevice() { __threadfence(); }

// ---- overlap with the launches before and after (Hopper and newer; nothing elsewhere)
// Waits until the launch before has ended and its writes are visible: before it, a kernel may touch
// only constants, the window's parameters, and what nobody else in the window writes. Every thread
// of a kernel that LaunchAhead starts calls it, also one that reads nothing of the launch before,
// because the launch after it relies on that.
LODE_DEVICE void WaitForPrevious() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The launch after may start its blocks where there is room.
LODE_DEVICE void LetNextStart() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
LODE_DEVICE void PrefetchLine(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// ---- copies from device to shared memory that go on by themselves: 16 bytes, both ends aligned.
// A thread sees its own behind WaitForCopies, the block all of them behind a barrier after that.
LODE_DEVICE void CopyAhead16(void* shared, const void* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(from)
               : "memory");
#else
  *static_cast<uint4*>(shared) = *static_cast<const uint4*>(from);
#endif
}
LODE_DEVICE void WaitForCopies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
// Copies since the last call are one group; WaitForEarlierCopies waits for all groups
// but the last.
LODE_DEVICE void EndCopyGroup() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
LODE_DEVICE void WaitForEarlierCopies() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group 1;" ::: "memory");
#endif
}
// The same for all groups but the last kLeft.
template <uint32_t kLeft>
LODE_DEVICE void WaitForCopiesBut() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#endif
}

// ---- integer tensor cores: a warp's product of 8 rows of 32 signed bytes with 8 others. Lane 4 g
// + t holds bytes 4 t.. and 16 + 4 t.. of row g of both (a0, a1 and b0, b1), and gets the sums of
// row g of a with rows 2 t and 2 t + 1 of b, exact integers as floats. Nothing on cards before 8.0.
LODE_DEVICE void MultiplyBlocks(uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1,
                                float (&sum)[2]) {
  sum[0] = sum[1] = 0.0f;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  // The sums begin at the bits of 1.5 * 2^23 and stay below 2^22, so they are that float plus the
  // sum; conversions of integers are slow. The instruction takes 16 rows of a: the upper eight are
  // zero.
  constexpr int32_t kMagicBits = 0x4b400000;
  constexpr float kMagic = 12582912.0f;
  [[maybe_unused]] int32_t biased0, biased1, none0, none1;
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%11, %11, %10, %10};"
      : "=r"(biased0), "=r"(biased1), "=r"(none0), "=r"(none1)
      : "r"(a0), "r"(0), "r"(a1), "r"(0), "r"(b0), "r"(b1), "r"(0), "r"(kMagicBits));
  sum[0] = canonical::Sub(__int_as_float(biased0), kMagic);
  sum[1] = canonical::Sub(__int_as_float(biased1), kMagic);
#endif
}

// ---- exchange inside a warp; all 32 lanes take part
LODE_DEVICE float ShuffleXor(float x, uint32_t mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}
LODE_DEVICE int32_t ShuffleXor(int32_t x, uint32_t mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}
LODE_DEVICE uint32_t ShuffleXor(uint32_t x, uint32_t mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}
LODE_DEVICE uint32_t ShuffleUp(uint32_t x, uint32_t by) {
  return __shfl_up_sync(0xffffffffu, x, by);
}
LODE_DEVICE float ShuffleFrom(float x, uint32_t lane) { return __shfl_sync(0xffffffffu, x, lane); }
LODE_DEVICE uint32_t ShuffleFrom(uint32_t x, uint32_t lane) {
  return __shfl_sync(0xffffffffu, x, lane);
}
LODE_DEVICE uint64_t ShuffleXor(uint64_t x, uint32_t mask) {
  return __shfl_xor_sync(0xffffffffu, static_cast<unsigned long long>(x), mask);
}
LODE_DEVICE uint32_t LargestOfWarp(uint32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xffffffffu, x);
#else
  for (uint32_t w = 16; w >= 1; w /= 2) x = max(x, ShuffleXor(x, w));
  return x;
#endif
}
LODE_DEVICE uint32_t SmallestOfWarp(uint32_t x) { return ~LargestOfWarp(~x); }
// Bit l: lane l's predicate.
LODE_DEVICE uint32_t Ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }

// ---- memory that is not written while the kernel runs
LODE_DEVICE uint32_t LoadOnce(const uint32_t* p) { return __ldg(p); }
LODE_DEVICE uint16_t LoadOnce(const uint16_t* p) { return __ldg(p); }
LODE_DEVICE float LoadOnce(const float* p) { return __ldg(p); }
LODE_DEVICE Word4 LoadOnce(const Word4* p) { return __ldg(p); }

// ---- atomics
LODE_DEVICE void AtomicMin(uint64_t* p, uint64_t x) {
  atomicMin(reinterpret_cast<unsigned long long*>(p), static_cast<unsigned long long>(x));
}
LODE_DEVICE uint32_t AtomicAdd(uint32_t* p, uint32_t x) { return atomicAdd(p, x); }
LODE_DEVICE uint32_t AtomicMax(uint32_t* p, uint32_t x) { return atomicMax(p, x); }
LODE_DEVICE void AtomicAdd(uint64_t* p, uint64_t x) {
  atomicAdd(reinterpret_cast<unsigned long long*>(p), static_cast<unsigned long long>(x));
}
LODE_DEVICE uint32_t AtomicExchange(uint32_t* p, uint32_t x) { return atomicExch(p, x); }

// ---- exact integer arithmetic
LODE_DEVICE int32_t Dp4a(uint32_t a, uint32_t b, int32_t c) {
  return __dp4a(static_cast<int>(a), static_cast<int>(b), c);
}
// Byte i of the result is byte (selector >> 4 i) & 7 of {low, high}.
LODE_DEVICE uint32_t BytePermute(uint32_t low, uint32_t high, uint32_t selector) {
  return __byte_perm(low, high, selector);
}
// Bits shift..shift + 31 of {low, high}; shift < 32.
LODE_DEVICE uint32_t FunnelRight(uint32_t low, uint32_t high, uint32_t shift) {
  return __funnelshift_r(low, high, shift);
}
LODE_DEVICE uint32_t PopCount(uint32_t x) { return static_cast<uint32_t>(__popc(x)); }
// Exact for every half, denormals included (tests/device compares all 65,536 with FromF16).
LODE_DEVICE float HalfToFloat(uint32_t h) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(h)));
}

// Dynamic shared memory of the block, 16-byte aligned.
LODE_DEVICE uint8_t* DynamicShared() {
  extern __shared__ uint4 lode_dynamic_shared[];
  return reinterpret_cast<uint8_t*>(lode_dynamic_shared);
}

struct Grid {
  uint32_t x, y = 1, z = 1;
};
// Set by OpenCard: launches may overlap.
extern bool launches_overlap;
#if defined(LODE_TEST_HOOKS)
// Benchmarks: launches start a kernel that does nothing, with the same grid, arguments and order: what
// a graph of them takes is the launches' own time.
extern bool launches_empty;
template <class... P>
__global__ void EmptyKernel(P...) {
  LetNextStart();
  WaitForPrevious();
}
#endif
// Dynamic shared memory that any kernel gets, beside what it has of its own.
inline constexpr size_t kSharedUnasked = 40 * 1024;
// From here on a kernel is told to prefer shared memory to L1: else the driver may leave it room
// for two or three blocks.
inline constexpr size_t kSharedMuch = 16 * 1024;
template <class... P, class... A>
inline void LaunchWith(cudaLaunchAttribute* attributes, uint32_t n_attributes, Stream stream,
                       Grid grid, uint32_t threads, size_t shared, void (*kernel)(P...),
                       A... args) {
#if defined(LODE_TEST_HOOKS)
  if (launches_empty) kernel = &EmptyKernel<P...>;
#endif
  if (shared > kSharedUnasked)  // what a card can give is for the caller to know
    (void)cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                               cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shared));
  if (shared > kSharedMuch)
    (void)cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                               cudaFuncAttributePreferredSharedMemoryCarveout,
                               cudaSharedmemCarveoutMaxShared);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(grid.x, grid.y, grid.z);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = n_attributes;
  // Also kept by the runtime: CheckLaunches reports it.
  (void)cudaLaunchKernelEx(&config, kernel, static_cast<P>(args)...);
}
// Starts when everything before it has ended.
template <class... P, class... A>
inline void Launch(Stream stream, Grid grid, uint32_t threads, size_t shared, void (*kernel)(P...),
                   A... args) {
  LaunchWith(nullptr, 0, stream, grid, threads, shared, kernel, args...);
}
// For kernels that call WaitForPrevious in every thread: where the card can, it starts while the
// launch ahead still runs.
template <class... P, class... A>
inline void LaunchAhead(Stream stream, Grid grid, uint32_t threads, size_t shared,
                        void (*kernel)(P...), A... args) {
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  LaunchWith(&overlap, launches_overlap ? 1 : 0, stream, grid, threads, shared, kernel, args...);
}

}  // namespace lode::cuda
#endif
