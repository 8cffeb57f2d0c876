// See daemon/app.h.
#include "daemon/app.h"

#include <signal.h>
#include <systemd/sd-daemon.h>
#include <time.h>

#include <algorithm>
#include <filesystem>
#include <thread>

#include "shared/base/log.h"
#include "shared/shm/wait_word.h"

namespace lode {
namespace {

// An orderly stop lets running answers go on this long; the unit's TimeoutStopSec is above the sum
// of all steps.
constexpr double kDrainSeconds = 10;
constexpr double kApiShutdownSeconds = 2;
constexpr uint64_t kTickMs = 500;  // signals, watchdog, engine state

uint64_t In(double seconds) { return NowNs() + static_cast<uint64_t>(seconds * 1e9); }

std::string ModelId(const std::string& description) {
  if (description.rfind("synth:", 0) == 0) return description;
  return std::filesystem::path(description).stem().string();
}

}  // namespace

App::App(const Options& options) : options_(options) {}

App::~App() { Stop(); }

void App::TakeSignals() {
  signal(SIGPIPE, SIG_IGN);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
}

// Waits for at most a tick.
bool App::SignalPending() {
  if (stopping_) return true;
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  const timespec tick = {0, static_cast<long>(kTickMs) * 1'000'000};
  const int signal = sigtimedwait(&set, nullptr, &tick);
  if (signal > 0) {
    spdlog::info("signal {}: stopping", signal);
    stopping_ = true;
  }
  return stopping_;
}

Status App::OpenModel() {
  LODE_ASSIGN_OR_RETURN(dir_, OpenRuntimeDir(options_.runtime_dir));
  options_.runtime_dir = dir_.path;
  LODE_ASSIGN_OR_RETURN(source_, ModelSource::Open(options_.model));
  LODE_ASSIGN_OR_RETURN(tokenizer_data_, source_->tokenizer());
  LODE_ASSIGN_OR_RETURN(tokenizer_, Tokenizer::Create(tokenizer_data_));
  if (tokenizer_data_.chat_template.empty()) return OkStatus();
  ChatTemplateOptions chat;
  chat.deadline = std::chrono::milliseconds(static_cast<int64_t>(options_.template_seconds * 1000));
  for (const auto& [name, id] :
       {std::pair{"bos_token", tokenizer_->bos_id()}, {"eos_token", tokenizer_->eos_id()}}) {
    if (id >= 0) chat.special_tokens.emplace_back(name, std::string(tokenizer_->TokenBytes(id)));
  }
  chat.control_tokens = tokenizer_->ControlNames();
  auto made = ChatTemplate::Create(tokenizer_data_.chat_template, chat);
  if (made.ok())
    chat_template_ = std::move(*made);
  else
    spdlog::warn("chat is not available: {}",
                 Message(made.status()));  // generation from raw prompts is
  return OkStatus();
}

Status App::StartEngine() {
  LODE_ASSIGN_OR_RETURN(const Topology topology, ReadTopology(TopologyOptions::FromEnvironment()));
  const std::string worker_dir = options_.worker_dir.empty() ? BinaryDir() : options_.worker_dir;
  LODE_ASSIGN_OR_RETURN(
      EngineSetup setup,
      MakeSetup(options_, *source_, topology, dir_.control_path + "/workers.sock", worker_dir));
  spdlog::info("{}", setup.summary);
  const Tunables& chosen = setup.scheduler.tunables;
  const TuningDefaults defaults = {chosen.vram_budget_bytes, chosen.pull_share,
                                   setup.scheduler.facts["device"] == "cuda"};
  setup.scheduler.facts["admin_socket"] = AdminSocket();
  LODE_ASSIGN_OR_RETURN(supervisor_, Supervisor::Create(std::move(setup.supervisor)));
  scheduler_ =
      std::make_unique<Scheduler>(std::move(setup.scheduler), supervisor_.get(), tokenizer_.get());
  tuning_ = std::make_unique<Tuning>(options_, defaults, [this](const TunablesChange& change) {
    return scheduler_->SetTunables(change);
  });
  supervisor_->Start();
  return OkStatus();
}

// Absolute: clients with another working folder read it in the status.
std::string App::AdminSocket() const {
  std::error_code error;
  const auto path = std::filesystem::absolute(dir_.control_path + "/admin.sock", error);
  return error ? dir_.control_path + "/admin.sock" : path.string();
}

Status App::StartServices() {
  LODE_ASSIGN_OR_RETURN(admin_, AdminServer::Start(AdminSocket(), [this](const auto& changes) {
                          return tuning_->Tune(changes);
                        }));
  ApiContext context;
  context.options = &options_;
  context.source = source_.get();
  context.tokenizer_data = &tokenizer_data_;
  context.tokenizer = tokenizer_.get();
  context.chat_template = chat_template_.get();
  context.engine = scheduler_.get();
  context.counters = &scheduler_->counters();
  context.model_id = ModelId(source_->description());
  LODE_ASSIGN_OR_RETURN(api_, StartApi(context));
  spdlog::info("client API at {}", api_->endpoints());
  return OkStatus();
}

// While anything loads, systemd's start timeout moves along; it ends when loading makes no progress
// for load_seconds.
void App::TellLoading(const std::string& text) {
  const uint64_t age = NowNs() - supervisor_->last_progress_ns();
  if (static_cast<double>(age) > options_.load_seconds * 1e9) return;
  const uint64_t extend_us = static_cast<uint64_t>(options_.load_seconds * 1e6) + 10'000'000;
  sd_notify(0, fmt::format("STATUS=loading {:.0f}%: {}\nEXTEND_TIMEOUT_USEC={}",
                           supervisor_->load_progress() * 100, text, extend_us)
                   .c_str());
}

// The workers chose their kernel tables when they loaded; windows name them by index.
void App::ApplyInstructionSets() {
  const auto index = [&](WorkerRole role, uint32_t worker) {
    const auto facts = supervisor_->Facts(role, worker);
    const auto it = facts.find("isa");
    return it == facts.end() ? 0 : IsaIndex(it->second);
  };
  TunablesChange change;
  change.device_isa = index(WorkerRole::kGpu, 0);
  for (uint32_t i = 0; i + 1 < supervisor_->Workers().size(); ++i)
    change.cpu_isa.emplace_back(i, index(WorkerRole::kCpu, i));
  const Status status = scheduler_->SetTunables(change);
  if (!status.ok()) spdlog::error("instruction sets: {}", Message(status));
}

Status App::WaitReady() {
  LODE_RETURN_IF_ERROR(supervisor_->WaitReady([&] {
    TellLoading(supervisor_->LoadingText());
    return !SignalPending();
  }));
  ApplyInstructionSets();
  TellLoading("warm-up");
  LODE_RETURN_IF_ERROR(scheduler_->WarmUp(In(options_.load_seconds)));
  scheduler_->SetAccepting(true);
  if (api_) api_->SetServing(true);
  sd_notify(0, "READY=1\nSTATUS=ready");
  spdlog::info("ready");
  return OkStatus();
}

Status App::Serve() {
  uint64_t watchdog_us = 0;
  const bool watchdog = sd_watchdog_enabled(0, &watchdog_us) > 0;
  std::string state;
  while (!SignalPending()) {
    LODE_RETURN_IF_ERROR(supervisor_->failure());
    // Real progress only: windows while there is work, the loop itself while there is none, loading
    // after a restart.
    const uint64_t progress =
        std::max(scheduler_->last_progress_ns(), supervisor_->last_progress_ns());
    if (watchdog && NowNs() - progress < watchdog_us * 1000 / 2) sd_notify(0, "WATCHDOG=1");
    const EngineSnapshot snapshot = scheduler_->Snapshot();
    if (snapshot.state != state) {
      state = snapshot.state;
      sd_notify(0, fmt::format("STATUS={}{}{}", state, snapshot.detail.empty() ? "" : ": ",
                               snapshot.detail)
                       .c_str());
    }
  }
  return OkStatus();
}

void App::Stop() {
  sd_notify(0, "STOPPING=1\nSTATUS=draining");
  if (api_) api_->SetServing(false);
  if (scheduler_) {
    const bool healthy = supervisor_->failure().ok();
    scheduler_->Drain(In(healthy ? kDrainSeconds : 0));
    scheduler_->Stop();
  }
  if (api_) api_->Shutdown(In(kApiShutdownSeconds));
  api_.reset();
  admin_.reset();
  if (supervisor_) supervisor_->Stop();
  scheduler_.reset();
  supervisor_.reset();
}

}  // namespace lode
