// The commands of `lode`. Each gets its parsed options and returns an error of one sentence, which
// main prints; the exit code is 0 or 1, 2 for wrong flags, 130 after Ctrl-C. Text of answers goes
// to stdout, everything else to stderr.
#pragma once

#include <istream>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/cli/client.h"
#include "shared/base/status.h"

namespace lode::cli {

struct SamplingOptions {
  double temperature = -1, top_p = -1, min_p = -1;  // -1: the model's own defaults
  int64_t top_k = -1;
  std::optional<double> repetition_penalty, presence_penalty, frequency_penalty;
  std::vector<std::string> logit_bias;  // "TOKEN=BIAS", well formed
  std::vector<int32_t> banned;
  std::optional<uint64_t> seed;
  int64_t max_tokens = -1;
  std::vector<std::string> stop;
};

struct DraftFlags {
  int64_t spec = -1;         // rows of a window: the decode row and spec - 1 drafts; -1: the daemon's
  std::string source;        // none, head, lookup, both; empty: the daemon's
  double min_p = -1;         // -1: the daemon's
  bool coupled = false, uncoupled = false, fixed = false;
};
// Texts travel as UTF-8. `what` begins the sentence.
Status CheckUtf8(std::string_view what, std::string_view text);

struct RunOptions {
  ConnectOptions connect;
  SamplingOptions sampling;
  DraftFlags drafts;
  int64_t expert_slots = -1;  // of a private stack; -1: no limit of its own
  std::string mtp;            // separate draft head of a private stack
  std::string prompt;  // "-": standard input
  std::string system;  // system message
  bool raw = false;    // continue the prompt itself, without the chat template
  bool think = false, no_think = false;
  bool timing = false, summary = false, hash = false;
};
Status Run(const RunOptions& options);
Status Chat(const RunOptions& options);

// `changes`: "option=value".
Status Tune(ConnectOptions connect, const std::vector<std::string>& changes);
Status ShowStatus(ConnectOptions connect, bool json);
Status Tokenize(const ConnectOptions& connect, const std::string& text, bool raw);
// "id count" lines of the tokens of a text, most frequent first: what option draft_vocab reads.
Status CountTokens(const ConnectOptions& connect, std::istream& in, bool raw);
Status Inspect(const std::string& model, bool tensors);

struct EvalOptions {
  ConnectOptions connect;
  std::string file;
  uint32_t chunk = 512;       // tokens per request, each from a fresh state
  uint32_t limit = 0;         // tokens in all; 0 = the whole file
  std::string save, compare;  // JSON of a run
};
Status Eval(const EvalOptions& options);

}  // namespace lode::cli
