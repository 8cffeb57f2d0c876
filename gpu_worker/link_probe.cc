// See link_probe.h.
#include "gpu_worker/link_probe.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <system_error>
#include <thread>

#include "gpu_worker/cuda_api.h"
#include "gpu_worker/cuda_lane_kernels.h"
#include "kernels/cuda/runtime.h"
#include "shared/base/log.h"
#include "shared/shm/wait_word.h"

namespace lode {
namespace {

constexpr uint32_t kPieces = 256;  // read per run: 350 MB at flagship size, 7 ms
constexpr uint64_t kWord = 16;     // of a load
constexpr double kNsPerSecond = 1e9, kMsPerSecond = 1e3;

// Random experts' bytes of one node, each `bytes` long: as much as the shortest has.
struct Pieces {
  const ArenaSet& arenas;
  uint32_t node;
  uint64_t bytes;

  const uint8_t* At(uint64_t random) const {
    const auto layer = static_cast<uint32_t>(random % arenas.layers());
    return arenas.piece(node, layer,
                        static_cast<uint32_t>(random / arenas.layers() % arenas.experts()),
                        Matrix::kGate);
  }
};

uint64_t ShortestPiece(const ArenaSet& arenas, uint32_t node) {
  uint64_t shortest = ~uint64_t{0};
  for (uint32_t layer = 0; layer < arenas.layers(); ++layer) {
    const uint8_t* const first = arenas.piece(node, layer, 0, Matrix::kGate);
    const uint64_t down = uint64_t{arenas.rows(node, Matrix::kDown).size()} *
                          arenas.shape(layer, Matrix::kDown).row_bytes;
    const auto before =
        static_cast<uint64_t>(arenas.piece(node, layer, 0, Matrix::kDown) - first);
    shortest = std::min(shortest, before + down);
  }
  return shortest / kWord * kWord;
}

// Threads that read until they are destroyed.
class Readers {
 public:
  Readers(const Pieces& pieces, uint32_t threads) : pieces_(pieces), begin_(NowNs()) {
    try {
      for (uint32_t t = 0; t < threads; ++t) threads_.emplace_back([this, t] { Read(t + 1); });
    } catch (const std::system_error& e) {  // a limit of threads: as many as there are will do
      spdlog::warn("the link's probe reads with {} threads instead of {}: {}", threads_.size(), threads,
                   e.what());
    }
  }
  ~Readers() {
    stop_.store(true, std::memory_order_relaxed);
    for (std::thread& t : threads_) t.join();
  }
  double BytesPerSecond() const {
    return static_cast<double>(bytes_.load(std::memory_order_relaxed)) /
           (static_cast<double>(NowNs() - begin_) / kNsPerSecond);
  }

 private:
  void Read(uint64_t seed) {
    std::mt19937_64 random(seed);
    uint64_t sum = 0;
    while (!stop_.load(std::memory_order_relaxed)) {
      const uint8_t* const from = pieces_.At(random());
      uint64_t lanes[kLanes] = {};  // so many additions side by side: vector registers
      for (uint64_t i = 0; i + sizeof(lanes) <= pieces_.bytes; i += sizeof(lanes)) {
        uint64_t words[kLanes];
        std::memcpy(words, from + i, sizeof(words));
        for (uint32_t k = 0; k < kLanes; ++k) lanes[k] += words[k];
      }
      for (const uint64_t lane : lanes) sum += lane;
      bytes_.fetch_add(pieces_.bytes, std::memory_order_relaxed);
    }
    sum_.fetch_add(sum, std::memory_order_relaxed);  // keeps the reads
  }

  static constexpr uint32_t kLanes = 16;
  const Pieces& pieces_;
  const uint64_t begin_;
  std::atomic<bool> stop_{false};
  std::atomic<uint64_t> bytes_{0}, sum_{0};
  std::vector<std::thread> threads_;
};

}  // namespace

StatusOr<std::vector<LinkRates>> ProbeLinks(CudaDevice& device, const ArenaSet& arenas,
                                            uint32_t threads) {
  LODE_ASSIGN_OR_RETURN(void* list,
                        device.Allocate("lanes probe list", kPieces * sizeof(uint8_t*)));
  LODE_ASSIGN_OR_RETURN(
      void* sink, device.Allocate("lanes probe sink", cuda::kProbeBlocks * sizeof(uint32_t)));
  cuda::Timer* const timer = cuda::NewTimer();
  std::vector<LinkRates> rates(arenas.nodes());
  std::mt19937_64 random;
  for (uint32_t node = 0; node < arenas.nodes(); ++node) {
    const Pieces pieces = {arenas, node, ShortestPiece(arenas, node)};
    if (pieces.bytes == 0) continue;
    std::vector<const uint8_t*> chosen;
    for (uint32_t i = 0; i < kPieces; ++i) chosen.push_back(pieces.At(random()));
    CUstream_st* const stream = device.stream();
    cuda::CopyAsync(list, chosen.data(), kPieces * sizeof(uint8_t*), stream);
    cuda::Synchronize(stream);
    const auto rate = [&] {
      cuda::StartTimer(timer, stream);
      cuda::LaunchProbe(stream, static_cast<const uint8_t* const*>(list), kPieces, pieces.bytes,
                        static_cast<uint32_t*>(sink));
      const double ms = cuda::StopTimer(timer, stream);
      return ms > 0 ? static_cast<double>(pieces.bytes * kPieces) / ms * kMsPerSecond : 0.0;
    };
    rate();  // touches the pages
    rates[node].idle = rates[node].busy = rate();
    if (threads == 0) continue;
    const Readers readers(pieces, threads);
    rate();  // until all of them run
    rates[node].busy = rate();
    rates[node].host = readers.BytesPerSecond();
  }
  cuda::DeleteTimer(timer);
  return rates;
}

LinkRates OverAllNodes(const std::vector<LinkRates>& nodes) {
  const auto mean = [&](double LinkRates::*rate) {
    double seconds = 0;
    for (const LinkRates& n : nodes) {
      if (n.*rate <= 0) return 0.0;
      seconds += 1 / (n.*rate);
    }
    return seconds > 0 ? static_cast<double>(nodes.size()) / seconds : 0.0;
  };
  return {mean(&LinkRates::idle), mean(&LinkRates::busy), mean(&LinkRates::host)};
}

}  // namespace lode
