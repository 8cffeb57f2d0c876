// Every unit of every job runs exactly once and is finished when ParallelFor returns, for any
// number of active threads.
#include "gpu_worker/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <vector>

namespace lode {
namespace {

TEST(ThreadPool, RunsEveryUnitOnce) {
  ThreadPool pool(4);
  for (uint32_t job = 0; job < 3000; ++job) {
    pool.SetActive(job % 5);
    const uint32_t units = job % 97;
    std::vector<uint32_t> runs(
        units, 0);  // plain integers: a unit run twice or late would be a data race as well
    pool.ParallelFor(units, [&](uint32_t unit, uint32_t thread) {
      ASSERT_LT(thread, 4u);
      ++runs[unit];
    });
    for (uint32_t r : runs) ASSERT_EQ(r, 1u) << "job " << job;
  }
}

// A thread that is late for an exhausted job must not take a unit of the next, longer one: short and
// long jobs alternate without a pause on more threads than cores, so that threads are descheduled
// between reading the job and taking a unit.
TEST(ThreadPool, LateThreadsTakeNothingOfTheNextJob) {
  constexpr uint32_t kJobs = 1000000, kLong = 9;
  ThreadPool pool(6);
  for (uint32_t job = 0; job < kJobs; ++job) {
    const uint32_t units = job % 2 ? kLong : 2;
    std::atomic<uint32_t> runs[kLong] = {};
    pool.ParallelFor(units, [&](uint32_t unit, uint32_t) {
      runs[unit].fetch_add(1, std::memory_order_relaxed);
    });
    for (uint32_t unit = 0; unit < units; ++unit)
      ASSERT_EQ(runs[unit].load(std::memory_order_relaxed), 1u) << "job " << job << " unit " << unit;
  }
}

TEST(ThreadPool, LongJobsRunInSlices) {
  ThreadPool pool(3);
  std::vector<uint8_t> runs(200001, 0);
  pool.ParallelFor(static_cast<uint32_t>(runs.size()), [&](uint32_t unit, uint32_t) { ++runs[unit]; });
  for (size_t unit = 0; unit < runs.size(); ++unit) ASSERT_EQ(runs[unit], 1) << unit;
}

TEST(ThreadPool, ShortJobsStayOnTheCaller) {
  ThreadPool pool(4);
  uint32_t threads_used = 0;
  pool.ParallelFor(64, uint64_t{1000},
                   [&](uint32_t, uint32_t thread) { threads_used |= 1u << thread; });
  EXPECT_EQ(threads_used, 1u);
}

TEST(ThreadPool, ActiveThreadsAreClamped) {
  ThreadPool pool(3);
  EXPECT_EQ(pool.active(), 3u);
  pool.SetActive(99);
  EXPECT_EQ(pool.active(), 3u);
  pool.SetActive(1);
  EXPECT_EQ(pool.active(), 1u);
  pool.SetActive(0);
  EXPECT_EQ(pool.active(), 3u);
}

}  // namespace
}  // namespace lode
