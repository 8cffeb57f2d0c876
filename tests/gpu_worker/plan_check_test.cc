// A good plan passes and its lists arrive in the copy; each single fault is refused with its own
// reason; random garbage never makes the checker read outside its bounds (run under the address
// sanitizer as well).
#include "gpu_worker/plan_check.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>

namespace lode {
namespace {

constexpr PlanLimits kLimits = {7, 0, 1000, 4096, 64, 4};

class PlanCheck : public ::testing::Test {
 protected:
  PlanCheck() : areas_(new SequenceArea[kSequenceSlotsMax]()), copy_(new PlanAreas()) {}

  // Two sequences: a decode row with a draft, and two prompt rows with lists.
  WindowPlan Good() {
    WindowPlan plan = {};
    plan.window = 5;
    plan.generation = 7;
    plan.n_rows = 4;
    plan.n_seqs = 3;
    plan.tunables.pull_share = 0.5f;
    for (uint32_t s = 0; s < 3; ++s) {
      SequencePlan& seq = plan.seqs[s];
      seq.slot = 2 - s;
      seq.committed = 300;
      seq.accepted = 1;
      seq.block_count = 2;
      seq.sampling = {1, 0.7f, 0.9f, 0.05f, 20, 1.1f, 0, 0, 0};
      areas_[seq.slot].kv_blocks[0] = 2 * s;
      areas_[seq.slot].kv_blocks[1] = 63 - s;
    }
    for (uint32_t r = 0; r < 4; ++r) {
      RowPlan& row = plan.rows[r];
      row.seq_index = r / 2;
      row.position = 300 + r % 2;
      row.token = 5;
      row.target = -1;
      row.mask_offset = kNoMask;
      row.needs_logits = row.pick = 1;
    }
    plan.rows[0].kind = RowKind::kDecode;
    plan.rows[1].kind = RowKind::kDraft;
    plan.rows[3].mask_offset = 0;
    plan.rows[3].bias_offset = 128;
    plan.rows[3].bias_count = 2;
    plan.rows[3].penalty_offset = 144;
    plan.rows[3].penalty_count = 1;
    SequenceArea& area = areas_[1];
    area.heap[0] = 0xaa;
    const TokenBias bias[] = {{999, -INFINITY}, {0, 1.5f}};
    std::memcpy(area.heap + 128, bias, sizeof(bias));
    const TokenCount count = {17, 3};
    std::memcpy(area.heap + 144, &count, sizeof(count));
    return plan;
  }
  PlanVerdict Check(const WindowPlan& plan) {
    return ValidatePlan(plan, kLimits, areas_.get(), copy_.get());
  }

  std::unique_ptr<SequenceArea[]> areas_;
  std::unique_ptr<PlanAreas> copy_;
};

TEST_F(PlanCheck, AcceptsAGoodPlanAndCopiesItsLists) {
  const WindowPlan plan = Good();
  const PlanVerdict verdict = Check(plan);
  ASSERT_TRUE(verdict.ok()) << PlanErrorText(verdict.error) << " at " << verdict.where;
  std::memset(static_cast<void*>(areas_.get()), 0xff,
              sizeof(SequenceArea) * kSequenceSlotsMax);  // a peer that goes on writing
  EXPECT_EQ(copy_->seqs[0].kv_blocks[1], 63u);
  EXPECT_EQ(copy_->Mask(plan.rows[0]), nullptr);
  EXPECT_EQ(copy_->Mask(plan.rows[3])[0] & 0xffu, 0xaau);
  ASSERT_EQ(copy_->Bias(plan.rows[3]).size(), 2u);
  EXPECT_EQ(copy_->Bias(plan.rows[3])[0].token, 999);
  EXPECT_EQ(copy_->Penalties(plan.rows[3])[0].count, 3u);
}

TEST_F(PlanCheck, AcceptsFlushAndEmptyPlans) {
  WindowPlan plan = Good();
  plan.n_rows = 0;
  EXPECT_TRUE(Check(plan).ok());
  plan.n_seqs = 0;
  EXPECT_TRUE(Check(plan).ok());
  plan = Good();
  plan.n_rows = 5;  // and a flush row for the third sequence
  plan.rows[4] = RowPlan{};
  plan.rows[4].seq_index = 2;
  plan.rows[4].kind = RowKind::kFlush;
  plan.rows[4].target = -1;
  plan.rows[4].mask_offset = kNoMask;
  EXPECT_TRUE(Check(plan).ok()) << PlanErrorText(Check(plan).error);
}

struct Fault {
  PlanError error;
  std::function<void(WindowPlan*, SequenceArea*)> spoil;
};

TEST_F(PlanCheck, RefusesEverySingleFault) {
  using P = WindowPlan;
  using A = SequenceArea;
  const Fault faults[] = {
      {PlanError::kGeneration, [](P* p, A*) { p->generation = 8; }},
      {PlanError::kGeneration, [](P* p, A*) { p->device = 1; }},
      {PlanError::kCounts, [](P* p, A*) { p->n_rows = kWindowRowsMax + 1; }},
      {PlanError::kCounts, [](P* p, A*) { p->n_seqs = 0xffffffff; }},
      {PlanError::kCounts, [](P* p, A*) { p->flags = 1u << 31; }},
      {PlanError::kTunables, [](P* p, A*) { p->tunables.pull_share = NAN; }},
      {PlanError::kTunables, [](P* p, A*) { p->tunables.pull_share = 1.5f; }},
      {PlanError::kTunables, [](P* p, A*) { p->tunables.tier_policy = 2; }},
      {PlanError::kTunables, [](P* p, A*) { p->tunables.split_policy = 9; }},
      {PlanError::kSlot, [](P* p, A*) { p->seqs[1].slot = 4; }},
      {PlanError::kSlot, [](P* p, A*) { p->seqs[2].slot = p->seqs[0].slot; }},
      {PlanError::kCommitted, [](P* p, A*) { p->seqs[2].committed = 4097; }},
      {PlanError::kCommitted, [](P* p, A*) { p->seqs[2].accepted = 9; }},
      {PlanError::kBlocks, [](P* p, A*) { p->seqs[0].block_count = kKvBlocksPerSequenceMax + 1; }},
      {PlanError::kBlocks, [](P* p, A*) { p->seqs[2].block_count = 1; }},
      {PlanError::kBlocks, [](P*, A* a) { a[2].kv_blocks[0] = 64; }},
      {PlanError::kSampling, [](P* p, A*) { p->seqs[0].sampling.temperature = -1; }},
      {PlanError::kSampling, [](P* p, A*) { p->seqs[0].sampling.temperature = INFINITY; }},
      {PlanError::kSampling, [](P* p, A*) { p->seqs[0].sampling.top_p = 0; }},
      {PlanError::kSampling, [](P* p, A*) { p->seqs[0].sampling.top_p = NAN; }},
      {PlanError::kSampling, [](P* p, A*) { p->seqs[0].sampling.min_p = 1; }},
      {PlanError::kSampling, [](P* p, A*) { p->seqs[0].sampling.repetition_penalty = 0; }},
      {PlanError::kRowOrder, [](P* p, A*) { p->rows[0].seq_index = 3; }},
      {PlanError::kRowOrder, [](P* p, A*) { p->rows[1].seq_index = 1, p->rows[2].seq_index = 0; }},
      {PlanError::kRowOrder, [](P* p, A*) { p->rows[1].position = 302; }},
      {PlanError::kRowOrder, [](P* p, A*) { p->rows[0].position = 299; }},
      {PlanError::kPosition,
       [](P* p, A*) {
         p->seqs[0].committed = p->rows[0].position = 512, p->rows[1].position = 513;
       }},
      {PlanError::kToken, [](P* p, A*) { p->rows[0].token = -1; }},
      {PlanError::kToken, [](P* p, A*) { p->rows[0].token = 1000; }},
      {PlanError::kToken, [](P* p, A*) { p->rows[0].target = 1000; }},
      {PlanError::kToken, [](P* p, A*) { p->rows[0].target = -2; }},
      {PlanError::kKind, [](P* p, A*) { p->rows[0].kind = RowKind::kDraft; }},
      {PlanError::kKind, [](P* p, A*) { p->rows[0].pick = 0; }},
      {PlanError::kKind, [](P* p, A*) { p->rows[1].kind = RowKind::kPrompt; }},
      {PlanError::kOutputs, [](P* p, A*) { p->rows[0].kind = RowKind::kFlush; }},
      {PlanError::kKind, [](P* p, A*) { p->rows[1].kind = RowKind::kFlush; }},
      {PlanError::kKind,
       [](P* p, A*) {
         p->rows[0] = RowPlan{}, p->rows[0].kind = RowKind::kFlush, p->rows[0].target = -1,
         p->rows[0].mask_offset = kNoMask;
       }},
      {PlanError::kKind, [](P* p, A*) { p->rows[0].kind = static_cast<RowKind>(77); }},
      {PlanError::kOutputs, [](P* p, A*) { p->rows[0].top_logprobs = kLogprobsMax + 1; }},
      {PlanError::kOutputs, [](P* p, A*) { p->rows[3].needs_logits = 0; }},
      {PlanError::kHeapRange, [](P* p, A*) { p->rows[3].mask_offset = kSequenceHeapBytes - 8; }},
      {PlanError::kHeapRange, [](P* p, A*) { p->rows[3].mask_offset = 2; }},
      {PlanError::kHeapRange, [](P* p, A*) { p->rows[3].bias_offset = 0xfffffffc; }},
      {PlanError::kHeapRange, [](P* p, A*) { p->rows[3].bias_count = 0xffffffff; }},
      {PlanError::kHeapRange, [](P* p, A*) { p->rows[3].penalty_offset = kSequenceHeapBytes; }},
      {PlanError::kListEntry, [](P*, A* a) { a[1].heap[128 + 2] = 1; }},
      {PlanError::kListEntry, [](P*, A* a) { std::memset(a[1].heap + 132, 0xff, 4); }},
      {PlanError::kListEntry, [](P*, A* a) { std::memset(a[1].heap + 144, 0xff, 4); }},
  };
  for (size_t i = 0; i < std::size(faults); ++i) {
    WindowPlan plan = Good();
    faults[i].spoil(&plan, areas_.get());
    const PlanVerdict verdict = Check(plan);
    EXPECT_EQ(PlanErrorText(verdict.error), PlanErrorText(faults[i].error)) << "fault " << i;
    areas_.reset(new SequenceArea[kSequenceSlotsMax]());
  }
}

TEST_F(PlanCheck, RefusesListsThatAreMoreTogetherThanTheHeap) {
  WindowPlan plan = Good();
  RowPlan& row = plan.rows[3];
  ASSERT_NE(row.mask_offset, kNoMask);
  row.bias_offset = row.mask_offset = 0;  // they may overlap
  row.penalty_count = 0;
  row.bias_count = kSequenceHeapBytes / sizeof(TokenBias);
  EXPECT_EQ(Check(plan).error, PlanError::kHeapRange);
  row.mask_offset = kNoMask;
  EXPECT_TRUE(Check(plan).ok()) << PlanErrorText(Check(plan).error);
}

TEST_F(PlanCheck, SurvivesGarbage) {
  std::mt19937 rng(1);
  int accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    WindowPlan plan = Good();
    auto* bytes = reinterpret_cast<uint8_t*>(&plan);
    for (uint32_t i = rng() % 4; i > 0; --i)
      bytes[rng() % sizeof(plan)] ^= static_cast<uint8_t>(1u << rng() % 8);
    if (round % 10 == 0) {
      for (size_t i = 0; i < sizeof(plan); ++i) bytes[i] = static_cast<uint8_t>(rng());
      plan.generation = 7;
      plan.device = plan.flags = 0;
      plan.n_rows = plan.n_seqs = 8;
    }
    if (Check(plan).ok()) ++accepted;
  }
  EXPECT_GT(accepted, 0);
  EXPECT_LT(accepted, 20000);
}

}  // namespace
}  // namespace lode
