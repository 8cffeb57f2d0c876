// The thread pool: every chunk exactly once, visible at the end, over many short phases, changing
// thread counts and sleeping or spinning threads. Clean under TSan. Labels: unit.
#include "shared/pool/node_pool.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <random>

namespace lode {
namespace {

void Phases(NodePool* pool, uint32_t count, uint32_t seed) {
  std::mt19937 rng(seed);
  std::vector<uint32_t> hits(512);  // plain memory: the pool alone orders it (TSan checks)
  for (uint32_t p = 0; p < count; ++p) {
    const uint32_t n = 1 + rng() % 40;
    if (rng() % 16 == 0) pool->SetActive(rng() % 6);
    if (rng() % 32 == 0) pool->SetAwake(rng() % 2 == 0);
    pool->RunPhase(n, [&](uint32_t chunk, uint32_t thread) {
      ASSERT_LT(thread, pool->threads());
      hits[chunk] += p + 1;
    });
    for (uint32_t i = 0; i < n; ++i) {
      ASSERT_EQ(hits[i], p + 1) << "phase " << p << " chunk " << i;
      hits[i] = 0;
    }
    // Every third chunk is followed, on its thread, by the one that it claimed.
    std::vector<uint32_t> promised(pool->threads(), NodePool::Next::kNone);
    pool->RunPhase(n, [&](uint32_t chunk, uint32_t thread, NodePool::Next& next) {
      if (promised[thread] != NodePool::Next::kNone) {
        ASSERT_EQ(chunk, promised[thread]);
      }
      promised[thread] = chunk % 3 == 0 ? next.Claim() : NodePool::Next::kNone;
      hits[chunk] += p + 1;
    });
    for (uint32_t i = 0; i < n; ++i) {
      ASSERT_EQ(hits[i], p + 1) << "phase " << p << " chunk " << i << ", claimed ahead";
      hits[i] = 0;
    }
  }
}

TEST(NodePool, EveryChunkOnce) {
  constexpr uint32_t kPhases = 5000;
  for (uint32_t threads : {1u, 2u, 5u}) {
    for (uint64_t spin_ns : {uint64_t{0}, uint64_t{20000}}) {
      auto pool = NodePool::Start({threads, {}, spin_ns});
      ASSERT_TRUE(pool.ok());
      Phases(pool->get(), kPhases, threads);
    }
  }
}

TEST(NodePool, PinsAndRefusesNonsense) {
  EXPECT_FALSE(NodePool::Start({0, {}, 0}).ok());
  EXPECT_FALSE(NodePool::Start({2, {0}, 0}).ok());
  EXPECT_FALSE(NodePool::Start({NodePool::kPoolThreadsMax + 1, {}, 0}).ok());
  cpu_set_t before;
  sched_getaffinity(0, sizeof(before), &before);
  {
    // A CPU outside the mask or the machine is a warning, not an end.
    auto pool = NodePool::Start({2, {0, 100000}, 0});
    ASSERT_TRUE(pool.ok());
    EXPECT_EQ(sched_getcpu(), 0);
    Phases(pool->get(), 10, 1);
  }
  sched_setaffinity(0, sizeof(before), &before);
}

// A library that set flush-to-zero would change results silently.
TEST(NodePool, RefusesAChangedFloatEnvironment) {
#if defined(__x86_64__)
  const unsigned int saved = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(saved | 0x8000);  // FTZ; new threads inherit it
  const auto pool = NodePool::Start({2, {}, 0});
  __builtin_ia32_ldmxcsr(saved);
  ASSERT_FALSE(pool.ok());
  EXPECT_NE(std::string(pool.status().message()).find("float environment"), std::string::npos);
#else
  GTEST_SKIP() << "no MXCSR on this architecture";
#endif
}

}  // namespace
}  // namespace lode
