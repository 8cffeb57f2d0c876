// Assembly of the in-process engine: see local_engine.h.
#include "gpu_worker/local_engine.h"

#include "shared/base/check.h"

namespace lode {

StatusOr<std::unique_ptr<LocalEngine>> LocalEngine::Create(const std::string& model,
                                                           const LocalEngineOptions& options) {
  std::unique_ptr<LocalEngine> e(new LocalEngine);
  LODE_ASSIGN_OR_RETURN(e->source_, ModelSource::Open(model));
  const ModelConfig& config = e->source_->config();
  LODE_RETURN_IF_ERROR(CheckComputable(*e->source_));
  LODE_ASSIGN_OR_RETURN(e->device_,
                        CpuDevice::Create(config, {.threads = options.threads,
                                                   .cpus = {},
                                                   .lock_memory = false,
                                                   .spin_ns = 0,
                                                   .isa = options.isa,
                                                   .float_reference = options.float_reference,
                                                   .context = options.context,
                                                   .drafts = options.drafts}));
  LODE_ASSIGN_OR_RETURN(e->weights_, ModelWeights::Load(*e->source_, *e->device_, nullptr));
  e->slots_ = LocalSlots(options.slots, options.context);
  LODE_ASSIGN_OR_RETURN(e->state_,
                        SequenceState::Create(config, *e->device_,
                                              {.slots = options.slots,
                                               .kv_blocks = e->slots_.kv_blocks(),
                                               .context = options.context,
                                               .kv_type = options.kv_type,
                                               .drafts = options.drafts}));
  if (!config.ple.empty()) {
    LODE_ASSIGN_OR_RETURN(e->ple_, PleReader::Create(*e->source_));
  }
  LODE_ASSIGN_OR_RETURN(e->lanes_, LocalExpertLanes::Load(*e->source_, *e->device_));
  LODE_ASSIGN_OR_RETURN(
      e->forward_, Forward::Create(config, e->weights_, *e->device_, *e->state_, e->ple_.get()));
  if (options.drafts) LODE_RETURN_IF_ERROR(e->LoadDrafter(options));
  e->stage_ns_.assign(kStages, 0);
  return e;
}

Status LocalEngine::LoadDrafter(const LocalEngineOptions& options) {
  std::unique_ptr<ModelSource> separate;
  if (!options.mtp.empty()) {
    LODE_ASSIGN_OR_RETURN(separate, ModelSource::OpenDraftHead(options.mtp, config()));
  }
  const ModelSource& head = separate != nullptr ? *separate : *source_;
  if (head.config().nextn_layers == 0)
    return InvalidArgument("{} has no draft block", source_->description());
  LODE_ASSIGN_OR_RETURN(draft_weights_, DraftWeights::Load(head, *source_, weights_, *device_,
                                                           options.draft_vocabulary));
  draft_weights_.full_width_norm = options.mtp_full_width_norm;
  LODE_ASSIGN_OR_RETURN(draft_lanes_, LocalExpertLanes::LoadDraft(head, *device_));
  LODE_ASSIGN_OR_RETURN(drafter_, Drafter::Create(config(), draft_weights_, weights_, *device_,
                                                  state_->draft_attention(), *draft_lanes_));
  return OkStatus();
}

StatusOr<WindowOutcome> LocalEngine::Draft(std::span<const LocalDraftRow> rows, bool chained) {
  if (drafter_ == nullptr) return FailedPrecondition("the engine was made without drafts");
  if (rows.size() > kWindowRowsMax)
    return InvalidArgument("{} rows do not fit one pass of {}", rows.size(), kWindowRowsMax);
  return drafter_->Step(DraftParams(rows), chained ? drafter_->wide() : forward_->wide());
}

WindowOutcome LocalEngine::RunWindow(const StepParams& params, ExpertLanes* lanes) {
  return forward_->Run(params, lanes == nullptr ? *lanes_ : *lanes, stage_ns_.data());
}

StatusOr<WindowOutcome> LocalEngine::Run(std::span<const LocalRow> rows, ExpertLanes* lanes) {
  LODE_ASSIGN_OR_RETURN(const StepParams params, slots_.Stage(rows, state_.get()));
  return RunWindow(params, lanes);
}

StatusOr<WindowOutcome> LocalEngine::Flush(uint32_t slot) {
  LODE_ASSIGN_OR_RETURN(const StepParams params, slots_.StageFlush(slot, state_.get()));
  return RunWindow(params, nullptr);
}

}  // namespace lode
