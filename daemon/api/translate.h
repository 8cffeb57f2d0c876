// Between the client protocol and the engine's types: validation, defaults, and nothing else. Every
// refusal is one sentence naming the field, the value and what is allowed.
#pragma once

#include <functional>
#include <string>

#include "daemon/api/api.h"
#include "lode/v1/lode.pb.h"

namespace lode {

// Bounds of what a request may ask (docs: proto comments).
inline constexpr int kStopStringsPerRequest = 16;
inline constexpr int kStopStringBytes = 256;
inline constexpr int kLogitBiasMax = 1024;

// The call that a request came with.
struct Arrival {
  uint64_t ns = 0;                  // CLOCK_MONOTONIC; the option request_seconds counts from here
  std::function<bool()> gone = {};  // true: the client does not wait any more; empty: never
};
// Sizes are checked before texts are rendered or tokenized: nobody computes for what cannot fit.
// Defaults: the request, else the model file's general.sampling.*, else 0.7 / 0.95 / 40 / 0.
StatusOr<Request> ToRequest(const ApiContext& context, const v1::GenerateRequest& request,
                            const Arrival& arrival);
StatusOr<Request> ToRequest(const ApiContext& context, const v1::ChatRequest& request,
                            const Arrival& arrival);

void ToProto(const Tokenizer& tokenizer, const StreamEvent& event, v1::Delta* delta);
// Entries [begin, end) of the event's report on the prompt; returns end: as many as make a message
// of about kPartBytes, so that a client with gRPC's default limit of 4 MiB reads every part.
inline constexpr size_t kPartBytes = 512 * 1024;
size_t ToProto(const Tokenizer& tokenizer, const StreamEvent& event, size_t begin,
               v1::PromptLogprobs* prompt);
void ToProto(const FinishEvent& finish, v1::Finish* out);
void ToProto(const ApiContext& context, const EngineSnapshot& snapshot, v1::StatusResponse* out);

// "embed", "hyper", ... and "hit", "pull", "cpu": the names used in metrics, --timing and the
// protocol.
const char* StageName(uint32_t stage);
const char* LaneName(uint32_t lane);

}  // namespace lode
