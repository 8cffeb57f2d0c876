// What the PCIe link gives to the lanes, measured alone: (1) the parts of a doorbell between a
// kernel and another process (fence, flight, answer, looks), inside one kernel and as launches of a
// graph; (2) kernels that copy listed pieces of registered host memory into device memory, over
// blocks, threads, loads in flight and bulk copies, against plain reads; alone, beside busy host
// threads, beside the copy engine. The figures behind docs/design/cuda.md, "Pull lane" and "The
// wait".
//
//   link_bench [doorbell|copy|all]     on a machine with a card (sm_90); needs 6 GiB of host memory
#include "tests/device/link/copies.cuh"
#include "tests/device/link/doorbell.cuh"

namespace {

void Fill(Host* h) {
  h->bytes = size_t{6} << 30;
  h->big = static_cast<uint8_t*>(
      mmap(nullptr, h->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
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
  h.shared = static_cast<Shared*>(
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
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
  std::printf("%s, %.0f clocks per us, 6 GiB registered after %.1f s\n", prop.name, h.clocks_per_us,
              Now() - begin);
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
