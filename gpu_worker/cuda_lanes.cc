// See cuda_lanes.h.
#include "gpu_worker/cuda_lanes.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "gpu_worker/cuda_api.h"
#include "gpu_worker/cuda_buffers.h"
#include "kernels/cuda/runtime.h"
#include "shared/base/check.h"
#include "shared/base/log.h"

namespace lode {
namespace {

constexpr uint32_t kActBlocks[] = {32, 64, 256};  // by exchange form - 1
constexpr int kExitDeviceFault = 1;
constexpr size_t kLayerIds = size_t{kWindowRowsMax} * kExpertsUsedMax;
constexpr uint64_t kBenchSeed = 1;

// One expert of a node's arena: gate, up and down behind each other, each on a 64-byte border.
struct NodeStride {
  uint64_t bytes, down_at;
};
NodeStride StrideOf(const ArenaSet& arenas, uint32_t node, uint32_t layer) {
  const uint8_t* base = arenas.piece(node, layer, 0, Matrix::kGate);
  const auto at = [&](const uint8_t* p) { return static_cast<uint64_t>(p - base); };
  const uint64_t down_at = at(arenas.piece(node, layer, 0, Matrix::kDown));
  const uint64_t down = uint64_t{arenas.rows(node, Matrix::kDown).size()} *
                        arenas.shape(layer, Matrix::kDown).row_bytes;
  const uint64_t alone = (down_at + down + kArenaAlign - 1) / kArenaAlign * kArenaAlign;
  return {arenas.experts() > 1 ? at(arenas.piece(node, layer, 1, Matrix::kGate)) : alone, down_at};
}

// While it lives, launches keep strictly behind those before: for a branch's first launch and for
// the first one behind a meeting of branches.
class StrictOrder {
 public:
  StrictOrder() : before_(cuda::SetLaunchOverlap(false)) {}
  ~StrictOrder() { cuda::SetLaunchOverlap(before_); }

 private:
  const bool before_;
};

// Exchange form of a format's activations: 0 f32, 1 q32, 2 q64, 3 q256.
uint32_t FormOf(Format format) {
  const uint32_t block = Info(format).act_block_len;
  for (uint32_t i = 0; i < std::size(kActBlocks); ++i) {
    if (kActBlocks[i] == block) return i + 1;
  }
  LODE_CHECK(block == 0, "no activation form for blocks of {}", block);
  return 0;
}

}  // namespace

void DeviceFault(const Status& status) {
  spdlog::critical("device fault, this worker ends: {}", Message(status));
  spdlog::default_logger()->flush();
  _exit(kExitDeviceFault);  // destructors would only meet the same device
}

StatusOr<std::unique_ptr<CudaLanes>> CudaLanes::Create(CudaDevice& device, const ArenaSet& arenas,
                                                       uint32_t experts_used, uint8_t* exchange,
                                                       const PullOptions& pull) {
  std::unique_ptr<CudaLanes> lanes(new CudaLanes(device, arenas, experts_used, pull));
  LODE_RETURN_IF_ERROR(lanes->Allocate());
  LODE_RETURN_IF_ERROR(lanes->AllocateStaging());
  lanes->FillConstants(exchange);
  lanes->FillPlaces();
  return lanes;
}

CudaLanes::~CudaLanes() {
  for (void* memory : {static_cast<void*>(host_window_), static_cast<void*>(host_places_),
                       static_cast<void*>(host_residency_), static_cast<void*>(host_forced_[0]),
                       static_cast<void*>(host_forced_[1])}) {
    if (memory != nullptr) cuda::FreePinned(memory);
  }
  for (CUstream_st* stream : {copies_, staged_}) cuda::CloseStream(stream);
}

Status CudaLanes::Allocate() {
  const DeviceBuffers device{device_};
  const PinnedBuffers pinned;
  const size_t vectors = layout_.vectors(), layers = arenas_.layers();
  const size_t residency = layers * arenas_.experts() * sizeof(uint16_t);
  cuda::LaneWindow* window = nullptr;
  cuda::LayerPlace* places = nullptr;
  uint16_t* table = nullptr;
  LODE_RETURN_IF_ERROR(device("lanes window", sizeof(cuda::LaneWindow), &window));
  LODE_RETURN_IF_ERROR(device("lanes report", sizeof(cuda::LaneReport), &c_.report));
  LODE_RETURN_IF_ERROR(device("lanes places", layers * sizeof(cuda::LayerPlace), &places));
  LODE_RETURN_IF_ERROR(device("lanes residency", residency, &table));
  LODE_RETURN_IF_ERROR(device("lanes answered", sizeof(uint64_t), &c_.answered));
  c_.window = window;
  c_.places = places;
  c_.residency = table;
  for (cuda::LaneParity& p : c_.parity) {
    LODE_RETURN_IF_ERROR(device("lanes expert list", sizeof(cuda::ExpertList), &p.lists.list));
    LODE_RETURN_IF_ERROR(device("lanes staged list", sizeof(cuda::ExpertList), &p.lists.staged));
    LODE_RETURN_IF_ERROR(
        device("lanes staged pieces", sizeof(cuda::StagedPieces), &p.lists.pieces));
    LODE_RETURN_IF_ERROR(device("lanes result table", vectors * sizeof(float*), &p.table));
    LODE_RETURN_IF_ERROR(
        device("lanes results", vectors * arenas_.hidden() * sizeof(float), &p.results));
    LODE_RETURN_IF_ERROR(device("lanes tag", sizeof(uint64_t), &p.tag));
  }
  LODE_RETURN_IF_ERROR(pinned("lane settings", sizeof(cuda::LaneWindow), &host_window_));
  LODE_RETURN_IF_ERROR(pinned("expert places", layers * sizeof(cuda::LayerPlace), &host_places_));
  return pinned("residency", residency, &host_residency_);
}

// As many experts as fit, but no more than a window can pull.
Status CudaLanes::AllocateStaging() {
  uint64_t piece = 0;
  for (uint32_t layer = 0; layer < arenas_.layers(); ++layer) {
    for (uint32_t n = 0; n < arenas_.nodes(); ++n) {
      const NodeStride s = StrideOf(arenas_, n, layer);
      piece = std::max(piece, s.bytes);
    }
  }
  const uint64_t expert = piece * arenas_.nodes();
  const uint64_t experts =
      expert == 0 ? 0 : std::min<uint64_t>(pull_.staging_bytes / expert, layout_.vectors());
  if (experts == 0) return OkStatus();
  LODE_ASSIGN_OR_RETURN(void* memory, device_.Allocate("pull staging", experts * expert));
  c_.staging = {static_cast<uint8_t*>(memory), piece, static_cast<uint32_t>(experts), 0};
  LODE_ASSIGN_OR_RETURN(copies_, cuda::OpenUrgentStream());
  LODE_ASSIGN_OR_RETURN(staged_, cuda::OpenUrgentStream());
  return OkStatus();
}

void CudaLanes::FillConstants(uint8_t* exchange) {
  c_.shape = {layout_.shape.experts_used, arenas_.hidden(),  arenas_.width(),
              arenas_.nodes(),            arenas_.experts(), arenas_.layers()};
  c_.block = device_.window_block();
  c_.exchange = exchange;
  c_.bell = offsetof(ExchangeHeader, bell) + offsetof(WaitWord, value);
  c_.abort_window = offsetof(ExchangeHeader, abort_window);
  c_.workers = offsetof(ExchangeHeader, workers);
  c_.worker_stride = sizeof(WorkerLine);
  c_.line_ack = offsetof(WorkerLine, ack) + offsetof(WaitWord, value);
  c_.line_status = offsetof(WorkerLine, status);
  c_.line_error_row = offsetof(WorkerLine, error_row);
  c_.line_progress = offsetof(WorkerLine, progress);
  for (uint32_t parity = 0; parity < 2; ++parity) {
    c_.jobs[parity] = offsetof(ExchangeHeader, jobs) + parity * sizeof(ExpertJob);
    c_.acts[parity] = layout_.acts_offset(parity);
    c_.results[parity] = layout_.result_offset(parity);
  }
  c_.act_row_bytes = layout_.act_row_bytes();
}

// Where experts lie in the arenas never changes; slots are filled in by UploadTables.
void CudaLanes::FillPlaces() {
  for (uint32_t layer = 0; layer < arenas_.layers(); ++layer) {
    cuda::LayerPlace& place = host_places_[layer];
    place.slot_bytes = arenas_.slot_bytes(layer);
    place.up_offset = arenas_.shape(layer, Matrix::kUp).slot_offset;
    place.down_offset = arenas_.shape(layer, Matrix::kDown).slot_offset;
    for (const Matrix m : {Matrix::kGate, Matrix::kUp})
      place.act_forms |= 1u << FormOf(arenas_.shape(layer, m).format);
    for (uint32_t n = 0; n < arenas_.nodes(); ++n) {
      cuda::NodePlace& node = place.nodes[n];
      const RowRange width = arenas_.rows(n, Matrix::kGate);
      const RowRange hidden = arenas_.rows(n, Matrix::kDown);
      node.base = arenas_.piece(n, layer, 0, Matrix::kGate);
      node.up_offset =
          static_cast<uint64_t>(arenas_.piece(n, layer, 0, Matrix::kUp) - node.base);
      const NodeStride stride = StrideOf(arenas_, n, layer);
      node.stride = stride.bytes;
      node.down_offset = stride.down_at;
      node.width_begin = width.begin;
      node.width_end = width.end;
      node.hidden_begin = hidden.begin;
      node.hidden_end = hidden.end;
    }
  }
}

void CudaLanes::UploadTables(const ExpertTier& tier) {
  if (tier.table_version() == table_version_) return;
  table_version_ = tier.table_version();
  for (uint32_t layer = 0; layer < arenas_.layers(); ++layer) {
    host_places_[layer].slots = tier.slot(layer, 0);
    std::memcpy(host_residency_ + size_t{layer} * arenas_.experts(), tier.residency(layer),
                arenas_.experts() * sizeof(uint16_t));
  }
  CUstream_st* const stream = device_.stream();
  cuda::CopyAsync(const_cast<cuda::LayerPlace*>(c_.places), host_places_,
                     arenas_.layers() * sizeof(cuda::LayerPlace), stream);
  cuda::CopyAsync(const_cast<uint16_t*>(c_.residency), host_residency_,
                     size_t{arenas_.layers()} * arenas_.experts() * sizeof(uint16_t), stream);
}

uint64_t CudaLanes::expert_bytes() const {
  uint64_t bytes = 0;
  for (uint32_t layer = 0; layer < arenas_.layers(); ++layer) bytes += arenas_.weight_bytes(layer);
  return bytes / arenas_.layers();
}

Status CudaLanes::ForceRouting() {
  LODE_ASSIGN_OR_RETURN(void* device, device_.Allocate("lanes forced routing", ForcedBytes()));
  forced_ = static_cast<uint16_t*>(device);
  for (uint16_t*& host : host_forced_) {
    LODE_ASSIGN_OR_RETURN(void* memory, cuda::AllocateZeroedPinned(ForcedBytes(), "forced routing"));
    host = static_cast<uint16_t*>(memory);
  }
  bench_.emplace(arenas_.experts(), c_.shape.experts_used, kBenchSeed);
  DrawForced();
  return OkStatus();
}

size_t CudaLanes::ForcedBytes() const {
  return arenas_.layers() * kLayerIds * sizeof(uint16_t);
}

void CudaLanes::SendForced() {
  if (!bench_) return;
  std::swap(host_forced_[0], host_forced_[1]);
  cuda::CopyAsync(forced_, host_forced_[0], ForcedBytes(), device_.stream());
}

// For as many rows as a window may have: a row depends on those before it only.
void CudaLanes::DrawForced() {
  for (uint32_t layer = 0; bench_ && layer < arenas_.layers(); ++layer)
    bench_->Draw(kWindowRowsMax, kExpertsUsedMax, host_forced_[1] + layer * kLayerIds);
}

void CudaLanes::PutForced(RoutedRow* routed, uint32_t n_rows) const {
  for (uint32_t layer = 0; bench_ && layer < arenas_.layers(); ++layer) {
    for (uint32_t row = 0; row < n_rows; ++row) {
      std::copy_n(host_forced_[0] + layer * kLayerIds + row * kExpertsUsedMax, c_.shape.experts_used,
                  routed[layer * kWindowRowsMax + row].ids);
    }
  }
}

void CudaLanes::EnqueueBegin() {
  cuda::CopyAsync(const_cast<cuda::LaneWindow*>(c_.window), host_window_,
                     sizeof(cuda::LaneWindow), device_.stream());
  cuda::LaunchBegin(device_.stream(), c_);
}

WindowOutcome CudaLanes::Start(uint32_t layer, const float* x, uint32_t n_rows,
                               const RoutedRow* routed) {
  n_rows_ = n_rows;
  cuda::ActForm forms[cuda::kActFormsMax] = {};
  uint32_t n_forms = 0, done = 0;
  for (const Matrix m : {Matrix::kGate, Matrix::kUp}) {
    const Format format = arenas_.shape(layer, m).format;
    const uint32_t form = FormOf(format);
    if (done >> form & 1) continue;
    done |= 1u << form;
    cuda::ActForm& f = forms[n_forms++];
    f.offset = static_cast<uint32_t>(layout_.form_offset(form));
    if (form == 0) {
      f.from = reinterpret_cast<const uint8_t*>(x);
      f.stride = f.bytes = static_cast<uint32_t>(arenas_.hidden() * sizeof(float));
    } else {
      size_t stride = 0;
      f.from = device_.QuantisedInput(format, x, &stride);
      f.stride = stride;
      f.bytes = static_cast<uint32_t>(ActLayout{arenas_.hidden(), kActBlocks[form - 1]}.bytes());
    }
  }
  const cuda::RoutedIds ids =
      bench_ ? cuda::RoutedIds{forced_ + layer * kLayerIds, kExpertsUsedMax}
             : cuda::IdsOf(routed);
  cuda::LaunchPlan(device_.stream(), c_, layer, n_rows, ids, forms, n_forms);
  const cuda::LaneParity& p = c_.parity[layer & 1];
  if (c_.staging.experts > 0) RecordStaged(layer, x);
  device_.LaunchExperts(FormatsOf(layer), p.lists.list, x, p.results);
  return {};
}

cuda::ExpertFormats CudaLanes::FormatsOf(uint32_t layer) const {
  return {arenas_.shape(layer, Matrix::kGate).format, arenas_.shape(layer, Matrix::kUp).format,
          arenas_.shape(layer, Matrix::kDown).format};
}

uint32_t CudaLanes::branch_nodes() const {
  uint32_t nodes = 0;
  if (c_.staging.experts == 0) return nodes;
  for (uint32_t layer = 0; layer < arenas_.layers(); ++layer) {
    const cuda::ExpertFormats f = FormatsOf(layer);
    nodes += f.gate == f.up ? 5 : 6;  // two copies; gate and up together or apart, hidden, down
  }
  return nodes;
}

// Beside the trunk (hits, shared expert):
//
//   copies   gate and up of all | down of all
//   staged                      | gate, up    | down
//
// so the link is busy from the plan to the last byte, and what comes behind it is one product.
// Combine brings the branches back.
void CudaLanes::RecordStaged(uint32_t layer, const float* x) {
  uint64_t bytes[2] = {0, 0};
  for (uint32_t n = 0; n < arenas_.nodes(); ++n) {
    const NodeStride s = StrideOf(arenas_, n, layer);
    bytes[0] = std::max(bytes[0], s.down_at);
    bytes[1] = std::max(bytes[1], s.bytes - s.down_at);
  }
  const cuda::LaneParity& p = c_.parity[layer & 1];
  cuda::Follow(device_.stream(), copies_);
  {
    const StrictOrder strict;
    cuda::LaunchStagedCopy(copies_, c_, layer, cuda::StagedPart::kGateUp, bytes[0], pull_.copy);
  }
  cuda::Follow(copies_, staged_);
  // Starts as the blocks of the first one end, so that the link has no gap.
  cuda::LaunchStagedCopy(copies_, c_, layer, cuda::StagedPart::kDown, bytes[1], pull_.copy);
  const StrictOrder strict;
  device_.LaunchExperts(FormatsOf(layer), p.lists.staged, x, p.results, staged_,
                        [this] { cuda::Follow(copies_, staged_); });
}

// The wait is the prologue of the combination.
WindowOutcome CudaLanes::Finish(uint32_t) { return {}; }

bool CudaLanes::Combine(uint32_t layer, const RoutedRow* routed, const float* shared, float* y) {
  device_.WillWrite(y);
  // Also without a branch that comes back: the next layer's mixer reads its state, folded behind this
  // layer's hits, before the launch ahead of it has ended. Somewhere in between one must wait for all.
  const StrictOrder strict;
  if (c_.staging.experts > 0) cuda::Follow(staged_, device_.stream());
  cuda::LaunchAnswer(device_.stream(), c_, layer, n_rows_,
                     {routed, shared, device_.shared_gate(), y});
  return true;
}

const float* CudaLanes::Result(uint32_t, uint32_t, uint32_t) const {
  LODE_CHECK(false, "the cuda lanes keep their results' addresses on the device");
}

}  // namespace lode
