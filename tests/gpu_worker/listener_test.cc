// The listener of the cuda lanes on the emulated device: what it says and what it does not, that it
// always leaves. A second thread of the test plays trunk and CPU workers.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "gpu_worker/cuda_listener.h"
#include "shared/wire/exchange_layout.h"

namespace lode::cuda {
namespace {

constexpr uint32_t kWorkers = 3;
constexpr uint64_t kNothingNs = 20'000'000;  // within it, something would have been said
// Of a trunk that lives whatever the machine does meanwhile: a moment in the far future.
constexpr uint64_t kAlive = ~uint64_t{0};
constexpr uint64_t kWindow = 7, kTag = 0x1234500000001ull;

LODE_KERNEL(32) ListenKernel(LaneConstants c) { Listen(c); }
class ListenerTest : public testing::Test {
 protected:
  ListenerTest() {
    c_.shape.nodes = kWorkers;
    c_.window = &window_;
    c_.listener = &words_;
    c_.exchange = reinterpret_cast<uint8_t*>(&header_);
    c_.abort_window = offsetof(ExchangeHeader, abort_window);
    c_.acks = offsetof(ExchangeHeader, acks);
    window_.window = kWindow;
    words_.trunk_ns = kAlive;
  }
  // As the trunk and as a reader of the listener's words.
  static uint64_t Read(uint64_t& word) { return std::atomic_ref(word).load(); }
  static void Write(uint64_t& word, uint64_t x) { std::atomic_ref(word).store(x); }
  void Ack(uint32_t worker, uint64_t tag) { header_.acks[worker].store(tag); }
  bool Says(uint64_t tag) { return Read(words_.tag) == tag; }
  template <class F>
  static bool Await(F done, uint64_t ns = 1'000'000'000) {
    for (const uint64_t begin = NowNs(); NowNs() - begin < ns;) {
      if (done()) return true;
      std::this_thread::yield();
    }
    return false;
  }
  void Run() { Launch(nullptr, Grid{1}, 32, 0, ListenKernel, c_); }
  LaneConstants c_ = {};
  LaneWindow window_ = {};
  ListenerWords words_ = {};
  ExchangeHeader header_ = {};
};

TEST_F(ListenerTest, SaysATagWhenEveryWorkerHasAcknowledgedIt) {
  bool said_all = false, two_were_not_enough = false, said_next = false;
  std::thread others([&] {
    for (uint32_t w = 0; w < kWorkers; ++w) Ack(w, kTag);
    said_all = Await([&] { return Says(kTag); });
    Ack(0, kTag + 1);
    Ack(2, kTag + 1);
    two_were_not_enough = !Await([&] { return !Says(kTag); }, kNothingNs);
    Ack(1, kTag + 1);
    said_next = Await([&] { return Says(kTag + 1); });
    Write(words_.ended, 1);
  });
  Run();
  others.join();
  EXPECT_TRUE(said_all);
  EXPECT_TRUE(two_were_not_enough);
  EXPECT_TRUE(said_next);
}

TEST_F(ListenerTest, LeavesWhenNoTrunkLives) {
  const uint64_t begin = NowNs();
  words_.trunk_ns = begin;
  Run();
  const uint64_t took = NowNs() - begin;
  EXPECT_GE(took, kTrunkStillNs / 2);
  EXPECT_LT(took, kListenNsMax / 2);  // not by its deadline, on a busy machine
}

TEST_F(ListenerTest, SaysNothingInAVoidWindow) {
  const uint64_t begin = NowNs();
  header_.abort_window.store(kWindow);
  for (uint32_t w = 0; w < kWorkers; ++w) Ack(w, kTag);
  Run();
  EXPECT_LT(NowNs() - begin, kListenNsMax / 2);
  EXPECT_TRUE(Says(0));
}

}  // namespace
}  // namespace lode::cuda
