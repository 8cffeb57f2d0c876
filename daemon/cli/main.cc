// `lode`, the command line: a client of the daemon, and a few offline tools. Parsing and help only;
// commands.h has the rest.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <iostream>

#include "cpu_worker/bench/report.h"
#include "daemon/cli/commands.h"
#include "daemon/cli/interrupt.h"
#include "shared/base/process_limits.h"
#include "shared/base/version.h"

namespace lode::cli {
namespace {

// CLI::Range lets NaN through, as every comparison with it is false.
CLI::Validator Bias() {
  return CLI::Validator(
      [](const std::string& text) {
        char *token = nullptr, *end = nullptr;
        const long id = std::strtol(text.c_str(), &token, 10);
        if (token != text.c_str() && *token == '=' && id >= 0 && id <= INT32_MAX) {
          const double bias = std::strtod(token + 1, &end);
          if (end != token + 1 && *end == '\0' && std::isfinite(bias)) return std::string();
        }
        return fmt::format("'{}' is not TOKEN=BIAS, e.g. 198=-5", text);
      },
      "TOKEN=BIAS");
}
CLI::Validator Between(double low, double high) {
  return CLI::Validator(
      [low, high](const std::string& text) {
        char* end = nullptr;
        const double value = std::strtod(text.c_str(), &end);
        if (end != text.c_str() && *end == '\0' && value >= low && value <= high)
          return std::string();
        return fmt::format("'{}' is no number from {} to {}", text, low, high);
      },
      fmt::format("NUMBER in [{} - {}]", low, high));
}

// Digits that fit 64 bits; the parser's own conversion cuts larger numbers without a word.
CLI::Validator Seed() {
  return CLI::Validator(
      [](const std::string& text) {
        uint64_t value = 0;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
        if (error == std::errc() && end == text.data() + text.size() && !text.empty())
          return std::string();
        return fmt::format("'{}' is no whole number from 0 to {}", text, UINT64_MAX);
      },
      "UINT64");
}

// How many letters must change, appear, go or trade places with a neighbour; for guessing what was
// meant.
size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) {
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        d[i][j] = i + j;
        continue;
      }
      const size_t change = a[i - 1] == b[j - 1] ? 0 : 1;
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + change});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  }
  return d[a.size()][b.size()];
}

// One sentence when the first word is no command; empty when it is one, or a flag.
std::string UnknownCommand(const CLI::App& app, const std::string& word) {
  constexpr size_t kGuessable = 64;  // longer words are no typing mistakes
  std::string names, nearest;
  size_t least = SIZE_MAX;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    const std::string name = command->get_name();
    if (name == word) return "";
    names += (names.empty() ? "" : ", ") + name;
    const size_t distance = EditDistance(word.substr(0, kGuessable), name);
    // Half of the letters may be wrong; beyond that it is no guess.
    if (distance < least && distance * 2 <= std::max(name.size(), word.size())) {
      least = distance;
      nearest = name;
    }
  }
  return fmt::format("there is no command '{}'{}; there are {} (lode --help)", word,
                     nearest.empty() ? "" : "; did you mean '" + nearest + "'?", names);
}

void AddConnect(CLI::App* app, ConnectOptions* o) {
  auto* socket = app->add_option(
      "--socket", o->socket,
      "Unix socket or host:port of the daemon (else $LODE_SOCKET and the usual places)");
  // The daemon behind a socket serves the model it was started with.
  app->add_option(
         "--model", o->model,
         "Model for a private stack: GGUF file, shard, folder, or synth:...; a daemon that "
         "serves another one is left alone")
      ->excludes(socket);
  app->add_flag("--private", o->private_stack,
                "Start a private stack even when a daemon runs; it ends with the command")
      ->excludes(socket);
  app->add_option("--daemon-flag", o->daemon_flags,
                  "Passed on to a private loded, e.g. --daemon-flag=--cpu_workers=2")
      ->allow_extra_args(false)
      ->excludes(socket);
  app->add_flag("--quiet", o->quiet, "No progress on standard error");
}

void AddGenerate(CLI::App* app, RunOptions* o) {
  AddConnect(app, &o->connect);
  SamplingOptions& s = o->sampling;
  app->add_option("--system", o->system, "System message");
  app->add_option("-n,--max-tokens", s.max_tokens, "Longest answer, in tokens")
      ->check(CLI::Range(1, 1 << 20));
  app->add_option("-t,--temperature", s.temperature, "0 = always the likeliest token")
      ->check(Between(0, 100));
  app->add_option("--top-k", s.top_k, "Keep the k likeliest tokens; 0 = off")
      ->check(CLI::Range(0, 1 << 20));
  app->add_option("--top-p", s.top_p,
                  "Keep the likeliest tokens of this total probability; 1 = off")
      ->check(Between(1e-6, 1));
  app->add_option("--min-p", s.min_p, "Drop tokens below this share of the likeliest; 0 = off")
      ->check(Between(0, 1));
  app->add_option("--repetition-penalty", s.repetition_penalty,
                  "Divides the logits of tokens that were there; 1 = off");
  app->add_option("--presence-penalty", s.presence_penalty,
                  "Taken off the logits of tokens that were there; 0 = off");
  app->add_option("--frequency-penalty", s.frequency_penalty,
                  "Taken off once for every time a token was there; 0 = off");
  app->add_option("--logit-bias", s.logit_bias,
                  "Added to a token's logit (may be repeated; ids: lode tokenize)")
      ->check(Bias())
      ->allow_extra_args(false);
  app->add_option("--ban", s.banned, "A token that is never picked (may be repeated)")
      ->type_name("TOKEN")
      ->allow_extra_args(false);
  app->add_option("--seed", s.seed, "The same seed gives the same answer, always")->check(Seed());
  app->add_option("--stop", s.stop, "End the answer before this text (may be repeated)")
      ->allow_extra_args(false);
  DraftFlags& d = o->drafts;
  app->add_option("--spec", d.spec,
                  "Rows of a window: 1 = no drafts, N = at most N - 1 (never changes the answer)")
      ->check(CLI::Range(1, 8));
  app->add_option("--draft-source", d.source, "Where drafts come from: none, head, lookup or both")
      ->check(CLI::IsMember({"none", "head", "lookup", "both"}));
  app->add_option("--draft-min-p", d.min_p, "The draft head guesses on while it is this sure")
      ->check(Between(0, 1));
  auto* coupled =
      app->add_flag("--draft-coupled", d.coupled,
                    "The draft head draws like the answer, with the same random numbers");
  app->add_flag("--draft-argmax", d.uncoupled, "The draft head takes its likeliest token")
      ->excludes(coupled);
  app->add_flag("--draft-fixed", d.fixed, "Verify all drafts there are, not only those that pay");
  app->add_option("--mtp", o->mtp, "Separate draft-head file, of a private stack");
  app->add_option("--expert-slots", o->expert_slots,
                  "Experts in VRAM at most, of a private stack; 0 = the daemon's default")
      ->check(CLI::Range(0, 1 << 18));
  auto* think =
      app->add_flag("--think", o->think, "Ask the template for a thought before the answer");
  app->add_flag("--no-think", o->no_think, "Ask the template for no thought")->excludes(think);
  app->add_flag("--timing", o->timing, "Print where the time went, by stage and lane");
  app->add_flag(
      "--summary", o->summary,
      "Last line: tokens_per_second=... hit_rate=... pcie_share=... cpu_share=...; before "
      "it, what drafts did");
  app->add_flag("--hash", o->hash, "Print the hash over the logits of the answer");
}

struct BenchFlags {
  KernelBenchOptions kernels;
  bool json = false;
};
void AddBench(CLI::App* app, BenchFlags* flags, Status* status) {
  CLI::App* bench = app->add_subcommand("bench", "Measure this machine");
  bench->require_subcommand(1);
  CLI::App* kernels = bench->add_subcommand(
      "kernels", "How fast this CPU computes expert products, by format and instruction set");
  kernels->footer(kBenchKernelsAbout);
  AddBenchKernelsFlags(kernels, &flags->kernels, &flags->json);
  kernels->callback([=] { *status = BenchKernels(flags->kernels, flags->json, stdout, stderr); });
}

struct TokenizeOptions {
  ConnectOptions connect;
  std::string text;
  bool raw = false, counts = false;
};

CLI::App* AddTokenize(CLI::App* app, TokenizeOptions* o) {
  CLI::App* tokenize = app->add_subcommand("tokenize", "Show the tokens of a text");
  AddConnect(tokenize, &o->connect);
  tokenize->add_flag("--raw", o->raw, "Do not look for special tokens");
  tokenize->add_flag("--counts", o->counts,
                     "Read a corpus from standard input and print 'id count' lines (for the option "
                     "draft_vocab)");
  tokenize->add_option("text", o->text, "The text");
  return tokenize;
}

Status RunTokenize(const TokenizeOptions& o) {
  if (o.counts) return CountTokens(o.connect, std::cin, o.raw);
  if (o.text.empty())
    return InvalidArgument("give a text, or --counts and a corpus on standard input");
  return Tokenize(o.connect, o.text, o.raw);
}

constexpr int kUsageError = 2;

constexpr const char* kAbout =
    R"(Lode serves large mixture-of-experts language models on one workstation.

Examples:
  lode run --model model.gguf "Why is the sky blue?"   start a private stack, answer, stop it
  lode chat                                            talk to the running service
  lode run --timing -t 0 "Count to ten."               where does the time go?
  lode inspect model.gguf                              what is in a file, what would fit where
  lode eval text.txt --save a.json                     nats per token of a text
  lode bench kernels                                   how fast this CPU reads weights, by format)";

// What the commands were given, and how the one that ran ended.
struct Commands {
  RunOptions run, chat;
  ConnectOptions status, tune;
  TokenizeOptions tokenize;
  bool json = false, tensors = false;
  std::vector<std::string> changes;
  std::string file;
  EvalOptions eval;
  Status ended = OkStatus();
};

void AddAnswers(CLI::App& app, Commands* c) {
  CLI::App* run = app.add_subcommand("run", "Answer one prompt and end");
  AddGenerate(run, &c->run);
  CLI::Option* raw =
      run->add_flag("--raw", c->run.raw, "Continue the text itself, without the chat template");
  for (const char* of_template : {"--system", "--think", "--no-think"})
    raw->excludes(run->get_option(of_template));
  run->add_option("prompt", c->run.prompt, "The prompt; '-' reads standard input")->required();
  run->callback([c] { c->ended = Run(c->run); });

  CLI::App* chat = app.add_subcommand("chat", "A conversation on the terminal");
  AddGenerate(chat, &c->chat);
  chat->callback([c] { c->ended = Chat(c->chat); });
}

void AddQuestions(CLI::App& app, Commands* c) {
  CLI::App* status = app.add_subcommand("status", "What the daemon is doing");
  AddConnect(status, &c->status);
  status->add_flag("--json", c->json, "As JSON");
  status->callback([c] { c->ended = ShowStatus(c->status, c->json); });

  CLI::App* tune =
      app.add_subcommand("tune", "Show or change what a running daemon needs no restart for");
  AddConnect(tune, &c->tune);
  tune->add_option("changes", c->changes, "option=value, e.g. vram_budget=8GiB pull_share=0.4");
  tune->callback([c] { c->ended = Tune(c->tune, c->changes); });

  AddTokenize(&app, &c->tokenize)->callback([c] { c->ended = RunTokenize(c->tokenize); });
}

void AddTools(CLI::App& app, Commands* c) {
  CLI::App* inspect =
      app.add_subcommand("inspect", "What a model file holds and what would fit where");
  inspect->add_flag("--tensors", c->tensors, "List every tensor");
  inspect->add_option("model", c->file, "GGUF file, shard, folder, or synth:...")->required();
  inspect->callback([c] { c->ended = Inspect(c->file, c->tensors); });

  EvalOptions& eval = c->eval;
  CLI::App* command = app.add_subcommand("eval", "Teacher-forced nats per token of a text file");
  AddConnect(command, &eval.connect);
  command->add_option("--chunk", eval.chunk, "Tokens per request, each from a fresh state")
      ->check(CLI::Range(2, 1 << 20));
  command->add_option("--limit", eval.limit, "Score only this many tokens; 0 = all");
  command->add_option("--save", eval.save, "Write the run as JSON");
  command->add_option("--compare", eval.compare, "Top-1 agreement with a saved run");
  command->add_option("file", eval.file, "The text")->required();
  command->callback([c] { c->ended = Eval(c->eval); });
}

int Main(int argc, char** argv) {
  CLI::App app{kAbout};
  app.name("lode");
  app.set_version_flag("--version", std::string("lode ") + kVersion);
  app.require_subcommand(1);
  Commands commands;
  AddAnswers(app, &commands);
  AddQuestions(app, &commands);
  AddTools(app, &commands);
  BenchFlags bench;
  AddBench(&app, &bench, &commands.ended);
  if (argc > 1 && argv[1][0] != '-') {
    if (const std::string unknown = UnknownCommand(app, argv[1]); !unknown.empty()) {
      std::fprintf(stderr, "lode: %s\n", unknown.c_str());
      return kUsageError;
    }
  }
  WatchInterrupts();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // help, version
    std::fprintf(stderr, "lode: %s (%s --help tells more)\n", error.what(),
                 argc > 1 && argv[1][0] != '-' ? fmt::format("lode {}", argv[1]).c_str() : "lode");
    return kUsageError;
  }
  const Status& ended = commands.ended;
  if (ended.ok()) return 0;
  std::fprintf(stderr, "lode: %s\n", Message(ended).c_str());
  return ended.code() == StatusCode::kCancelled && WasInterrupted() ? kInterruptedExit : 1;
}

}  // namespace
}  // namespace lode::cli

int main(int argc, char** argv) {
  lode::InstallLastWords("lode");
  // Libraries and threads of a client; 1 MiB is the log of a private daemon.
  const lode::LimitNeeds needs = {
      .open_files = 32, .address_space_bytes = 1ull << 30, .file_bytes = 1 << 20};
  if (const lode::Status limits = lode::CheckProcessLimits(needs); !limits.ok()) {
    std::fprintf(stderr, "lode: %s\n", lode::Message(limits).c_str());
    return 1;
  }
  return lode::cli::Main(argc, argv);
}
