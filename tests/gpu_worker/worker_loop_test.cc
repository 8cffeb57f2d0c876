// A whole GPU worker in process, with real CPU workers and rings: load, plans in, results out. Same
// picks and logits as the in-process engine, whatever the tunables; drafts judged right; bad plans
// refused; void windows leave nothing behind; a worker's death ends in pulls. Compiled for the cpu
// device and, with LODE_TEST_DEVICE = "cuda", for the emulated card and for a real one.
#include "gpu_worker/worker_loop.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string_view>

#include "gpu_worker/local_engine.h"
#include "tests/gpu_worker/gpu_worker_fixture.h"

namespace lode {
namespace {

#if !defined(LODE_TEST_DEVICE)
#define LODE_TEST_DEVICE "cpu"
#endif
const bool kCuda = std::string_view(LODE_TEST_DEVICE) == "cuda";

constexpr uint32_t kGeneration = ServedGpuWorker::kGeneration;
// Slots for some of the experts; on a card the whole of a budget includes the rest of its memory.
const uint64_t kSlotBytes = 4 << 20;
// Room for some of a layer's pulls; the rest are read straight from the arenas.
const uint64_t kStagingBytes = 512 << 10;

#if defined(LODE_CUDA_EMULATED)
constexpr bool kEmulatedCard = true;
#else
constexpr bool kEmulatedCard = false;
#endif

class WorkerLoopTest : public ::testing::Test {
 protected:
  WorkerLoopTest() : workers_(DemoModel(), 2, false, 20'000, LODE_TEST_DEVICE), gpu_(workers_) {
    if (kCuda && !ProbeCuda(0).ok()) return;
    auto ready = gpu_.Start(Plan());
    EXPECT_TRUE(ready.ok()) << ready.status();
    worker_ = gpu_.worker();
    for (uint32_t b = 0; b < ServedGpuWorker::kBlocks; ++b) {
      for (uint32_t slot = 0; slot < ServedGpuWorker::kSlots; ++slot)
        segment()->sequences[slot].kv_blocks[b] = slot * ServedGpuWorker::kBlocks + b;
    }
  }
  void SetUp() override {
    if (!worker_) GTEST_SKIP() << "no card: " << Message(ProbeCuda(0).status());
  }

  // Deadlines times this: under a sanitizer a kernel takes a hundred times as long.
  static uint32_t Patience() {
    return static_cast<uint32_t>(std::stoul(FromEnvironment("LODE_TEST_PATIENCE", "1")));
  }

  LoadPlan Plan() const {
    LoadPlan plan = gpu_.Plan(LODE_TEST_DEVICE);
    plan.wait_ms = 1'500 * Patience();  // the tests' only wait that ends by time
    plan.wait_max_ms = 60'000 * Patience();
    if (!kCuda) plan.vram_budget_bytes = kSlotBytes;
    plan.pull_staging_bytes = kStagingBytes;
    return plan;
  }
  GpuSegments Segments() const { return gpu_.Segments(); }
  WindowSegment* segment() const { return gpu_.segment(); }

  WindowResult Run(WindowPlan plan) {
    WindowResult result = {};
    gpu_.Run(&plan, &result);
    return result;
  }
  // A window of `tokens` of one slot from `position` on; the last `drafts` of them are drafts.
  // Every row picks.
  WindowPlan Rows(uint32_t slot, uint64_t epoch, uint32_t position,
                  const std::vector<int32_t>& tokens, uint32_t drafts = 0) const {
    WindowPlan plan = {};
    plan.flags = kHashLogits;
    plan.tunables = tunables_;
    plan.n_seqs = 1;
    SequencePlan& seq = plan.seqs[0];
    seq.epoch = epoch;
    seq.slot = slot;
    seq.committed = position;
    seq.block_count = 4;
    seq.sampling = sampling_;
    for (uint32_t i = 0; i < tokens.size(); ++i) {
      RowPlan& row = plan.rows[plan.n_rows++];
      row.position = position + i;
      row.token = tokens[i];
      row.target = -1;
      row.mask_offset = kNoMask;
      row.needs_logits = row.pick = 1;
      row.kind = i + drafts >= tokens.size() ? RowKind::kDraft : RowKind::kPrompt;
    }
    return plan;
  }

  struct Text {
    std::vector<int32_t> tokens;
    std::vector<uint64_t> hashes;
    bool operator==(const Text&) const = default;
  };
  // Prompt, then `n` tokens one by one; `each` may change anything of a plan before it goes out.
  Text Generate(uint32_t n, const std::function<void(uint32_t step, WindowPlan*)>& each = nullptr) {
    const std::vector<int32_t> prompt = {100, 200, 300, 400, 500};
    ++epoch_;
    Text text;
    uint32_t position = 0;
    std::vector<int32_t> next = prompt;
    for (uint32_t step = 0; step < n; ++step) {
      WindowPlan plan = Rows(0, epoch_, position, next);
      if (step > 0) plan.rows[0].kind = RowKind::kDecode;
      if (each) each(step, &plan);
      const WindowResult result = Run(plan);
      EXPECT_EQ(result.status, WindowStatus::kOk)
          << "step " << step << " detail " << result.error.detail;
      if (result.status != WindowStatus::kOk) break;
      position += plan.n_rows;
      const RowResult& last = result.rows[plan.n_rows - 1];
      text.tokens.push_back(last.token);
      text.hashes.push_back(last.logits_hash);
      next = {last.token};
    }
    return text;
  }

  static Tunables StartTunables() {
    Tunables t = {};
    t.epoch = 1;
    t.vram_budget_bytes = kSlotBytes;  // all lanes have work
    t.pull_share = 0.5f;
    t.tier_policy = static_cast<uint32_t>(TierPolicy::kDecayedLfu);
    t.device_isa = BestIsa();
    for (uint32_t& isa : t.cpu_isa) isa = BestIsa();
    return t;
  }
  static SamplingPlan StartSampling() {
    SamplingPlan s = {};
    s.seed = 42;
    s.temperature = 0.8f;
    s.top_p = 0.95f;
    s.top_k = 50;
    s.repetition_penalty = 1.0f;
    return s;
  }

  Workers workers_;
  ServedGpuWorker gpu_;
  GpuWorker* worker_ = nullptr;  // null: no card
  Tunables tunables_ = StartTunables();
  SamplingPlan sampling_ = StartSampling();
  uint64_t epoch_ = 0;
};

TEST_F(WorkerLoopTest, TextDoesNotDependOnTunables) {
  const uint32_t n = kCuda ? 8 : 16;  // the emulated card takes seconds per window
  const Text plain = Generate(n);
  ASSERT_EQ(plain.tokens.size(), n);
  const Text again = Generate(n, [&](uint32_t step, WindowPlan* plan) {
    Tunables& t = plan->tunables;
    t.epoch = 100 + step;
    t.pull_share = static_cast<float>(step % 5) / 4;
    t.vram_budget_bytes = (step % 4) * (3 << 20);
    t.tier_policy = step % 2;
    t.device_isa = step % 2 ? BestIsa() : 0;
    t.cpu_isa[0] = step % 3 ? BestIsa() : 0;
    t.cpu_threads = t.device_threads = step % 2;
    if (step % 7 == 6) plan->flags |= kCpuLaneDown;
  });
  EXPECT_EQ(plain, again);
}

// The yardstick: no lanes, no tier, no processes, the cpu device.
TEST_F(WorkerLoopTest, LogitsAreThoseOfTheInProcessEngine) {
  auto engine = LocalEngine::Create(DemoModel(), {.threads = 2, .context = 1024});
  ASSERT_TRUE(engine.ok()) << engine.status();
  const Text text = Generate(8);
  ASSERT_EQ(text.tokens.size(), 8u);
  std::vector<int32_t> next = {100, 200, 300, 400, 500};
  uint32_t position = 0;
  for (uint32_t step = 0; step < text.tokens.size(); ++step) {
    std::vector<LocalRow> rows;
    for (const int32_t token : next) rows.push_back({0, position++, token, true});
    auto outcome = (*engine)->Run(rows);
    ASSERT_TRUE(outcome.ok() && outcome->ok());
    EXPECT_EQ(HashLogits((*engine)->logits(static_cast<uint32_t>(rows.size()) - 1)),
              text.hashes[step])
        << "step " << step;
    (*engine)->Commit(0, position);
    next = {text.tokens[step]};
  }
}

// Prompts cut into windows of every size: the logits behind the last token are the same.
TEST_F(WorkerLoopTest, PromptsAreTheSameInWindowsOfEverySize) {
  const bool kEmulated = kCuda && kEmulatedCard;  // takes seconds per window
  const std::vector<std::vector<int32_t>> prompts = {
      {100, 200, 300, 400, 500, 600, 700, 800, 900}, {7, 7, 7, 7, 7, 7, 7, 7}, {1, 2, 3}};
  for (const std::vector<int32_t>& prompt : prompts) {
    uint64_t first = 0;
    for (uint32_t rows = 1; rows <= kWindowRowsMax; rows += kEmulated ? 7 : 1) {
      ++epoch_;
      uint64_t hash = 0;
      for (uint32_t at = 0; at < prompt.size(); at += rows) {
        const uint32_t end = std::min<uint32_t>(at + rows, static_cast<uint32_t>(prompt.size()));
        const WindowResult r = Run(Rows(0, epoch_, at, {prompt.begin() + at, prompt.begin() + end}));
        ASSERT_EQ(r.status, WindowStatus::kOk) << "detail " << r.error.detail;
        hash = r.rows[end - at - 1].logits_hash;
      }
      if (rows == 1) first = hash;
      EXPECT_EQ(hash, first) << prompt.size() << " tokens, " << rows << " rows";
    }
    if (kEmulated) break;
  }
}

// A worker that does not answer ends the window, not the device; with the CPU lane down the same
// rows come out by pulling.
TEST_F(WorkerLoopTest, ASilentWorkerVoidsTheWindowAndPullingGoesOn) {
  tunables_.pull_share = 0.25f;
  tunables_.vram_budget_bytes = 0;
  tunables_.epoch = 50;
  const Text plain = Generate(5);
  const Text again = Generate(5, [&](uint32_t step, WindowPlan* plan) {
    if (step == 2) {
      workers_.StopWorker(1);
      const WindowResult r = Run(*plan);
      EXPECT_EQ(r.status, WindowStatus::kAborted);
      EXPECT_EQ(r.error.detail, static_cast<uint32_t>(LaneError::kNoProgress));
      workers_.header()->abort_window.store(gpu_.windows());  // as the daemon does: frees the peer
    }
    if (step >= 2 && step < 4) plan->flags |= kCpuLaneDown;
    if (step == 4) {
      workers_.StartWorker(1, 2);
      worker_->CpuWorkerReplaced(1);
    }
  });
  EXPECT_EQ(plain, again);
}

TEST_F(WorkerLoopTest, DraftsAreProposedByEqualityAndLeaveNoTrace) {
  const Text plain = Generate(8);
  ++epoch_;
  // The prompt's last token and three drafts of which two are right; then the right ones are
  // committed.
  WindowResult r = Run(Rows(0, epoch_, 0, {100, 200, 300, 400}));
  ASSERT_EQ(r.status, WindowStatus::kOk);
  EXPECT_EQ(r.proposed_accepts[0], 4u);
  WindowPlan plan =
      Rows(0, epoch_, 4, {500, plain.tokens[0], plain.tokens[1], plain.tokens[2] + 1}, 3);
  plan.rows[0].kind = RowKind::kDecode;
  r = Run(plan);
  ASSERT_EQ(r.status, WindowStatus::kOk);
  EXPECT_EQ(r.proposed_accepts[0], 3u);
  EXPECT_EQ(r.n_drafts[0], 0u);
  for (uint32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(r.rows[i].token, plain.tokens[i]);
    EXPECT_EQ(r.rows[i].logits_hash, plain.hashes[i]);
  }
  plan = Rows(0, epoch_, 7, {plain.tokens[2]});
  plan.seqs[0].accepted = 3;
  plan.rows[0].kind = RowKind::kDecode;
  r = Run(plan);
  EXPECT_EQ(r.rows[0].logits_hash, plain.hashes[3]) << "the rejected draft left a trace";
}

TEST_F(WorkerLoopTest, AVoidWindowIsAnsweredAndItsRelaunchHasTheSameBits) {
  const Text plain = Generate(6);
  ++epoch_;
  const Text again = Generate(6, [&](uint32_t step, WindowPlan* plan) {
    if (step != 3) return;
    workers_.header()->abort_window.store(gpu_.windows() + 1);
    const WindowResult void_result = Run(*plan);
    EXPECT_EQ(void_result.status, WindowStatus::kAborted);
    EXPECT_EQ(void_result.error.detail, static_cast<uint32_t>(LaneError::kAbortWord));
  });
  EXPECT_EQ(plain, again);
}

TEST_F(WorkerLoopTest, RefusesBadPlansAndGoesOn) {
  const Text plain = Generate(3);
  WindowPlan bad = Rows(0, epoch_ + 1, 0, {1});
  bad.rows[0].token = -3;
  WindowResult r = Run(bad);
  EXPECT_EQ(r.status, WindowStatus::kBadPlan);
  EXPECT_EQ(r.error.detail, static_cast<uint32_t>(PlanError::kToken));
  bad = Rows(0, epoch_ + 1, 7, {1});  // a sequence that never computed positions 0..6
  r = Run(bad);
  EXPECT_EQ(r.status, WindowStatus::kBadPlan);
  EXPECT_EQ(r.error.detail, static_cast<uint32_t>(PlanError::kHistory));
  bad = Rows(0, epoch_ + 1, 0, {1});
  bad.tunables.epoch = 999;
  bad.tunables.device_isa = 1000;
  r = Run(bad);
  EXPECT_EQ(r.error.detail, static_cast<uint32_t>(PlanError::kTunables));
  EXPECT_EQ(Generate(3), plain);
}

TEST_F(WorkerLoopTest, ResultsCarryWhatTheContractLists) {
  // A smaller budget than at start empties the tier of a card first.
  if (kCuda) tunables_.vram_budget_bytes = ~uint64_t{0};
  WindowPlan plan = Rows(1, 77, 0, {100, 200, 300});
  plan.flags |= kTraceRouting | kTimeStages;
  plan.rows[1].top_logprobs = 5;
  plan.rows[1].target = 300;
  plan.rows[0].needs_logits = plan.rows[0].pick = 0;
  const WindowResult r = Run(plan);
  ASSERT_EQ(r.status, WindowStatus::kOk);
  EXPECT_EQ(r.rows[0].token, -1);
  EXPECT_EQ(r.rows[0].logits_hash, 0u);
  EXPECT_EQ(r.rows[1].n_top, 5u);
  EXPECT_EQ(r.rows[1].top[0].token, r.rows[1].argmax);
  for (int i = 1; i < 5; ++i) EXPECT_GE(r.rows[1].top[i - 1].logprob, r.rows[1].top[i].logprob);
  EXPECT_LT(r.rows[1].target_logprob, 0.0f);
  EXPECT_LE(r.rows[1].logprob, r.rows[1].top[0].logprob);
  const ModelConfig& c = workers_.config();
  uint64_t distinct = 0, bytes = 0;
  for (uint32_t lane = 0; lane < kLanes; ++lane)
    distinct += r.lookups[lane], bytes += r.bytes[lane];
  EXPECT_GE(distinct, uint64_t{c.layers} * c.experts_used);
  EXPECT_GT(bytes, 0u);
  for (uint32_t row = 0; row < 3; ++row) {
    EXPECT_EQ(r.rows[row].lookups[0] + r.rows[row].lookups[1] + r.rows[row].lookups[2],
              c.layers * c.experts_used);
    for (uint32_t layer = 0; layer < c.layers; ++layer) {
      const uint16_t* ids = segment()->traces[r.window % kWindowRingSlots].ids[row][layer];
      for (uint32_t o = 0; o < c.experts_used; ++o) {
        EXPECT_LT(ids[o], c.experts);
        for (uint32_t p = 0; p < o; ++p) EXPECT_NE(ids[o], ids[p]);
      }
    }
  }
  EXPECT_GT(r.window_ns, 0u);
  EXPECT_GT(r.stage_ns[static_cast<uint32_t>(Stage::kHead)], 0u);
  EXPECT_GT(r.resident_experts, 0u);
  if (!kCuda) {
    EXPECT_LE(r.resident_bytes, kSlotBytes);
  }
  EXPECT_GT(workers_.header()->gpu_heartbeat.load(), 0u);
  // A flush answers too.
  WindowPlan flush = {};
  flush.tunables = tunables_;
  flush.n_seqs = 1;
  flush.seqs[0] = plan.seqs[0];
  flush.seqs[0].committed = 3;
  flush.seqs[0].accepted = 3;
  EXPECT_EQ(Run(flush).status, WindowStatus::kOk);
  const auto statistics = worker_->Statistics();
  EXPECT_EQ(statistics.at("windows_ok"), 2.0);
}

// What may stand between a row's logits and its pick.
struct Change {
  std::vector<TokenBias> bias;
  std::vector<TokenCount> counts;
  std::vector<uint32_t> mask;
  float repetition, presence, frequency;
};
std::vector<Change> SomeChanges(uint32_t vocab) {
  const std::vector<TokenBias> bias = {{7, 0.0f}, {300, 2.5f}, {41, 30.0f}, {41, -17.0f}, {5, -3.0f}};
  const std::vector<TokenCount> counts = {{100, 2}, {41, 1}, {9, 3}, {300, 1}};
  const std::vector<uint32_t> mask((vocab + 31) / 32, 0x6d5b37a9), none((vocab + 31) / 32, 0);
  return {{{}, {}, {}, 1, 0, 0},
          {bias, {}, {}, 1, 0, 0},
          {{}, counts, {}, 1.2f, 0.5f, 0.125f},
          {{}, {}, mask, 1, 0, 0},
          {bias, counts, mask, 0.8f, -1.5f, 0.75f},
          {{}, {}, none, 1, 0, 0}};
}

// A device that holds the logits picks where they are; the sampler on the in-process engine's logits
// says what every row must pick and report, by ==: rows of a prompt and two drafts, greedy and
// drawn, under biases (one token twice), penalties (of the drafts too) and masks.
TEST_F(WorkerLoopTest, PicksAreTheSameWhereverTheyAreMade) {
  const std::vector<int32_t> tokens = {100, 200, 300, 100};
  auto oracle = LocalEngine::Create(DemoModel(), {});
  ASSERT_TRUE(oracle.ok()) << oracle.status();
  std::vector<LocalRow> local;
  for (uint32_t r = 0; r < tokens.size(); ++r) local.push_back({0, r, tokens[r]});
  (*oracle)->Restart(0);
  ASSERT_TRUE((*oracle)->Run(local).ok());
  const uint32_t vocab = workers_.config().vocab;
  SamplerScratch scratch(vocab);
  uint8_t* heap = segment()->sequences[0].heap;
  constexpr uint32_t kCountsAt = 1024, kMaskAt = 4096;
  uint32_t different = 0;
  for (const Change& change : SomeChanges(vocab)) {
    std::copy(change.bias.begin(), change.bias.end(), reinterpret_cast<TokenBias*>(heap));
    std::copy(change.counts.begin(), change.counts.end(),
              reinterpret_cast<TokenCount*>(heap + kCountsAt));
    std::copy(change.mask.begin(), change.mask.end(), reinterpret_cast<uint32_t*>(heap + kMaskAt));
    for (const float temperature : {0.0f, 0.8f, 3.0f}) {
      sampling_.temperature = temperature;
      sampling_.top_p = temperature > 1 ? 0.97f : 1.0f;
      sampling_.min_p = temperature > 1 ? 0.001f : 0.0f;
      sampling_.top_k = temperature > 1 ? 0 : 40;
      sampling_.repetition_penalty = change.repetition;
      sampling_.presence_penalty = change.presence;
      sampling_.frequency_penalty = change.frequency;
      WindowPlan plan = Rows(0, ++epoch_, 0, tokens, 2);
      plan.flags = 0;
      for (uint32_t r = 0; r < plan.n_rows; ++r) {
        RowPlan& row = plan.rows[r];
        row.target = static_cast<int32_t>(1000 * r + 5);
        row.bias_count = static_cast<uint32_t>(change.bias.size());
        row.penalty_offset = kCountsAt;
        row.penalty_count = static_cast<uint32_t>(change.counts.size());
        row.mask_offset = change.mask.empty() ? kNoMask : kMaskAt;
      }
      const WindowResult result = Run(plan);
      ASSERT_EQ(result.status, WindowStatus::kOk);
      for (uint32_t r = 0; r < plan.n_rows; ++r) {
        SCOPED_TRACE(::testing::Message() << "temperature " << temperature << ", row " << r);
        const std::span<const float> logits = (*oracle)->logits(r);
        PickInput in;
        in.logits = logits;
        in.mask = change.mask.empty() ? nullptr : change.mask.data();
        in.bias = change.bias;
        in.counts = change.counts;
        in.draft_tokens = std::span(tokens).subspan(2, r < 2 ? 0 : r - 1);
        in.position = r + 1;
        in.sampling = &sampling_;
        const int32_t token = PickToken(in, &scratch), argmax = ArgmaxLogit(logits);
        const LogNormalizer norm = Normalize(logits, argmax);
        const RowResult& row = result.rows[r];
        EXPECT_EQ(row.token, token);
        EXPECT_EQ(row.argmax, argmax);
        EXPECT_EQ(row.logprob, norm.LogProb(logits[static_cast<size_t>(token)]));
        EXPECT_EQ(row.target_logprob, norm.LogProb(logits[1000 * r + 5]));
        different += token != argmax;
      }
    }
  }
  EXPECT_GT(different, 30u);  // of 72
}

TEST_F(WorkerLoopTest, LoadRefusesWhatDoesNotFit) {
  const auto refused = [&](const std::function<void(LoadPlan*, GpuSegments*)>& spoil) {
    LoadPlan plan = Plan();
    GpuSegments segments = Segments();
    spoil(&plan, &segments);
    GpuWorker other(0, kGeneration);
    auto ready = other.Load(plan, std::move(segments), nullptr, gpu_.stop());
    return ready.ok() ? std::string() : Message(ready.status());
  };
  EXPECT_EQ(refused([](LoadPlan*, GpuSegments*) {}), "");
  EXPECT_NE(refused([](LoadPlan* p, GpuSegments*) { p->device = "abacus"; }), "");
  EXPECT_NE(refused([](LoadPlan* p, GpuSegments*) { p->identity = "other"; }), "");
  EXPECT_NE(refused([](LoadPlan* p, GpuSegments*) { p->kv_type = "q4"; }), "");
  EXPECT_NE(refused([](LoadPlan* p, GpuSegments*) { p->profile = "/nonexistent"; }), "");
  EXPECT_NE(refused([](LoadPlan*, GpuSegments* s) { std::swap(s->arenas[0], s->arenas[1]); }), "");
  EXPECT_NE(refused([](LoadPlan*, GpuSegments* s) { std::swap(s->window, s->exchange); }), "");
  EXPECT_NE(refused([](LoadPlan*, GpuSegments* s) { s->arenas.pop_back(); }), "");
}

TEST(ProposeAccepts, CountsRowsUntilTheFirstWrongDraft) {
  WindowPlan plan = {};
  WindowResult result = {};
  plan.n_rows = 6;
  plan.n_seqs = 2;
  const int32_t tokens[] = {1, 2, 3, 9, 5, 6};
  for (uint32_t r = 0; r < 6; ++r) {
    plan.rows[r].seq_index = r < 5 ? 0 : 1;
    plan.rows[r].kind = r == 0 || r == 5 ? RowKind::kDecode : RowKind::kDraft;
    plan.rows[r].token = tokens[r];
    result.rows[r].token = static_cast<int32_t>(r + 2);  // the row before picked 2, 3, 4, 5, ...
  }
  ProposeAccepts(plan, &result);
  EXPECT_EQ(result.proposed_accepts[0],
            3u);  // 1, 2, 3; 9 is wrong, and 5 behind it does not count although it equals the pick
  EXPECT_EQ(result.proposed_accepts[1], 1u);
}

}  // namespace
}  // namespace lode
