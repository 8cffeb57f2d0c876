// The promise of the engine, tested whole: the same requests give the same tokens and the same
// logits, bit for bit, whatever the number of CPU workers, the expert slots, the split, the
// threads, the instruction sets, the company, the cut of the prompt and the tier's policy. The real
// engine with real worker processes; what may change at a window border changes there, so caches
// and tables of one combination meet the settings of the next.
//
//   bit_matrix_test MODEL       demo, synth, synth_q4
//   LODE_BITS=full | NUMBER     the full product, or at least so many combinations (default 120)
//
// Where the scalar table is too slow for all of it (flagship width), it runs a choice that covers
// every pair of the other factors' values, with one token of each answer; "full" means all of the
// rest.
//
// One line per combination; the last one says `bits: N combinations, H hash`. Exit status 0 only
// when H is 1 and every combination really ran as it says. How combinations are chosen:
// docs/design/testing.md.
#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <map>

#include "kernels/kernel_table.h"
#include "shared/base/log.h"
#include "shared/shm/wait_word.h"
#include "tests/bits/combinations.h"
#include "tests/bits/engine_stack.h"

namespace lode {
namespace {

constexpr size_t kCombinations = 120;
constexpr uint32_t kThreads = 2;  // in every pool; combinations use one or two
constexpr uint32_t kNeighbours = 3;
constexpr uint32_t kNeighbourTokens = 600;  // longer than any answer under test lasts

// The factors, in the order of a Combination; CPU workers first: they cost a new set of processes.
enum Factor { kWorkers, kSlots, kShare, kActive, kIsa, kCompany, kPromptRows, kTier, kFactors };
constexpr uint32_t kWorkerCounts[] = {1, 2, 3};
constexpr double kSlotParts[] = {0, 0.3, 1};
constexpr float kShares[] = {0, 0.55f, 1};
constexpr uint32_t kActiveThreads[] = {1, 2};
constexpr uint32_t kRows[] = {1, 3, 8};
constexpr TierPolicy kTiers[] = {TierPolicy::kStatic, TierPolicy::kDecayedLfu};

// Indices of the kernel tables that this machine runs; the others are named.
std::vector<uint32_t> Tables() {
  const IsaChoice* choices = nullptr;
  const size_t n = IsaChoices(&choices);
  std::vector<uint32_t> tables;
  for (uint32_t i = 0; i < n; ++i) {
    if (choices[i].supported)
      tables.push_back(i);
    else
      std::printf("not run: %s (%s)\n", choices[i].table->name, choices[i].why_not);
  }
  if (tables.size() < 2) std::printf("not run: mixed instruction sets (there is only one)\n");
  return tables;
}

const char* TableName(uint32_t index) {
  const IsaChoice* choices = nullptr;
  IsaChoices(&choices);
  return choices[index].table->name;
}

class Matrix {
 public:
  Matrix(const BitsModel& model, const ModelSource& source, const Tokenizer& tokenizer)
      : model_(model),
        source_(source),
        tokenizer_(tokenizer),
        tables_(Tables()),
        requests_(BitsRequests(model, tokenizer)),
        first_tokens_(requests_) {
    static constexpr const char* kTexts[kNeighbours] = {"import os\n\nclass", "#",
                                                        "The answer to the question is"};
    for (uint32_t i = 0; i < kNeighbours; ++i) {
      Request request = requests_[1];
      request.id = fmt::format("neighbour {}", i);
      request.prompt = tokenizer.Encode(kTexts[i], false).value();
      request.sampling.seed = i;
      request.max_tokens = kNeighbourTokens;
      if (model.slow_scalar) request.prompt.resize(1);
      neighbours_.push_back(std::move(request));
    }
    for (Request& request : first_tokens_) request.max_tokens = 1;
  }

  Status Run() {
    LODE_ASSIGN_OR_RETURN(slot_bytes_, ExpertSlotBytesTotal(source_));
    LODE_RETURN_IF_ERROR(RunLocally());
    std::vector<Combination> chosen = Choose();
    for (uint32_t w = 0; w < std::size(kWorkerCounts); ++w) {
      LODE_ASSIGN_OR_RETURN(const auto stack, EngineStack::Start(source_, tokenizer_,
                                                                 {.cpu_workers = kWorkerCounts[w],
                                                                  .threads = kThreads}));
      for (const Combination& c : chosen) {
        if (c[kWorkers] == w) LODE_RETURN_IF_ERROR(RunOne(*stack, kWorkerCounts[w], c));
      }
    }
    return OkStatus();
  }

  // The last line; true when all is well.
  bool Report() const {
    if (wrong_splits_ > 0) std::printf("%zu combinations did not run as they say\n", wrong_splits_);
    std::printf("bits: %zu combinations, %zu hash\n", ran_, answers_.size());
    return answers_.size() == 1 && wrong_splits_ == 0 && ran_ > 1;
  }

 private:
  std::vector<Combination> Choose() const {
    std::vector<uint32_t> values(kFactors);
    values[kWorkers] = std::size(kWorkerCounts);
    values[kSlots] = std::size(kSlotParts);
    values[kShare] = std::size(kShares);
    values[kActive] = std::size(kActiveThreads);
    values[kCompany] = 2;
    values[kPromptRows] = std::size(kRows);
    values[kTier] = std::size(kTiers);
    const char* wish = std::getenv("LODE_BITS");
    const bool full = wish != nullptr && std::string(wish) == "full";
    const size_t n = wish != nullptr ? std::strtoul(wish, nullptr, 10) : kCombinations;
    // Values of kIsa: the tables in their order, then the mixture. Table 0 is scalar.
    const auto all = static_cast<uint32_t>(tables_.size() + (tables_.size() > 1 ? 1 : 0));
    const uint32_t apart = model_.slow_scalar ? 1 : 0;
    std::vector<Combination> chosen;
    values[kIsa] = all - apart;
    if (values[kIsa] > 0) chosen = full ? FullProduct(values) : ChooseCombinations(values, n);
    for (Combination& c : chosen) c[kIsa] += apart;
    if (apart > 0) {
      constexpr uint32_t kPairs = 2;
      values[kIsa] = 1;
      for (Combination& c : ChooseCombinations(values, 0, kPairs)) chosen.push_back(c);
    }
    return chosen;
  }

  void Count(const std::string& text, const BitsAnswer& answer, const std::string& split,
             uint64_t begin_ns) {
    ++ran_;
    const auto shortened = full_hash_of_.find(answer.Hash());
    const uint64_t hash = shortened == full_hash_of_.end() ? answer.Hash() : shortened->second;
    const bool first = answers_.empty(), known = answers_.count(hash) > 0;
    answers_.emplace(hash, answer);
    std::printf("%s %3zu %s%s hash=%016llx %.2fs%s\n", model_.name.c_str(), ran_, text.c_str(),
                split.c_str(), static_cast<unsigned long long>(hash),
                static_cast<double>(NowNs() - begin_ns) / 1e9, first || known ? "" : " DIFFERS");
    if (!known) {
      for (const auto& tokens : answer.tokens) {
        std::printf("    tokens");
        for (const int32_t token : tokens) std::printf(" %d", token);
        std::printf("\n");
      }
    }
    std::fflush(stdout);
  }

  // The in-process engine: experts computed in place, the first yardstick; also of the answers'
  // first tokens.
  Status RunLocally() {
    constexpr uint32_t kLocalRows = 5;
    LODE_ASSIGN_OR_RETURN(const auto engine, LocalEngine::Create(model_.description, {}));
    const uint64_t begin = NowNs();
    LODE_ASSIGN_OR_RETURN(const BitsAnswer answer, AnswerLocally(*engine, requests_, kLocalRows));
    Count(fmt::format("in-process engine, prompt of {} tokens, {} answer tokens",
                      requests_[0].prompt.size(), model_.answer_tokens),
          answer, "", begin);
    LODE_ASSIGN_OR_RETURN(const BitsAnswer start,
                          AnswerLocally(*engine, first_tokens_, kLocalRows));
    full_hash_of_[start.Hash()] = answer.Hash();
    return OkStatus();
  }

  // Mixed: the device takes a table, each CPU worker the next one; who starts with which moves
  // along.
  Status RunOne(EngineStack& stack, uint32_t workers, const Combination& c) {
    const auto tables = static_cast<uint32_t>(tables_.size());
    const bool mixed = c[kIsa] == tables;
    TunablesChange change;
    const bool slow = model_.slow_scalar && c[kIsa] == 0;
    const uint32_t lowest = model_.slow_scalar ? 1 : 0;  // for the device of a mixture
    const uint32_t device =
        mixed ? lowest + static_cast<uint32_t>(ran_) % (tables - lowest) : c[kIsa];
    change.device_isa = tables_[device];
    std::string isa = TableName(*change.device_isa);
    for (uint32_t w = 0; w < workers; ++w) {
      const uint32_t table = tables_[mixed ? (device + 1 + w) % tables : device];
      change.cpu_isa.emplace_back(w, table);
      if (mixed) isa += fmt::format("{}{}", w == 0 ? "|" : ",", TableName(table));
    }
    const double slots = kSlotParts[c[kSlots]];
    change.vram_budget_bytes = static_cast<uint64_t>(slots * static_cast<double>(slot_bytes_));
    change.pull_share = kShares[c[kShare]];
    change.split_policy = SplitPolicy::kFixed;
    change.tier_policy = kTiers[c[kTier]];
    change.cpu_threads = change.device_threads = kActiveThreads[c[kActive]];
    change.prompt_rows = kRows[c[kPromptRows]];
    LODE_RETURN_IF_ERROR(stack.scheduler().SetTunables(change));

    const uint64_t begin = NowNs();
    uint64_t lookups[kLanes] = {};
    std::vector<Request> company;
    if (c[kCompany]) company = neighbours_;
    if (c[kCompany] && slow) company.resize(1);  // every neighbour's row costs a second
    LODE_ASSIGN_OR_RETURN(const BitsAnswer answer,
                          stack.Answer(slow ? first_tokens_ : requests_, company, lookups));
    Count(
        fmt::format("workers={} slots={:.0f}% share={} threads={} isa={} others={} rows={} tier={}",
                    workers, slots * 100, *change.pull_share, *change.cpu_threads, isa,
                    company.size(), *change.prompt_rows, c[kTier] == 0 ? "static" : "decayed_lfu") +
            (slow ? " (first tokens)" : ""),
        answer, fmt::format(" hit/pull/cpu={}/{}/{}", lookups[0], lookups[1], lookups[2]), begin);
    CheckSplit(slots, *change.pull_share, lookups);
    return OkStatus();
  }

  // A combination that silently ran as another one would prove nothing.
  void CheckSplit(double slots, float share, const uint64_t* lookups) {
    const uint64_t hits = lookups[0], pulls = lookups[1], cpu = lookups[2];
    bool ok = (hits > 0) == (slots > 0);
    if (share == 0) ok &= pulls == 0;
    if (share == 1) ok &= cpu == 0;
    if (slots < 1) ok &= (pulls > 0) == (share > 0) && (cpu > 0) == (share < 1);
    if (ok) return;
    ++wrong_splits_;
    std::printf("    the lookups do not fit slots and share\n");
  }

  const BitsModel& model_;
  const ModelSource& source_;
  const Tokenizer& tokenizer_;
  const std::vector<uint32_t> tables_;
  const std::vector<Request> requests_;
  std::vector<Request> first_tokens_;  // requests_, with one token of each answer
  std::vector<Request> neighbours_;
  std::map<uint64_t, uint64_t> full_hash_of_;  // the right hash of the first tokens -> of the whole
  uint64_t slot_bytes_ = 0;
  size_t ran_ = 0, wrong_splits_ = 0;
  std::map<uint64_t, BitsAnswer> answers_;
};

Status Main(const std::string& name, bool* all_well) {
  const BitsModel* model = FindBitsModel(name);
  if (model == nullptr) return InvalidArgument("there is no model {} in this test", name);
  LODE_ASSIGN_OR_RETURN(const auto source, ModelSource::Open(model->description));
  LODE_ASSIGN_OR_RETURN(const TokenizerData data, source->tokenizer());
  LODE_ASSIGN_OR_RETURN(const auto tokenizer, Tokenizer::Create(data));
  Matrix matrix(*model, *source, *tokenizer);
  const Status status = matrix.Run();
  *all_well = matrix.Report();
  return status;
}

}  // namespace
}  // namespace lode

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: bit_matrix_test demo|synth|synth_q4\n");
    return 2;
  }
  signal(SIGPIPE, SIG_IGN);
  spdlog::set_level(spdlog::level::err);
  bool all_well = false;
  const lode::Status status = lode::Main(argv[1], &all_well);
  if (!status.ok()) std::printf("failed: %s\n", lode::Message(status).c_str());
  return status.ok() && all_well ? 0 : 1;
}
