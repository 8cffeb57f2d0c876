// See cuda_engine.h.
#include "tests/cuda/cuda_engine.h"

#include <algorithm>

namespace lode::testing {

StatusOr<std::unique_ptr<CudaListLanes>> CudaListLanes::Load(const ModelSource& source,
                                                             CudaDevice& device) {
  const ModelConfig& c = source.config();
  std::unique_ptr<CudaListLanes> lanes(new CudaListLanes(c, device));
  const auto load = [&](const TensorInfo& t) -> StatusOr<const uint8_t*> {
    std::vector<uint8_t> bytes(t.bytes);
    LODE_RETURN_IF_ERROR(source.ReadRows(t, 0, t.rows(), bytes.data()));
    LODE_ASSIGN_OR_RETURN(void* memory, device.Allocate(t.name, t.bytes));
    device.Upload(memory, bytes.data(), t.bytes);
    return static_cast<const uint8_t*>(memory);
  };
  for (uint32_t l = 0; l < c.layers; ++l) {
    Layer layer;
    LODE_ASSIGN_OR_RETURN(layer.tensors, FindExperts(source, l));
    const ExpertTensors& t = layer.tensors;
    layer.formats = {FormatOf(t.gate->type), FormatOf(t.up->type), FormatOf(t.down->type)};
    LODE_ASSIGN_OR_RETURN(layer.gate, load(*t.gate));
    layer.up = layer.gate;
    if (!t.fused) {
      LODE_ASSIGN_OR_RETURN(layer.up, load(*t.up));
    }
    LODE_ASSIGN_OR_RETURN(layer.down, load(*t.down));
    layer.gate_row_bytes = t.gate->row_bytes();
    layer.up_row_bytes = t.up->row_bytes();
    layer.down_row_bytes = t.down->row_bytes();
    lanes->layers_.push_back(layer);
  }
  lanes->routed_.resize(c.layers * kWindowRowsMax);
  LODE_ASSIGN_OR_RETURN(void* list, device.Allocate("expert list", sizeof(cuda::ExpertList)));
  lanes->list_ = static_cast<cuda::ExpertList*>(list);
  for (float*& results : lanes->results_) {
    const size_t floats = size_t{kWindowRowsMax} * c.experts_used * c.hidden;
    LODE_ASSIGN_OR_RETURN(void* memory, device.Allocate("expert results", floats * sizeof(float)));
    results = static_cast<float*>(memory);
  }
  return lanes;
}

void CudaListLanes::AddEntries(const Layer& l, uint32_t e, cuda::ExpertEntry entry) {
  const uint32_t width = config_.expert_width, hidden = config_.hidden;
  for (uint32_t p = 0; p < pieces; ++p) {
    entry.width_begin = width * p / pieces, entry.width_end = width * (p + 1) / pieces;
    entry.hidden_begin = hidden * p / pieces, entry.hidden_end = hidden * (p + 1) / pieces;
    entry.gate = l.gate + l.tensors.gate_row(e, entry.width_begin, width) * l.gate_row_bytes;
    entry.up = l.up + l.tensors.up_row(e, entry.width_begin, width) * l.up_row_bytes;
    entry.down = l.down + (uint64_t{e} * hidden + entry.hidden_begin) * l.down_row_bytes;
    host_list_.entries[host_list_.n_entries++] = entry;
  }
}

const cuda::ExpertList* CudaListLanes::SpreadList(uint32_t layer, uint32_t rows) {
  host_list_.n_entries = host_list_.n_slow = 0;
  for (uint32_t row = 0; row < rows; ++row) {
    for (uint32_t order = 0; order < config_.experts_used; ++order) {
      cuda::ExpertEntry entry = {};
      entry.rows = 1u << row;
      entry.order[row] = static_cast<uint8_t>(order);
      AddEntries(layers_[layer], (row * config_.experts_used + order) % config_.experts, entry);
    }
  }
  StatusOr<void*> list = device_.Allocate("expert list", sizeof(host_list_));
  if (!list.ok()) return nullptr;
  device_.Upload(*list, &host_list_, sizeof(host_list_));
  return static_cast<const cuda::ExpertList*>(*list);
}

WindowOutcome CudaListLanes::Start(uint32_t layer, const float* x, uint32_t n_rows,
                                   const RoutedRow* routed) {
  const Layer& l = layers_[layer];
  RoutedRow* rows = routed_.data() + layer * kWindowRowsMax;
  device_.Download(rows, routed, n_rows * sizeof(RoutedRow));
  std::vector<uint16_t> seen;
  cuda::ExpertList& list = host_list_;
  list.n_entries = 0;
  for (uint32_t row = 0; row < n_rows; ++row) {
    for (uint32_t order = 0; order < config_.experts_used; ++order) {
      const uint16_t e = rows[row].ids[order];
      if (std::find(seen.begin(), seen.end(), e) != seen.end()) continue;
      seen.push_back(e);
      cuda::ExpertEntry entry = {};
      for (uint32_t r = row; r < n_rows; ++r) {
        for (uint32_t o = 0; o < config_.experts_used; ++o) {
          if (rows[r].ids[o] != e) continue;
          entry.rows |= 1u << r;
          entry.order[r] = static_cast<uint8_t>(o);
        }
      }
      AddEntries(l, e, entry);
    }
  }
  list.n_slow = slow;
  device_.Upload(list_, &list, sizeof(list));
  device_.LaunchExperts(l.formats, list_, x, results_[layer & 1]);
  return device_.Outcome();
}

const float* CudaListLanes::Result(uint32_t layer, uint32_t row, uint32_t order) const {
  return results_[layer & 1] + (size_t{row} * config_.experts_used + order) * config_.hidden;
}

StatusOr<std::unique_ptr<CudaEngine>> CudaEngine::Create(const std::string& model,
                                                         const LocalEngineOptions& options) {
  std::unique_ptr<CudaEngine> e(new CudaEngine);
  LODE_ASSIGN_OR_RETURN(e->source_, ModelSource::Open(model));
  const ModelConfig& config = e->source_->config();
  LODE_ASSIGN_OR_RETURN(e->device_,
                        CudaDevice::Create(config, {.ordinal = 0, .context = options.context}));
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
  LODE_ASSIGN_OR_RETURN(e->lanes_, CudaListLanes::Load(*e->source_, *e->device_));
  LODE_ASSIGN_OR_RETURN(
      e->forward_, Forward::Create(config, e->weights_, *e->device_, *e->state_, e->ple_.get()));
  if (options.drafts) LODE_RETURN_IF_ERROR(e->LoadDrafter(options));
  return e;
}

Status CudaEngine::LoadDrafter(const LocalEngineOptions& options) {
  if (!options.mtp.empty()) {
    LODE_ASSIGN_OR_RETURN(head_, ModelSource::OpenDraftHead(options.mtp, config()));
  }
  LODE_ASSIGN_OR_RETURN(draft_weights_, DraftWeights::Load(draft_source(), *source_, weights_,
                                                           *device_, options.draft_vocabulary));
  draft_weights_.full_width_norm = options.mtp_full_width_norm;
  LODE_RETURN_IF_ERROR(device_->EnableDrafts());
  LODE_ASSIGN_OR_RETURN(draft_lanes_, CudaDraftLanes::Load(draft_source(), *device_));
  LODE_ASSIGN_OR_RETURN(drafter_, Drafter::Create(config(), draft_weights_, weights_, *device_,
                                                  state_->draft_attention(), *draft_lanes_));
  return OkStatus();
}

StatusOr<WindowOutcome> CudaEngine::Draft(std::span<const LocalDraftRow> rows, bool chained) {
  return drafter_->Step(DraftParams(rows), chained ? drafter_->wide() : forward_->wide());
}

std::vector<float> CudaEngine::draft_logits(uint32_t row) {
  std::vector<float> values(drafter_->logits_size());
  device_->Download(values.data(), drafter_->logits(row), values.size() * sizeof(float));
  return values;
}

std::vector<float> CudaEngine::draft_residual() {
  std::vector<float> values(size_t{kWindowRowsMax} * config().WideWidth());
  device_->Download(values.data(), drafter_->wide(), values.size() * sizeof(float));
  return values;
}

StatusOr<WindowOutcome> CudaEngine::Run(std::span<const LocalRow> rows) {
  LODE_ASSIGN_OR_RETURN(const StepParams params, slots_.Stage(rows, state_.get()));
  return forward_->Run(params, *lanes_, nullptr);
}

StatusOr<WindowOutcome> CudaEngine::Flush(uint32_t slot) {
  LODE_ASSIGN_OR_RETURN(const StepParams params, slots_.StageFlush(slot, state_.get()));
  return forward_->Run(params, *lanes_, nullptr);
}

std::vector<float> CudaEngine::logits(uint32_t row) {
  std::vector<float> values(config().vocab);
  device_->Download(values.data(), forward_->logits(row), values.size() * sizeof(float));
  return values;
}

}  // namespace lode::testing
