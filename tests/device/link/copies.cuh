// Kernels that bring listed pieces of host memory to the device, over blocks, threads and loads in
// flight; beside host threads, beside the copy engine, as a branch of a graph. Included by link.cu
// only.
#pragma once

#include "tests/device/link/common.cuh"

namespace {

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
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t buffer[];
  __shared__ __align__(8) uint64_t full[kBulkStages];
  if (threadIdx.x != 0) return;
  const auto address = [](const void* q) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(q));
  };
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
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(address(buffer + (k % kBulkStages) * kBulkBytes)),
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
      asm volatile(
          "{ .reg .pred q; mbarrier.try_wait.parity.shared.b64 q, [%1], %2; selp.u32 %0, 1, 0, q; }"
          : "=r"(done)
          : "r"(bar), "r"(parity)
          : "memory");
    uint32_t e, at, bytes;
    place(k, &e, &at, &bytes);
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                     p.to + uint64_t{e} * p.bytes + at),
                 "r"(address(buffer + (k % kBulkStages) * kBulkBytes)), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
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
  }
  // GB/s over `launches` launches of n pieces each, launch gaps included.
  double Rate(uint32_t n, uint32_t bytes, uint32_t launches,
              const std::function<void(const Pieces&)>& go) {
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
    OK(cudaFuncSetAttribute(BulkKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                            kBulkBytes * kBulkStages));
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
        OK(cudaMemcpyAsync(p.to + uint64_t{i} * p.bytes, p.from[i], p.bytes, cudaMemcpyHostToDevice,
                           s));
    };
  }
};

constexpr uint32_t kPart[] = {460800, 684032, 1043456};  // one matrix: Q2_0, IQ3_S, UD-Q4_K_XL
const char* kPack[] = {"q2_0", "iq3_s", "ud_q4_k_xl"};

void Grid(CopyBench& c) {
  std::printf("copies of 36 pieces a launch (12 experts), GB/s; pieces of %u bytes\n", kPart[2]);
  const uint32_t n = 36, launches = 16, bytes = kPart[2];
  for (const uint32_t blocks : {8u, 16u, 24u, 32u, 48u, 96u, 132u}) {
    std::printf(
        "  %3u blocks: read %.1f | 256 threads, 1, 2, 4, 8 loads: %.1f %.1f %.1f %.1f | no L1: 4, "
        "8: %.1f %.1f | "
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
    std::printf("  bulk copies, %3u blocks: %.1f GB/s", blocks,
                c.Rate(36, kPart[2], 16, c.Bulk(blocks)));
    const bool same = (c.Rate(36, kPart[2], 1, c.Bulk(blocks)), c.Same(36, kPart[2]));
    std::printf(" same %d\n", same);
    std::fflush(stdout);
  }
}

void Sizes(CopyBench& c, const char* when) {
  for (uint32_t pack = 0; pack < 3; ++pack) {
    for (const uint32_t experts : {1u, 3u, 12u}) {
      const uint32_t bytes = kPart[pack], n = 3 * experts, launches = 16;
      std::printf(
          "  %s%s, %2u experts a launch: read 48 blocks %.1f | copy 24 blocks x 256 x 8 %.1f, 32 x "
          "256 x 4 %.1f, "
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
        for (size_t at = 0; !stop.load(std::memory_order_relaxed);
             at = (at + slice) % (part - slice)) {
          for (size_t i = at / 8; i < (at + slice) / 8; i += 8)
            sum += from[i] ^ from[i + 1] ^ from[i + 2] ^ from[i + 3] ^ from[i + 4] ^ from[i + 5] ^
                   from[i + 6] ^ from[i + 7];
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

void Beside(CopyBench& c) {
  for (const uint32_t threads : {0u, 4u, 8u, 14u}) {
    Readers readers(c.h, threads);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const uint64_t before = readers.bytes;
    const double begin = Now();
    const double read = c.Rate(36, kPart[2], 32, c.Read(48)),
                 copy = c.Rate(36, kPart[2], 32, c.Copy<4, false>(32, 256)),
                 wide = c.Rate(36, kPart[2], 32, c.Copy<8, false>(48, 256));
    const double host = static_cast<double>(readers.bytes - before) / (Now() - begin) / 1e9;
    std::printf(
        "  beside %2u host threads (%.1f GB/s): read %.1f, copy 32 x 256 x 4 %.1f, 48 x 256 x 8 "
        "%.1f GB/s\n",
        threads, host, read, copy, wide);
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
        OK(cudaMemcpyAsync(to, c.h.big + (i * 7919 % 5000) * kPart[2], kPart[2],
                           cudaMemcpyHostToDevice, c.h.other));
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
    std::printf(
        "  beside the copy engine (%.1f GB/s, %u us between copies): copy 32 x 256 x 4 %.1f GB/s\n",
        up, pause, copy);
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
    std::printf(
        "  branch: copy of %2u pieces alone %.0f us, trunk alone %.0f us, both with fork and join "
        "%.0f us (8 blocks per "
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
                mode == 0 ? "" : (mode == 1 ? " with a branch of one" : " with a branch of four"),
                GraphUs(h, exec) / 48);
    OK(cudaGraphExecDestroy(exec));
  }
}

}  // namespace
