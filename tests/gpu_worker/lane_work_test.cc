// The cuda device's lane functions on the host: the plan equals PlanExperts in every field, and what
// is built from it (expert list, result table, job, counts) names exactly the planned experts at the
// right places. The bounded wait against made-up clocks: abort first, answers by status, deadlines.
#include "gpu_worker/lane_work.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "gpu_worker/lane_wait.h"

namespace lode::cuda {
namespace {

constexpr uint32_t kExperts = 64, kNodes = 3;

struct Case {
  std::vector<RoutedRow> rows;
  std::vector<uint16_t> residency;
  LaneShape shape;
  LaneSplit split;
  uint32_t staged_max;  // experts that the staging area holds
};

Case RandomCase(std::mt19937* rng) {
  Case c = {};
  c.shape = {static_cast<uint32_t>(1 + (*rng)() % 16), 96, 48, kNodes, kExperts, 4};
  c.rows.resize((*rng)() % (kWindowRowsMax + 1));
  std::vector<uint16_t> ids(kExperts);
  for (uint32_t i = 0; i < kExperts; ++i) ids[i] = static_cast<uint16_t>(i);
  for (RoutedRow& row : c.rows) {
    std::shuffle(ids.begin(), ids.begin() + 24, *rng);  // rows share many experts
    std::copy_n(ids.begin(), c.shape.experts_used, row.ids);
  }
  c.residency.assign(kExperts, kNotResident);
  uint16_t slot = 0;
  for (uint32_t i = 0; i < kExperts; ++i) {
    if ((*rng)() % 3 == 0) c.residency[i] = slot++;
  }
  c.split.cpu_lane_down = (*rng)() % 5 == 0;
  c.split.share_256 = (*rng)() % (kShareOne + 1);
  c.staged_max = (*rng)() % 3 == 0 ? 0 : (*rng)() % 20;
  return c;
}

uint32_t RowCount(const Case& c) { return static_cast<uint32_t>(c.rows.size()); }

void Plan(const Case& c, LaneWork* work) {
  PlanLane(SerialGroup{}, c.rows.data(), RowCount(c), c.shape, c.residency.data(), c.split, work);
}

TEST(LaneWork, PlanEqualsTheHostsInEveryField) {
  std::mt19937 rng(1);
  for (int i = 0; i < 2000; ++i) {
    const Case c = RandomCase(&rng);
    ExpertPlan plan;
    PlanExperts(c.rows.data(), RowCount(c), c.shape.experts_used, c.residency.data(),
                c.split.share_256, c.split.cpu_lane_down != 0, &plan);
    LaneWork work;
    Plan(c, &work);
    ASSERT_EQ(work.n_experts, plan.n_experts);
    for (uint32_t l = 0; l < kLanes; ++l) ASSERT_EQ(work.n_by_lane[l], plan.n_by_lane[l]);
    for (uint32_t p = 0; p < plan.n_experts; ++p) {
      const PlannedExpert &a = work.experts[p], &b = plan.experts[p];
      ASSERT_EQ(a.expert, b.expert);
      ASSERT_EQ(a.slot, b.slot);
      ASSERT_EQ(a.lane, b.lane);
      ASSERT_EQ(a.rows, b.rows);
      ASSERT_EQ(std::memcmp(a.order, b.order, sizeof(a.order)), 0);
    }
  }
}

// Everything that is made of one plan, from made-up memory.
struct Built {
  explicit Built(const Case& c)
      : arena(1 << 20), slots(1 << 20), area(1 << 20), list(new ExpertList), staged(new ExpertList),
        pieces(new StagedPieces), table(kJobExpertsMax) {
    place.slots = slots.data();
    place.slot_bytes = 900;
    place.up_offset = 300;
    place.down_offset = 600;
    for (uint32_t n = 0; n < kNodes; ++n) {
      place.nodes[n] = {arena.data() + n * 300'000, 1000, 200, 400, 16 * n, 16 * (n + 1), 32 * n,
                        32 * (n + 1)};
    }
    Plan(c, &work);
    const SerialGroup g;
    LaneWindow window = {};
    window.window = 77;
    window.generation = 3;
    BuildExpertLists(g, work, c.shape, place, {area.data(), kPieceBytes, c.staged_max, 0},
                     {list.get(), staged.get(), pieces.get()});
    BuildResultTable(g, work, RowCount(c), c.shape, device.data(), worker.data(), table.data());
    BuildJobHead(g, window, 2, RowCount(c), kActQ64, &job);
    BuildJobExperts(g, work, &job);
    AddCounts(g, work, RowCount(c), c.shape, by_lane, row_lookups);
  }
  static constexpr uint64_t kPieceBytes = 1024;
  std::vector<uint8_t> arena, slots, area;
  std::vector<float> device{0}, worker{0};
  LayerPlace place = {};
  LaneWork work;
  std::unique_ptr<ExpertList> list, staged;
  std::unique_ptr<StagedPieces> pieces;
  ExpertJob job = {};
  std::vector<const float*> table;
  uint32_t by_lane[kLanes] = {}, row_lookups[kWindowRowsMax][kLanes] = {};
};

void CheckRows(const PlannedExpert& e, RowMask rows, const uint8_t* order) {
  EXPECT_EQ(rows, e.rows);
  EXPECT_EQ(std::memcmp(order, e.order, sizeof(e.order)), 0);
}

void CheckHit(const Case& c, const Built& b, const PlannedExpert& e, const ExpertEntry& entry) {
  EXPECT_EQ(entry.gate, b.slots.data() + e.slot * 900);
  EXPECT_EQ(entry.up, entry.gate + 300);
  EXPECT_EQ(entry.down, entry.gate + 600);
  EXPECT_EQ(entry.width_end - entry.width_begin, c.shape.width);
  EXPECT_EQ(entry.hidden_end - entry.hidden_begin, c.shape.hidden);
  CheckRows(e, entry.rows, entry.order);
}

// Rank `rank` of the pulls: while there is room its pieces are copied and the entry names the copy.
void CheckPull(const Case& c, const Built& b, const PlannedExpert& e, uint32_t rank) {
  const bool staged = rank < c.staged_max;
  const ExpertEntry* entries = staged
                                   ? &b.staged->entries[rank * kNodes]
                                   : &b.list->entries[(rank - c.staged_max) * kNodes];

  for (uint32_t n = 0; n < kNodes; ++n) {
    const ExpertEntry& entry = entries[n];
    const uint8_t* from = b.arena.data() + n * 300'000 + e.expert * 1000;
    if (staged) {
      const StagedPiece& piece = b.pieces->pieces[rank * kNodes + n];
      EXPECT_EQ(piece.from, from);
      EXPECT_EQ(piece.to, b.area.data() + (rank * kNodes + n) * Built::kPieceBytes);
      EXPECT_EQ(piece.down_at, 400u);
      EXPECT_EQ(piece.bytes, 1000u);
      from = piece.to;
    }
    EXPECT_EQ(entry.gate, from);
    EXPECT_EQ(entry.up, entry.gate + 200);
    EXPECT_EQ(entry.down, entry.gate + 400);
    EXPECT_EQ(entry.width_begin, 16 * n);
    EXPECT_EQ(entry.hidden_end, 32 * (n + 1));
    CheckRows(e, entry.rows, entry.order);
  }
}

void CheckTable(const Case& c, const Built& b, const PlannedExpert& e) {
  const bool on_cpu = e.lane == static_cast<uint32_t>(Lane::kCpu);
  for (uint32_t r = 0; r < RowCount(c); ++r) {
    if (!(e.rows >> r & 1)) continue;
    const uint32_t at = r * c.shape.experts_used + e.order[r];
    EXPECT_EQ(b.table[at], (on_cpu ? b.worker.data() : b.device.data()) + at * c.shape.hidden);
    EXPECT_GT(b.row_lookups[r][e.lane], 0u);
  }
}

// Every expert of the plan appears in the list or in the job, with its own weights, rows and places.
TEST(LaneWork, ListTableAndJobNameThePlannedExperts) {
  std::mt19937 rng(2);
  for (int i = 0; i < 500; ++i) {
    const Case c = RandomCase(&rng);
    const Built b(c);
    uint32_t pulled = 0, hits = 0, cpu = 0;
    const uint32_t pulls = b.work.n_by_lane[1], copied = std::min(pulls, c.staged_max);
    ASSERT_EQ(b.list->n_slow, (pulls - copied) * kNodes);
    ASSERT_EQ(b.list->n_entries, b.list->n_slow + b.work.n_by_lane[0]);
    ASSERT_EQ(b.staged->n_slow, 0u);
    ASSERT_EQ(b.staged->n_entries, copied * kNodes);
    ASSERT_EQ(b.pieces->n, copied * kNodes);
    for (uint32_t p = 0; p < b.work.n_experts; ++p) {
      const PlannedExpert& e = b.work.experts[p];
      if (e.lane == static_cast<uint32_t>(Lane::kCpu)) {
        const JobExpert& j = b.job.experts[cpu++];
        EXPECT_EQ(j.expert, e.expert);
        CheckRows(e, j.rows, j.order);
      } else if (e.lane == static_cast<uint32_t>(Lane::kHit)) {
        CheckHit(c, b, e, b.list->entries[b.list->n_slow + hits++]);
      } else {
        CheckPull(c, b, e, pulled++);
      }
      CheckTable(c, b, e);
    }
    EXPECT_EQ(b.job.n_experts, cpu);
    EXPECT_EQ(b.job.tag, JobTag(3, 77, 2));
    for (uint32_t l = 0; l < kLanes; ++l) EXPECT_EQ(b.by_lane[l], b.work.n_by_lane[l]);
    for (uint32_t r = 0; r < RowCount(c); ++r) {
      EXPECT_EQ(b.row_lookups[r][0] + b.row_lookups[r][1] + b.row_lookups[r][2],
                c.shape.experts_used);
    }
  }
}

// Against every possible number of pulls.
TEST(LaneWork, BalancedSplitMakesTheSlowerLaneFastest) {
  std::mt19937 rng(3);
  for (int i = 0; i < 5000; ++i) {
    LaneSplit s = {};
    s.balanced = 1;
    s.pull_ns = static_cast<uint32_t>(rng() % 60000);
    s.cpu_ns = 1 + rng() % 60'000;
    s.cpu_fixed_ns = rng() % 10'000;
    const uint32_t misses = rng() % 81;
    const auto cost = [&](uint32_t k) {
      return std::max<uint64_t>(uint64_t{k} * s.pull_ns,
                                k == misses ? 0
                                            : s.cpu_fixed_ns + uint64_t{misses - k} * s.cpu_ns);
    };
    uint64_t best = ~uint64_t{0};
    for (uint32_t k = 0; k <= misses; ++k) best = std::min(best, cost(k));
    ASSERT_LE(PullsOf(misses, s), misses);
    ASSERT_EQ(cost(PullsOf(misses, s)), best) << misses << " misses";
    s.cpu_lane_down = 1;
    ASSERT_EQ(PullsOf(misses, s), misses);
  }
}

// ---- the bounded wait
class LaneWait : public ::testing::Test {
 protected:
  static constexpr uint64_t kTag = 99, kWindow = 10, kWait = 200, kWaitMax = 500;
  WaitVerdict At(uint64_t now, const WorkerLook& look, uint64_t abort = 0) {
    return LookAtWorker(look, abort, kWindow, kTag, now, kWait, kWaitMax, 7, 2, &state_, &fault_);
  }
  void ExpectFault(WindowStatus status, uint32_t row, LaneError error) {
    EXPECT_EQ(fault_.status, static_cast<uint32_t>(status));
    EXPECT_EQ(fault_.error.layer, 7u);
    EXPECT_EQ(fault_.error.worker, 2u);
    EXPECT_EQ(fault_.error.row, row);
    EXPECT_EQ(fault_.error.detail, static_cast<uint32_t>(error));
  }
  WaitState state_ = {};
  LaneFault fault_ = {};
};

TEST_F(LaneWait, AnAnswerEndsIt) {
  EXPECT_EQ(At(0, {1, 1}), WaitVerdict::kWait);
  EXPECT_EQ(At(100, {kTag, 2}), WaitVerdict::kAnswered);
  EXPECT_EQ(fault_.status, 0u);
}
TEST_F(LaneWait, TheAbortWordComesBeforeAnAnswer) {
  EXPECT_EQ(At(0, {kTag, 1}, kWindow), WaitVerdict::kFailed);
  ExpectFault(WindowStatus::kAborted, 0, LaneError::kAbortWord);
  EXPECT_EQ(At(0, {kTag, 1}, kWindow - 1), WaitVerdict::kAnswered);
}
TEST_F(LaneWait, StandstillEndsItAndProgressProlongsIt) {
  EXPECT_EQ(At(0, {1, 1}), WaitVerdict::kWait);
  EXPECT_EQ(At(199, {1, 1}), WaitVerdict::kWait);
  EXPECT_EQ(At(199, {1, 2}), WaitVerdict::kWait);
  EXPECT_EQ(At(398, {1, 2}), WaitVerdict::kWait);
  EXPECT_EQ(At(399, {1, 2}), WaitVerdict::kFailed);
  ExpectFault(WindowStatus::kAborted, 0, LaneError::kNoProgress);
}
TEST_F(LaneWait, ProgressDoesNotProlongItForEver) {
  for (uint64_t now = 0; now < kWaitMax; now += 50)
    ASSERT_EQ(At(now, {1, now}), WaitVerdict::kWait);
  EXPECT_EQ(At(kWaitMax, {1, kWaitMax}), WaitVerdict::kFailed);
  ExpectFault(WindowStatus::kAborted, 0, LaneError::kTooLong);
}
TEST_F(LaneWait, TheWorkersWordDecides) {
  const auto judge = [&](JobStatus status, uint32_t row) {
    fault_ = {};
    return JudgeAnswer(static_cast<uint32_t>(status), row, 7, 2, &fault_);
  };
  EXPECT_TRUE(judge(JobStatus::kOk, 5));
  EXPECT_EQ(fault_.status, 0u);
  EXPECT_FALSE(judge(JobStatus::kNotFinite, 3));
  ExpectFault(WindowStatus::kNotFinite, 3, LaneError{0});
  EXPECT_FALSE(judge(JobStatus::kNotFinite, 4000));
  ExpectFault(WindowStatus::kNotFinite, kWindowRowsMax - 1, LaneError{0});
  EXPECT_FALSE(judge(JobStatus::kPeerTimeout, 1));
  ExpectFault(WindowStatus::kAborted, 1, LaneError::kPeerTimeout);
  EXPECT_FALSE(judge(JobStatus::kAborted, 0));
  ExpectFault(WindowStatus::kAborted, 0, LaneError::kAbortWord);
  EXPECT_FALSE(judge(JobStatus::kBadJob, 0));
  ExpectFault(WindowStatus::kAborted, 0, LaneError::kBadJob);
  EXPECT_FALSE(judge(JobStatus{1234}, 0));
  ExpectFault(WindowStatus::kAborted, 0, LaneError::kBadJob);
}

}  // namespace
}  // namespace lode::cuda
