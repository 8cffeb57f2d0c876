// See answers.h.
#include "tests/bits/answers.h"

#include <xxhash.h>

#include <algorithm>
#include <map>

#include "daemon/sequence.h"
#include "gpu_worker/sampler.h"
#include "tests/support/places.h"

namespace lode {
namespace {

const BitsModel kModels[] = {
    {"demo", TestSources() + "/tests/models/demo-q4-with-mtp.gguf",
     "def read_lines(path):\n    \"\"\"Return the lines of a text file.\"\"\"\n    with", 12,
     false},
    {"synth", "synth:layers=4,experts=32,pack=q2_0,vocab=2048", "Lode", 3, true},
    {"synth_q4", "synth:layers=4,experts=32,pack=q4,vocab=2048", "Lode", 3, true},
};

int32_t Pick(std::span<const float> logits, const Request& request,
             const std::map<int32_t, uint32_t>& counts, uint32_t position,
             SamplerScratch* scratch) {
  std::vector<TokenCount> list;
  for (const auto& [token, count] : counts) list.push_back({token, count});
  PickInput in;
  in.logits = logits;
  in.counts = list;
  in.position = position;
  in.sampling = &request.sampling;
  return PickToken(in, scratch);
}

}  // namespace

const BitsModel* FindBitsModel(const std::string& name) {
  for (const BitsModel& model : kModels) {
    if (model.name == name) return &model;
  }
  return nullptr;
}

uint64_t BitsAnswer::Hash() const {
  uint64_t hash = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    hash = ChainLogitsHash(hash, XXH3_64bits(tokens[i].data(), tokens[i].size() * sizeof(int32_t)));
    hash = ChainLogitsHash(hash, logits_hash[i]);
  }
  return hash;
}

std::vector<Request> BitsRequests(const BitsModel& model, const Tokenizer& tokenizer) {
  Request greedy;
  greedy.id = "greedy";
  greedy.prompt = tokenizer.Encode(model.prompt, false).value();
  greedy.sampling.top_p = 1;
  greedy.sampling.repetition_penalty = 1;
  greedy.max_tokens = model.answer_tokens;
  greedy.hash_logits = true;
  Request drawn = greedy;
  drawn.id = "drawn";
  drawn.sampling = {.seed = 20240229,
                    .temperature = 0.9f,
                    .top_p = 0.97f,
                    .min_p = 0.001f,
                    .top_k = 200,
                    .repetition_penalty = 1.1f,
                    .presence_penalty = 0.1f,
                    .frequency_penalty = 0.2f,
                    .stream = 0};
  return {greedy, drawn};
}

StatusOr<BitsAnswer> AnswerLocally(LocalEngine& engine, const std::vector<Request>& requests,
                                   uint32_t rows_per_window, ExpertLanes* lanes) {
  BitsAnswer answer;
  SamplerScratch scratch(engine.config().vocab);
  for (const Request& request : requests) {
    engine.Restart(0);
    std::vector<int32_t> tokens = request.prompt;
    std::map<int32_t, uint32_t> counts;
    uint64_t hash = 0;
    uint32_t done = 0;
    const size_t end = request.prompt.size() + request.max_tokens;
    while (tokens.size() < end) {
      std::vector<LocalRow> rows;
      while (rows.size() < rows_per_window && done + rows.size() < tokens.size()) {
        const uint32_t at = done + static_cast<uint32_t>(rows.size());
        rows.push_back({0, at, tokens[at], at + 1 == tokens.size()});
      }
      engine.Commit(0, done);
      LODE_ASSIGN_OR_RETURN(const WindowOutcome outcome, engine.Run(rows, lanes));
      if (!outcome.ok()) {
        return Internal("a window of the in-process engine ended with status {} in layer {}",
                        static_cast<uint32_t>(outcome.status), outcome.error.layer);
      }
      done += static_cast<uint32_t>(rows.size());
      if (done < tokens.size()) continue;
      const auto logits = engine.logits(static_cast<uint32_t>(rows.size()) - 1);
      hash = ChainLogitsHash(hash, HashLogits(logits));
      tokens.push_back(Pick(logits, request, counts, done, &scratch));
      ++counts[tokens.back()];
    }
    answer.tokens.emplace_back(tokens.begin() + static_cast<ptrdiff_t>(request.prompt.size()),
                               tokens.end());
    answer.logits_hash.push_back(hash);
  }
  return answer;
}

}  // namespace lode
