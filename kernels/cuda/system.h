// What kernels take from CUDA to talk to other processes: words and vectors in shared memory with
// system scope, the clock of deadlines, a nap between polls. The same names for nvcc and for the
// emulated device (platform.h). Orders: docs/design/exchange.md. Device code.
#pragma once

#include "kernels/cuda/platform.h"

#if defined(LODE_CUDA_EMULATED)
#include <atomic>
#include <chrono>
#include <thread>
#endif

namespace lode::cuda {

#if defined(LODE_CUDA_EMULATED)

#define LODE_DEVICE_MEMBER inline

LODE_DEVICE uint32_t BallotWarp(bool mine) {
  uint32_t mask = mine ? 1u << (ThreadId() % 32) : 0;
  for (uint32_t step = 1; step < 32; step *= 2) mask |= ShuffleXor(mask, step);
  return mask;
}

LODE_DEVICE void AtomicMin(uint32_t* p, uint32_t x) { *p = x < *p ? x : *p; }
LODE_DEVICE void AtomicOr(uint32_t* p, uint32_t x) { *p |= x; }
LODE_DEVICE void AtomicMax(uint64_t* p, uint64_t x) { *p = x > *p ? x : *p; }

LODE_DEVICE void StoreReleaseSystem(uint64_t* p, uint64_t x) {
  std::atomic_ref<uint64_t>(*p).store(x, std::memory_order_release);
}
LODE_DEVICE uint64_t LoadAcquireSystem(uint64_t* p) {
  return std::atomic_ref<uint64_t>(*p).load(std::memory_order_acquire);
}
LODE_DEVICE uint64_t LoadRelaxedSystem(uint64_t* p) {
  return std::atomic_ref<uint64_t>(*p).load(std::memory_order_relaxed);
}
LODE_DEVICE uint32_t LoadRelaxedSystem(uint32_t* p) {
  return std::atomic_ref<uint32_t>(*p).load(std::memory_order_relaxed);
}
LODE_DEVICE Word4 LoadRelaxedSystem(const Word4* p) { return *p; }
LODE_DEVICE void StoreReleaseDevice(uint64_t* p, uint64_t x) { StoreReleaseSystem(p, x); }
LODE_DEVICE uint64_t LoadAcquireDevice(uint64_t* p) { return LoadAcquireSystem(p); }
LODE_DEVICE void FenceSystem() { std::atomic_thread_fence(std::memory_order_seq_cst); }
LODE_DEVICE uint64_t ClockNs() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}
LODE_DEVICE void Nap(uint32_t) { std::this_thread::yield(); }

#else

#define LODE_DEVICE_MEMBER __device__ __forceinline__

// Bit l: lane l of the warp says yes. All 32 lanes take part.
LODE_DEVICE uint32_t BallotWarp(bool mine) { return __ballot_sync(0xffffffffu, mine); }

LODE_DEVICE void AtomicMin(uint32_t* p, uint32_t x) { atomicMin(p, x); }
LODE_DEVICE void AtomicOr(uint32_t* p, uint32_t x) { atomicOr(p, x); }
LODE_DEVICE void AtomicMax(uint64_t* p, uint64_t x) {
  atomicMax(reinterpret_cast<unsigned long long*>(p), static_cast<unsigned long long>(x));
}

// A release at system scope: everything this thread has written, or has observed through barriers
// and fences, is visible to whoever acquires the word.
LODE_DEVICE void StoreReleaseSystem(uint64_t* p, uint64_t x) {
  asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(p), "l"(x) : "memory");
}
LODE_DEVICE uint64_t LoadAcquireSystem(uint64_t* p) {
  uint64_t x;
  asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(x) : "l"(p) : "memory");
  return x;
}
LODE_DEVICE uint64_t LoadRelaxedSystem(uint64_t* p) {
  uint64_t x;
  asm volatile("ld.relaxed.sys.u64 %0, [%1];" : "=l"(x) : "l"(p) : "memory");
  return x;
}
LODE_DEVICE uint32_t LoadRelaxedSystem(uint32_t* p) {
  uint32_t x;
  asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
LODE_DEVICE Word4 LoadRelaxedSystem(const Word4* p) {
  Word4 v;
  asm volatile("ld.relaxed.sys.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
LODE_DEVICE void StoreReleaseDevice(uint64_t* p, uint64_t x) {
  asm volatile("st.release.gpu.u64 [%0], %1;" ::"l"(p), "l"(x) : "memory");
}
LODE_DEVICE uint64_t LoadAcquireDevice(uint64_t* p) {
  uint64_t x;
  asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(x) : "l"(p) : "memory");
  return x;
}
LODE_DEVICE void FenceSystem() { __threadfence_system(); }
// Of the whole machine's GPUs, in ns; ticks in steps of 32 ns to 1 us.
LODE_DEVICE uint64_t ClockNs() {
  uint64_t x;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(x));
  return x;
}
LODE_DEVICE void Nap(uint32_t ns) { __nanosleep(ns); }

#endif

}  // namespace lode::cuda
