// What the PCIe link gives to the lanes, measured alone: (1) the parts of a doorbell between a kernel
// and another process (fence, flight, answer, looks), inside one kernel and as launches of a graph;
// (2) kernels that copy listed pieces of registered host memory into device memory, over blocks,
// threads, loads in flight and bulk copies, against plain reads; alone, beside busy host threads,
// beside the copy engine. The figures behind docs/design/cuda.md, "Pull lane" and "The wait".
//
//   link [doorbell|copy|all]     on a machine with a card (sm_90); needs 6 GiB of host memory
#include <cuda_runtime.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace {

#define OK(call)                                                                         \
  do {                                                                                   \
    const cudaError_t e_ = (call);                                                       \
    if (e_ != cudaSuccess) {                                                             \
      std::printf("%s: %s (line %d)\n", #call, cudaGetErrorString(e_), __LINE__);        \
      std::exit(1);                                                                      \
    }                                                                                    \
  } while (0)

double Median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.empty() ? 0 : v[v.size() / 2];
}

// ---------------------------------------------------------------- doorbell

constexpr uint32_t kPayloadMax = 64 * 1024;
enum Answer : uint32_t { kBellOnly = 0, kReadAll = 1, kTags = 2 };

// Between the two processes.
struct Shared {
  alignas(128) uint64_t bell;
  alignas(128) uint64_t ack;
  alignas(128) std::atomic<uint32_t> mode, bytes, stop;
  std::atomic<uint64_t> late;  // bells whose payload was not complete at the first look
  alignas(4096) uint8_t payload[kPayloadMax];
};

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
__global__ void BusyKernel(uint64_t clocks) {
  const uint64_t begin = clock64();
  while (clock64() - begin < clocks) {
  }
}
// Copies random pieces of 1 MB until told to stop, with as much in flight as the staged pull lane or
// (loads == 4) far more than the link needs.
__global__ void Saturate(const uint8_t* from, uint64_t bytes, uint4* to, uint32_t loads,
                         const volatile uint32_t* stop) {
  constexpr uint32_t kWords = 65536;
  uint64_t random = 1;
  for (uint32_t round = 0; round < 4000000; ++round) {
    random = random * 6364136223846793005ull + 1442695040888963407ull;
    const uint4* piece = reinterpret_cast<const uint4*>(from + (random >> 20) % (bytes - 16 * kWords) / 64 * 64);
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < kWords; i += loads * gridDim.x * blockDim.x) {
      uint4 v[4];
#pragma unroll
      for (uint32_t k = 0; k < 4; ++k)
        if (k < loads && i + k * gridDim.x * blockDim.x < kWords) v[k] = __ldg(piece + i + k * gridDim.x * blockDim.x);
#pragma unroll
      for (uint32_t k = 0; k < 4; ++k)
        if (k < loads && i + k * gridDim.x * blockDim.x < kWords) to[i + k * gridDim.x * blockDim.x] = v[k];
    }
    if (*stop != 0) return;
  }
}

struct Host {
  uint8_t* big = nullptr;
  size_t bytes = 0;
  Shared* shared = nullptr;
  cudaStream_t stream = nullptr, other = nullptr, third = nullptr;
  uint8_t* target = nullptr;  // device, 4 MiB
  double clocks_per_us = 1;
  uint32_t *device_words = nullptr, *stop = nullptr;  // device
};

// Keeps the link busy while it lives: 1, 2: kernels with little, much in flight; 3: the copy engine.
struct Load {
  Load(const Host& h, uint32_t kind) : h_(h), kind_(kind) {
    if (kind == 0) return;
    if (kind == 3) {
      worker_ = std::thread([this] {
        OK(cudaSetDevice(0));
        while (!over_) {
          for (int i = 0; i < 8; ++i)
            OK(cudaMemcpyAsync(h_.target, h_.big + i * 300000064ull, 4 << 20, cudaMemcpyHostToDevice, h_.other));
          OK(cudaStreamSynchronize(h_.other));
        }
      });
    } else {
      OK(cudaMemset(h.stop, 0, 4));
      Saturate<<<kind == 1 ? 8 : 32, 256, 0, h.other>>>(h.big, h.bytes, reinterpret_cast<uint4*>(h.target), kind == 1 ? 2 : 4,
                                                        h.stop);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  ~Load() {
    if (kind_ == 0) return;
    over_ = true;
    if (worker_.joinable()) worker_.join();
    const uint32_t one = 1;
    if (kind_ != 3) OK(cudaMemcpyAsync(h_.stop, &one, 4, cudaMemcpyHostToDevice, h_.third));
    OK(cudaStreamSynchronize(h_.other));
  }
  static const char* Name(uint32_t kind) {
    static const char* names[] = {"link idle", "reads of 8 blocks, 2 loads", "reads of 32 blocks, 4 loads", "copy engine busy"};
    return names[kind];
  }
  const Host& h_;
  const uint32_t kind_;
  std::atomic<bool> over_{false};
  std::thread worker_;
};

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
          std::printf("  inside a kernel, %5u bytes, %-13s %u looks: stores %.2f fence %.2f bell %.2f "
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

cudaGraphExec_t Capture(cudaStream_t stream, const std::function<void()>& enqueue) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  enqueue();
  OK(cudaStreamEndCapture(stream, &graph));
  OK(cudaGraphInstantiate(&exec, graph, 0));
  OK(cudaGraphDestroy(graph));
  return exec;
}
double GraphUs(const Host& h, cudaGraphExec_t exec, int repeats = 15) {
  cudaEvent_t a, b;
  OK(cudaEventCreate(&a));
  OK(cudaEventCreate(&b));
  std::vector<double> us;
  for (int i = 0; i < repeats + 3; ++i) {
    OK(cudaEventRecord(a, h.stream));
    OK(cudaGraphLaunch(exec, h.stream));
    OK(cudaEventRecord(b, h.stream));
    OK(cudaStreamSynchronize(h.stream));
    float ms = 0;
    OK(cudaEventElapsedTime(&ms, a, b));
    if (i >= 3) us.push_back(1e3 * ms);
  }
  OK(cudaEventDestroy(a));
  OK(cudaEventDestroy(b));
  return Median(us);
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
  const auto one = [&](const char* what, const Ring& r, double between_us, uint32_t early, uint32_t busy) {
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
    std::printf("  graph, %s%5u bytes, %-13s %u looks, %4.0f us between: %.2f without, %.2f with, "
                "difference %.2f us per layer%s%s\n",
                what, r.bytes, kOrderName[r.order], r.looks, between_us, us[0], us[1], us[1] - us[0],
                busy ? ", link busy" : "", bad ? " FAILED" : "");
  };
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
  OK(cudaMemcpy(tag, counter, sizeof(uint64_t), cudaMemcpyDeviceToHost));
  OK(cudaFree(counter));
}

// ---------------------------------------------------------------- copies

struct Pieces {
  const uint8_t* const* from;
  uint32_t n;
  uint32_t bytes;  // of each, a multiple of 16
  uint8_t* to;     // piece i goes to to + i * bytes
};

__global__ void ReadKernel(Pieces p, uint32_t* sink) {  // as the start-up probe
  const uint64_t words = p.bytes / 16, stride = uint64_t{gridDim.x} * blockDim.x;
  uint32_t sum = 0;
  for (uint32_t e = 0; e < p.n; ++e) {
    const uint4* from = reinterpret_cast<const uint4*>(p.from[e]);
    for (uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += 4 * stride) {
#pragma unroll
      for (uint32_t k = 0; k < 4; ++k) {
        if (i + k * stride >= words) continue;
        const uint4 v = __ldg(from + i + k * stride);
        sum ^= v.x ^ v.y ^ v.z ^ v.w;
      }
    }
  }
  if (sum == 0x12345678u) sink[blockIdx.x] = sum;
}

// Blocks take chunks of blockDim * kInFlight words in the order of the list.
template <uint32_t kInFlight, bool kStream>
__global__ void CopyKernel(Pieces p) {
  const uint32_t words = p.bytes / 16, chunk = blockDim.x * kInFlight;
  const uint32_t per_piece = (words + chunk - 1) / chunk;
  for (uint32_t item = blockIdx.x; item < p.n * per_piece; item += gridDim.x) {
    const uint32_t e = item / per_piece, first = item % per_piece * chunk + threadIdx.x;
    const uint4* from = reinterpret_cast<const uint4*>(p.from[e]);
    uint4* to = reinterpret_cast<uint4*>(p.to + uint64_t{e} * p.bytes);
    uint4 v[kInFlight];
#pragma unroll
    for (uint32_t k = 0; k < kInFlight; ++k)
      if (first + k * blockDim.x < words) {
        const uint4* a = from + first + k * blockDim.x;
        if constexpr (kStream) {
          asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                       : "=r"(v[k].x), "=r"(v[k].y), "=r"(v[k].z), "=r"(v[k].w)
                       : "l"(a));
        } else {
          v[k] = __ldg(a);
        }
      }
#pragma unroll
    for (uint32_t k = 0; k < kInFlight; ++k)
      if (first + k * blockDim.x < words) to[first + k * blockDim.x] = v[k];
  }
}

// One thread per block moves chunks with bulk copies: host -> shared memory -> device memory.
constexpr uint32_t kBulkBytes = 8192, kBulkStages = 6;
__global__ void BulkKernel(Pieces p) {
  extern __shared__ __align__(128) uint8_t buffer[];
  __shared__ __align__(8) uint64_t full[kBulkStages];
  if (threadIdx.x != 0) return;
  const auto address = [](const void* q) { return static_cast<uint32_t>(__cvta_generic_to_shared(q)); };
  for (uint32_t s = 0; s < kBulkStages; ++s)
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(address(&full[s])));
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  const uint32_t per_piece = (p.bytes + kBulkBytes - 1) / kBulkBytes, items = p.n * per_piece;
  const uint32_t mine = items > blockIdx.x ? (items - blockIdx.x - 1) / gridDim.x + 1 : 0;
  const auto place = [&](uint32_t k, uint32_t* e, uint32_t* at, uint32_t* bytes) {
    const uint32_t item = blockIdx.x + k * gridDim.x;
    *e = item / per_piece;
    *at = item % per_piece * kBulkBytes;
    *bytes = p.bytes - *at < kBulkBytes ? p.bytes - *at : kBulkBytes;
  };
  const auto load = [&](uint32_t k) {
    uint32_t e, at, bytes;
    place(k, &e, &at, &bytes);
    const uint32_t bar = address(&full[k % kBulkStages]);
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     address(buffer + (k % kBulkStages) * kBulkBytes)),
                 "l"(p.from[e] + at), "r"(bytes), "r"(bar)
                 : "memory");
  };
  for (uint32_t k = 0; k < kBulkStages - 1 && k < mine; ++k) load(k);
  for (uint32_t k = 0; k < mine; ++k) {
    if (k + kBulkStages - 1 < mine) {
      // The stage that it takes was stored in the step before: one group may still read.
      asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      load(k + kBulkStages - 1);
    }
    const uint32_t bar = address(&full[k % kBulkStages]), parity = k / kBulkStages & 1;
    uint32_t done = 0;
    while (!done)
      asm volatile("{ .reg .pred q; mbarrier.try_wait.parity.shared.b64 q, [%1], %2; selp.u32 %0, 1, 0, q; }"
                   : "=r"(done)
                   : "r"(bar), "r"(parity)
                   : "memory");
    uint32_t e, at, bytes;
    place(k, &e, &at, &bytes);
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(p.to + uint64_t{e} * p.bytes + at),
                 "r"(address(buffer + (k % kBulkStages) * kBulkBytes)), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

struct CopyBench {
  const Host& h;
  const uint8_t** list;  // pinned
  uint8_t* to;
  uint32_t* sink;
  cudaEvent_t a, b;

  static constexpr uint32_t kListMax = 40 * 64;
  explicit CopyBench(const Host& host) : h(host) {
    OK(cudaMallocManaged(&list, kListMax * sizeof(void*)));
    OK(cudaMalloc(&to, size_t{64} << 20));
    OK(cudaMalloc(&sink, 4096));
    OK(cudaEventCreate(&a));
    OK(cudaEventCreate(&b));
  }
  void Draw(uint32_t n, uint32_t bytes) {
    static uint64_t random = 1;
    for (uint32_t i = 0; i < n; ++i) {
      random = random * 6364136223846793005ull + 1442695040888963407ull;
      list[i] = h.big + (random >> 20) % ((h.bytes - bytes) / 64) * 64;
    }
    int device = 0;
    OK(cudaGetDevice(&device));
    cudaMemLocation place = {cudaMemLocationTypeDevice, device};
    cudaMemPrefetchAsync(list, kListMax * sizeof(void*), place, 0, h.stream);
    OK(cudaStreamSynchronize(h.stream));
  }
  // GB/s over `launches` launches of n pieces each, launch gaps included.
  double Rate(uint32_t n, uint32_t bytes, uint32_t launches, const std::function<void(const Pieces&)>& go) {
    Draw(n * launches, bytes);
    std::vector<double> rates;
    for (int run = 0; run < 3; ++run) {
      OK(cudaEventRecord(a, h.stream));
      for (uint32_t l = 0; l < launches; ++l) go({list + l * n, n, bytes, to});
      OK(cudaEventRecord(b, h.stream));
      OK(cudaStreamSynchronize(h.stream));
      float ms = 0;
      OK(cudaEventElapsedTime(&ms, a, b));
      rates.push_back(static_cast<double>(n) * bytes * launches / ms / 1e6);
    }
    return Median(rates);
  }
  bool Same(uint32_t n, uint32_t bytes) {  // of the last launch's pieces list[0..n)
    std::vector<uint8_t> got(size_t{n} * bytes);
    OK(cudaMemcpy(got.data(), to, got.size(), cudaMemcpyDeviceToHost));
    for (uint32_t i = 0; i < n; ++i)
      if (std::memcmp(got.data() + size_t{i} * bytes, list[i], bytes) != 0) return false;
    return true;
  }
  template <uint32_t kInFlight, bool kStream>
  std::function<void(const Pieces&)> Copy(uint32_t blocks, uint32_t threads) const {
    const cudaStream_t s = h.stream;
    return [=](const Pieces& p) { CopyKernel<kInFlight, kStream><<<blocks, threads, 0, s>>>(p); };
  }
  std::function<void(const Pieces&)> Bulk(uint32_t blocks) const {
    const cudaStream_t s = h.stream;
    OK(cudaFuncSetAttribute(BulkKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBulkBytes * kBulkStages));
    return [=](const Pieces& p) { BulkKernel<<<blocks, 32, kBulkBytes * kBulkStages, s>>>(p); };
  }
  std::function<void(const Pieces&)> Read(uint32_t blocks) const {
    const cudaStream_t s = h.stream;
    uint32_t* const sk = sink;
    return [=](const Pieces& p) { ReadKernel<<<blocks, 256, 0, s>>>(p, sk); };
  }
  std::function<void(const Pieces&)> Engine() const {  // the copy engine, one call per piece
    const cudaStream_t s = h.stream;
    return [=](const Pieces& p) {
      for (uint32_t i = 0; i < p.n; ++i)
        OK(cudaMemcpyAsync(p.to + uint64_t{i} * p.bytes, p.from[i], p.bytes, cudaMemcpyHostToDevice, s));
    };
  }
};

constexpr uint32_t kPart[] = {460800, 684032, 1043456};  // one matrix: Q2_0, IQ3_S, UD-Q4_K_XL
const char* kPack[] = {"q2_0", "iq3_s", "ud_q4_k_xl"};

void Grid(CopyBench& c) {
  std::printf("copies of 36 pieces a launch (12 experts), GB/s; pieces of %u bytes\n", kPart[2]);
  const uint32_t n = 36, launches = 16, bytes = kPart[2];
  for (const uint32_t blocks : {8u, 16u, 24u, 32u, 48u, 96u, 132u}) {
    std::printf("  %3u blocks: read %.1f | 256 threads, 1, 2, 4, 8 loads: %.1f %.1f %.1f %.1f | no L1: 4, 8: %.1f %.1f | "
                "512 threads, 2, 4, 8: %.1f %.1f %.1f | 1024 threads, 2, 4: %.1f %.1f",
                blocks, c.Rate(n, bytes, launches, c.Read(blocks)),
                c.Rate(n, bytes, launches, c.Copy<1, false>(blocks, 256)),
                c.Rate(n, bytes, launches, c.Copy<2, false>(blocks, 256)),
                c.Rate(n, bytes, launches, c.Copy<4, false>(blocks, 256)),
                c.Rate(n, bytes, launches, c.Copy<8, false>(blocks, 256)),
                c.Rate(n, bytes, launches, c.Copy<4, true>(blocks, 256)),
                c.Rate(n, bytes, launches, c.Copy<8, true>(blocks, 256)),
                c.Rate(n, bytes, launches, c.Copy<2, false>(blocks, 512)),
                c.Rate(n, bytes, launches, c.Copy<4, false>(blocks, 512)),
                c.Rate(n, bytes, launches, c.Copy<8, false>(blocks, 512)),
                c.Rate(n, bytes, launches, c.Copy<2, false>(blocks, 1024)),
                c.Rate(n, bytes, launches, c.Copy<4, false>(blocks, 1024)));
    const bool same = (c.Rate(n, bytes, 1, c.Copy<4, false>(blocks, 256)), c.Same(n, bytes));
    std::printf(" | same %d\n", same);
    std::fflush(stdout);
  }
}

void Bulks(CopyBench& c) {
  for (const uint32_t blocks : {4u, 8u, 16u, 24u, 32u, 48u, 96u}) {
    std::printf("  bulk copies, %3u blocks: %.1f GB/s", blocks, c.Rate(36, kPart[2], 16, c.Bulk(blocks)));
    const bool same = (c.Rate(36, kPart[2], 1, c.Bulk(blocks)), c.Same(36, kPart[2]));
    std::printf(" same %d\n", same);
    std::fflush(stdout);
  }
}

void Sizes(CopyBench& c, const char* when) {
  for (uint32_t pack = 0; pack < 3; ++pack) {
    for (const uint32_t experts : {1u, 3u, 12u}) {
      const uint32_t bytes = kPart[pack], n = 3 * experts, launches = 16;
      std::printf("  %s%s, %2u experts a launch: read 48 blocks %.1f | copy 24 blocks x 256 x 8 %.1f, 32 x 256 x 4 %.1f, "
                  "48 x 256 x 4 %.1f, 48 x 256 x 8 %.1f | copy engine %.1f GB/s\n",
                  when, kPack[pack], experts, c.Rate(n, bytes, launches, c.Read(48)),
                  c.Rate(n, bytes, launches, c.Copy<8, false>(24, 256)),
                  c.Rate(n, bytes, launches, c.Copy<4, false>(32, 256)),
                  c.Rate(n, bytes, launches, c.Copy<4, false>(48, 256)),
                  c.Rate(n, bytes, launches, c.Copy<8, false>(48, 256)),
                  c.Rate(n, bytes, launches, c.Engine()));
      std::fflush(stdout);
    }
  }
}

// Host threads that read memory, as the CPU lane does.
struct Readers {
  Readers(const Host& h, uint32_t threads) {
    for (uint32_t t = 0; t < threads; ++t) {
      pool.emplace_back([this, &h, t, threads] {
        const size_t part = h.bytes / threads / 64 * 64, slice = size_t{1} << 20;
        const uint64_t* from = reinterpret_cast<const uint64_t*>(h.big + t * part);
        uint64_t sum = 0;
        for (size_t at = 0; !stop.load(std::memory_order_relaxed); at = (at + slice) % (part - slice)) {
          for (size_t i = at / 8; i < (at + slice) / 8; i += 8)
            sum += from[i] ^ from[i + 1] ^ from[i + 2] ^ from[i + 3] ^ from[i + 4] ^ from[i + 5] ^ from[i + 6] ^ from[i + 7];
          bytes.fetch_add(slice, std::memory_order_relaxed);
        }
        keep.fetch_add(sum, std::memory_order_relaxed);
      });
    }
  }
  ~Readers() {
    stop = true;
    for (std::thread& t : pool) t.join();
  }
  std::vector<std::thread> pool;
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> bytes{0}, keep{0};
};

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void Beside(CopyBench& c) {
  for (const uint32_t threads : {0u, 4u, 8u, 14u}) {
    Readers readers(c.h, threads);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const uint64_t before = readers.bytes;
    const double begin = Now();
    const double read = c.Rate(36, kPart[2], 32, c.Read(48)), copy = c.Rate(36, kPart[2], 32, c.Copy<4, false>(32, 256)),
                 wide = c.Rate(36, kPart[2], 32, c.Copy<8, false>(48, 256));
    const double host = static_cast<double>(readers.bytes - before) / (Now() - begin) / 1e9;
    std::printf("  beside %2u host threads (%.1f GB/s): read %.1f, copy 32 x 256 x 4 %.1f, 48 x 256 x 8 %.1f GB/s\n", threads, host,
                read, copy, wide);
  }
  // The copy engine at work on the other stream, as for swaps.
  uint8_t* to;
  OK(cudaMalloc(&to, kPart[2]));
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> moved{0};
  const auto uploads = [&](uint32_t pause_us) {
    return std::thread([&, pause_us] {
      OK(cudaSetDevice(0));
      for (uint64_t i = 0; !stop; ++i) {
        OK(cudaMemcpyAsync(to, c.h.big + (i * 7919 % 5000) * kPart[2], kPart[2], cudaMemcpyHostToDevice, c.h.other));
        OK(cudaStreamSynchronize(c.h.other));
        moved += kPart[2];
        if (pause_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(pause_us));
      }
    });
  };
  for (const uint32_t pause : {0u, 100u, 1000u}) {
    stop = false;
    moved = 0;
    std::thread t = uploads(pause);
    const double begin = Now();
    const double copy = c.Rate(36, kPart[2], 64, c.Copy<4, false>(32, 256));
    const double up = static_cast<double>(moved) / (Now() - begin) / 1e9;
    stop = true;
    t.join();
    std::printf("  beside the copy engine (%.1f GB/s, %u us between copies): copy 32 x 256 x 4 %.1f GB/s\n", up, pause, copy);
  }
}

// Does a branch of a graph run beside the trunk? 36 pieces copied in a branch, six busy kernels of
// 20 us on all multiprocessors in the trunk.
void Branches(CopyBench& c) {
  const Host& h = c.h;
  cudaEvent_t fork, join;
  OK(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
  OK(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
  for (const uint32_t n : {3u, 9u, 36u}) {
    c.Draw(n, kPart[2]);
    const Pieces p = {c.list, n, kPart[2], c.to};
    const auto trunk = [&](uint32_t blocks) {
      for (int i = 0; i < 6; ++i)
        BusyKernel<<<blocks, 128, 0, h.stream>>>(static_cast<uint64_t>(20 * h.clocks_per_us));
    };
    double us[4];
    const auto time = [&](const std::function<void()>& enqueue) {
      cudaGraphExec_t exec = Capture(h.stream, enqueue);
      const double t = GraphUs(h, exec, 15);
      OK(cudaGraphExecDestroy(exec));
      return t;
    };
    us[0] = time([&] { CopyKernel<4, false><<<32, 256, 0, h.stream>>>(p); });
    us[1] = time([&] { trunk(8 * 132); });
    for (const uint32_t blocks : {8u * 132, 2u * 132}) {
      us[blocks == 8 * 132 ? 2 : 3] = time([&] {
        BusyKernel<<<1, 32, 0, h.stream>>>(100);
        OK(cudaEventRecord(fork, h.stream));
        OK(cudaStreamWaitEvent(h.other, fork, 0));
        CopyKernel<4, false><<<32, 256, 0, h.other>>>(p);
        OK(cudaEventRecord(join, h.other));
        trunk(blocks);
        OK(cudaStreamWaitEvent(h.stream, join, 0));
        BusyKernel<<<1, 32, 0, h.stream>>>(100);
      });
    }
    std::printf("  branch: copy of %2u pieces alone %.0f us, trunk alone %.0f us, both with fork and join %.0f us (8 blocks per "
                "multiprocessor), %.0f us (2)\n",
                n, us[0], us[1], us[2], us[3]);
  }
  // What fork and join cost a chain of short kernels: per layer ring-like, two, await-like.
  for (const uint32_t mode : {0u, 1u, 2u}) {
    cudaGraphExec_t exec = Capture(h.stream, [&] {
      for (int layer = 0; layer < 48; ++layer) {
        BusyKernel<<<1, 32, 0, h.stream>>>(100);
        if (mode > 0) {
          OK(cudaEventRecord(fork, h.stream));
          OK(cudaStreamWaitEvent(h.other, fork, 0));
          BusyKernel<<<32, 256, 0, h.other>>>(100);
          if (mode > 1) BusyKernel<<<32, 256, 0, h.other>>>(100);
          if (mode > 1) BusyKernel<<<32, 256, 0, h.other>>>(100);
          if (mode > 1) BusyKernel<<<32, 256, 0, h.other>>>(100);
          OK(cudaEventRecord(join, h.other));
        }
        for (int i = 0; i < 5; ++i) BusyKernel<<<132, 128, 0, h.stream>>>(100);
        if (mode > 0) OK(cudaStreamWaitEvent(h.stream, join, 0));
      }
    });
    std::printf("  chain of 6 short kernels%s: %.2f us per layer\n",
                mode == 0 ? "" : (mode == 1 ? " with a branch of one" : " with a branch of four"), GraphUs(h, exec) / 48);
    OK(cudaGraphExecDestroy(exec));
  }
}

void Fill(Host* h) {
  h->bytes = size_t{6} << 30;
  h->big = static_cast<uint8_t*>(mmap(nullptr, h->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  madvise(h->big, h->bytes, MADV_HUGEPAGE);
  std::vector<std::thread> pool;
  for (uint32_t t = 0; t < 12; ++t) {
    pool.emplace_back([=] {
      const size_t part = h->bytes / 12 / 4096 * 4096;
      uint64_t x = t + 1;
      for (size_t i = t * part; i < (t + 1) * part; i += 8) {
        x = x * 6364136223846793005ull + 1442695040888963407ull;
        std::memcpy(h->big + i, &x, 8);
      }
    });
  }
  for (std::thread& t : pool) t.join();
  OK(cudaHostRegister(h->big, h->bytes, cudaHostRegisterMapped | cudaHostRegisterPortable));
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "all";
  setvbuf(stdout, nullptr, _IOLBF, 0);
  Host h;
  h.shared = static_cast<Shared*>(mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  std::memset(static_cast<void*>(h.shared), 0, sizeof(Shared));
  const pid_t child = fork();  // before any CUDA call
  if (child == 0) {
    Watch(h.shared);
    _exit(0);
  }
  OK(cudaSetDevice(0));
  cudaDeviceProp prop;
  OK(cudaGetDeviceProperties(&prop, 0));
  OK(cudaStreamCreateWithFlags(&h.stream, cudaStreamNonBlocking));
  OK(cudaStreamCreateWithFlags(&h.other, cudaStreamNonBlocking));
  OK(cudaMalloc(&h.device_words, 1 << 20));
  OK(cudaMalloc(&h.stop, 64));
  OK(cudaMalloc(&h.target, 4 << 20));
  OK(cudaStreamCreateWithFlags(&h.third, cudaStreamNonBlocking));
  OK(cudaHostRegister(h.shared, sizeof(Shared), cudaHostRegisterMapped));
  {  // clocks per us, warm
    cudaEvent_t a, b;
    OK(cudaEventCreate(&a));
    OK(cudaEventCreate(&b));
    BusyKernel<<<132, 128, 0, h.stream>>>(100000000);
    OK(cudaEventRecord(a, h.stream));
    BusyKernel<<<1, 32, 0, h.stream>>>(20000000);
    OK(cudaEventRecord(b, h.stream));
    OK(cudaStreamSynchronize(h.stream));
    float ms = 0;
    OK(cudaEventElapsedTime(&ms, a, b));
    h.clocks_per_us = 20000000 / (1e3 * ms);
  }
  const double begin = Now();
  Fill(&h);
  std::printf("%s, %.0f clocks per us, 6 GiB registered after %.1f s\n", prop.name, h.clocks_per_us, Now() - begin);
  if (what != "doorbell") {
    CopyBench c(h);
    Grid(c);
    Sizes(c, "");
    Beside(c);
    Branches(c);
    std::printf("copies: %.1f s\n", Now() - begin);
  }
  if (what != "copy") {
    uint64_t tag = 0;
    Inside(h, &tag);
    Launches(h, &tag);
    std::printf("doorbell: %.1f s\n", Now() - begin);
  }
  if (what != "doorbell") {  // last: a card that refuses it is lost
    CopyBench c(h);
    Bulks(c);
  }
  h.shared->stop = 1;
  waitpid(child, nullptr, 0);
  std::printf("link: done, %.1f s\n", Now() - begin);
  return 0;
}
