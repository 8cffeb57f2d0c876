// The emulated device: kernels of kernels/cuda run on the host, so that tests without a card
// compare their bits and their barriers. A launch runs its blocks one after the other; the threads
// of a block are fibers of one host thread, switched at barriers and shuffles only, in an order
// that changes from launch to launch (a race shows as a changed bit sooner or later). A barrier
// that not every thread reaches ends the program with the place named. Same names as platform.h.
// Thread: launches of one process come from one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>

#include "kernels/canonical.h"

#define LODE_DEVICE static inline __attribute__((unused))
#define LODE_KERNEL(threads) [[maybe_unused]] static void
#define LODE_KERNEL_FITTING(threads, blocks) LODE_KERNEL(threads)
#define LODE_DEVICE_TABLE static const
#define LODE_SHARED static thread_local
#define LODE_UNROLL
#define LODE_NO_UNROLL

struct CUstream_st;

namespace lode::cuda {

using Stream = CUstream_st*;
struct Word2 {
  uint32_t x, y;
};
struct alignas(16) Word4 {
  uint32_t x, y, z, w;
};
struct Grid {
  uint32_t x, y = 1, z = 1;
};

namespace emulated {
struct Place {
  uint32_t thread, threads;
  Grid block, grid;
};
const Place& Here();
void BarrierBlock();
void BarrierWarp();
// The calling lane's value becomes visible to its warp; returns that of `lane` (its own when that
// lane does not exist).
uint64_t Exchange(uint64_t value, uint32_t lane);
uint32_t Votes(bool mine);
// Everybody's four words, by lane; valid until the warp's next exchange.
struct Words4 {
  uint32_t word[4];
};
const Words4* Gather(const Words4& mine);
uint8_t* SharedMemory();
// A copy of 16 bytes that happens as late as it may: when the thread waits for its group of copies.
void CopyLater(void* shared, const void* from);
void EndGroup();
void CopyNow(uint32_t groups_left);
// Runs `body` once per thread of every block.
void RunGrid(Grid grid, uint32_t threads, size_t shared, void (*body)(void*), void* context);
}  // namespace emulated

LODE_DEVICE uint32_t ThreadId() { return emulated::Here().thread; }
LODE_DEVICE uint32_t ThreadCount() { return emulated::Here().threads; }
LODE_DEVICE uint32_t BlockX() { return emulated::Here().block.x; }
LODE_DEVICE uint32_t BlockY() { return emulated::Here().block.y; }
LODE_DEVICE uint32_t BlockZ() { return emulated::Here().block.z; }
LODE_DEVICE uint32_t GridX() { return emulated::Here().grid.x; }
LODE_DEVICE uint32_t GridY() { return emulated::Here().grid.y; }
LODE_DEVICE uint32_t GridZ() { return emulated::Here().grid.z; }

LODE_DEVICE void SyncBlock() { emulated::BarrierBlock(); }
LODE_DEVICE void SyncWarp() { emulated::BarrierWarp(); }
LODE_DEVICE void FenceDevice() {}
LODE_DEVICE void WaitForPrevious() {}
LODE_DEVICE void LetNextStart() {}
LODE_DEVICE void PrefetchLine(const void*) {}
LODE_DEVICE void CopyAhead16(void* shared, const void* from) { emulated::CopyLater(shared, from); }
LODE_DEVICE void WaitForCopies() { emulated::CopyNow(0); }
LODE_DEVICE void EndCopyGroup() { emulated::EndGroup(); }
LODE_DEVICE void WaitForEarlierCopies() { emulated::CopyNow(1); }
template <uint32_t kLeft>
LODE_DEVICE void WaitForCopiesBut() {
  emulated::CopyNow(kLeft);
}

LODE_DEVICE uint32_t ShuffleFrom(uint32_t x, uint32_t lane) {
  return static_cast<uint32_t>(emulated::Exchange(x, lane));
}
LODE_DEVICE float ShuffleFrom(float x, uint32_t lane) {
  return canonical::FromBits(ShuffleFrom(canonical::BitsOf(x), lane));
}
LODE_DEVICE uint32_t ShuffleXor(uint32_t x, uint32_t mask) {
  return ShuffleFrom(x, (ThreadId() % 32) ^ mask);
}
LODE_DEVICE int32_t ShuffleXor(int32_t x, uint32_t mask) {
  return static_cast<int32_t>(ShuffleXor(static_cast<uint32_t>(x), mask));
}
LODE_DEVICE float ShuffleXor(float x, uint32_t mask) {
  return ShuffleFrom(x, (ThreadId() % 32) ^ mask);
}
LODE_DEVICE uint64_t ShuffleXor(uint64_t x, uint32_t mask) {
  return emulated::Exchange(x, (ThreadId() % 32) ^ mask);
}
LODE_DEVICE uint32_t LargestOfWarp(uint32_t x) {
  for (uint32_t w = 16; w >= 1; w /= 2) {
    const uint32_t other = ShuffleXor(x, w);
    x = other > x ? other : x;
  }
  return x;
}
LODE_DEVICE uint32_t SmallestOfWarp(uint32_t x) { return ~LargestOfWarp(~x); }
LODE_DEVICE uint32_t Ballot(bool predicate) { return emulated::Votes(predicate); }
LODE_DEVICE uint32_t ShuffleUp(uint32_t x, uint32_t by) {
  const uint32_t lane = ThreadId() % 32;
  return ShuffleFrom(x, lane < by ? lane : lane - by);
}

template <class T>
LODE_DEVICE T LoadOnce(const T* p) {
  return *p;
}

LODE_DEVICE void AtomicMin(uint64_t* p, uint64_t x) {
  if (x < *p) *p = x;
}
LODE_DEVICE uint32_t AtomicAdd(uint32_t* p, uint32_t x) { return std::exchange(*p, *p + x); }
LODE_DEVICE void AtomicAdd(uint64_t* p, uint64_t x) { *p += x; }
LODE_DEVICE uint32_t AtomicExchange(uint32_t* p, uint32_t x) { return std::exchange(*p, x); }
LODE_DEVICE uint32_t AtomicMax(uint32_t* p, uint32_t x) {
  return std::exchange(*p, x > *p ? x : *p);
}

LODE_DEVICE int32_t Dp4a(uint32_t a, uint32_t b, int32_t c) {
  int8_t u[4], v[4];
  std::memcpy(u, &a, 4);
  std::memcpy(v, &b, 4);
  return c + u[0] * v[0] + u[1] * v[1] + u[2] * v[2] + u[3] * v[3];
}
LODE_DEVICE void MultiplyBlocks(uint32_t a0, uint32_t a1, uint32_t b0, uint32_t b1,
                                float (&sum)[2]) {
  const emulated::Words4* all = emulated::Gather({{a0, a1, b0, b1}});
  const uint32_t lane = ThreadId() % 32, g = lane / 4, t = lane % 4;
  for (uint32_t i = 0; i < 2; ++i) {
    int32_t exact = 0;
    for (uint32_t q = 0; q < 4; ++q) {
      const uint32_t* a = all[4 * g + q].word;
      const uint32_t* b = all[4 * (2 * t + i) + q].word;
      exact = Dp4a(a[0], b[2], Dp4a(a[1], b[3], exact));
    }
    sum[i] = static_cast<float>(exact);
  }
  SyncWarp();
}
LODE_DEVICE uint32_t BytePermute(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t pick = (selector >> (4 * i)) & 15;
    uint32_t byte = static_cast<uint32_t>(both >> (8 * (pick & 7))) & 255;
    if (pick & 8) byte = byte & 128 ? 255 : 0;  // the instruction's sign replication
    r |= byte << (8 * i);
  }
  return r;
}
LODE_DEVICE uint32_t FunnelRight(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}
LODE_DEVICE uint32_t PopCount(uint32_t x) { return static_cast<uint32_t>(__builtin_popcount(x)); }
LODE_DEVICE float HalfToFloat(uint32_t h) { return canonical::FromF16(static_cast<uint16_t>(h)); }
LODE_DEVICE uint8_t* DynamicShared() { return emulated::SharedMemory(); }

template <class... P, class... A>
inline void Launch(Stream, Grid grid, uint32_t threads, size_t shared, void (*kernel)(P...),
                   A... args) {
  struct Call {
    void (*kernel)(P...);
    std::tuple<P...> args;
  } call{kernel, std::tuple<P...>(static_cast<P>(args)...)};
  emulated::RunGrid(
      grid, threads, shared,
      [](void* context) {
        const Call& c = *static_cast<Call*>(context);
        std::apply(c.kernel, c.args);
      },
      &call);
}

template <class... P, class... A>
inline void LaunchAhead(Stream stream, Grid grid, uint32_t threads, size_t shared,
                        void (*kernel)(P...), A... args) {
  Launch(stream, grid, threads, shared, kernel, args...);
}

}  // namespace lode::cuda
