// The state of one admitted request: everything from which the device's state can be rebuilt, and
// everything the answer's stream needs. The device holds a function of `tokens` and nothing else,
// so a lost device is rebuilt by running the tokens again under a new epoch
// (docs/design/window-protocol.md). Scheduler thread only; after a window only daemon/commit.cc
// writes.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "daemon/detokenizer.h"
#include "daemon/request.h"
#include "daemon/sequence_drafts.h"
#include "daemon/stop_matcher.h"
#include "shared/base/status.h"

namespace lode {

struct Sequence {
  // Fails when a stop string is not usable.
  static StatusOr<std::unique_ptr<Sequence>> Create(Request request,
                                                    std::shared_ptr<RequestStream> stream,
                                                    const Tokenizer* tokenizer, uint64_t now_ns);

  // The device's state is lost or void: run all tokens again. `epoch` has never been used before.
  void StartOver(uint64_t new_epoch) {
    epoch = new_epoch;
    rows_done = 0;
    last_accepted = 0;
    drafts.guesses.clear();
  }

  uint32_t prompt_size() const { return static_cast<uint32_t>(request.prompt.size()); }
  uint32_t answer_size() const { return static_cast<uint32_t>(tokens.size()) - prompt_size(); }
  bool scoring_only() const { return request.max_tokens == 0; }
  bool penalised() const {
    return request.sampling.repetition_penalty != 1.0f ||
           request.sampling.presence_penalty != 0.0f || request.sampling.frequency_penalty != 0.0f;
  }
  // All that is left is the next token of the answer: one row a window.
  bool decoding() const { return answer_size() > 0 && rows_done + 1 == tokens.size(); }
  uint64_t cells_max() const { return request.prompt.size() + request.max_tokens; }

  Request request;
  std::shared_ptr<RequestStream> stream;
  uint64_t submitted_ns = 0;

  // Given at admission, returned at the end.
  uint32_t slot = 0;
  bool closed = false;  // its client has the last event; slot and blocks go back at the border
  std::vector<uint32_t> kv_blocks;
  uint64_t order = 0;  // of admission: who came first
  uint64_t admitted_ns = 0;
  uint32_t area_generation =
      0;  // GPU worker whose window segment holds this sequence's area, 0 = none yet

  // The device's side.
  uint64_t epoch = 0;
  std::vector<int32_t> tokens;  // prompt, then the committed answer
  uint32_t rows_done =
      0;  // positions whose rows the device has run and the daemon has committed, in this epoch
  uint32_t last_accepted = 0;  // rows of this sequence's last committed window that counted
  uint64_t last_turn =
      0;  // number of its last share of a window; the planner serves the longest waiting first
  uint32_t workers_lost =
      0;  // GPU workers that ended while a window with rows of this sequence ran

  // The answer's side.
  StopMatcher stops;
  Detokenizer detokenizer;
  std::map<int32_t, uint32_t> answer_counts;  // filled only when penalties are on
  // prompt_logprobs: what has been seen of the prompt and not sent, and how many of its rows have
  // been seen in all.
  std::vector<TokenOut> prompt_out;
  std::vector<int32_t> prompt_argmax;
  uint32_t prompt_reported = 0;
  uint64_t logits_hash = 0;  // chain over the rows of the answer's tokens
  uint64_t first_token_ns = 0, last_token_ns = 0;
  RequestUsage usage;
  SequenceDrafts drafts;

 private:
  Sequence(StopMatcher matcher, Detokenizer text)
      : stops(std::move(matcher)), detokenizer(std::move(text)) {}
};

// hash' = XXH3-64(hash, row hash), both as 8 little-endian bytes; starts at 0. Of an answer: over
// RowResult::logits_hash of the rows that picked its tokens, in order.
uint64_t ChainLogitsHash(uint64_t hash, uint64_t row_hash);

}  // namespace lode
