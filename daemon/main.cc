// loded: the daemon. Table of contents of the process; the chapters are in daemon/app.cc.
#include <cstdio>
#include <string>
#include <vector>

#include "daemon/app.h"
#include "shared/base/log.h"
#include "shared/base/process_limits.h"
#include "shared/base/version.h"

namespace {

// Before the model: libraries, threads and sockets of a daemon with a few workers and clients. What
// the model needs on top is asked for when its size is known, and refused with its name.
constexpr lode::LimitNeeds kNeeds = {
    .open_files = 64, .address_space_bytes = 2ull << 30, .file_bytes = 1 << 20};

int Print(const std::string& text) {
  std::fputs(text.c_str(), stdout);
  return 0;
}

lode::Status Live(lode::App& app) {
  // What is served: the model file, its tokenizer and chat template.
  LODE_RETURN_IF_ERROR(app.OpenModel());
  // Who computes: worker processes and the scheduler that feeds them.
  LODE_RETURN_IF_ERROR(app.StartEngine());
  // Who asks: the client API and metrics; until ready they say that the model is loading.
  LODE_RETURN_IF_ERROR(app.StartServices());
  // From here on a token has really come out of every process, and nothing is allocated per request
  // but its own record.
  LODE_RETURN_IF_ERROR(app.WaitReady());
  // Until SIGTERM or SIGINT, or until the engine cannot go on.
  return app.Serve();
}

}  // namespace

int main(int argc, char** argv) {
  lode::InstallLastWords("loded");
  const auto line = lode::ParseCommandLine({argv + 1, argv + argc});
  if (!line.ok()) {
    std::fprintf(stderr, "loded: %s\n", lode::Message(line.status()).c_str());
    return 2;
  }
  using Action = lode::CommandLine::Action;
  if (line->action == Action::kHelp) return Print(lode::HelpText("loded"));
  if (line->action == Action::kVersion) return Print(std::string("loded ") + lode::kVersion + "\n");
  if (line->action == Action::kPrintMarkdown) return Print(lode::OptionsMarkdown());
  if (line->action == Action::kPrintExampleToml) return Print(lode::ExampleToml());

  if (const lode::Status limits = lode::CheckProcessLimits(kNeeds); !limits.ok()) {
    std::fprintf(stderr, "loded: %s\n", lode::Message(limits).c_str());
    return 1;
  }
  lode::InitLog("loded", line->options.log_level);
  spdlog::info("loded {} {}", lode::kVersion, lode::ChangedOptions(line->options));
  lode::App::TakeSignals();
  lode::App app(line->options);
  const lode::Status status = Live(app);
  if (!status.ok() && status.code() != lode::StatusCode::kCancelled)
    spdlog::error("{}", lode::Message(status));
  app.Stop();
  return status.ok() || status.code() == lode::StatusCode::kCancelled ? 0 : 1;
}
