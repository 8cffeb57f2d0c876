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
  e->blocks_per_slot_ = (options.context + kKvBlockCells - 1) / kKvBlockCells;
  LODE_ASSIGN_OR_RETURN(e->state_,
                        SequenceState::Create(config, *e->device_,
                                              {.slots = options.slots,
                                               .kv_blocks = options.slots * e->blocks_per_slot_,
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
  e->epochs_.assign(options.slots, 1);
  e->committed_.assign(options.slots, 0);
  e->kv_blocks_.resize(options.slots);
  // Blocks of the slots interleave, so that a mistake in the block table cannot hide behind
  // contiguous memory.
  for (uint32_t b = 0; b < e->blocks_per_slot_; ++b) {
    for (uint32_t s = 0; s < options.slots; ++s)
      e->kv_blocks_[s].push_back(b * options.slots + (options.slots - 1 - s));
  }
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
  StepParams params = {};
  for (const LocalDraftRow& r : rows) {
    if (params.n_seqs == 0 || params.seqs[params.n_seqs - 1].slot != r.slot) {
      params.seqs[params.n_seqs++] = {
          .slot = r.slot, .committed = r.position, .first_row = params.n_rows, .n_rows = 0};
    }
    ++params.seqs[params.n_seqs - 1].n_rows;
    params.rows[params.n_rows++] = {params.n_seqs - 1, r.position, r.token, r.needs_logits ? 1u : 0u,
                                    r.source};
  }
  return drafter_->Step(params, chained ? drafter_->wide() : forward_->wide());
}

void LocalEngine::AddSequence(uint32_t slot, WindowPlan* plan) const {
  SequencePlan& q = plan->seqs[plan->n_seqs++];
  q.epoch = epochs_[slot];
  q.slot = slot;
  q.committed = committed_[slot];
  q.block_count = blocks_per_slot_;
}

StatusOr<WindowOutcome> LocalEngine::RunPlan(const WindowPlan& plan, ExpertLanes* lanes) {
  const uint32_t* blocks[kWindowRowsMax] = {};
  for (uint32_t i = 0; i < plan.n_seqs; ++i) blocks[i] = kv_blocks_[plan.seqs[i].slot].data();
  StepParams params;
  uint32_t row_of[kWindowRowsMax];
  LODE_RETURN_IF_ERROR(state_->Stage(plan, blocks, &params, row_of));
  return forward_->Run(params, lanes == nullptr ? *lanes_ : *lanes, stage_ns_.data());
}

StatusOr<WindowOutcome> LocalEngine::Run(std::span<const LocalRow> rows, ExpertLanes* lanes) {
  if (rows.size() > kWindowRowsMax)
    return InvalidArgument("{} rows do not fit one window of {}", rows.size(), kWindowRowsMax);
  WindowPlan plan = {};
  for (const LocalRow& r : rows) {
    if (r.slot >= epochs_.size()) return InvalidArgument("slot {} of {}", r.slot, epochs_.size());
    if (plan.n_seqs == 0 || plan.seqs[plan.n_seqs - 1].slot != r.slot) AddSequence(r.slot, &plan);
    RowPlan& row = plan.rows[plan.n_rows++];
    row.seq_index = plan.n_seqs - 1;
    row.position = r.position;
    row.token = r.token;
    row.kind = RowKind::kPrompt;
    row.needs_logits = r.needs_logits;
  }
  return RunPlan(plan, lanes);
}

StatusOr<WindowOutcome> LocalEngine::Flush(uint32_t slot) {
  WindowPlan plan = {};
  AddSequence(slot, &plan);
  return RunPlan(plan, nullptr);
}

}  // namespace lode
