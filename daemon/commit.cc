// See daemon/commit.h.
#include "daemon/commit.h"

#include <algorithm>
#include <iterator>

#include "shared/base/check.h"

namespace lode {
namespace {

std::vector<TopLogprob> TopOf(const RowResult& row, uint32_t wanted) {
  const uint32_t n = std::min({row.n_top, wanted, kLogprobsMax});
  return {row.top, row.top + n};
}

FinishEvent MakeFinish(Sequence* sequence, FinishReason reason, Status error, uint64_t now_ns) {
  FinishEvent finish;
  finish.reason = reason;
  finish.error = std::move(error);
  RequestUsage& usage = sequence->usage;
  if (sequence->admitted_ns == 0) {  // never left the queue
    usage.queue_ns = now_ns - sequence->submitted_ns;
  } else {
    usage.queue_ns = sequence->admitted_ns - sequence->submitted_ns;
    const uint64_t first = sequence->first_token_ns ? sequence->first_token_ns : now_ns;
    usage.prompt_ns = first - sequence->admitted_ns;
    usage.decode_ns = sequence->first_token_ns ? sequence->last_token_ns - first : 0;
  }
  finish.usage = usage;
  finish.seed = sequence->request.sampling.seed;
  finish.logits_hash = sequence->logits_hash;
  return finish;
}

// Text that was held back and is text after all, since the stream ends without a stop string.
void ReleaseHeldText(Sequence* sequence, StreamEvent* event) {
  StopMatcher::Piece piece = sequence->stops.Push(sequence->detokenizer.Flush());
  event->text += piece.text;
  if (piece.matched < 0) event->text += sequence->stops.Flush();
}

void Finish(Sequence* sequence, FinishReason reason, Status error, uint64_t now_ns,
            Committed* out) {
  if (reason != FinishReason::kStop || sequence->stops.matched() < 0)
    ReleaseHeldText(sequence, &out->event);
  out->event.finish = MakeFinish(sequence, reason, std::move(error), now_ns);
  if (sequence->stops.matched() >= 0)
    out->event.finish->stop_string = sequence->stops.stops()[sequence->stops.matched()];
  out->has_event = true;
}

// One more token of the answer: counters, text, and whether it is the last.
void AppendToken(const RowResult& row, uint64_t now_ns, Sequence* sequence, Committed* out) {
  const Request& request = sequence->request;
  sequence->tokens.push_back(row.token);
  if (sequence->penalised()) ++sequence->answer_counts[row.token];
  if (request.hash_logits)
    sequence->logits_hash = ChainLogitsHash(sequence->logits_hash, row.logits_hash);
  if (sequence->first_token_ns == 0) sequence->first_token_ns = now_ns;
  sequence->last_token_ns = now_ns;
  ++sequence->usage.completion_tokens;
  // Here, since the last window's Finish takes the usage as it stands.
  if (out->answer_tokens++ == 0) ++sequence->usage.decode_windows;
  TokenOut token{row.token, row.logprob, {}};
  if (request.want_logprobs) token.top = TopOf(row, request.top_logprobs);
  out->event.tokens.push_back(std::move(token));
  out->has_event = true;

  const auto& stop_tokens = request.stop_tokens;
  if (std::find(stop_tokens.begin(), stop_tokens.end(), row.token) != stop_tokens.end()) {
    return Finish(sequence, FinishReason::kStop, OkStatus(), now_ns,
                  out);  // the end token is no text
  }
  StopMatcher::Piece piece = sequence->stops.Push(sequence->detokenizer.Push(row.token));
  out->event.text += piece.text;
  if (piece.matched >= 0) return Finish(sequence, FinishReason::kStop, OkStatus(), now_ns, out);
  if (sequence->answer_size() >= request.max_tokens)
    Finish(sequence, FinishReason::kLength, OkStatus(), now_ns, out);
}

// A prompt row's own report: its argmax, and the log probability of the token that follows.
void RecordPromptRow(const RowPlan& plan, const RowResult& row, Sequence* sequence) {
  if (sequence->prompt_reported++ == 0)
    sequence->prompt_out.push_back({sequence->tokens[0], 0.0f, {}});
  sequence->prompt_argmax.push_back(row.argmax);
  if (plan.target >= 0) {
    sequence->prompt_out.push_back(
        {plan.target, row.target_logprob, TopOf(row, sequence->request.top_logprobs)});
  }
}

void CommitPromptRow(const RowPlan& plan, const RowResult& row, uint64_t now_ns, Sequence* sequence,
                     Committed* out) {
  const bool wanted =
      sequence->request.prompt_logprobs && plan.position == sequence->prompt_reported;
  if (!wanted || plan.position >= sequence->prompt_size()) return;
  RecordPromptRow(plan, row, sequence);
  const bool last = plan.position + 1 == sequence->prompt_size();
  if (!last && sequence->prompt_argmax.size() < kPromptPartRows) return;
  StreamEvent& event = out->event;  // holds a part already when one ended in this very window
  std::move(sequence->prompt_out.begin(), sequence->prompt_out.end(),
            std::back_inserter(event.prompt_tokens));
  event.prompt_argmax.insert(event.prompt_argmax.end(), sequence->prompt_argmax.begin(),
                             sequence->prompt_argmax.end());
  sequence->prompt_out.clear();
  sequence->prompt_argmax.clear();
  out->has_event = true;
  if (last && sequence->scoring_only())
    Finish(sequence, FinishReason::kLength, OkStatus(), now_ns, out);
}

void AddTiming(const WindowPlan& plan, const WindowResult& result, Sequence* sequence) {
  RequestTiming& timing = sequence->usage.timing;
  ++timing.windows;
  timing.window_ns += result.window_ns;
  timing.draft_ns += result.draft_ns;
  for (uint32_t i = 0; i < kLanes; ++i) {
    timing.lane_ns[i] += result.lane_ns[i];
    timing.lane_bytes[i] += result.bytes[i];
  }
  if ((plan.flags & kTimeStages) == 0 || !sequence->request.time_stages) return;
  for (uint32_t i = 0; i < kStages; ++i) timing.stage_ns[i] += result.stage_ns[i];
}

}  // namespace

Committed CommitRows(const WindowPlan& plan, const WindowResult& result, uint32_t seq_index,
                     uint32_t vocab, uint64_t now_ns, Sequence* sequence) {
  Committed out;
  AddTiming(plan, result, sequence);
  uint32_t accepted = 0;
  int32_t picked = -1;  // by the row before
  for (uint32_t i = 0; i < plan.n_rows; ++i) {
    const RowPlan& row = plan.rows[i];
    const RowResult& got = result.rows[i];
    if (row.seq_index != seq_index) continue;
    for (uint32_t lane = 0; lane < kLanes; ++lane)
      sequence->usage.lookups[lane] += got.lookups[lane];
    const bool draft = row.kind == RowKind::kDraft;
    if (draft) ++sequence->usage.drafted_tokens;
    // A draft counts only when the row before picked it; after the first that does not, none does.
    const bool ended = out.event.finish.has_value();
    if (ended || (draft && (row.token != picked || row.position != sequence->rows_done))) {
      picked = -1;
      continue;
    }
    if (draft) ++sequence->usage.accepted_draft_tokens;
    LODE_CHECK(row.position == sequence->rows_done, "row at {} committed after {}", row.position,
               sequence->rows_done);
    ++accepted;
    ++sequence->rows_done;
    if (row.position < sequence->prompt_size()) ++out.prompt_rows;
    CommitPromptRow(row, got, now_ns, sequence, &out);
    if (!row.pick || out.event.finish) continue;
    if (got.token < 0 || static_cast<uint32_t>(got.token) >= vocab) {
      Finish(sequence, FinishReason::kError,
             Internal("the GPU worker picked token {} at position {}, outside the vocabulary of {}",
                      got.token, row.position + 1, vocab),
             now_ns, &out);
      continue;
    }
    picked = got.token;
    AppendToken(got, now_ns, sequence, &out);
  }
  sequence->last_accepted = accepted;
  return out;
}

StreamEvent FinishNow(Sequence* sequence, FinishReason reason, Status error, uint64_t now_ns) {
  Committed out;
  Finish(sequence, reason, std::move(error), now_ns, &out);
  return std::move(out.event);
}

}  // namespace lode
