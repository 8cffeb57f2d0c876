// `lode run` and `lode chat`: send a prompt, print the answer as it comes, then (asked) where the
// time went.
#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <iterator>
#include <utility>

#include "daemon/cli/commands.h"
#include "daemon/cli/interrupt.h"

namespace lode::cli {
namespace {

void FillSampling(const SamplingOptions& in, v1::Sampling* sampling, v1::Limits* limits) {
  if (in.temperature >= 0) sampling->set_temperature(static_cast<float>(in.temperature));
  if (in.top_p >= 0) sampling->set_top_p(static_cast<float>(in.top_p));
  if (in.min_p >= 0) sampling->set_min_p(static_cast<float>(in.min_p));
  if (in.top_k >= 0) sampling->set_top_k(static_cast<uint32_t>(in.top_k));
  const auto as_float = [](double x) { return static_cast<float>(x); };
  if (in.repetition_penalty) sampling->set_repetition_penalty(as_float(*in.repetition_penalty));
  if (in.presence_penalty) sampling->set_presence_penalty(as_float(*in.presence_penalty));
  if (in.frequency_penalty) sampling->set_frequency_penalty(as_float(*in.frequency_penalty));
  for (const std::string& entry : in.logit_bias) {
    const size_t equals = entry.find('=');
    const auto token = static_cast<int32_t>(std::strtol(entry.c_str(), nullptr, 10));
    (*sampling->mutable_logit_bias())[token] = std::strtof(entry.c_str() + equals + 1, nullptr);
  }
  for (const int32_t token : in.banned) sampling->add_banned_tokens(token);
  if (in.seed) sampling->set_seed(*in.seed);
  if (in.max_tokens >= 0) limits->set_max_tokens(static_cast<uint32_t>(in.max_tokens));
  for (const std::string& stop : in.stop) limits->add_stop(stop);
}

void FillDrafts(const DraftFlags& in, v1::Drafts* drafts) {
  if (in.spec >= 1) drafts->set_max(static_cast<uint32_t>(in.spec - 1));
  if (!in.source.empty()) drafts->set_source(in.source);
  if (in.min_p >= 0) drafts->set_min_p(static_cast<float>(in.min_p));
  if (in.coupled || in.uncoupled) drafts->set_coupled(in.coupled);
  if (in.fixed) drafts->set_fixed(true);
}

// What belongs to the daemon's start needs a stack of its own.
StatusOr<ConnectOptions> ConnectionOf(const RunOptions& options) {
  ConnectOptions connect = options.connect;
  if (options.expert_slots < 0 && options.mtp.empty()) return connect;
  if (connect.model.empty()) {
    return InvalidArgument(
        "--expert-slots limits the tier of a private stack, and --mtp is read by one: give "
        "--model, "
        "or start the daemon with these options");
  }
  connect.private_stack = true;
  if (options.expert_slots >= 0)
    connect.daemon_flags.push_back(fmt::format("--expert_slots={}", options.expert_slots));
  if (!options.mtp.empty()) connect.daemon_flags.push_back("--mtp=" + options.mtp);
  return connect;
}

// Reads the stream to its end; prints text as it comes.
template <class Response>
StatusOr<v1::Finish> Print(grpc::ClientReader<Response>& reader, std::string* answer) {
  Response response;
  v1::Finish finish;
  bool finished = false;
  while (reader.Read(&response)) {
    if (response.has_delta()) {
      const std::string& text = response.delta().text();
      std::fwrite(text.data(), 1, text.size(), stdout);
      std::fflush(stdout);
      *answer += text;
    } else if (response.has_finish()) {
      finish = response.finish();
      finished = true;
    }
  }
  const grpc::Status status = reader.Finish();
  if (!answer->empty() && answer->back() != '\n') std::fputc('\n', stdout);
  std::fflush(stdout);
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE) {
    return Unavailable("the daemon went away{} ({}); its log says why",
                       answer->empty() ? "" : " in the middle of the answer",
                       status.error_message());
  }
  if (!status.ok() && status.error_code() != grpc::StatusCode::CANCELLED) return FromGrpc(status);
  if (finished && finish.reason() == v1::FINISH_REASON_ERROR)
    return Internal("the answer ended early: {}", finish.error());
  if (!finished) finish.set_reason(v1::FINISH_REASON_CANCELLED);
  return finish;
}

double TokensPerSecond(const v1::Usage& usage) {
  // The first token belongs to the prompt; the rest took decode_seconds.
  const double decoded = usage.completion_tokens() > 1 ? usage.completion_tokens() - 1 : 0;
  return usage.decode_seconds() > 0 ? decoded / usage.decode_seconds() : 0;
}

void PrintDrafts(const v1::Usage& usage) {
  const v1::TimingBreakdown& timing = usage.timing();
  std::fprintf(stderr, "tokens   %.2f per window; drafting %.3f s, verifying %.3f s\n",
               usage.tokens_per_window(), timing.draft_seconds(), timing.verify_seconds());
  for (const v1::DraftCount& d : usage.drafts()) {
    std::fprintf(stderr, "drafts   %-6s depth %u: %u of %u held\n", d.source().c_str(), d.depth(),
                 d.accepted(), d.offered());
  }
}

void PrintTiming(const v1::Finish& finish) {
  const v1::Usage& usage = finish.usage();
  const v1::TimingBreakdown& timing = usage.timing();
  std::fprintf(stderr,
               "\nprompt   %u tokens in %.3f s (queued %.3f s)\nanswer   %u tokens in %.3f s, %.2f "
               "tokens/s, seed %llu\n",
               usage.prompt_tokens(), usage.prompt_seconds(), usage.queue_seconds(),
               usage.completion_tokens(), usage.decode_seconds(), TokensPerSecond(usage),
               static_cast<unsigned long long>(finish.seed()));
  PrintDrafts(usage);
  const double windows = std::max<double>(1, static_cast<double>(timing.windows()));
  std::fprintf(stderr, "windows  %llu, %.3f ms each\n",
               static_cast<unsigned long long>(timing.windows()),
               timing.window_seconds() / windows * 1e3);
  std::vector<std::pair<double, std::string>> stages;
  double known = 0;
  for (const auto& [name, seconds] : timing.stage_seconds()) {
    if (seconds > 0) stages.emplace_back(seconds, name);
    known += seconds;
  }
  stages.emplace_back(std::max(0.0, timing.window_seconds() - known), "other");
  std::sort(stages.rbegin(), stages.rend());
  std::fprintf(stderr, "%-10s %12s %8s\n", "stage", "ms/window", "share");
  for (const auto& [seconds, name] : stages) {
    std::fprintf(stderr, "%-10s %12.4f %7.1f%%\n", name.c_str(), seconds / windows * 1e3,
                 timing.window_seconds() > 0 ? seconds / timing.window_seconds() * 100 : 0);
  }
  std::fprintf(stderr, "%-10s %12s %12s %14s %10s\n", "lane", "lookups", "ms/window", "MB/window",
               "GB/s");
  for (const char* lane : {"hit", "pull", "cpu"}) {
    const double seconds = timing.lane_seconds().count(lane) ? timing.lane_seconds().at(lane) : 0;
    const double bytes =
        timing.lane_bytes().count(lane) ? static_cast<double>(timing.lane_bytes().at(lane)) : 0;
    const uint64_t lookups = timing.lane_lookups().count(lane) ? timing.lane_lookups().at(lane) : 0;
    std::fprintf(stderr, "%-10s %12llu %12.4f %14.3f %10.2f\n", lane,
                 static_cast<unsigned long long>(lookups), seconds / windows * 1e3,
                 bytes / windows * 1e-6, seconds > 0 ? bytes / seconds * 1e-9 : 0);
  }
  std::fprintf(stderr, "hit_rate %.3f, of the misses: pcie_share %.3f, cpu_share %.3f\n",
               usage.hit_rate(), usage.pcie_share(), usage.cpu_share());
}

void PrintEnd(const RunOptions& options, const v1::Finish& finish) {
  if (options.timing) PrintTiming(finish);
  if (options.hash)
    std::printf("logits_hash=%016llx\n", static_cast<unsigned long long>(finish.logits_hash()));
  if (options.summary) {
    const v1::Usage& usage = finish.usage();
    std::printf("tokens_per_window=%.2f drafted=%u accepted=%u\n", usage.tokens_per_window(),
                usage.drafted_tokens(), usage.accepted_draft_tokens());
    std::printf("tokens_per_second=%.2f hit_rate=%.3f pcie_share=%.3f cpu_share=%.3f\n",
                TokensPerSecond(usage), usage.hit_rate(), usage.pcie_share(), usage.cpu_share());
  }
}

void FillThinking(const RunOptions& options, v1::ChatRequest* request) {
  if (options.think) (*request->mutable_template_options_json())["enable_thinking"] = "true";
  if (options.no_think) (*request->mutable_template_options_json())["enable_thinking"] = "false";
}

StatusOr<v1::Finish> SendChat(Client& client, const v1::ChatRequest& request, std::string* answer) {
  grpc::ClientContext call;
  const CancelOnInterrupt interrupt(&call);
  const auto reader = client.stub().Chat(&call, request);
  return Print(*reader, answer);
}

StatusOr<std::string> ReadPrompt(const std::string& prompt) {
  if (prompt != "-") return prompt;
  std::string text((std::istreambuf_iterator<char>(std::cin)), std::istreambuf_iterator<char>());
  if (text.empty()) return InvalidArgument("standard input is empty; give a prompt");
  return text;
}

Status CheckTexts(const RunOptions& options) {
  LODE_RETURN_IF_ERROR(CheckUtf8("the system message", options.system));
  for (const std::string& stop : options.sampling.stop)
    LODE_RETURN_IF_ERROR(CheckUtf8("a stop string", stop));
  return OkStatus();
}

void AddMessage(v1::ChatRequest* request, const char* role, const std::string& content) {
  v1::ChatMessage* message = request->add_messages();
  message->set_role(role);
  message->set_content(content);
}

}  // namespace

Status Run(const RunOptions& options) {
  LODE_RETURN_IF_ERROR(CheckTexts(options));
  LODE_ASSIGN_OR_RETURN(const std::string prompt, ReadPrompt(options.prompt));
  LODE_RETURN_IF_ERROR(CheckUtf8("the prompt", prompt));
  LODE_ASSIGN_OR_RETURN(const ConnectOptions connect, ConnectionOf(options));
  LODE_ASSIGN_OR_RETURN(const auto client, Client::Connect(connect));
  std::string answer;
  StatusOr<v1::Finish> finish = Internal("not sent");
  if (options.raw) {
    v1::GenerateRequest request;
    request.set_text(prompt);
    FillSampling(options.sampling, request.mutable_sampling(), request.mutable_limits());
    request.mutable_limits()->set_hash_logits(options.hash);
    FillDrafts(options.drafts, request.mutable_drafts());
    grpc::ClientContext call;
    const CancelOnInterrupt interrupt(&call);
    const auto reader = client->stub().Generate(&call, request);
    finish = Print(*reader, &answer);
  } else {
    v1::ChatRequest request;
    if (!options.system.empty()) AddMessage(&request, "system", options.system);
    AddMessage(&request, "user", prompt);
    FillSampling(options.sampling, request.mutable_sampling(), request.mutable_limits());
    request.mutable_limits()->set_hash_logits(options.hash);
    FillDrafts(options.drafts, request.mutable_drafts());
    FillThinking(options, &request);
    finish = SendChat(*client, request, &answer);
  }
  if (!finish.ok()) return finish.status();
  PrintEnd(options, *finish);
  if (finish->reason() != v1::FINISH_REASON_CANCELLED) return OkStatus();
  if (WasInterrupted()) return Error(StatusCode::kCancelled, "the answer was cancelled");
  return Unavailable("the daemon cancelled the answer: {}",
                     finish->error().empty() ? "the call was cut" : finish->error());
}

Status Chat(const RunOptions& options) {
  LODE_RETURN_IF_ERROR(CheckTexts(options));
  LODE_ASSIGN_OR_RETURN(const ConnectOptions connect, ConnectionOf(options));
  LODE_ASSIGN_OR_RETURN(const auto client, Client::Connect(connect));
  v1::ChatRequest request;
  FillSampling(options.sampling, request.mutable_sampling(), request.mutable_limits());
  request.mutable_limits()->set_hash_logits(options.hash);
  FillDrafts(options.drafts, request.mutable_drafts());
  FillThinking(options, &request);
  if (!options.system.empty()) AddMessage(&request, "system", options.system);
  const bool terminal = isatty(STDIN_FILENO) != 0;
  if (terminal)
    std::fprintf(stderr,
                 "Connected to %s. An empty line, /exit or Ctrl-D ends; Ctrl-C stops an answer; "
                 "/new forgets.\n",
                 client->target().c_str());
  std::string line;
  for (;;) {
    if (terminal) std::fprintf(stderr, "> ");
    if (!std::getline(std::cin, line) || line == "/exit") return OkStatus();
    if (line.empty()) {
      if (terminal) return OkStatus();
      continue;  // a piped text has empty lines
    }
    if (const Status valid = CheckUtf8("the line", line); !valid.ok()) {
      std::fprintf(stderr, "lode: %s\n", Message(valid).c_str());
      continue;
    }
    if (line == "/new") {
      request.clear_messages();
      if (!options.system.empty()) AddMessage(&request, "system", options.system);
      continue;
    }
    if (terminal && line[0] == '/') {
      std::fprintf(stderr, "lode: there is no command '%s'; there are /new and /exit\n",
                   line.c_str());
      continue;
    }
    AddMessage(&request, "user", line);
    std::string answer;
    StatusOr<v1::Finish> finish = SendChat(*client, request, &answer);
    if (!finish.ok()) {
      // Nobody is left to talk to.
      if (finish.status().code() == StatusCode::kUnavailable) return finish.status();
      // The turn failed: say so, forget it, go on.
      std::fprintf(stderr, "lode: %s\n", Message(finish.status()).c_str());
      request.mutable_messages()->RemoveLast();
      continue;
    }
    AddMessage(&request, "assistant", answer);
    PrintEnd(options, *finish);
  }
}

}  // namespace lode::cli
