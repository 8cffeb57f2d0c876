// The parts of a doorbell: a process that answers, kernels that ring and look, one after the other
// inside one kernel and as launches of a graph. Included by link.cu only.
#pragma once

#include "tests/device/link/common.cuh"

namespace {

uint32_t g_sink;

// The answering process.
void Watch(Shared* s) {
  uint64_t answered = 0;
  const pid_t parent = getppid();
  uint32_t spins = 0;
  while (s->stop.load(std::memory_order_relaxed) == 0) {
    if (++spins == 0 && getppid() != parent) return;
    const uint64_t tag = std::atomic_ref<uint64_t>(s->bell).load(std::memory_order_acquire);
    if (tag == answered) continue;
    const uint32_t mode = s->mode.load(std::memory_order_relaxed);
    const uint32_t n = s->bytes.load(std::memory_order_relaxed) / 16;
    if (mode != kBellOnly) {
      const volatile uint32_t* words = reinterpret_cast<const volatile uint32_t*>(s->payload);
      bool first = true;
      for (;;) {
        uint32_t wrong = 0, sum = 0;
        for (uint32_t i = 0; i < n; ++i) {
          sum += words[4 * i] ^ words[4 * i + 1] ^ words[4 * i + 2];
          wrong |= words[4 * i + 3] ^ static_cast<uint32_t>(tag);
        }
        g_sink += sum;
        if (mode == kReadAll || wrong == 0) break;
        if (first) s->late.fetch_add(1, std::memory_order_relaxed);
        first = false;
      }
    }
    answered = tag;
    std::atomic_ref<uint64_t>(s->ack).store(tag, std::memory_order_release);
  }
}

__device__ __forceinline__ uint64_t LoadSys(const uint64_t* p) {
  uint64_t x;
  asm volatile("ld.relaxed.sys.u64 %0, [%1];" : "=l"(x) : "l"(p) : "memory");
  return x;
}
__device__ __forceinline__ void StoreRelaxedSys(uint64_t* p, uint64_t x) {
  asm volatile("st.relaxed.sys.u64 [%0], %1;" ::"l"(p), "l"(x) : "memory");
}
__device__ __forceinline__ void StoreReleaseSys(uint64_t* p, uint64_t x) {
  asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(p), "l"(x) : "memory");
}

enum Order : uint32_t { kNone = 0, kRelease = 1, kFenceRelease = 2, kFenceRelaxed = 3 };

struct Ring {
  Shared* s;
  uint32_t bytes, order, looks;
};

__device__ __forceinline__ void Payload(const Ring& r, uint64_t tag) {
  uint4* to = reinterpret_cast<uint4*>(r.s->payload);
  for (uint32_t i = threadIdx.x; i < r.bytes / 16; i += blockDim.x)
    to[i] = make_uint4(i, static_cast<uint32_t>(tag) * 3, i ^ 5, static_cast<uint32_t>(tag));
}
__device__ __forceinline__ void Bell(const Ring& r, uint64_t tag) {
  if (r.order == kFenceRelease || r.order == kFenceRelaxed) __threadfence_system();
  if (r.order == kRelease || r.order == kFenceRelease) {
    StoreReleaseSys(&r.s->bell, tag);
  } else {
    StoreRelaxedSys(&r.s->bell, tag);
  }
}
// One thread; `looks` loads in flight, a part of a round trip apart. Ends after some 20 ms anyway.
__device__ __forceinline__ bool Await(const uint64_t* ack, uint32_t looks, uint64_t tag) {
  constexpr uint32_t kGiveUp = 20000;
  constexpr uint64_t kTrip = 2400;  // clocks
  const auto pause = [](uint64_t clocks) {
    const uint64_t begin = clock64();
    while (clock64() - begin < clocks) {
    }
  };
  if (looks == 1) {
    for (uint32_t i = 0; i < kGiveUp; ++i)
      if (LoadSys(ack) == tag) return true;
    return false;
  }
  if (looks == 2) {
    uint64_t a = LoadSys(ack);
    pause(kTrip / 2);
    uint64_t b = LoadSys(ack);
    for (uint32_t i = 0; i < kGiveUp; ++i) {
      if (a == tag) return true;
      a = LoadSys(ack);
      if (b == tag) return true;
      b = LoadSys(ack);
    }
    return false;
  }
  uint64_t a = LoadSys(ack);
  pause(kTrip / 4);
  uint64_t b = LoadSys(ack);
  pause(kTrip / 4);
  uint64_t c = LoadSys(ack);
  pause(kTrip / 4);
  uint64_t d = LoadSys(ack);
  for (uint32_t i = 0; i < kGiveUp; ++i) {
    if (a == tag) return true;
    a = LoadSys(ack);
    if (b == tag) return true;
    b = LoadSys(ack);
    if (c == tag) return true;
    c = LoadSys(ack);
    if (d == tag) return true;
    d = LoadSys(ack);
  }
  return false;
}

// Times of one doorbell in clocks: stores and barrier, fence, bell, answer seen.
__global__ void BellsInside(Ring r, uint64_t first, uint32_t n, uint32_t* times, uint32_t* failed) {
  for (uint32_t i = 0; i < n; ++i) {
    const uint64_t tag = first + i;
    __syncthreads();
    const uint64_t t0 = clock64();
    Payload(r, tag);
    __syncthreads();
    if (threadIdx.x == 0) {
      const uint64_t t1 = clock64();
      if (r.order == kFenceRelease || r.order == kFenceRelaxed) __threadfence_system();
      const uint64_t t2 = clock64();
      if (r.order == kRelease || r.order == kFenceRelease) {
        StoreReleaseSys(&r.s->bell, tag);
      } else {
        StoreRelaxedSys(&r.s->bell, tag);
      }
      const uint64_t t3 = clock64();
      if (!Await(&r.s->ack, r.looks, tag)) *failed = 1;
      const uint64_t t4 = clock64();
      times[4 * i] = static_cast<uint32_t>(t1 - t0);
      times[4 * i + 1] = static_cast<uint32_t>(t2 - t1);
      times[4 * i + 2] = static_cast<uint32_t>(t3 - t2);
      times[4 * i + 3] = static_cast<uint32_t>(t4 - t3);
    }
  }
}
__global__ void LookAlone(const uint64_t* p, uint32_t n, uint32_t* times) {
  for (uint32_t i = 0; i < n; ++i) {
    const uint64_t t0 = clock64();
    const uint64_t x = LoadSys(p);
    if (x == 0x1234567890abcdefull) times[0] = 1;
    times[i] = static_cast<uint32_t>(clock64() - t0);
  }
}
__global__ void FenceAlone(Shared* s, uint32_t stores, uint32_t n, uint32_t* times) {
  for (uint32_t i = 0; i < n; ++i) {
    for (uint32_t k = 0; k < stores; ++k)
      reinterpret_cast<volatile uint64_t*>(s->payload)[16 * k] = i;
    const uint64_t t0 = clock64();
    __threadfence_system();
    times[i] = static_cast<uint32_t>(clock64() - t0);
  }
}
// The same as launches. `counter`: device memory, the tag of the newest bell.
__global__ void RingKernel(Ring r, uint64_t* counter, bool ring) {
  const uint64_t tag = *counter + 1;
  if (ring) Payload(r, tag);
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (ring) {
    Bell(r, tag);
    *counter = tag;
  }
}
__global__ void SendKernel(Ring r, const uint64_t* counter) {
  Payload(r, *counter + 1);
  __syncthreads();
  if (threadIdx.x == 0) __threadfence_system();
}
__global__ void AwaitKernel(Ring r, const uint64_t* counter, bool ring, uint32_t* failed) {
  if (threadIdx.x == 0 && ring && !Await(&r.s->ack, r.looks, *counter)) *failed = 1;
}
const char* kOrderName[] = {"no fence", "release", "fence+release", "fence+relaxed"};

void Inside(const Host& h, uint64_t* tag) {
  constexpr uint32_t kN = 600;
  uint32_t* times;
  OK(cudaMallocManaged(&times, (4 * kN + 1) * sizeof(uint32_t)));
  const auto quartiles = [&](uint32_t part, uint32_t parts, uint32_t n) {
    std::vector<double> v;
    for (uint32_t i = 50; i < n; ++i) v.push_back(times[parts * i + part] / h.clocks_per_us);
    return Median(v);
  };
  for (const uint32_t busy : {0u, 1u, 2u, 3u}) {
    Load load(h, busy);
    LookAlone<<<1, 1, 0, h.stream>>>(&h.shared->ack, kN, times);
    OK(cudaStreamSynchronize(h.stream));
    std::printf("%s: one look %.2f us;", Load::Name(busy), quartiles(0, 1, kN));
    for (const uint32_t stores : {0u, 1u, 16u, 64u}) {
      FenceAlone<<<1, 1, 0, h.stream>>>(h.shared, stores, kN, times);
      OK(cudaStreamSynchronize(h.stream));
      std::printf(" fence behind %u stores %.2f us;", stores, quartiles(0, 1, kN));
    }
    std::printf("\n");
    for (const uint32_t bytes : {0u, 256u, 3328u, 13312u}) {
      for (const uint32_t order : {kNone, kRelease, kFenceRelease}) {
        for (const uint32_t looks : {1u, 2u}) {
          if (looks != 1 && (order != kRelease || busy != 0)) continue;
          h.shared->mode = order == kNone && bytes > 0 ? kTags : (bytes > 0 ? kReadAll : kBellOnly);
          h.shared->bytes = bytes;
          h.shared->late = 0;
          times[4 * kN] = 0;
          BellsInside<<<1, 256, 0, h.stream>>>({h.shared, bytes, order, looks}, *tag + 1, kN, times,
                                               times + 4 * kN);
          OK(cudaStreamSynchronize(h.stream));
          *tag += kN;
          std::printf(
              "  inside a kernel, %5u bytes, %-13s %u looks: stores %.2f fence %.2f bell %.2f "
              "answer %.2f us, late %llu%s\n",
              bytes, kOrderName[order], looks, quartiles(0, 4, kN), quartiles(1, 4, kN),
              quartiles(2, 4, kN), quartiles(3, 4, kN),
              static_cast<unsigned long long>(h.shared->late.load()),
              times[4 * kN] != 0 ? " FAILED" : "");
        }
      }
    }
  }
  OK(cudaFree(times));
}

// one(what, ring, microseconds between, early, load of the link) for every case worth a line.
template <class One>
void Sweep(const Host& h, const One& one) {
  for (const uint32_t busy : {0u, 1u, 2u, 3u}) {
    std::printf("  %s\n", Load::Name(busy));
    for (const double between : {0.0, 15.0}) {
      for (const uint32_t looks : {1u, 2u}) {
        for (const uint32_t bytes : {0u, 3328u, 13312u}) {
          for (const uint32_t order : {kNone, kRelease, kFenceRelease}) {
            if (looks == 2 && (order != kRelease || busy != 0)) continue;
            if (busy != 0 && bytes == 3328) continue;
            one("", {h.shared, bytes, order, looks}, between, 0, busy);
          }
        }
      }
    }
    one("not sent          ", {h.shared, 256, kRelease, 1}, 0, 3, busy);
    one("sent ahead        ", {h.shared, 3328, kRelease, 1}, 0, 1, busy);
    one("sent in a branch  ", {h.shared, 3328, kRelease, 1}, 0, 2, busy);
  }
}

// 48 layers of ring, [busy kernel], await; against the same launches without bell.
void Launches(const Host& h, uint64_t* tag) {
  constexpr uint32_t kLayers = 48;
  uint64_t* counter;
  uint32_t* failed = h.device_words;
  OK(cudaMalloc(&counter, sizeof(uint64_t)));
  OK(cudaMemset(failed, 0, 4));
  cudaEvent_t fork, join;
  OK(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
  OK(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
  *tag += 1000;
  OK(cudaMemcpy(counter, tag, sizeof(uint64_t), cudaMemcpyHostToDevice));
  // early: 0 all in the ring kernel; 1 a send kernel in front of a busy kernel; 2 the same in a
  // branch beside it; 3 nothing sent before, 256 bytes with the bell.
  const auto layers = [&](const Ring& r, bool ring, double between_us, uint32_t early) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      Ring small = r;
      if (early == 1 || early == 2) {
        if (early == 2) {
          OK(cudaEventRecord(fork, h.stream));
          OK(cudaStreamWaitEvent(h.other, fork, 0));
        }
        if (ring) SendKernel<<<1, 256, 0, early == 2 ? h.other : h.stream>>>(r, counter);
        if (early == 2) OK(cudaEventRecord(join, h.other));
      }
      if (early != 0) {
        small.bytes = 256;
        BusyKernel<<<1, 32, 0, h.stream>>>(static_cast<uint64_t>(5 * h.clocks_per_us));
        if (early == 2) OK(cudaStreamWaitEvent(h.stream, join, 0));
      }
      RingKernel<<<1, 256, 0, h.stream>>>(small, counter, ring);
      if (between_us > 0)
        BusyKernel<<<132, 128, 0, h.stream>>>(static_cast<uint64_t>(between_us * h.clocks_per_us));
      AwaitKernel<<<1, 32, 0, h.stream>>>(r, counter, ring, failed);
    }
  };
  const auto one = [&](const char* what, const Ring& r, double between_us, uint32_t early,
                       uint32_t busy) {
    h.shared->mode = r.order == kNone && r.bytes > 0 ? kTags : (r.bytes > 0 ? kReadAll : kBellOnly);
    h.shared->bytes = early != 0 && r.bytes > 256 ? 256 : r.bytes;
    double us[2];
    for (const bool ring : {false, true}) {
      cudaGraphExec_t exec = Capture(h.stream, [&] { layers(r, ring, between_us, early); });
      Load load(h, busy);
      us[ring] = GraphUs(h, exec) / kLayers;
      OK(cudaGraphExecDestroy(exec));
    }
    uint32_t bad = 0;
    OK(cudaMemcpy(&bad, failed, 4, cudaMemcpyDeviceToHost));
    std::printf(
        "  graph, %s%5u bytes, %-13s %u looks, %4.0f us between: %.2f without, %.2f with, "
        "difference %.2f us per layer%s%s\n",
        what, r.bytes, kOrderName[r.order], r.looks, between_us, us[0], us[1], us[1] - us[0],
        busy ? ", link busy" : "", bad ? " FAILED" : "");
  };
  Sweep(h, one);
  OK(cudaMemcpy(tag, counter, sizeof(uint64_t), cudaMemcpyDeviceToHost));
  OK(cudaFree(counter));
}

}  // namespace
