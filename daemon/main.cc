// loded: the daemon. Table of contents of the process; the chapters are in daemon/app.cc.
#include <cstdio>
#include <string>
#include <vector>

#include "daemon/app.h"
#include "shared/base/log.h"
#include "shared/base/version.h"

namespace {

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
