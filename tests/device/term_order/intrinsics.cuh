// Every CUDA built-in and PTX instruction that the term-order kernels use, one thin function each,
// so that the kernels themselves are plain C++ and can be stepped through on a host by replacing
// this one header. Device code only. Target: sm_80 and newer (cp.async, s8 tensor cores).
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

namespace lode::term_order {

#define LODE_DEV static __device__ __forceinline__

LODE_DEV uint8_t* DynamicShared() {
  extern __shared__ uint4 lode_dynamic_shared[];
  return reinterpret_cast<uint8_t*>(lode_dynamic_shared);
}
LODE_DEV uint32_t ThreadIndex() { return threadIdx.x; }
LODE_DEV uint32_t BlockIndex() { return blockIdx.x; }
LODE_DEV uint32_t BlockIndexY() { return blockIdx.y; }
LODE_DEV uint32_t BlockCount() { return gridDim.x; }
LODE_DEV void SyncWarp() { __syncwarp(); }
LODE_DEV void SyncBlock() { __syncthreads(); }

// Asynchronous global -> shared copies; 16 bytes bypass L1, 4 bytes do not.
LODE_DEV void CopyAsync16(void* shared, const void* global) {
  const uint32_t s = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n" ::"r"(s), "l"(global)
               : "memory");
}
LODE_DEV void CopyAsync4(void* shared, const void* global) {
  const uint32_t s = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(s), "l"(global) : "memory");
}
LODE_DEV void CopyCommit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
// Waits until at most `kPending` of the calling thread's newest groups are still in flight.
template <int kPending>
LODE_DEV void CopyWait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

LODE_DEV float ShuffleXor(float x, uint32_t mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
LODE_DEV int Dp4a(uint32_t a, uint32_t b, int c) {
  return __dp4a(static_cast<int>(a), static_cast<int>(b), c);
}
// c + low/high byte pair of b (signed 8 bit) times both halves of a (signed 16 bit).
LODE_DEV int Dp2aLow(uint32_t a, uint32_t b, int c) {
  return __dp2a_lo(static_cast<int>(a), static_cast<int>(b), c);
}
LODE_DEV int Dp2aHigh(uint32_t a, uint32_t b, int c) {
  return __dp2a_hi(static_cast<int>(a), static_cast<int>(b), c);
}
LODE_DEV uint32_t BytePermute(uint32_t low, uint32_t high, uint32_t selector) {
  return __byte_perm(low, high, selector);
}
// Exact for every half, denormals included (compared with canonical::FromF16 for all 65,536 in
// section "exact").
LODE_DEV float HalfBitsToFloat(uint32_t h) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(h)));
}

// D = A * B + C on one warp: A 16x32 s8 (rows), B 32x8 s8 (columns), C and D 16x8 s32.
// With g = lane / 4 and t = lane % 4: a[0] row g, k 4t..; a[1] row g+8; a[2] row g, k 16+4t..; a[3]
// row g+8, k 16+4t..; b[0] column g, k 4t..; b[1] k 16+4t..; d[0], d[1] row g, columns 2t, 2t+1;
// d[2], d[3] row g+8.
LODE_DEV void MmaS8(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                    const int (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%10,%11,%12,%13};\n"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c[0]), "r"(c[1]),
        "r"(c[2]), "r"(c[3]));
}

}  // namespace lode::term_order
