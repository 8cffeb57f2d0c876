// The listener of the cuda lanes on the emulated device: what it says and what it does not, that it
// always leaves, and what a waiter makes of its words. A second thread of the test plays trunk and
// CPU workers.
#include "gpu_worker/cuda_listener.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "shared/wire/exchange_layout.h"

namespace lode::cuda {
namespace {

constexpr uint32_t kWarps = 4, kWorkers = 3;
// Of a trunk that lives whatever the machine does meanwhile: a moment in the far future.
constexpr uint64_t kAlive = ~uint64_t{0};
constexpr uint64_t kWindow = 7, kTag = 0x1234500000001ull;

LODE_KERNEL(kListenersMax * 32) ListenKernel(LaneConstants c) { Listen(c); }
LODE_KERNEL(32) HearKernel(LaneConstants c, uint64_t tag, uint32_t hearings, Heard* out) {
  Ear ear;
  for (uint32_t i = 0; i < hearings; ++i) {
    const Heard heard = JudgeHearing(Hear(c), tag, &ear);
    if (ThreadId() == 0) out[i] = heard;
  }
}

class ListenerTest : public testing::Test {
 protected:
  ListenerTest() {
    c_.shape.nodes = kWorkers;
    c_.window = &window_;
    c_.listener = &words_;
    c_.exchange = reinterpret_cast<uint8_t*>(&header_);
    c_.abort_window = offsetof(ExchangeHeader, abort_window);
    c_.workers = offsetof(ExchangeHeader, workers);
    c_.worker_stride = sizeof(WorkerLine);
    c_.line_ack = offsetof(WorkerLine, ack) + offsetof(WaitWord, value);
    window_.window = kWindow;
    words_.trunk_ns = kAlive;
  }
  // As the trunk and as a reader of the listener's words.
  static uint64_t Read(uint64_t& word) { return std::atomic_ref(word).load(); }
  static void Write(uint64_t& word, uint64_t x) { std::atomic_ref(word).store(x); }
  void Ack(uint32_t worker, uint64_t tag) { header_.workers[worker].ack.value.store(tag); }
  bool Says(uint64_t tag) {
    for (uint32_t w = 0; w < kWarps; ++w) {
      if (Read(words_.tags[w]) != tag) return false;
    }
    return true;
  }
  template <class F>
  static bool Await(F done) {
    for (const uint64_t begin = NowNs(); NowNs() - begin < 1'000'000'000;) {
      if (done()) return true;
      std::this_thread::yield();
    }
    return false;
  }
  void Run() { Launch(nullptr, Grid{1}, kWarps * 32, 0, ListenKernel, c_); }
  bool AllGone() {
    for (uint32_t w = 0; w < kWarps; ++w) {
      if (words_.beats[w] != kListenerGone) return false;
    }
    return true;
  }
  std::vector<Heard> HearTimes(uint32_t n) {
    std::vector<Heard> heard(n);
    Launch(nullptr, Grid{1}, 32, 0, HearKernel, c_, kTag, n, heard.data());
    return heard;
  }

  LaneConstants c_ = {};
  LaneWindow window_ = {};
  ListenerWords words_ = {};
  ExchangeHeader header_ = {};
};

TEST_F(ListenerTest, SaysATagWhenEveryWorkerHasAcknowledgedIt) {
  bool two_were_not_enough = false, said = false;
  std::thread others([&] {
    Ack(0, kTag);
    Ack(2, kTag);
    const uint64_t beat = 50;
    two_were_not_enough = Await([&] { return Read(words_.beats[kWarps - 1]) > beat; }) &&
                          !Says(kTag) && Read(words_.tags[0]) != kTag;
    Ack(1, kTag);
    said = Await([&] { return Says(kTag); });
    Write(words_.ended, 1);
  });
  Run();
  others.join();
  EXPECT_TRUE(two_were_not_enough);
  EXPECT_TRUE(said);
  EXPECT_TRUE(AllGone());
}

TEST_F(ListenerTest, LeavesWhenNoTrunkLives) {
  const uint64_t begin = NowNs();
  words_.trunk_ns = begin;
  Run();
  const uint64_t took = NowNs() - begin;
  EXPECT_GE(took, kTrunkStillNs / 2);
  EXPECT_LT(took, kListenNsMax / 2);  // not by its deadline, on a busy machine
  EXPECT_TRUE(AllGone());
}

TEST_F(ListenerTest, SaysNothingInAVoidWindow) {
  header_.abort_window.store(kWindow);
  for (uint32_t w = 0; w < kWorkers; ++w) Ack(w, kTag);
  Run();
  EXPECT_TRUE(AllGone());
  for (uint32_t w = 0; w < kWarps; ++w) EXPECT_EQ(words_.tags[w], 0u);
}

TEST_F(ListenerTest, WaitersHearTheirTagOnly) {
  words_.beats[1] = 5;
  words_.tags[1] = kTag + 1;
  EXPECT_EQ(HearTimes(1)[0], Heard::kNothing);
  words_.tags[3] = kTag;
  EXPECT_EQ(HearTimes(1)[0], Heard::kAnswered);
}

TEST_F(ListenerTest, WaitersTrustNobodyWhoIsNotThereOrStandsStill) {
  EXPECT_EQ(HearTimes(1)[0], Heard::kNobody);  // has not begun
  for (uint64_t& beat : words_.beats) beat = kListenerGone;
  EXPECT_EQ(HearTimes(1)[0], Heard::kNobody);
  words_.beats[2] = 9;
  const std::vector<Heard> heard = HearTimes(kStillHearings + 1);
  EXPECT_EQ(heard[kStillHearings - 1], Heard::kNothing);
  EXPECT_EQ(heard[kStillHearings], Heard::kNobody);
  c_.listener = nullptr;
  EXPECT_EQ(HearTimes(1)[0], Heard::kNobody);
}

}  // namespace
}  // namespace lode::cuda
