// The requests whose answers the bit tests compare, and the yardstick: the same requests through
// the in-process engine (no daemon, no lanes, no processes). An answer counts as its token ids and
// the chained hash of the logits that picked them, so a difference in the last bit of one logit
// shows. Test processes only.
#pragma once

#include <string>
#include <vector>

#include "daemon/request.h"
#include "daemon/tokenizer.h"
#include "gpu_worker/local_engine.h"
#include "shared/model/model_source.h"

namespace lode {

// A model under test and how much is asked of it.
struct BitsModel {
  std::string name;         // "demo", "synth"
  std::string description;  // what ModelSource::Open takes
  std::string prompt;
  uint32_t answer_tokens;
  // True: the scalar table needs about a second per token, so it runs fewer combinations and one
  // token of each answer.
  bool slow_scalar;
};
// The demo model; a synthetic one at the flagship's full width, whose sums are long enough to show
// an order.
const BitsModel* FindBitsModel(const std::string& name);

// One answer to each request of BitsRequests.
struct BitsAnswer {
  std::vector<std::vector<int32_t>> tokens;  // [request]
  std::vector<uint64_t> logits_hash;         // [request]
  uint64_t Hash() const;                     // of all of it
};

// A greedy request, and one that draws with a seed through every filter and penalty.
std::vector<Request> BitsRequests(const BitsModel& model, const Tokenizer& tokenizer);

// Answers by `engine`, through its own experts or through `lanes`. `rows_per_window`: how the
// prompt is cut.
StatusOr<BitsAnswer> AnswerLocally(LocalEngine& engine, const std::vector<Request>& requests,
                                   uint32_t rows_per_window, ExpertLanes* lanes = nullptr);

}  // namespace lode
