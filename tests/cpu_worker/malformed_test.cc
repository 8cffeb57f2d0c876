// Jobs that a broken peer could leave in shared memory: each is refused with kBadJob, touches
// nothing, and the worker goes on. Every field of the job is broken once; then random garbage.
// Labels: malformed.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <random>

#include "cpu_worker/job_check.h"
#include "tests/cpu_worker/exchange_harness.h"

namespace lode::test {
namespace {

struct Break {
  const char* name;
  std::function<void(ExpertJob*)> apply;
};

std::vector<Break> Breaks() {
  return {
      {"layer too large", [](ExpertJob* j) { j->layer = 8; }},
      {"layer huge", [](ExpertJob* j) { j->layer = 0xffffffff; }},
      {"layer of another tag", [](ExpertJob* j) { j->layer += 2; }},
      {"tag of another job", [](ExpertJob* j) { j->tag += 1ull << 16; }},
      {"tag zero", [](ExpertJob* j) { j->tag = 0; }},
      {"experts one too many", [](ExpertJob* j) { j->n_experts = kJobExpertsMax + 1; }},
      {"experts huge", [](ExpertJob* j) { j->n_experts = 0xffffffff; }},
      {"no rows", [](ExpertJob* j) { j->n_rows = 0; }},
      {"too many rows", [](ExpertJob* j) { j->n_rows = kWindowRowsMax + 1; }},
      {"expert id", [](ExpertJob* j) { j->experts[0].expert = 64; }},
      {"expert id max", [](ExpertJob* j) { j->experts[j->n_experts - 1].expert = 0xffff; }},
      {"row mask empty", [](ExpertJob* j) { j->experts[0].rows = 0; }},
      {"row mask too wide", [](ExpertJob* j) { j->experts[0].rows |= 1u << j->n_rows; }},
      {"row mask full", [](ExpertJob* j) { j->experts[0].rows = 0xffffffff; }},
      {"order",
       [](ExpertJob* j) {
         for (uint8_t& o : j->experts[0].order) o = 8;
       }},
      {"order max",
       [](ExpertJob* j) {
         for (uint8_t& o : j->experts[0].order) o = 255;
       }},
      {"one place twice", [](ExpertJob* j) { j->experts[1] = j->experts[0]; }},
      {"isa", [](ExpertJob* j) { j->isa[0] = 99; }},
      {"isa max", [](ExpertJob* j) { j->isa[0] = 0xffffffff; }},
      {"activation form", [](ExpertJob* j) { j->act_forms = kActF32; }},
      {"float reference flag", [](ExpertJob* j) { j->float_reference = 2; }},
  };
}

class MalformedTest : public ::testing::Test {
 protected:
  MalformedTest() : h_(kDemoModel, 1) {
    h_.StartAll(2);
    h_.OpenWindow(1);
  }
  ExpertJob Sound(uint32_t seed) {
    routing_ = h_.RandomRouting(0, 3, seed);
    x_ = h_.RandomActivations(3, seed);
    ExpertJob job = h_.MakeJob(0, routing_, x_);
    job.tag = JobTag(7, 1000 + seed, 0);
    return job;
  }
  // The bell keeps the sound tag: the job in the slot is what is broken.
  void RingAs(const ExpertJob& job, uint64_t tag) {
    std::memcpy(&h_.header().jobs[0], &job, sizeof(job));
    Publish(h_.header().bell, tag);
  }
  void ExpectAlive(uint32_t seed) {
    const ExpertJob job = Sound(seed);
    const uint64_t tag = h_.Ring(job);
    ASSERT_TRUE(h_.WaitAck(0, tag));
    ASSERT_EQ(h_.StatusOf(0), JobStatus::kOk);
    h_.ExpectResults(job, routing_, x_);
  }

  ExchangeHarness h_;
  Routing routing_;
  std::vector<std::vector<float>> x_;
};

TEST_F(MalformedTest, EveryBrokenFieldIsRefused) {
  uint32_t seed = 1;
  for (const Break& b : Breaks()) {
    ExpertJob job = Sound(++seed);
    ASSERT_GE(job.n_experts, 2u);
    const uint64_t tag = job.tag;
    b.apply(&job);
    std::memset(const_cast<float*>(h_.Result(0, 0, 0)), 0x5a,
                size_t{3} * h_.shape().experts_used * h_.shape().hidden * sizeof(float));
    RingAs(job, tag);
    ASSERT_TRUE(h_.WaitAck(0, tag)) << b.name;
    EXPECT_EQ(h_.StatusOf(0), JobStatus::kBadJob) << b.name;
    const uint8_t* results = reinterpret_cast<const uint8_t*>(h_.Result(0, 0, 0));
    for (size_t i = 0; i < 64; ++i) ASSERT_EQ(results[i], 0x5a) << b.name;
  }
  ExpectAlive(++seed);
  EXPECT_EQ(h_.worker(0).Statistics()["jobs_bad"], static_cast<double>(Breaks().size()));
}

TEST_F(MalformedTest, RandomGarbageNeverCrashes) {
  constexpr uint32_t kTries = 2000;
  std::mt19937 rng(5);
  for (uint32_t i = 0; i < kTries; ++i) {
    ExpertJob job = Sound(1);
    job.tag = JobTag(7, 100000 + i, 0);
    const uint64_t tag = job.tag;
    // A few random bytes, sometimes in the counts at the front.
    uint8_t* bytes = reinterpret_cast<uint8_t*>(&job);
    const size_t used = offsetof(ExpertJob, experts) + job.n_experts * sizeof(JobExpert);
    const uint32_t flips = 1 + rng() % 4;
    for (uint32_t f = 0; f < flips; ++f)
      bytes[8 + rng() % (used - 8)] = static_cast<uint8_t>(rng());
    RingAs(job, tag);
    ASSERT_TRUE(h_.WaitAck(0, tag)) << i;
    // Flips of activations' meaning (threads, order) may leave it sound; then it is computed.
    ASSERT_TRUE(h_.StatusOf(0) == JobStatus::kBadJob || h_.StatusOf(0) == JobStatus::kOk) << i;
  }
  ExpectAlive(2);
}

// A bell value that no worker could have meant: parity and layer come from it.
TEST_F(MalformedTest, StrangeBells) {
  for (uint64_t tag :
       {uint64_t{1} << 63, uint64_t{0xffffffffffffffff}, uint64_t{0xffff}, uint64_t{0x10000}}) {
    const ExpertJob job = Sound(3);
    RingAs(job, tag);
    ASSERT_TRUE(h_.WaitAck(0, tag));
    EXPECT_EQ(h_.StatusOf(0), JobStatus::kBadJob);
  }
  ExpectAlive(4);
}

// The check itself, over a job that is sound but for one bit, for every bit of the used part:
// whatever it accepts stays in range.
TEST_F(MalformedTest, AcceptedJobsAreInRange) {
  const ArenaLayout layout = *ComputeArenaLayout(h_.source(), 0, 1);
  const IsaChoice* tables = nullptr;
  const uint32_t n_tables = static_cast<uint32_t>(IsaChoices(&tables));
  const ExpertJob sound = Sound(6);
  const JobLimits limits = {&layout, h_.shape(), 0, tables, n_tables};
  ASSERT_EQ(CheckJob(sound, sound.tag, limits), nullptr);
  const size_t used = offsetof(ExpertJob, experts) + sound.n_experts * sizeof(JobExpert);
  uint32_t refused = 0;
  for (size_t bit = 0; bit < used * 8; ++bit) {
    ExpertJob job = sound, copy = {};
    reinterpret_cast<uint8_t*>(&job)[bit / 8] ^= static_cast<uint8_t>(1u << bit % 8);
    if (!CopyJob(job, &copy) || CheckJob(copy, sound.tag, limits) != nullptr) {
      ++refused;
      continue;
    }
    for (uint32_t j = 0; j < copy.n_experts; ++j) {
      ASSERT_LT(copy.experts[j].expert, layout.experts);
      ASSERT_EQ(copy.experts[j].rows >> copy.n_rows, 0u);
    }
  }
  EXPECT_GT(refused, 100u);
}

}  // namespace
}  // namespace lode::test
