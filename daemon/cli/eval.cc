// `lode eval FILE`: how well the served model predicts a text: teacher-forced nats per token, and
// how often its first choice equals that of a saved run (another pack, another engine version).
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "daemon/cli/commands.h"

namespace lode::cli {
namespace {

struct Evaluation {
  std::string model;
  std::vector<int32_t> tokens;  // of the text
  std::vector<int32_t>
      argmax;  // the model's first choice for the token after position i, chunk by chunk
  uint32_t chunk = 0;
  double nats = 0;
  uint64_t scored = 0;
};

// A text to score, or a saved run of one.
constexpr uintmax_t kTextBytesMax = 256u << 20;

StatusOr<std::string> ReadFile(const std::string& path) {
  // Folders and devices open, then fail or never end.
  std::error_code error;
  const auto size = std::filesystem::file_size(path, error);
  if (error || !std::filesystem::is_regular_file(path, error))
    return NotFound("cannot read '{}': it is missing or no regular file", path);
  if (size > kTextBytesMax)
    return InvalidArgument("'{}' has {} bytes; at most {} are read", path, size, kTextBytesMax);
  std::ifstream file(path, std::ios::binary);
  if (!file) return NotFound("cannot read '{}'", path);
  return std::string((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
}

Status ScoreChunk(Client& client, const int32_t* tokens, size_t n, Evaluation* out) {
  v1::GenerateRequest request;
  for (size_t i = 0; i < n; ++i) request.mutable_tokens()->add_ids(tokens[i]);
  request.mutable_limits()->set_max_tokens(0);
  request.mutable_limits()->set_prompt_logprobs(true);
  request.mutable_sampling()->set_temperature(0);
  grpc::ClientContext call;
  auto reader = client.stub().Generate(&call, request);
  v1::GenerateResponse response;
  size_t seen = 0;  // the very first token has no probability
  while (reader->Read(&response)) {
    if (response.has_finish() && response.finish().reason() == v1::FINISH_REASON_ERROR) {
      return Internal("the model failed on the text: {}", response.finish().error());
    }
    if (!response.has_prompt()) continue;
    const v1::PromptLogprobs& prompt = response.prompt();
    for (const v1::Token& token : prompt.tokens()) {
      if (seen++ == 0) continue;
      out->nats -= token.logprob();
      ++out->scored;
    }
    out->argmax.insert(out->argmax.end(), prompt.argmax().begin(), prompt.argmax().end());
  }
  LODE_RETURN_IF_ERROR(FromGrpc(reader->Finish()));
  if (seen == n) return OkStatus();
  return Internal("the daemon sent log probabilities for {} of {} tokens", seen, n);
}

Status Save(const Evaluation& e, const std::string& path) {
  nlohmann::json json = {{"model", e.model},   {"chunk", e.chunk}, {"tokens", e.tokens},
                         {"argmax", e.argmax}, {"nats", e.nats},   {"scored", e.scored}};
  std::ofstream file(path);
  file << json.dump() << "\n";
  return file ? OkStatus() : Unavailable("cannot write '{}'", path);
}

Status Compare(const Evaluation& e, const std::string& path) {
  LODE_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, false);
  if (json.is_discarded() || !json.contains("argmax") || !json["argmax"].is_array() ||
      !json.contains("tokens") || !json["tokens"].is_array()) {
    return InvalidArgument("'{}' is no saved evaluation (lode eval --save)", path);
  }
  for (const char* key : {"argmax", "tokens"}) {
    for (const auto& v : json[key]) {
      if (!v.is_number_integer())
        return InvalidArgument("'{}' is damaged: {} holds something that is no token id", path,
                               key);
    }
  }
  const auto number = [&](const char* key) {
    return json.contains(key) && json[key].is_number() ? json[key].get<double>() : 0.0;
  };
  const std::vector<int32_t> other = json["argmax"], tokens = json["tokens"];
  if (tokens != e.tokens || other.size() != e.argmax.size() || number("chunk") != e.chunk) {
    return InvalidArgument(
        "'{}' was made from another text or with another --chunk or --limit; the runs cannot be "
        "compared",
        path);
  }
  size_t equal = 0;
  for (size_t i = 0; i < other.size(); ++i) equal += other[i] == e.argmax[i];
  const double nats = number("nats"), scored = number("scored");
  std::printf("top1_agreement=%.4f (of %zu positions) nats_per_token_there=%.4f difference=%+.4f\n",
              other.empty() ? 1.0 : static_cast<double>(equal) / static_cast<double>(other.size()),
              other.size(), scored > 0 ? nats / scored : 0,
              e.nats / static_cast<double>(std::max<uint64_t>(1, e.scored)) -
                  (scored > 0 ? nats / scored : 0));
  return OkStatus();
}

}  // namespace

Status Eval(const EvalOptions& options) {
  LODE_ASSIGN_OR_RETURN(const std::string text, ReadFile(options.file));
  LODE_RETURN_IF_ERROR(CheckUtf8(fmt::format("'{}'", options.file), text));
  LODE_ASSIGN_OR_RETURN(const auto client, Client::Connect(options.connect));
  v1::TokenizeRequest tokenize;
  tokenize.set_text(text);
  tokenize.set_raw_text(true);
  grpc::ClientContext call;
  v1::TokenizeResponse tokenized;
  LODE_RETURN_IF_ERROR(FromGrpc(client->stub().Tokenize(&call, tokenize, &tokenized)));
  Evaluation e;
  e.chunk = options.chunk;
  e.tokens.assign(tokenized.ids().begin(), tokenized.ids().end());
  if (options.limit > 0 && e.tokens.size() > options.limit) e.tokens.resize(options.limit);
  if (e.tokens.size() < 2)
    return InvalidArgument("'{}' has {} tokens; at least two are needed to score one", options.file,
                           e.tokens.size());
  {
    grpc::ClientContext models_call;
    v1::ListModelsResponse models;
    LODE_RETURN_IF_ERROR(FromGrpc(client->stub().ListModels(&models_call, {}, &models)));
    if (models.models_size() > 0) e.model = models.models(0).source();
  }
  ProgressLine progress(options.connect.quiet);
  for (size_t at = 0; at + 1 < e.tokens.size(); at += options.chunk) {
    const size_t n = std::min<size_t>(options.chunk, e.tokens.size() - at);
    if (n < 2) break;
    LODE_RETURN_IF_ERROR(ScoreChunk(*client, e.tokens.data() + at, n, &e));
    progress.Show(static_cast<double>(at + n) / static_cast<double>(e.tokens.size()),
                  fmt::format("{:.4f} nats/token", e.nats / static_cast<double>(e.scored)));
  }
  progress.Clear();
  std::printf("nats_per_token=%.6f perplexity=%.4f tokens=%llu chunk=%u model=%s\n",
              e.nats / static_cast<double>(e.scored),
              std::exp(e.nats / static_cast<double>(e.scored)),
              static_cast<unsigned long long>(e.scored), options.chunk, e.model.c_str());
  if (!options.compare.empty()) LODE_RETURN_IF_ERROR(Compare(e, options.compare));
  if (!options.save.empty()) LODE_RETURN_IF_ERROR(Save(e, options.save));
  return OkStatus();
}

}  // namespace lode::cli
