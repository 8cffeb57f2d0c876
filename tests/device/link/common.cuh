// What both halves of link.cu use: error checks, medians, the shared segment, the measured machine,
// graphs, and loads that keep the link busy. Included by link.cu only.
#pragma once

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

#define OK(call)                                                                  \
  do {                                                                            \
    const cudaError_t e_ = (call);                                                \
    if (e_ != cudaSuccess) {                                                      \
      std::printf("%s: %s (line %d)\n", #call, cudaGetErrorString(e_), __LINE__); \
      std::exit(1);                                                               \
    }                                                                             \
  } while (0)

double Median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.empty() ? 0 : v[v.size() / 2];
}

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

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

struct Host {
  uint8_t* big = nullptr;
  size_t bytes = 0;
  Shared* shared = nullptr;
  cudaStream_t stream = nullptr, other = nullptr, third = nullptr;
  uint8_t* target = nullptr;  // device, 4 MiB
  double clocks_per_us = 1;
  uint32_t *device_words = nullptr, *stop = nullptr;  // device
};

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

__global__ void BusyKernel(uint64_t clocks) {
  const uint64_t begin = clock64();
  while (clock64() - begin < clocks) {
  }
}
// Copies random pieces of 1 MB until told to stop, with as much in flight as the staged pull lane
// or (loads == 4) far more than the link needs.
__global__ void Saturate(const uint8_t* from, uint64_t bytes, uint4* to, uint32_t loads,
                         const volatile uint32_t* stop) {
  constexpr uint32_t kWords = 65536;
  uint64_t random = 1;
  for (uint32_t round = 0; round < 4000000; ++round) {
    random = random * 6364136223846793005ull + 1442695040888963407ull;
    const uint4* piece =
        reinterpret_cast<const uint4*>(from + (random >> 20) % (bytes - 16 * kWords) / 64 * 64);
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < kWords;
         i += loads * gridDim.x * blockDim.x) {
      uint4 v[4];
#pragma unroll
      for (uint32_t k = 0; k < 4; ++k)
        if (k < loads && i + k * gridDim.x * blockDim.x < kWords)
          v[k] = __ldg(piece + i + k * gridDim.x * blockDim.x);
#pragma unroll
      for (uint32_t k = 0; k < 4; ++k)
        if (k < loads && i + k * gridDim.x * blockDim.x < kWords)
          to[i + k * gridDim.x * blockDim.x] = v[k];
    }
    if (*stop != 0) return;
  }
}

// Keeps the link busy while it lives: 1, 2: kernels with little, much in flight; 3: the copy
// engine.
struct Load {
  Load(const Host& h, uint32_t kind) : h_(h), kind_(kind) {
    if (kind == 0) return;
    if (kind == 3) {
      worker_ = std::thread([this] {
        OK(cudaSetDevice(0));
        while (!over_) {
          for (int i = 0; i < 8; ++i)
            OK(cudaMemcpyAsync(h_.target, h_.big + i * 300000064ull, 4 << 20,
                               cudaMemcpyHostToDevice, h_.other));
          OK(cudaStreamSynchronize(h_.other));
        }
      });
    } else {
      OK(cudaMemset(h.stop, 0, 4));
      Saturate<<<kind == 1 ? 8 : 32, 256, 0, h.other>>>(
          h.big, h.bytes, reinterpret_cast<uint4*>(h.target), kind == 1 ? 2 : 4, h.stop);
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
    static const char* names[] = {"link idle", "reads of 8 blocks, 2 loads",
                                  "reads of 32 blocks, 4 loads", "copy engine busy"};
    return names[kind];
  }
  const Host& h_;
  const uint32_t kind_;
  std::atomic<bool> over_{false};
  std::thread worker_;
};

}  // namespace
