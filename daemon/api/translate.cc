// Step 1 of the life of a token: what a client asked, checked and completed with defaults. See
// translate.h.
#include "daemon/api/translate.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <random>
#include <span>

#include "daemon/draft_source.h"
#include "daemon/utf8.h"
#include "shared/shm/wait_word.h"

namespace lode {
namespace {

constexpr double kTemperatureMax = 100;  // beyond it every distribution is flat in float32
constexpr double kPenaltyMax = 100;
constexpr size_t kQuotedBytes = 64;  // of a client's own text in an error

std::string Quoted(const std::string& text) {
  return text.substr(0, ValidUtf8Prefix(std::string_view(text).substr(0, kQuotedBytes)));
}

// A float of the request inside [low, high]; NaN is outside every range.
Status CheckRange(const char* field, double value, double low, double high) {
  if (value >= low && value <= high) return OkStatus();
  return InvalidArgument("sampling.{} is {}; allowed are {} to {}", field, value, low, high);
}

uint64_t RandomSeed() {
  std::random_device device;
  return static_cast<uint64_t>(device()) << 32 | device();
}

double Default(double from_file, double otherwise) {
  return from_file >= 0 ? from_file : otherwise;
}

// Every id that may be picked: neither an unused place of the vocabulary nor banned by the request.
// Null when that is all of them.
StatusOr<std::shared_ptr<const std::vector<uint32_t>>> AllowedTokens(const ApiContext& context,
                                                                     const v1::Sampling& in) {
  constexpr uint64_t kUnused = 5;  // tokenizer.ggml.token_type
  const uint32_t vocab = context.source->config().vocab;
  if (in.banned_tokens_size() > kLogitBiasMax) {
    return InvalidArgument("sampling.banned_tokens has {} ids; at most {} are allowed",
                           in.banned_tokens_size(), kLogitBiasMax);
  }
  std::vector<uint32_t> words((vocab + 31) / 32, ~0u);
  bool any = false;
  const auto ban = [&](uint32_t id) {
    words[id / 32] &= ~(1u << id % 32);
    any = true;
  };
  const std::vector<uint64_t>& types = context.tokenizer_data->token_types;
  for (uint32_t id = 0; id < vocab && id < types.size(); ++id) {
    if (types[id] == kUnused) ban(id);
  }
  for (const int32_t id : in.banned_tokens()) {
    if (!context.tokenizer->IsValid(id)) {
      return InvalidArgument(
          "sampling.banned_tokens holds {}, which is not a token of the vocabulary (0 to {})", id,
          context.tokenizer->vocab_size() - 1);
    }
    ban(static_cast<uint32_t>(id));
  }
  if (!any) return std::shared_ptr<const std::vector<uint32_t>>();
  return std::make_shared<const std::vector<uint32_t>>(std::move(words));
}

Status FillSampling(const ApiContext& context, const v1::Sampling& in, Request* request) {
  const TokenizerData& file = *context.tokenizer_data;
  const double temperature =
      in.has_temperature() ? in.temperature() : Default(file.temperature, 0.7);
  const double top_p = in.has_top_p() ? in.top_p() : Default(file.top_p, 0.95);
  const double min_p = in.has_min_p() ? in.min_p() : Default(file.min_p, 0);
  const double repetition = in.has_repetition_penalty() ? in.repetition_penalty() : 1;
  LODE_RETURN_IF_ERROR(CheckRange("temperature", temperature, 0, kTemperatureMax));
  if (!(top_p > 0 && top_p <= 1))
    return InvalidArgument("sampling.top_p is {}; allowed are above 0 and up to 1", top_p);
  if (!(min_p >= 0 && min_p < 1))
    return InvalidArgument("sampling.min_p is {}; allowed are 0 to below 1", min_p);
  LODE_RETURN_IF_ERROR(CheckRange("repetition_penalty", repetition, 1 / kPenaltyMax, kPenaltyMax));
  LODE_RETURN_IF_ERROR(
      CheckRange("presence_penalty", in.presence_penalty(), -kPenaltyMax, kPenaltyMax));
  LODE_RETURN_IF_ERROR(
      CheckRange("frequency_penalty", in.frequency_penalty(), -kPenaltyMax, kPenaltyMax));
  SamplingPlan& out = request->sampling;
  out = {};
  out.temperature = static_cast<float>(temperature);
  out.top_p = static_cast<float>(top_p);
  out.min_p = static_cast<float>(min_p);
  out.top_k =
      in.has_top_k() ? in.top_k() : (file.top_k >= 0 ? static_cast<uint32_t>(file.top_k) : 40);
  out.repetition_penalty = static_cast<float>(repetition);
  out.presence_penalty = in.presence_penalty();
  out.frequency_penalty = in.frequency_penalty();
  out.seed = in.has_seed() ? in.seed() : RandomSeed();
  if (in.logit_bias_size() > kLogitBiasMax) {
    return InvalidArgument("sampling.logit_bias has {} entries; at most {} are allowed",
                           in.logit_bias_size(), kLogitBiasMax);
  }
  for (const auto& [token, bias] : in.logit_bias()) {
    if (!context.tokenizer->IsValid(token) || !std::isfinite(bias)) {
      return InvalidArgument(
          "sampling.logit_bias entry {}: {} is not a finite bias of a token of the vocabulary (0 "
          "to {})",
          token, bias, context.tokenizer->vocab_size() - 1);
    }
    request->logit_bias.push_back({token, bias});
  }
  // A map has no order: sort, so that the same request is the same plan.
  std::sort(request->logit_bias.begin(), request->logit_bias.end(),
            [](const TokenBias& a, const TokenBias& b) { return a.token < b.token; });
  LODE_ASSIGN_OR_RETURN(request->allowed, AllowedTokens(context, in));
  return OkStatus();
}

Status FillDrafts(const ApiContext& context, const v1::Drafts& in, Request* request) {
  const Options& options = *context.options;
  DraftOptions& out = request->drafts;
  const std::string source = in.has_source() ? in.source() : options.draft_source;
  if (source != "none" && source != "head" && source != "lookup" && source != "both") {
    return InvalidArgument("drafts.source is '{}'; allowed are none, head, lookup and both",
                           Quoted(source));
  }
  out.max = in.has_max() ? in.max() : options.draft_max;
  if (out.max > kDraftsMax)
    return InvalidArgument("drafts.max is {}; allowed are 0 to {}", out.max, kDraftsMax);
  if (source == "none") out.max = 0;
  out.head = source != "lookup";
  out.lookup = source != "head";
  out.min_p = in.has_min_p() ? in.min_p() : static_cast<float>(options.draft_min_p);
  if (!(out.min_p >= 0 && out.min_p <= 1))
    return InvalidArgument("drafts.min_p is {}; allowed are 0 to 1", out.min_p);
  out.coupled = in.has_coupled() ? in.coupled() : options.draft_coupled;
  out.fixed = in.has_fixed() ? in.fixed() : options.draft_policy == "fixed";
  return OkStatus();
}

Status FillStops(const ApiContext& context, const v1::Limits& in, Request* request) {
  if (in.stop_size() > kStopStringsPerRequest) {
    return InvalidArgument("limits.stop has {} strings; at most {} are allowed", in.stop_size(),
                           kStopStringsPerRequest);
  }
  for (const std::string& stop : in.stop()) {
    if (stop.empty() || stop.size() > static_cast<size_t>(kStopStringBytes)) {
      return InvalidArgument("limits.stop holds a string of {} bytes; allowed are 1 to {}",
                             stop.size(), kStopStringBytes);
    }
    request->stop.push_back(stop);
  }
  if (in.stop_tokens_size() > kStopStringsPerRequest) {
    return InvalidArgument("limits.stop_tokens has {} ids; at most {} are allowed",
                           in.stop_tokens_size(), kStopStringsPerRequest);
  }
  for (int32_t token : in.stop_tokens()) {
    if (!context.tokenizer->IsValid(token)) {
      return InvalidArgument(
          "limits.stop_tokens holds {}, which is not a token of the vocabulary (0 to {})", token,
          context.tokenizer->vocab_size() - 1);
    }
    request->stop_tokens.push_back(token);
  }
  if (!in.ignore_end()) {
    const auto& ends = context.tokenizer->stop_ids();
    request->stop_tokens.insert(request->stop_tokens.end(), ends.begin(), ends.end());
  }
  return OkStatus();
}

Status FillLimits(const ApiContext& context, const v1::Limits& in, const Arrival& arrival,
                  Request* request) {
  const uint32_t context_tokens = context.engine->context();
  const size_t prompt = request->prompt.size();
  if (prompt == 0) return InvalidArgument("the prompt has no tokens; give at least one");
  if (prompt > context_tokens) {
    return InvalidArgument("the prompt has {} tokens; the context holds {} (option context)",
                           prompt, context_tokens);
  }
  const uint32_t room = context_tokens - static_cast<uint32_t>(prompt);
  request->prompt_logprobs = in.prompt_logprobs();
  if (in.has_max_tokens()) {
    if (in.max_tokens() == 0 && !in.prompt_logprobs()) {
      return InvalidArgument(
          "limits.max_tokens is 0; only a request with prompt_logprobs may ask for no tokens");
    }
    if (in.max_tokens() > room) {
      return InvalidArgument(
          "limits.max_tokens is {}; after a prompt of {} tokens the context of {} leaves {}",
          in.max_tokens(), prompt, context_tokens, room);
    }
    request->max_tokens = in.max_tokens();
  } else {
    if (room == 0 && !in.prompt_logprobs()) {
      return InvalidArgument("the prompt of {} tokens fills the context of {}; no answer fits",
                             prompt, context_tokens);
    }
    request->max_tokens = std::min(room, context.options->max_tokens);
  }
  if (in.has_logprobs()) {
    if (in.logprobs() > kLogprobsMax) {
      return InvalidArgument("limits.logprobs is {}; at most {} alternatives are reported",
                             in.logprobs(), kLogprobsMax);
    }
    request->want_logprobs = true;
    request->top_logprobs = in.logprobs();
  }
  request->hash_logits = in.hash_logits();
  if (context.options->request_seconds > 0) {
    request->deadline_ns =
        arrival.ns + static_cast<uint64_t>(context.options->request_seconds * 1e9);
  }
  return FillStops(context, in, request);
}

// Whether a text of this size could fit at all: known from its length alone.
Status CheckTextSize(const ApiContext& context, const char* what, size_t bytes) {
  const uint32_t tokens = context.engine->context();
  const uint64_t most = context.tokenizer->TextBytesMax(tokens);
  if (bytes <= most) return OkStatus();
  return InvalidArgument(
      "the {} has {} bytes; the context holds {} tokens (option context), which are at most {} "
      "bytes",
      what, bytes, tokens, most);
}

StatusOr<std::vector<int32_t>> EncodePrompt(const ApiContext& context, std::string_view text,
                                            bool parse_special, const Arrival& arrival,
                                            std::span<const size_t> marks = {}) {
  EncodeOptions options;
  options.parse_special = parse_special;
  options.marks = marks;
  options.tokens_max = context.engine->context();
  options.stop = arrival.gone;
  auto ids = context.tokenizer->Encode(text, options);
  if (ids.status().code() != StatusCode::kOutOfRange) return ids;
  return InvalidArgument(
      "the prompt has more than {} tokens; the context holds {} (option context)",
      options.tokens_max, options.tokens_max);
}

Status CheckModel(const ApiContext& context, const std::string& model) {
  if (model.empty() || model == context.model_id) return OkStatus();
  return NotFound("model '{}' is not served here; the loaded model is '{}'", Quoted(model),
                  context.model_id);
}

Status CheckTokens(const Tokenizer& tokenizer, const std::vector<int32_t>& ids) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (!tokenizer.IsValid(ids[i])) {
      return InvalidArgument("tokens[{}] is {}, which is not a token of the vocabulary (0 to {})",
                             i, ids[i], tokenizer.vocab_size() - 1);
    }
  }
  return OkStatus();
}

// Values are spliced into the template's request as they are; how deep they nest is checked there.
StatusOr<std::string> TemplateVariables(const v1::ChatRequest& in) {
  std::string json;
  for (const auto& [key, value] : in.template_options_json()) {
    if (!nlohmann::json::accept(value)) {
      return InvalidArgument("template_options_json['{}'] is not valid JSON: {}", Quoted(key),
                             Quoted(value));
    }
    json += json.empty() ? "{" : ",";
    json += nlohmann::json(key).dump() + ":" + value;
  }
  if (!json.empty()) json += "}";
  return json;
}

StatusOr<ChatRequest> ToTemplate(const v1::ChatRequest& in) {
  if (in.messages().empty()) return InvalidArgument("messages is empty; give at least one message");
  ChatRequest out;
  for (const v1::ChatMessage& m : in.messages()) {
    if (m.role() != "system" && m.role() != "user" && m.role() != "assistant" &&
        m.role() != "tool") {
      return InvalidArgument(
          "messages[{}].role is '{}'; allowed are system, user, assistant and tool",
          out.messages.size(), Quoted(m.role()));
    }
    ChatMessage message;
    message.role = m.role();
    message.content = m.content();
    message.reasoning_content = m.reasoning_content();
    message.tool_calls_json = m.tool_calls_json();
    message.name = m.name();
    message.tool_call_id = m.tool_call_id();
    out.messages.push_back(std::move(message));
  }
  out.tools_json = in.tools_json();
  LODE_ASSIGN_OR_RETURN(out.variables_json, TemplateVariables(in));
  return out;
}

void FillToken(const Tokenizer& tokenizer, const TokenOut& in, v1::Token* out) {
  out->set_id(in.id);
  out->set_logprob(in.logprob);
  for (const TopLogprob& t : in.top) {
    v1::Alternative* alternative = out->add_top();
    alternative->set_id(t.token);
    alternative->set_logprob(t.logprob);
    alternative->set_text(tokenizer.PrintableToken(t.token));
  }
}

double Seconds(uint64_t ns) { return static_cast<double>(ns) * 1e-9; }

void FillUsage(const RequestUsage& in, v1::Usage* out) {
  out->set_prompt_tokens(in.prompt_tokens);
  out->set_cached_prompt_tokens(in.cached_prompt_tokens);
  out->set_completion_tokens(in.completion_tokens);
  out->set_drafted_tokens(in.drafted_tokens);
  out->set_accepted_draft_tokens(in.accepted_draft_tokens);
  const uint64_t hit = in.lookups[0], pull = in.lookups[1], cpu = in.lookups[2];
  const uint64_t all = hit + pull + cpu, misses = pull + cpu;
  out->set_hit_rate(all ? static_cast<double>(hit) / static_cast<double>(all) : 0);
  out->set_pcie_share(misses ? static_cast<double>(pull) / static_cast<double>(misses) : 0);
  out->set_cpu_share(misses ? static_cast<double>(cpu) / static_cast<double>(misses) : 0);
  out->set_queue_seconds(Seconds(in.queue_ns));
  out->set_prompt_seconds(Seconds(in.prompt_ns));
  out->set_decode_seconds(Seconds(in.decode_ns));
  for (uint32_t s = 0; s < kDraftSources; ++s) {
    for (uint32_t depth = 1; depth <= kDraftsMax; ++depth) {
      if (in.drafts_offered[s][depth] == 0) continue;
      v1::DraftCount* count = out->add_drafts();
      count->set_source(DraftSourceName(static_cast<DraftSource>(s)));
      count->set_depth(depth);
      count->set_offered(in.drafts_offered[s][depth]);
      count->set_accepted(in.drafts_held[s][depth]);
    }
  }
  if (in.decode_windows > 0)
    out->set_tokens_per_window(static_cast<double>(in.completion_tokens) / in.decode_windows);
  v1::TimingBreakdown* timing = out->mutable_timing();
  timing->set_draft_seconds(Seconds(in.timing.draft_ns));
  timing->set_verify_seconds(Seconds(in.timing.window_ns - in.timing.draft_ns));
  timing->set_windows(in.timing.windows);
  timing->set_window_seconds(Seconds(in.timing.window_ns));
  for (uint32_t s = 0; s < kStages; ++s)
    (*timing->mutable_stage_seconds())[StageName(s)] = Seconds(in.timing.stage_ns[s]);
  for (uint32_t l = 0; l < kLanes; ++l) {
    (*timing->mutable_lane_seconds())[LaneName(l)] = Seconds(in.timing.lane_ns[l]);
    (*timing->mutable_lane_lookups())[LaneName(l)] = in.lookups[l];
    (*timing->mutable_lane_bytes())[LaneName(l)] = in.timing.lane_bytes[l];
  }
}

}  // namespace

const char* StageName(uint32_t stage) {
  static constexpr const char* kNames[kStages] = {
      "embed", "hyper",  "deltanet", "attention", "ple",  "router", "hit",
      "pull",  "shared", "cpu_wait", "combine",   "head", "sample", "draft"};
  return stage < kStages ? kNames[stage] : "?";
}

const char* LaneName(uint32_t lane) {
  static constexpr const char* kNames[kLanes] = {"hit", "pull", "cpu"};
  return lane < kLanes ? kNames[lane] : "?";
}

StatusOr<Request> ToRequest(const ApiContext& context, const v1::GenerateRequest& in,
                            const Arrival& arrival) {
  LODE_RETURN_IF_ERROR(CheckModel(context, in.model()));
  Request request;
  if (in.has_text()) {
    LODE_RETURN_IF_ERROR(CheckTextSize(context, "prompt", in.text().size()));
    LODE_ASSIGN_OR_RETURN(request.prompt,
                          EncodePrompt(context, in.text(), !in.raw_text(), arrival));
  } else if (in.has_tokens()) {
    request.prompt.assign(in.tokens().ids().begin(), in.tokens().ids().end());
    LODE_RETURN_IF_ERROR(CheckTokens(*context.tokenizer, request.prompt));
  } else {
    return InvalidArgument("the request has no prompt; set text or tokens");
  }
  request.keep_special = in.keep_special();
  LODE_RETURN_IF_ERROR(FillSampling(context, in.sampling(), &request));
  LODE_RETURN_IF_ERROR(FillDrafts(context, in.drafts(), &request));
  LODE_RETURN_IF_ERROR(FillLimits(context, in.limits(), arrival, &request));
  return request;
}

StatusOr<Request> ToRequest(const ApiContext& context, const v1::ChatRequest& in,
                            const Arrival& arrival) {
  LODE_RETURN_IF_ERROR(CheckModel(context, in.model()));
  if (context.chat_template == nullptr) {
    return FailedPrecondition("the model '{}' has no chat template; use Generate with a prompt",
                              context.model_id);
  }
  if (in.limits().prompt_logprobs()) {
    return InvalidArgument(
        "limits.prompt_logprobs is answered by Generate only; render the conversation there");
  }
  // What is said, as every template prints it; other fields it may leave out.
  size_t said = 0;
  for (const v1::ChatMessage& message : in.messages()) said += message.content().size();
  LODE_RETURN_IF_ERROR(CheckTextSize(context, "conversation", said));
  LODE_ASSIGN_OR_RETURN(const ChatRequest chat, ToTemplate(in));
  LODE_ASSIGN_OR_RETURN(const RenderedChat prompt, context.chat_template->Render(chat));
  Request request;
  LODE_ASSIGN_OR_RETURN(request.prompt, EncodePrompt(context, prompt.text, /*parse_special=*/true,
                                                     arrival, prompt.marks));
  request.keep_special = in.keep_special();
  LODE_RETURN_IF_ERROR(FillSampling(context, in.sampling(), &request));
  LODE_RETURN_IF_ERROR(FillDrafts(context, in.drafts(), &request));
  LODE_RETURN_IF_ERROR(FillLimits(context, in.limits(), arrival, &request));
  return request;
}

void ToProto(const Tokenizer& tokenizer, const StreamEvent& event, v1::Delta* delta) {
  delta->set_text(event.text);
  for (const TokenOut& token : event.tokens) FillToken(tokenizer, token, delta->add_tokens());
}

size_t ToProto(const Tokenizer& tokenizer, const StreamEvent& event, size_t begin,
               v1::PromptLogprobs* prompt) {
  // A part ends with a choice whose token is in the next one, so the lists differ by one at most.
  const size_t end = std::max(event.prompt_tokens.size(), event.prompt_argmax.size());
  size_t i = begin;
  for (size_t bytes = 0; i < end && bytes < kPartBytes; ++i) {
    if (i < event.prompt_argmax.size()) prompt->add_argmax(event.prompt_argmax[i]);
    if (i >= event.prompt_tokens.size()) continue;
    v1::Token* token = prompt->add_tokens();
    FillToken(tokenizer, event.prompt_tokens[i], token);
    bytes += token->ByteSizeLong();
  }
  return i;
}

void ToProto(const FinishEvent& finish, v1::Finish* out) {
  switch (finish.reason) {
    case FinishReason::kStop:
      out->set_reason(v1::FINISH_REASON_STOP);
      break;
    case FinishReason::kLength:
      out->set_reason(v1::FINISH_REASON_LENGTH);
      break;
    case FinishReason::kCancelled:
      out->set_reason(v1::FINISH_REASON_CANCELLED);
      break;
    case FinishReason::kError:
      out->set_reason(v1::FINISH_REASON_ERROR);
      break;
  }
  out->set_stop_string(finish.stop_string);
  if (!finish.error.ok()) out->set_error(Message(finish.error));
  FillUsage(finish.usage, out->mutable_usage());
  out->set_seed(finish.seed);
  out->set_logits_hash(finish.logits_hash);
}

void ToProto(const ApiContext& context, const EngineSnapshot& s, v1::StatusResponse* out) {
  out->set_state(s.state);
  out->set_detail(s.detail);
  out->set_load_progress(s.load_progress);
  for (const EngineSnapshot::WorkerInfo& w : s.workers) {
    v1::Worker* worker = out->add_workers();
    worker->set_name(w.name);
    worker->set_pid(w.pid);
    worker->set_state(w.state);
    worker->set_restarts(w.restarts);
    worker->set_detail(w.detail);
    for (const auto& [name, value] : w.statistics) (*worker->mutable_statistics())[name] = value;
  }
  out->set_running(s.running);
  out->set_queued(s.queued);
  out->set_slots(s.slots);
  out->set_kv_blocks(s.kv_blocks);
  out->set_kv_blocks_free(s.kv_blocks_free);
  out->set_hit_rate(s.hit_rate);
  out->set_pcie_share(s.pcie_share);
  out->set_seconds_since_progress(s.last_progress_ns ? Seconds(NowNs() - s.last_progress_ns) : 0);
  out->set_requests(context.counters->requests_submitted.load(std::memory_order_relaxed));
  out->set_tokens(context.counters->answer_tokens.load(std::memory_order_relaxed));
  out->set_model(context.model_id);
  for (const auto& [key, value] : s.facts) (*out->mutable_facts())[key] = value;
}

}  // namespace lode
