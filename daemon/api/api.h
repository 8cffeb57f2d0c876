// The daemon's outer face: gRPC service with health and reflection on a unix socket and on loopback
// TCP, and the Prometheus endpoint. No gRPC type appears here, so the rest of the daemon never
// includes its headers. Step 1 of the life of a token.
#pragma once

#include <memory>
#include <string>

#include "daemon/chat_template.h"
#include "daemon/engine_counters.h"
#include "daemon/request.h"
#include "daemon/tokenizer.h"
#include "shared/base/status.h"
#include "shared/config/fields.h"
#include "shared/model/model_source.h"

namespace lode {

// Everything the API reads; all pointers outlive the ApiServer. chat_template may be null (a file
// without one).
struct ApiContext {
  const Options* options;
  const ModelSource* source;
  const TokenizerData* tokenizer_data;  // sampling defaults of the file
  const Tokenizer* tokenizer;
  ChatTemplate* chat_template;
  Engine* engine;
  EngineCounters* counters;  // the API adds what it refuses before the engine sees it
  std::string model_id;  // what ListModels and requests call it
};

class ApiServer {
 public:
  virtual ~ApiServer() = default;
  // Health becomes SERVING / NOT_SERVING. Any thread.
  virtual void SetServing(bool serving) = 0;
  // Refuses new calls, lets running streams end until the deadline, then cuts them. Blocks.
  virtual void Shutdown(uint64_t deadline_ns) = 0;
  // Where it listens: "unix:/run/lode/lode.sock", "127.0.0.1:7070", for the log and for tests
  // (ports chosen by the kernel).
  virtual std::string endpoints() const = 0;
};

// Binds everything or fails with one sentence: an address in use, a non-loopback bind without a
// key, a socket path in use by a live daemon. Listening starts at once (so that Status can be asked
// while the model loads).
StatusOr<std::unique_ptr<ApiServer>> StartApi(const ApiContext& context);

}  // namespace lode
