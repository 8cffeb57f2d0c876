// The daemon's parts in the order of their lives, for main.cc: each step builds on those before it,
// and Stop undoes them in reverse. Main thread.
#pragma once

#include <memory>
#include <string>

#include "daemon/api/admin_server.h"
#include "daemon/api/api.h"
#include "daemon/chat_template.h"
#include "daemon/runtime_dir.h"
#include "daemon/scheduler.h"
#include "daemon/setup.h"
#include "daemon/supervisor.h"
#include "daemon/tuning.h"
#include "shared/config/config.h"

namespace lode {

class App {
 public:
  explicit App(const Options& options);
  ~App();  // Stop()

  // SIGTERM and SIGINT are taken by Serve and the waits, in every thread made later; SIGPIPE is
  // ignored.
  static void TakeSignals();

  Status OpenModel();      // runtime folder and lock, model source, tokenizer, chat template
  Status StartEngine();    // supervisor with its workers, scheduler
  Status StartServices();  // client API and metrics; answers "loading" until Ready
  Status
  WaitReady();  // workers loaded, a token really came out of them; then tells the service manager
  Status Serve();  // until SIGTERM or SIGINT (OK) or the engine fails (why)
  void Stop();     // drain, services, scheduler, workers

 private:
  bool SignalPending();
  std::string AdminSocket() const;
  void TellLoading(const std::string& text);
  void ApplyInstructionSets();

  Options options_;
  RuntimeDir dir_;
  std::unique_ptr<ModelSource> source_;
  TokenizerData tokenizer_data_;
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<ChatTemplate> chat_template_;
  std::unique_ptr<Supervisor> supervisor_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<Tuning> tuning_;
  std::unique_ptr<AdminServer> admin_;
  std::unique_ptr<ApiServer> api_;
  bool stopping_ = false;  // a signal came
};

}  // namespace lode
