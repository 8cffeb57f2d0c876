// `lode`, the command line: a client of the daemon, and a few offline tools. Parsing and help only;
// commands.h has the rest.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <iostream>

#include "cpu_worker/bench/report.h"
#include "daemon/cli/commands.h"
#include "daemon/cli/interrupt.h"
#include "shared/base/version.h"

namespace lode::cli {
namespace {

void AddConnect(CLI::App* app, ConnectOptions* o) {
  app->add_option(
      "--socket", o->socket,
      "Unix socket or host:port of the daemon (else $LODE_SOCKET and the usual places)");
  app->add_option("--model", o->model,
                  "Model for a private stack: GGUF file, shard, folder, or synth:...");
  app->add_flag("--private", o->private_stack,
                "Start a private stack even when a daemon runs; it ends with the command");
  app->add_option("--daemon-flag", o->daemon_flags,
                  "Passed on to a private loded, e.g. --daemon-flag=--cpu_workers=2")
      ->allow_extra_args(false);
  app->add_flag("--quiet", o->quiet, "No progress on standard error");
}

void AddGenerate(CLI::App* app, RunOptions* o) {
  AddConnect(app, &o->connect);
  SamplingOptions& s = o->sampling;
  app->add_option("--system", o->system, "System message");
  app->add_option("-n,--max-tokens", s.max_tokens, "Longest answer, in tokens")
      ->check(CLI::Range(1, 1 << 20));
  app->add_option("-t,--temperature", s.temperature, "0 = always the likeliest token")
      ->check(CLI::Range(0.0, 100.0));
  app->add_option("--top-k", s.top_k, "Keep the k likeliest tokens; 0 = off")
      ->check(CLI::Range(0, 1 << 20));
  app->add_option("--top-p", s.top_p,
                  "Keep the likeliest tokens of this total probability; 1 = off")
      ->check(CLI::Range(0.0, 1.0));
  app->add_option("--min-p", s.min_p, "Drop tokens below this share of the likeliest; 0 = off")
      ->check(CLI::Range(0.0, 1.0));
  app->add_option("--seed", s.seed, "The same seed gives the same answer, always")
      ->check(CLI::Range(int64_t{0}, INT64_MAX));
  app->add_option("--stop", s.stop, "End the answer before this text (may be repeated)")
      ->allow_extra_args(false);
  DraftFlags& d = o->drafts;
  app->add_option("--spec", d.spec,
                  "Rows of a window: 1 = no drafts, N = at most N - 1 (never changes the answer)")
      ->check(CLI::Range(1, 8));
  app->add_option("--draft-source", d.source, "Where drafts come from: none, head, lookup or both")
      ->check(CLI::IsMember({"none", "head", "lookup", "both"}));
  app->add_option("--draft-min-p", d.min_p, "The draft head guesses on while it is this sure")
      ->check(CLI::Range(0.0, 1.0));
  auto* coupled = app->add_flag("--draft-coupled", d.coupled,
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
  app->add_flag("--summary", o->summary,
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

int Main(int argc, char** argv) {
  CLI::App app{kAbout};
  app.name("lode");
  app.set_version_flag("--version", std::string("lode ") + kVersion);
  app.require_subcommand(1);
  Status status = OkStatus();

  RunOptions run;
  CLI::App* run_app = app.add_subcommand("run", "Answer one prompt and end");
  AddGenerate(run_app, &run);
  run_app->add_flag("--raw", run.raw, "Continue the text itself, without the chat template");
  run_app->add_option("prompt", run.prompt, "The prompt; '-' reads standard input")->required();
  run_app->callback([&] { status = Run(run); });

  RunOptions chat;
  CLI::App* chat_app = app.add_subcommand("chat", "A conversation on the terminal");
  AddGenerate(chat_app, &chat);
  chat_app->callback([&] { status = Chat(chat); });

  ConnectOptions status_connect;
  bool json = false;
  CLI::App* status_app = app.add_subcommand("status", "What the daemon is doing");
  AddConnect(status_app, &status_connect);
  status_app->add_flag("--json", json, "As JSON");
  status_app->callback([&] { status = ShowStatus(status_connect, json); });

  TokenizeOptions tokenize;
  CLI::App* tokenize_app = AddTokenize(&app, &tokenize);
  tokenize_app->callback([&] { status = RunTokenize(tokenize); });

  std::string file;
  bool tensors = false;
  CLI::App* inspect_app =
      app.add_subcommand("inspect", "What a model file holds and what would fit where");
  inspect_app->add_flag("--tensors", tensors, "List every tensor");
  inspect_app->add_option("model", file, "GGUF file, shard, folder, or synth:...")->required();
  inspect_app->callback([&] { status = Inspect(file, tensors); });

  EvalOptions eval;
  CLI::App* eval_app = app.add_subcommand("eval", "Teacher-forced nats per token of a text file");
  AddConnect(eval_app, &eval.connect);
  eval_app->add_option("--chunk", eval.chunk, "Tokens per request, each from a fresh state")
      ->check(CLI::Range(2, 1 << 20));
  eval_app->add_option("--limit", eval.limit, "Score only this many tokens; 0 = all");
  eval_app->add_option("--save", eval.save, "Write the run as JSON");
  eval_app->add_option("--compare", eval.compare, "Top-1 agreement with a saved run");
  eval_app->add_option("file", eval.file, "The text")->required();
  eval_app->callback([&] { status = Eval(eval); });

  BenchFlags bench;
  AddBench(&app, &bench, &status);

  WatchInterrupts();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kUsageError;
  }
  if (!status.ok()) std::fprintf(stderr, "lode: %s\n", Message(status).c_str());
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace lode::cli

int main(int argc, char** argv) { return lode::cli::Main(argc, argv); }
