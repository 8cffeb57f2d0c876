// A client's request as the engine sees it, and the bounded stream that carries its answer back. The API layer (gRPC, later
// HTTP) fills a Request and reads a RequestStream; the scheduler is the only writer. Step 1 of the life of a token.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/draft_source.h"
#include "shared/base/status.h"
#include "shared/wire/window_plan.h"
#include "shared/wire/window_result.h"

namespace lode {

// Tests and measurements: drafts made from the answer itself, of which a chosen share is wrong.
struct ReplayDrafts {
  std::vector<int32_t> answer;
  double right = 1;   // share of drafts that are the answer's own token
  uint64_t seed = 0;  // which ones are not: a function of seed and place
  std::vector<uint8_t> turns;  // most drafts of the windows behind the prompt's, in turn; empty: any
};

// Guesses of an answer. They change its speed and nothing else.
struct DraftOptions {
  uint32_t max = 0;      // drafts of one window, at most kDraftsMax; 0: none
  bool head = true;      // the model's draft head, when there is one
  bool lookup = true;    // repetitions of the sequence's own tokens
  float min_p = 0.5f;    // the head guesses while it is at least this sure
  bool coupled = false;  // the head draws with the request's own sampling and key
  bool fixed = false;    // always as many as there are; false: as many as pay
  std::shared_ptr<const ReplayDrafts> replay;  // offered instead of guesses and repetitions
};

struct Request {
  std::string id;                      // for logs
  std::vector<int32_t> prompt;         // at least one token
  SamplingPlan sampling = {};          // complete (defaults already applied)
  std::vector<TokenBias> logit_bias;
  // ceil(vocab / 32) words, bit set = the token may be picked; null: every token may.
  std::shared_ptr<const std::vector<uint32_t>> allowed;
  uint32_t max_tokens = 0;             // >= 1, or 0 together with prompt_logprobs (scoring only)
  std::vector<std::string> stop;
  std::vector<int32_t> stop_tokens;    // complete: the model's end tokens are in here unless ignored
  DraftOptions drafts;
  bool want_logprobs = false;
  uint32_t top_logprobs = 0;
  bool prompt_logprobs = false;
  bool hash_logits = false;
  bool time_stages = true;
  bool keep_special = false;
  std::optional<uint64_t> deadline_ns; // CLOCK_MONOTONIC
};

enum class FinishReason { kStop, kLength, kCancelled, kError };

struct TokenOut {
  int32_t id;
  float logprob;
  std::vector<TopLogprob> top;
};

struct RequestTiming {
  uint64_t windows = 0, window_ns = 0;
  uint64_t draft_ns = 0;               // of window_ns: following and guessing
  uint64_t stage_ns[kStages] = {};
  uint64_t lane_ns[kLanes] = {};
  uint64_t lane_bytes[kLanes] = {};
};

struct RequestUsage {
  uint32_t prompt_tokens = 0, cached_prompt_tokens = 0, completion_tokens = 0;
  uint32_t drafted_tokens = 0, accepted_draft_tokens = 0;
  // The same by source (DraftSource) and depth, 1 = right behind the decode row.
  uint32_t drafts_offered[kDraftSources][kDraftsMax + 1] = {};
  uint32_t drafts_held[kDraftSources][kDraftsMax + 1] = {};
  uint32_t decode_windows = 0;         // windows that gave tokens of the answer
  uint64_t lookups[kLanes] = {};       // this request's own rows
  uint64_t queue_ns = 0, prompt_ns = 0, decode_ns = 0;
  RequestTiming timing;
};

struct FinishEvent {
  FinishReason reason = FinishReason::kError;
  std::string stop_string;
  Status error;                        // kError: why; otherwise OK
  RequestUsage usage;
  uint64_t seed = 0;
  uint64_t logits_hash = 0;
};

// A long prompt's report travels while the prompt runs, so that nobody holds all of it at once.
inline constexpr uint32_t kPromptPartRows = 256;

struct StreamEvent {
  std::string text;                    // whole UTF-8 characters, never the start of a stop string
  std::vector<TokenOut> tokens;
  // prompt_logprobs: the prompt's tokens and the model's choice after each, in parts of about kPromptPartRows.
  std::vector<TokenOut> prompt_tokens;
  std::vector<int32_t> prompt_argmax;
  std::optional<FinishEvent> finish;   // last event
};

// Bounded, one writer (scheduler), one reader (API). When the reader falls behind by more than the capacity the scheduler
// stops planning rows for this sequence; when it stays behind for `slow_client_seconds` the sequence is cancelled.
class RequestStream {
 public:
  static constexpr size_t kCapacityEvents = 256;

  // Writer. Never blocks. Returns false when the buffer is over capacity now (pause the sequence).
  bool Push(StreamEvent event);
  bool Full() const;
  // Reader: sets the function called (from the writer's thread, outside locks) whenever an event becomes available.
  void SetNotify(std::function<void()> notify);
  // Reader. Never blocks. False when nothing is there.
  bool TryPop(StreamEvent* event);
  // Reader, blocking with a deadline (tests, in-process use).
  bool Pop(StreamEvent* event, uint64_t deadline_ns);
  // Either side: the reader is gone, or wants no more. The scheduler cancels at the next window border.
  void Cancel();
  bool cancelled() const;
  uint64_t full_since_ns() const;      // 0: not full

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<StreamEvent> events_;     // guarded by mutex_
  std::function<void()> notify_;       // guarded by mutex_
  bool cancelled_ = false;             // guarded by mutex_
  uint64_t full_since_ns_ = 0;         // guarded by mutex_
};

struct EngineSnapshot {                // for Status and metrics; a copy, any thread
  struct WorkerInfo {
    std::string name, state, detail;
    int pid = 0;
    uint32_t restarts = 0;
    std::map<std::string, double> statistics = {};  // the worker's own counts, some seconds old
  };
  std::string state, detail;           // loading, ready, degraded, draining
  double load_progress = 0;
  std::vector<WorkerInfo> workers;
  uint32_t running = 0, queued = 0, slots = 0, kv_blocks = 0, kv_blocks_free = 0;
  double hit_rate = 0, pcie_share = 0; // last 256 windows
  double tokens_per_window = 0;        // last 256 windows that gave tokens of answers
  uint64_t last_progress_ns = 0;
  std::map<std::string, std::string> facts;
};

// What the API layer needs from the engine; the scheduler implements it, tests fake it.
class Engine {
 public:
  virtual ~Engine() = default;
  // Queues the request or refuses it with one sentence (queue full, prompt too long, draining, not ready). Any thread.
  virtual StatusOr<std::shared_ptr<RequestStream>> Submit(Request request) = 0;
  virtual EngineSnapshot Snapshot() const = 0;
  virtual uint32_t context() const = 0;  // tokens a request may use
};

}  // namespace lode
