// A whole GPU worker with its draft head, window by window, against an oracle made of the
// in-process engine's single steps: picks of draft rows (penalties count the drafts before them),
// which rows hold, the guesses behind the window and their probabilities, bit for bit. Prompts in
// chunks, rejected drafts, chains of every depth, min-p, drawn guesses, two sequences at once, a
// reduced vocabulary, a head of its own, a sequence that is not followed for a while. Compiled for
// the cpu device and, with LODE_TEST_DEVICE = "cuda", for the emulated card and for a real one.
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <string_view>

#include "gpu_worker/local_engine.h"
#include "gpu_worker/sampler.h"
#include "tests/drafts/head_files.h"
#include "tests/gpu_worker/gpu_worker_fixture.h"
#include "tests/support/gguf_writer.h"

namespace lode {
namespace {

#if !defined(LODE_TEST_DEVICE)
#define LODE_TEST_DEVICE "cpu"
#endif
const bool kCuda = std::string_view(LODE_TEST_DEVICE) == "cuda";

constexpr uint32_t kSlots = ServedGpuWorker::kSlots, kBlocks = ServedGpuWorker::kBlocks,
                   kContext = ServedGpuWorker::kContext;

// What one sequence does in one window.
struct Part {
  uint32_t slot;
  uint32_t prompt;        // rows of the prompt; 0: one decode row
  uint32_t right, wrong;  // drafts behind it
  uint32_t depth;         // guesses wanted
  float min_p = 0;
  bool coupled = false;
  bool follow = true;
};

struct Options {
  std::string mtp = {};
  bool full_width_norm = true;
  std::vector<int32_t> vocabulary = {};
};

class DraftWorker : public ::testing::Test {
 protected:
  void SetUp() override {
    if (kCuda && !ProbeCuda(0).ok()) GTEST_SKIP() << "no card: " << Message(ProbeCuda(0).status());
  }
  void Start(const Options& options) {
    gpu_.reset();  // before the workers that it stands on
    workers_ = std::make_unique<Workers>(DemoModel(), 1, false, 20'000, LODE_TEST_DEVICE);
    gpu_ = std::make_unique<ServedGpuWorker>(*workers_);
    vocab_ = workers_->config().vocab;
    LoadPlan plan = gpu_->Plan(LODE_TEST_DEVICE);
    plan.draft_head = true;
    plan.mtp = options.mtp;
    plan.mtp_full_width_norm = options.full_width_norm;
    if (!options.vocabulary.empty()) {
      plan.draft_vocab = folder_.File("vocabulary.txt");
      std::ofstream out(plan.draft_vocab);
      for (const int32_t id : options.vocabulary) out << id << "\n";
    }
    auto ready = gpu_->Start(plan);
    ASSERT_TRUE(ready.ok()) << ready.status();
    EXPECT_EQ(ready->facts.count("draft_bytes"), 1u);
    LocalEngineOptions oracle = {.threads = 2, .slots = kSlots, .context = kContext};
    oracle.drafts = true;
    oracle.mtp = options.mtp;
    oracle.mtp_full_width_norm = options.full_width_norm;
    oracle.draft_vocabulary = vocabulary_ = options.vocabulary;
    auto engine = LocalEngine::Create(DemoModel(), oracle);
    ASSERT_TRUE(engine.ok()) << engine.status();
    oracle_ = std::move(*engine);
    for (uint32_t b = 0; b < kBlocks; ++b) {
      for (uint32_t slot = 0; slot < kSlots; ++slot)
        segment()->sequences[slot].kv_blocks[b] = b * kSlots + slot;
    }
    for (uint32_t slot = 0; slot < kSlots; ++slot) {
      texts_[slot] = {};
      for (int32_t i = 0; i < 40; ++i)
        texts_[slot].tokens.push_back(70 + (i * 31 + static_cast<int32_t>(slot) * 7) % 900);
    }
    sampling_[0].top_p = sampling_[1].top_p = 1;
    sampling_[0].repetition_penalty = 1;
    sampling_[1].seed = 9;
    sampling_[1].temperature = 0.7f;
    sampling_[1].top_k = 40;
    sampling_[1].repetition_penalty = 1.4f;
    sampling_[1].presence_penalty = 0.3f;
    sampling_[1].frequency_penalty = 0.1f;
  }

  WindowSegment* segment() const { return gpu_->segment(); }

  // ---- the oracle
  // Picks of a window that runs alone, as the worker must pick them.
  std::vector<int32_t> Picks(uint32_t slot, uint32_t position, const std::vector<int32_t>& tokens,
                             uint32_t first_draft) {
    std::vector<LocalRow> rows;
    for (uint32_t i = 0; i < tokens.size(); ++i)
      rows.push_back({slot, position + i, tokens[i], true});
    oracle_->Commit(slot, position);
    EXPECT_TRUE(oracle_->Run(rows)->ok());
    std::vector<int32_t> picks;
    for (uint32_t i = 0; i < tokens.size(); ++i) {
      const std::span drafts(tokens.data() + std::min(first_draft, i + 1), tokens.data() + i + 1);
      picks.push_back(Pick(slot, oracle_->logits(i), position + i + 1, drafts));
    }
    return picks;
  }
  int32_t Pick(uint32_t slot, std::span<const float> logits, uint32_t position,
               std::span<const int32_t> drafts) {
    PickInput in;
    in.logits = logits;
    in.position = position;
    in.draft_tokens = drafts;
    in.sampling = &sampling_[slot];
    SamplerScratch scratch(vocab_);
    return PickToken(in, &scratch);
  }
  // The oracle's chain behind row `row` of its last pass, which stands at `position`.
  std::vector<DraftGuess> Chain(const Part& part, uint32_t row, uint32_t position,
                                std::vector<int32_t> tail) {
    std::vector<DraftGuess> guesses;
    while (guesses.size() < part.depth) {
      const std::span<const float> logits = oracle_->draft_logits(row);
      std::vector<float> full(vocab_, -INFINITY);
      for (size_t i = 0; i < logits.size(); ++i)
        full[vocabulary_.empty() ? i : static_cast<size_t>(vocabulary_[i])] = logits[i];
      const int32_t token =
          part.coupled ? Pick(part.slot, full, position + 2, tail) : ArgmaxLogit(full);
      const float p = canonical::Exp(Normalize(logits).LogProb(full[static_cast<size_t>(token)]));
      if (p < part.min_p) break;
      guesses.push_back({token, p});
      tail.push_back(token);
      ++position;
      const LocalDraftRow next = {part.slot, position, token, row};
      EXPECT_TRUE(oracle_->Draft(std::span(&next, 1), true)->ok());
      row = 0;
    }
    return guesses;
  }

  // ---- a window of both
  struct Text {
    std::vector<int32_t> tokens;  // the prompt, then what was picked
    uint32_t committed = 0, accepted = 0;
    uint64_t epoch = 1;
  };
  void Window(const std::vector<Part>& parts) {
    WindowPlan plan = {};
    plan.flags = kHashLogits;
    plan.tunables = StartTunables();
    std::vector<std::vector<int32_t>> picks(parts.size());
    std::vector<uint32_t> first(parts.size()), held(parts.size());
    for (uint32_t s = 0; s < parts.size(); ++s) {
      const Part& part = parts[s];
      Text& text = texts_[part.slot];
      const uint32_t known = std::max(part.prompt, 1u);
      std::vector<int32_t> tokens(text.tokens.begin() + text.committed,
                                  text.tokens.begin() + text.committed + known);
      for (uint32_t i = 0; i < part.right; ++i)
        tokens.push_back(Picks(part.slot, text.committed, tokens, known).back());
      for (uint32_t i = 0; i < part.wrong; ++i)
        tokens.push_back((Picks(part.slot, text.committed, tokens, known).back() + 3) % 800);
      picks[s] = Picks(part.slot, text.committed, tokens, known);
      first[s] = plan.n_rows;
      held[s] = known + part.right;
      SequencePlan& q = plan.seqs[plan.n_seqs++];
      q = {.epoch = text.epoch,
           .slot = part.slot,
           .committed = text.committed,
           .accepted = text.accepted,
           .block_count = kBlocks,
           .sampling = sampling_[part.slot],
           .draft_max = static_cast<uint8_t>(part.depth),
           .draft_flags = static_cast<uint8_t>((part.follow ? kDraftFollow : 0) |
                                               (part.coupled ? kDraftCoupled : 0)),
           .reserved = 0,
           .draft_min_p = part.min_p};
      for (uint32_t i = 0; i < tokens.size(); ++i) {
        RowPlan& row = plan.rows[plan.n_rows++];
        row.seq_index = s;
        row.position = text.committed + i;
        row.token = tokens[i];
        row.target = -1;
        row.mask_offset = kNoMask;
        row.needs_logits = 1;
        row.kind =
            i >= known ? RowKind::kDraft : (part.prompt > 0 ? RowKind::kPrompt : RowKind::kDecode);
        // The end of the prompt, and every row behind it, picks.
        const uint32_t behind = text.committed + i + 1;
        row.pick = i + 1 >= known && behind >= text.tokens.size() ? 1 : 0;
        row.next_token = row.pick ? -1 : text.tokens[behind];
      }
    }
    ASSERT_LE(plan.n_rows, kWindowRowsMax);
    auto result = std::make_unique<WindowResult>();
    ASSERT_NO_FATAL_FAILURE(gpu_->Run(&plan, result.get()));
    ASSERT_EQ(result->status, WindowStatus::kOk) << "detail " << result->error.detail;
    Compare(plan, parts, first, picks, held, *result);
    for (uint32_t s = 0; s < parts.size(); ++s) {
      Text& text = texts_[parts[s].slot];
      for (uint32_t i = 0; i < held[s]; ++i) {
        if (plan.rows[first[s] + i].pick) text.tokens.push_back(picks[s][i]);
      }
      text.committed += held[s];
      text.accepted = held[s];
    }
  }

  void Compare(const WindowPlan& plan, const std::vector<Part>& parts,
               const std::vector<uint32_t>& first, const std::vector<std::vector<int32_t>>& picks,
               const std::vector<uint32_t>& held, const WindowResult& result) {
    // One window of the oracle with all rows: its residual is what the head starts from.
    std::vector<LocalRow> rows;
    for (uint32_t r = 0; r < plan.n_rows; ++r) {
      const RowPlan& row = plan.rows[r];
      const uint32_t slot = plan.seqs[row.seq_index].slot;
      oracle_->Commit(slot, plan.seqs[row.seq_index].committed);
      rows.push_back({slot, row.position, row.token, true});
    }
    ASSERT_TRUE(oracle_->Run(rows)->ok());
    std::vector<LocalDraftRow> follow;
    std::map<uint32_t, uint32_t> last;  // [part] row of the pass
    for (uint32_t s = 0; s < parts.size(); ++s) {
      SCOPED_TRACE(fmt::format("window {}, slot {}, at {}", gpu_->windows(), parts[s].slot,
                               plan.seqs[s].committed));
      for (uint32_t i = 0; i < picks[s].size(); ++i) {
        const RowResult& row = result.rows[first[s] + i];
        EXPECT_EQ(row.logits_hash, HashLogits(oracle_->logits(first[s] + i)));
        EXPECT_EQ(row.token, plan.rows[first[s] + i].pick ? picks[s][i] : -1) << "row " << i;
      }
      EXPECT_EQ(result.proposed_accepts[s], held[s]);
      if (!parts[s].follow || spoilt_) missed_.insert(parts[s].slot);
      if (missed_.count(parts[s].slot) != 0) continue;
      for (uint32_t i = 0; i < held[s]; ++i) {
        const RowPlan& row = plan.rows[first[s] + i];
        const int32_t next = row.next_token >= 0 ? row.next_token : picks[s][i];
        follow.push_back({parts[s].slot, row.position, next, first[s] + i});
      }
      last[s] = static_cast<uint32_t>(follow.size()) - 1;
    }
    std::vector<std::vector<DraftGuess>> want(parts.size());
    for (const auto& [s, row] : last) {
      if (!plan.rows[first[s] + held[s] - 1].pick) continue;
      std::vector<int32_t> tail;
      for (uint32_t i = 0; i < held[s]; ++i) {
        if (plan.rows[first[s] + i].kind == RowKind::kDraft)
          tail.push_back(plan.rows[first[s] + i].token);
      }
      tail.push_back(picks[s][held[s] - 1]);
      // Chains of the oracle run one after the other, each behind a fresh pass of all rows.
      ASSERT_TRUE(oracle_->Draft(follow, false)->ok());
      want[s] = Chain(parts[s], row, follow[row].position, tail);
    }
    if (!follow.empty()) {
      ASSERT_TRUE(oracle_->Draft(follow, false)->ok());
    }
    last_p_.assign(result.draft_p[0], result.draft_p[0] + result.n_drafts[0]);
    for (uint32_t s = 0; s < parts.size(); ++s) {
      SCOPED_TRACE(fmt::format("window {}, slot {}, at {}, depth {}, min-p {}, coupled {}",
                               gpu_->windows(), parts[s].slot, plan.seqs[s].committed,
                               parts[s].depth, parts[s].min_p, parts[s].coupled));
      EXPECT_EQ(result.n_drafts[s], want[s].size());
      for (uint32_t g = 0; g < std::min<size_t>(result.n_drafts[s], want[s].size()); ++g) {
        EXPECT_EQ(result.drafts[s][g], want[s][g].token) << "guess " << g;
        EXPECT_EQ(std::memcmp(&result.draft_p[s][g], &want[s][g].p, sizeof(float)), 0)
            << "guess " << g << ": " << result.draft_p[s][g] << " for " << want[s][g].p;
        ++guesses_;
      }
      cut_ += want[s].size() < parts[s].depth && plan.rows[first[s] + held[s] - 1].pick;
    }
  }

  static Tunables StartTunables() {
    Tunables t = {};
    t.epoch = 1;
    t.vram_budget_bytes = ~uint64_t{0};
    t.pull_share = 0.5f;
    t.device_isa = BestIsa();
    for (uint32_t& isa : t.cpu_isa) isa = BestIsa();
    return t;
  }
  void Restart(uint32_t slot, uint32_t prompt = 12) {
    Text& text = texts_[slot];
    ++text.epoch;
    text.committed = text.accepted = 0;
    text.tokens.resize(prompt);
    oracle_->Restart(slot);
    missed_.erase(slot);
  }

  const test::TempFolder folder_;
  std::unique_ptr<Workers> workers_;
  std::unique_ptr<ServedGpuWorker> gpu_;
  std::unique_ptr<LocalEngine> oracle_;
  std::vector<int32_t> vocabulary_;
  uint32_t vocab_ = 0;
  SamplingPlan sampling_[kSlots] = {};
  Text texts_[kSlots];
  std::vector<float> last_p_;  // of the last window's first sequence
  bool spoilt_ = false;        // the head meets values that are not finite
  std::set<uint32_t> missed_;  // slots whose head has a hole
  uint64_t guesses_ = 0, cut_ = 0;
};

TEST_F(DraftWorker, PromptThenEveryDepth) {
  Start({});
  if (HasFatalFailure()) return;
  texts_[0].tokens.resize(13);
  Window({{.slot = 0, .prompt = 8, .right = 0, .wrong = 0, .depth = 3}});
  Window({{.slot = 0, .prompt = 5, .right = 0, .wrong = 0, .depth = 7}});
  // Right and wrong drafts in every number, chains of every depth behind them.
  for (uint32_t depth = 1; depth <= kDraftsMax; ++depth) {
    const uint32_t right = depth % 4, wrong = (depth + 1) % 3;
    Window({{.slot = 0, .prompt = 0, .right = right, .wrong = wrong, .depth = depth}});
    if (HasFailure()) return;
  }
  Window({{.slot = 0, .prompt = 0, .right = 0, .wrong = 0, .depth = 0}});
  Window({{.slot = 0, .prompt = 0, .right = 1, .wrong = 0, .depth = 2}});
  EXPECT_GE(guesses_, 7u + 28u + 2u);
}

TEST_F(DraftWorker, TwoSequencesWithEndsOfTheirOwn) {
  Start({});
  if (HasFatalFailure()) return;
  texts_[0].tokens.resize(6);
  texts_[1].tokens.resize(9);
  Window({{.slot = 1, .prompt = 5, .right = 0, .wrong = 0, .depth = 2},
          {.slot = 0, .prompt = 3, .right = 0, .wrong = 0, .depth = 2}});
  Window({{.slot = 0, .prompt = 3, .right = 0, .wrong = 0, .depth = 2},
          {.slot = 1, .prompt = 4, .right = 0, .wrong = 0, .depth = 5}});
  // Which chain is the longer one changes; min-p ends some of them early.
  const float cuts[] = {0, 0.3f, 0.6f, 1};
  for (uint32_t i = 0; i < 6; ++i) {
    Window({{.slot = 0,
             .prompt = 0,
             .right = i % 2,
             .wrong = i % 3,
             .depth = i + 1,
             .min_p = cuts[i % 4]},
            {.slot = 1,
             .prompt = 0,
             .right = i % 3,
             .wrong = 1,
             .depth = 7 - i,
             .min_p = cuts[(i + 1) % 4]}});
    if (HasFailure()) return;
  }
  EXPECT_GT(guesses_, 10u);
  EXPECT_GT(cut_, 3u);
}

// A chain goes on with a guess of exactly min_p, and ends before one that is the least bit below.
TEST_F(DraftWorker, MinPIsInclusive) {
  Start({});
  if (HasFatalFailure()) return;
  texts_[0].tokens.resize(6);
  Window({{.slot = 0, .prompt = 6, .right = 0, .wrong = 0, .depth = 3}});
  ASSERT_EQ(last_p_.size(), 3u);
  const float least = *std::min_element(last_p_.begin(), last_p_.end());
  const size_t at =
      static_cast<size_t>(std::find(last_p_.begin(), last_p_.end(), least) - last_p_.begin());
  for (const bool above : {false, true}) {
    Restart(0, 6);
    const float cut = above ? std::nextafter(least, 1.0f) : least;
    Window({{.slot = 0, .prompt = 6, .right = 0, .wrong = 0, .depth = 3, .min_p = cut}});
    EXPECT_EQ(last_p_.size(), above ? at : 3u);
  }
}

TEST_F(DraftWorker, DrawnGuessesCountPenalties) {
  Start({});
  if (HasFatalFailure()) return;
  // A reward for what was just said: one token counted or not makes another guess.
  sampling_[1].repetition_penalty = 1;
  sampling_[1].presence_penalty = -3;
  sampling_[1].frequency_penalty = -2;
  texts_[0].tokens.resize(4);
  texts_[1].tokens.resize(4);
  Window({{.slot = 1, .prompt = 4, .right = 0, .wrong = 0, .depth = 4, .coupled = true},
          {.slot = 0, .prompt = 4, .right = 0, .wrong = 0, .depth = 3}});
  for (uint32_t i = 0; i < 4; ++i) {
    Window({{.slot = 1,
             .prompt = 0,
             .right = 1 + i % 2,
             .wrong = i % 2,
             .depth = 3 + i,
             .min_p = i == 3 ? 0.2f : 0,
             .coupled = true},
            {.slot = 0, .prompt = 0, .right = i % 3, .wrong = 1, .depth = 2}});
    if (HasFailure()) return;
  }
  EXPECT_GT(guesses_, 12u);
}

TEST_F(DraftWorker, AHoleEndsGuessingUntilANewSequence) {
  Start({});
  if (HasFatalFailure()) return;
  texts_[0].tokens.resize(4);
  Window({{.slot = 0, .prompt = 4, .right = 0, .wrong = 0, .depth = 2}});
  Window({{.slot = 0, .prompt = 0, .right = 1, .wrong = 0, .depth = 2, .follow = false}});
  Window({{.slot = 0, .prompt = 0, .right = 0, .wrong = 0, .depth = 2}});
  Restart(0);
  Window({{.slot = 0, .prompt = 8, .right = 0, .wrong = 0, .depth = 2}});
  Window({{.slot = 0, .prompt = 4, .right = 0, .wrong = 0, .depth = 3}});
  EXPECT_EQ(guesses_, 2u + 3u);
}

// A fault of the head costs guesses, never a window: with a weight that is infinite there are none,
// and picks and logits are what they were.
TEST_F(DraftWorker, AHeadThatIsNotFiniteGuessesNothing) {
  testing::WriteDraftHead({}, folder_.File("head.gguf"));
  const auto file = GgufFile::Open(folder_.File("head.gguf"));
  ASSERT_TRUE(file.ok()) << file.status();
  test::GgufWriter writer = test::GgufWriter::From(**file);
  for (test::WrittenTensor& t : writer.tensors()) t.offset = -1;
  const float infinite = INFINITY;
  std::memcpy(writer.Find("blk.8.nextn.enorm.weight")->data.data(), &infinite, sizeof(infinite));
  writer.Write(folder_.File("spoilt.gguf"));
  Options options;
  options.mtp = folder_.File("spoilt.gguf");
  Start(options);
  if (HasFatalFailure()) return;
  spoilt_ = true;
  texts_[0].tokens.resize(4);
  texts_[1].tokens.resize(4);
  Window({{.slot = 0, .prompt = 4, .right = 0, .wrong = 0, .depth = 3},
          {.slot = 1, .prompt = 4, .right = 0, .wrong = 0, .depth = 2}});
  Window({{.slot = 0, .prompt = 0, .right = 2, .wrong = 1, .depth = 5}});
  Restart(1, 4);
  Window({{.slot = 1, .prompt = 4, .right = 0, .wrong = 0, .depth = 2, .coupled = true}});
  EXPECT_EQ(guesses_, 0u);
}

TEST_F(DraftWorker, EveryFormOfAHead) {
  testing::WriteDraftHead({.own_embedding = false, .q8_inject = true}, folder_.File("32.gguf"));
  testing::WriteDraftHead({.own_embedding = true, .q8_inject = false}, folder_.File("34.gguf"));
  std::vector<int32_t> some;
  for (int32_t id = 2; id < 8192; id += 3) some.push_back(id);
  const Options forms[] = {{.mtp = folder_.File("32.gguf")},
                           {.mtp = folder_.File("34.gguf")},
                           {.full_width_norm = false},
                           {.vocabulary = some}};
  for (const Options& form : forms) {
    SCOPED_TRACE(form.mtp + (form.full_width_norm ? "" : " norm per stream") +
                 (form.vocabulary.empty() ? "" : " reduced vocabulary"));
    Start(form);
    if (HasFatalFailure()) return;
    texts_[0].tokens.resize(4);
    texts_[1].tokens.resize(4);
    missed_.clear();
    Window({{.slot = 0, .prompt = 4, .right = 0, .wrong = 0, .depth = 3},
            {.slot = 1, .prompt = 4, .right = 0, .wrong = 0, .depth = 2}});
    Window({{.slot = 1, .prompt = 0, .right = 1, .wrong = 1, .depth = 2, .coupled = true},
            {.slot = 0, .prompt = 0, .right = 1, .wrong = 1, .depth = 4}});
    gpu_.reset();
    if (HasFailure()) return;
  }
  EXPECT_EQ(guesses_, 4u * 11u);
}

}  // namespace
}  // namespace lode
