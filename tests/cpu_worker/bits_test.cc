// The CPU lane gives the bits of one kernel table over whole matrices, whatever the number of
// workers, threads, rows and instruction sets: every combination is compared with ==. Labels: bits.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "tests/cpu_worker/exchange_harness.h"

namespace lode::test {
namespace {

constexpr uint32_t kWindows = 3;

// Runs windows of `n_rows` rows over every layer and checks every result vector. isa_of: kernel
// table per worker.
void RunWindows(ExchangeHarness* h, uint32_t n_rows, uint32_t threads, bool float_reference = false,
                bool mixed_isa = true) {
  const IsaChoice* tables = nullptr;
  const uint32_t n_tables = static_cast<uint32_t>(IsaChoices(&tables));
  static uint64_t window = 0;
  for (uint32_t w = 0; w < kWindows; ++w) {
    h->OpenWindow(++window);
    for (uint32_t layer = 0; layer < h->source().config().layers; ++layer) {
      const Routing routing = h->RandomRouting(layer, n_rows, static_cast<uint32_t>(window));
      const auto x = h->RandomActivations(n_rows, static_cast<uint32_t>(window * 1000 + layer));
      ExpertJob job = h->MakeJob(layer, routing, x, float_reference);
      job.threads = threads;
      for (uint32_t i = 0; i < kCpuWorkersMax; ++i) {
        uint32_t isa = mixed_isa ? (i + w + layer) % n_tables : 0;
        while (!tables[isa].supported) isa = (isa + 1) % n_tables;
        job.isa[i] = isa;
      }
      const uint64_t tag = h->Ring(job);
      for (uint32_t i = 0; i < h->shape().n_workers; ++i) {
        ASSERT_TRUE(h->WaitAck(i, tag)) << "worker " << i;
        ASSERT_EQ(h->StatusOf(i), JobStatus::kOk) << "worker " << i;
      }
      h->ExpectResults(job, routing, x, float_reference);
      if (::testing::Test::HasFatalFailure()) return;
    }
    h->CloseWindow();
  }
}

struct Case {
  const char* name;
  std::string model;
};
std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }

class BitsTest : public ::testing::TestWithParam<Case> {};

TEST_P(BitsTest, SameForEveryNumberOfWorkersThreadsRowsAndIsa) {
  for (uint32_t n_workers : {1u, 2u, 3u}) {
    for (uint32_t threads : {1u, 2u}) {
      ExchangeHarness h(GetParam().model, n_workers);
      h.StartAll(threads);
      if (HasFatalFailure()) return;
      for (uint32_t n_rows : {1u, 2u, 5u, 8u}) RunWindows(&h, n_rows, 0);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_P(BitsTest, FloatReferenceMode) {
  for (uint32_t n_workers : {1u, 2u}) {
    ExchangeHarness h(GetParam().model, n_workers);
    h.StartAll(2);
    if (HasFatalFailure()) return;
    RunWindows(&h, 3, 0, true);
    if (HasFatalFailure()) return;
  }
}

const char kSmall[] =
    ",layers=2,experts=6,experts_used=4,vocab=300,ple=0,heads=2,kv_heads=1,ssm_key_heads=1,ssm_"
    "value_heads=1";
INSTANTIATE_TEST_SUITE_P(
    Models, BitsTest,
    ::testing::Values(Case{"demo", kDemoModel},
                      Case{"q2_0", std::string("synth:pack=q2_0,hidden=256,width=192") + kSmall},
                      Case{"q4_k", std::string("synth:pack=q4_k,hidden=512,width=64") + kSmall},
                      Case{"bf16", std::string("synth:pack=bf16,hidden=96,width=160") + kSmall},
                      Case{"q8_0", std::string("synth:pack=q8_0,hidden=96,width=32") + kSmall}),
    [](const auto& info) { return std::string(info.param.name); });

// The number of active threads may change from job to job; late wakers of one phase must not touch
// the next.
TEST(CpuWorkerBits, ActiveThreadsChangePerJob) {
  ExchangeHarness h(kDemoModel, 2);
  LoadPlan plan = h.Plan(4);
  plan.spin_us = 50;
  for (uint32_t i = 0; i < 2; ++i) h.StartWorker(i, plan);
  for (uint32_t threads : {1u, 4u, 2u, 3u, 0u, 99u}) RunWindows(&h, 2, threads);
}

// A bell that is stored by a GPU, without a wake: workers poll it, also after a quiet time.
TEST(CpuWorkerBits, BellWithoutWakes) {
  ExchangeHarness h(kDemoModel, 2);
  LoadPlan plan = h.Plan(2);
  plan.device = "cuda";
  for (uint32_t i = 0; i < 2; ++i) h.StartWorker(i, plan);
  h.OpenWindow(1);
  for (uint32_t layer = 0; layer < 4; ++layer) {
    const Routing routing = h.RandomRouting(layer, 2, 1);
    const auto x = h.RandomActivations(2, layer);
    const ExpertJob job = h.MakeJob(layer, routing, x);
    if (layer == 2) std::this_thread::sleep_for(std::chrono::milliseconds(150));
    std::memcpy(&h.header().jobs[layer & 1], &job, sizeof(job));
    h.header().bell.value.store(job.tag, std::memory_order_release);
    for (uint32_t i = 0; i < 2; ++i) ASSERT_TRUE(h.WaitAck(i, job.tag));
    h.ExpectResults(job, routing, x);
  }
}

// A worker with no rows of its own (more workers than rows of a matrix part) still flags and
// acknowledges.
TEST(CpuWorkerBits, MoreWorkersThanBlocksOfRows) {
  ExchangeHarness h(std::string("synth:pack=q8_0,hidden=32,width=32") + kSmall, 16);
  h.StartAll(1);
  RunWindows(&h, 2, 0);
}

TEST(CpuWorkerBits, EmptyJobIsAcknowledgedAtOnce) {
  ExchangeHarness h(kDemoModel, 1);
  h.StartAll(1);
  h.OpenWindow(1);
  ExpertJob job = {};
  job.tag = JobTag(7, 1, 3);
  job.layer = 3;
  const uint64_t tag = h.Ring(job);
  ASSERT_TRUE(h.WaitAck(0, tag));
  EXPECT_EQ(h.StatusOf(0), JobStatus::kOk);
  EXPECT_EQ(h.worker(0).Statistics()["weight_bytes"], 0);
}

// A hidden value that is not finite is reported with the lowest such row, alike by every worker.
TEST(CpuWorkerBits, NotFiniteNamesTheRow) {
  ExchangeHarness h(kDemoModel, 2);
  h.StartAll(2);
  h.OpenWindow(1);
  const Routing routing = h.RandomRouting(0, 4, 1);
  auto x = h.RandomActivations(4, 1);
  ExpertJob job = h.MakeJob(0, routing, x);
  // Infinite scales in the quantised form of rows 2 and 3, as a broken activation would leave them.
  const ExchangeLayout layout = {h.shape()};
  for (uint32_t row : {2u, 3u}) {
    for (uint32_t form : {1u, 2u, 3u}) {
      const uint32_t block = form == 1 ? 32 : (form == 2 ? 64 : 256);
      uint8_t* q =
          reinterpret_cast<uint8_t*>(h.MutableActivation(0, row)) + layout.form_offset(form);
      const float inf = std::numeric_limits<float>::infinity();
      std::memcpy(q + ActLayout{h.shape().hidden, block}.d_offset(), &inf, sizeof(inf));
    }
  }
  const uint64_t tag = h.Ring(job);
  for (uint32_t i = 0; i < 2; ++i) {
    ASSERT_TRUE(h.WaitAck(i, tag));
    EXPECT_EQ(h.StatusOf(i), JobStatus::kNotFinite);
    EXPECT_EQ(h.header().workers[i].error_row.load(), 2u);
  }
  // The next job is computed as if nothing had happened.
  x = h.RandomActivations(4, 2);
  job = h.MakeJob(1, routing, x);
  const uint64_t next = h.Ring(job);
  for (uint32_t i = 0; i < 2; ++i) {
    ASSERT_TRUE(h.WaitAck(i, next));
    EXPECT_EQ(h.StatusOf(i), JobStatus::kOk);
  }
  h.ExpectResults(job, routing, x);
}

// A value that is not finite, and then a peer that answers for the first expert only: the threads
// that wait for the second one's hidden vector must hear that the job has ended.
TEST(CpuWorkerBits, ASilentPeerEndsAJobWithANonFiniteValue) {
  ExchangeHarness h(kDemoModel, 2);
  LoadPlan plan = h.Plan(2);
  plan.wait_ms = 300;
  plan.wait_max_ms = 600;
  h.StartWorker(0, plan);
  h.OpenWindow(1);
  const auto x = h.RandomActivations(4, 1);
  ExpertJob job = h.MakeJob(0, h.RandomRouting(0, 4, 1), x);
  const ExchangeLayout layout = {h.shape()};
  const float infinity = std::numeric_limits<float>::infinity();
  for (uint32_t row = 0; row < 4; ++row) {
    for (const auto& [form, block] : {std::pair{1u, 32u}, {2u, 64u}, {3u, 256u}}) {
      uint8_t* const scales = reinterpret_cast<uint8_t*>(h.MutableActivation(0, row)) +
                              layout.form_offset(form) +
                              ActLayout{h.shape().hidden, block}.d_offset();
      std::memcpy(scales, &infinity, sizeof(infinity));
    }
  }
  ASSERT_GE(job.n_experts, 2u);
  job.n_experts = 2;
  h.header().hidden_ready[0][1][0].store(job.tag);
  const uint64_t tag = h.Ring(job);
  ASSERT_TRUE(h.WaitAck(0, tag, 10000));
  EXPECT_EQ(h.StatusOf(0), JobStatus::kPeerTimeout);
}

}  // namespace
}  // namespace lode::test
