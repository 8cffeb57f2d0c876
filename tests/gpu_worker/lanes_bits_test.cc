// The lanes give the bits of the obvious path (every expert computed in place from one copy of the
// file) whatever the split: pull share, VRAM budget, tier policy, number of CPU workers,
// instruction sets; also when a worker dies and comes back. Real CPU workers, real exchange
// segment, demo model.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <map>

#include "gpu_worker/cpu_lanes.h"
#include "gpu_worker/local_engine.h"
#include "gpu_worker/sampler.h"
#include "tests/gpu_worker/worker_fixture.h"

namespace lode {
namespace {

constexpr uint32_t kWindows = 14;  // three policy rounds

std::unique_ptr<LocalEngine> Engine(bool float_reference) {
  LocalEngineOptions options;
  options.slots = 2;
  options.float_reference = float_reference;
  if (float_reference) options.kv_type = KvType::kF32;
  auto engine = LocalEngine::Create(DemoModel(), options);
  EXPECT_TRUE(engine.ok()) << engine.status();
  return std::move(*engine);
}

// Window w: rows of one or two sequences; all accepted. The same tokens for everybody.
std::vector<LocalRow> WindowRows(uint32_t w, std::vector<uint32_t>* positions) {
  std::vector<LocalRow> rows;
  const uint32_t counts[2] = {1 + w % 4, w % 3 == 0 ? 4u : w % 2};
  for (uint32_t slot = 0; slot < 2; ++slot) {
    for (uint32_t i = 0; i < counts[slot]; ++i) {
      const uint32_t position = (*positions)[slot]++;
      rows.push_back({slot, position,
                      static_cast<int32_t>((position * 7919 + slot * 104729 + 13) % 8000), true});
    }
  }
  return rows;
}

struct Split {
  uint32_t share_256 = 0;
  double budget = 0;  // of all experts
  TierPolicy policy = TierPolicy::kStatic;
  bool mixed_isa = false;
};

class LanesBits : public ::testing::TestWithParam<std::tuple<uint32_t, bool>> {
 protected:
  uint32_t n_workers() const { return std::get<0>(GetParam()); }
  bool float_reference() const { return std::get<1>(GetParam()); }

  static uint64_t AllHashes(LocalEngine& engine, size_t n_rows, uint64_t hash) {
    for (uint32_t r = 0; r < n_rows; ++r)
      hash = hash * 0x9e3779b97f4a7c15ull + HashLogits(engine.logits(r));
    return hash;
  }

  // Hash of all logits of all windows through the engine's own path.
  uint64_t Expected(LocalEngine& engine) {
    std::vector<uint32_t> positions = {0, 0};
    uint64_t hash = 1;
    for (uint32_t w = 0; w < kWindows; ++w) {
      for (uint32_t s = 0; s < 2; ++s) engine.Commit(s, positions[s]);
      const auto rows = WindowRows(w, &positions);
      auto outcome = engine.Run(rows);
      EXPECT_TRUE(outcome.ok() && outcome->ok());
      hash = AllHashes(engine, rows.size(), hash);
    }
    for (uint32_t s = 0; s < 2; ++s) engine.Restart(s);
    return hash;
  }

  // The same through lanes. `before` is called before each window and may set
  // LanesWindow::cpu_lane_down.
  template <class F>
  uint64_t ThroughLanes(LocalEngine& engine, CpuLanes& lanes, ExpertTier& tier, const Split& setup,
                        uint64_t budget, LaneCounts* sum, F before) {
    std::vector<uint32_t> positions = {0, 0};
    uint64_t hash = 1;
    for (uint32_t w = 0; w < kWindows; ++w) {
      for (uint32_t s = 0; s < 2; ++s) engine.Commit(s, positions[s]);
      const auto rows = WindowRows(w, &positions);
      tier.Border(setup.policy, budget);
      LanesWindow window;
      window.window = ++window_;
      window.share_256 = setup.share_256;
      window.kernels = &engine.device().kernels();
      for (uint32_t i = 0; i < kCpuWorkersMax; ++i)
        window.cpu_isa[i] = setup.mixed_isa ? i % (BestIsa() + 1) : BestIsa();
      before(w, &window);
      lanes.BeginWindow(window);
      auto outcome = engine.Run(rows, &lanes);
      lanes.EndWindow();
      tier.WindowDone();
      tier.WaitUploads(NowNs() + 60'000'000'000);
      EXPECT_TRUE(outcome.ok()) << outcome.status();
      EXPECT_TRUE(outcome->ok()) << "window " << w << " status "
                                 << static_cast<int>(outcome->status) << " layer "
                                 << outcome->error.layer << " worker " << outcome->error.worker
                                 << " "
                                 << LaneErrorText(static_cast<LaneError>(outcome->error.detail));
      hash = AllHashes(engine, rows.size(), hash);
      for (uint32_t l = 0; l < kLanes; ++l)
        sum->lookups[l] += lanes.counts().lookups[l], sum->bytes[l] += lanes.counts().bytes[l];
    }
    for (uint32_t s = 0; s < 2; ++s) engine.Restart(s);
    return hash;
  }

  LanesOptions Options(const Workers& workers) const {
    LanesOptions options;
    options.experts_used = workers.config().experts_used;
    options.generation = 3;
    options.float_reference = float_reference();
    options.wait_ns = 30'000'000'000;  // a loaded build machine must not fail the test
    options.wait_max_ns = 60'000'000'000;
    return options;
  }

  uint64_t window_ = 0;
};

TEST_P(LanesBits, EqualTheObviousPathWhateverTheSplit) {
  Workers workers(DemoModel(), n_workers(), float_reference());
  const ArenaSet arenas = workers.Arenas();
  const auto engine = Engine(float_reference());
  const uint64_t expected = Expected(*engine);
  uint64_t all_bytes = 0;
  for (const uint64_t bytes : arenas.all_slot_bytes()) all_bytes += bytes * arenas.experts();

  for (const double share : {0.0, 0.55, 1.0}) {
    for (const double budget : {0.0, 0.3, 1.0}) {
      for (const TierPolicy policy : {TierPolicy::kStatic, TierPolicy::kDecayedLfu}) {
        Split setup = {static_cast<uint32_t>(std::lround(share * 256)), budget, policy,
                       share == 0.55};
        const uint64_t bytes = static_cast<uint64_t>(budget * static_cast<double>(all_bytes));
        auto tier = ExpertTier::Create(arenas, bytes, {}, nullptr);
        ASSERT_TRUE(tier.ok()) << tier.status();
        CpuLanes lanes(Options(workers), arenas, tier->get(), workers.exchange().data(),
                       &engine->device().pool());
        LaneCounts sum;
        const uint64_t hash =
            ThroughLanes(*engine, lanes, **tier, setup, bytes, &sum, [](uint32_t, LanesWindow*) {});
        EXPECT_EQ(hash, expected) << "share " << share << " budget " << budget << " policy "
                                  << static_cast<int>(policy);
        // The split really was what the case says.
        EXPECT_EQ(sum.lookups[0] > 0, budget > 0);
        EXPECT_EQ(sum.lookups[1] > 0, share > 0 && budget < 1);
        EXPECT_EQ(sum.lookups[2] > 0, share < 1 && budget < 1);
        EXPECT_EQ(sum.bytes[2] > 0, sum.lookups[2] > 0);
      }
    }
  }
}

TEST_P(LanesBits, SurviveAWorkerThatDiesAndComesBack) {
  Workers workers(DemoModel(), n_workers(), float_reference());
  const ArenaSet arenas = workers.Arenas();
  const auto engine = Engine(float_reference());
  const uint64_t expected = Expected(*engine);
  auto tier = ExpertTier::Create(arenas, arenas.slot_bytes(0) * 100, {}, nullptr);
  ASSERT_TRUE(tier.ok());
  CpuLanes lanes(Options(workers), arenas, tier->get(), workers.exchange().data(),
                 &engine->device().pool());
  const uint32_t victim = n_workers() - 1;
  LaneCounts sum;
  const uint64_t hash =
      ThroughLanes(*engine, lanes, **tier, {100, 0.3, TierPolicy::kDecayedLfu, false},
                   arenas.slot_bytes(0) * 100, &sum, [&](uint32_t w, LanesWindow* window) {
                     if (w == 4) workers.StopWorker(victim);
                     window->cpu_lane_down = w >= 4 && w < 8;
                     if (w == 8) {
                       workers.StartWorker(victim, 2);
                       lanes.WorkerReplaced(victim);
                     }
                   });
  EXPECT_EQ(hash, expected);
}

INSTANTIATE_TEST_SUITE_P(Workers, LanesBits,
                         ::testing::Values(std::tuple(1u, false), std::tuple(2u, false),
                                           std::tuple(3u, false), std::tuple(2u, true)));

// ---- the bounded wait
// --------------------------------------------------------------------------------------------------------
class LanesWait : public ::testing::Test {
 protected:
  LanesWait()
      : workers_(DemoModel(), 2, false, 2000), arenas_(workers_.Arenas()), engine_(Engine(false)) {
    options_.experts_used = workers_.config().experts_used;
    options_.generation = 1;
    options_.wait_ns = 3'000'000'000;
    options_.wait_max_ns = 6'000'000'000;
  }
  // Layer 0 with some activations through lanes whose worker 1 does not answer.
  WindowOutcome RunLayer(CpuLanes* lanes, uint64_t number, bool down = false, float x0 = 0.5f) {
    LanesWindow window;
    window.window = number;
    window.cpu_lane_down = down;
    window.kernels = &engine_->device().kernels();
    for (uint32_t& isa : window.cpu_isa) isa = BestIsa();
    lanes->BeginWindow(window);
    std::vector<float> x(2 * arenas_.hidden(), 0.25f);
    x[arenas_.hidden()] = x0;
    RoutedRow routed[2] = {};
    for (uint32_t o = 0; o < options_.experts_used; ++o) {
      routed[0].ids[o] = static_cast<uint16_t>(o);
      routed[1].ids[o] = static_cast<uint16_t>(o + 3);
    }
    WindowOutcome outcome = lanes->Start(0, x.data(), 2, routed);
    if (outcome.ok()) outcome = lanes->Finish(0);
    lanes->EndWindow();
    return outcome;
  }

  Workers workers_;
  ArenaSet arenas_;
  std::unique_ptr<LocalEngine> engine_;
  LanesOptions options_;
};

TEST_F(LanesWait, ADeadWorkerEndsTheWindowAndIsNamed) {
  CpuLanes lanes(options_, arenas_, nullptr, workers_.exchange().data(), &engine_->device().pool());
  ASSERT_TRUE(RunLayer(&lanes, 1).ok());
  workers_.StopWorker(1);
  const uint64_t begin = NowNs();
  const WindowOutcome outcome = RunLayer(&lanes, 2);
  const uint64_t took = NowNs() - begin;
  EXPECT_EQ(outcome.status, WindowStatus::kAborted);
  // Worker 0 waits for worker 1's share of the hidden vectors and says so first: either way worker
  // 1 is named.
  if (outcome.error.detail == static_cast<uint32_t>(LaneError::kPeerTimeout)) {
    EXPECT_EQ(outcome.error.row, 1u);
  } else {
    EXPECT_EQ(outcome.error.worker, 1u);
    EXPECT_EQ(outcome.error.detail, static_cast<uint32_t>(LaneError::kNoProgress));
  }
  EXPECT_GE(took, 1'000'000'000u);  // not before the patience is over
  EXPECT_TRUE(RunLayer(&lanes, 3, /*down=*/true).ok());
}

TEST_F(LanesWait, TheAbortWordEndsTheWaitAtOnce) {
  options_.wait_ns = options_.wait_max_ns = 60'000'000'000;
  CpuLanes lanes(options_, arenas_, nullptr, workers_.exchange().data(), &engine_->device().pool());
  workers_.StopWorker(0);
  workers_.StopWorker(1);
  std::thread daemon([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    workers_.header()->abort_window.store(7);
  });
  const uint64_t begin = NowNs();
  const WindowOutcome outcome = RunLayer(&lanes, 7);
  daemon.join();
  EXPECT_EQ(outcome.status, WindowStatus::kAborted);
  EXPECT_EQ(outcome.error.detail, static_cast<uint32_t>(LaneError::kAbortWord));
  EXPECT_LT(NowNs() - begin, 30'000'000'000u);
  EXPECT_GT(NowNs() - begin, 40'000'000u);
}

TEST_F(LanesWait, ProgressRestartsTheClockUpToTheMaximum) {
  options_.wait_ns = 1'000'000'000;
  options_.wait_max_ns = 2'000'000'000;
  CpuLanes lanes(options_, arenas_, nullptr, workers_.exchange().data(), &engine_->device().pool());
  workers_.StopWorker(0);
  workers_.StopWorker(1);
  std::atomic<bool> stop{false};
  std::thread slow([&] {
    while (!stop) {
      workers_.header()->workers[0].progress.fetch_add(1);
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  });
  const uint64_t begin = NowNs();
  const WindowOutcome outcome = RunLayer(&lanes, 2);
  const uint64_t took = NowNs() - begin;
  stop = true;
  slow.join();
  EXPECT_EQ(outcome.error.detail, static_cast<uint32_t>(LaneError::kTooLong));
  EXPECT_EQ(outcome.error.worker, 0u);
  EXPECT_GE(took, 2'000'000'000u);
}

TEST_F(LanesWait, StatusesBecomeOutcomes) {
  CpuLanes lanes(options_, arenas_, nullptr, workers_.exchange().data(), &engine_->device().pool());
  workers_.StopWorker(0);
  workers_.StopWorker(1);
  uint64_t window = 10;
  const auto answered = [&](JobStatus status, uint32_t row) {
    ++window;
    std::thread worker([&, number = window] {
      const uint64_t tag = JobTag(options_.generation, number, 0);
      while (workers_.header()->bell.value.load() != tag) std::this_thread::yield();
      for (uint32_t w = 0; w < 2; ++w) {
        WorkerLine& line = workers_.header()->workers[w];
        line.status.store(static_cast<uint32_t>(w == 1 ? status : JobStatus::kOk));
        line.error_row.store(row);
        Publish(line.ack, tag);
      }
    });
    const WindowOutcome outcome = RunLayer(&lanes, window);
    worker.join();
    return outcome;
  };
  EXPECT_TRUE(answered(JobStatus::kOk, 0).ok());
  WindowOutcome o = answered(JobStatus::kNotFinite, 1);
  EXPECT_EQ(o.status, WindowStatus::kNotFinite);
  EXPECT_EQ(o.error.row, 1u);
  EXPECT_EQ(o.error.worker, 1u);
  o = answered(JobStatus::kBadJob, 0);
  EXPECT_EQ(o.status, WindowStatus::kAborted);
  EXPECT_EQ(o.error.detail, static_cast<uint32_t>(LaneError::kBadJob));
  o = answered(JobStatus::kPeerTimeout, 0);
  EXPECT_EQ(o.error.detail, static_cast<uint32_t>(LaneError::kPeerTimeout));
  EXPECT_EQ(o.error.row, 0u);
  o = answered(static_cast<JobStatus>(77), 0);
  EXPECT_EQ(o.status, WindowStatus::kAborted);
}

TEST_F(LanesWait, ANotFiniteActivationNamesItsRow) {
  CpuLanes lanes(options_, arenas_, nullptr, workers_.exchange().data(), &engine_->device().pool());
  for (const float bad : {INFINITY, -INFINITY, NAN}) {
    const WindowOutcome outcome = RunLayer(&lanes, 3, false, bad);
    EXPECT_EQ(outcome.status, WindowStatus::kNotFinite);
    EXPECT_EQ(outcome.error.row, 1u);
    EXPECT_EQ(outcome.error.layer, 0u);
  }
}

}  // namespace
}  // namespace lode
