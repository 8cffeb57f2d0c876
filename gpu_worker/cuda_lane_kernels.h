// The kernels around the experts of a layer on the cuda device, and at the two ends of a window: plan
// and doorbell, bounded wait, stamps, results to the host. All launches only enqueue and may be
// captured: whatever changes between windows lies in device memory behind LaneConstants. Plain C++
// header for both compilers; called by cuda_lanes.cc and cuda_engine.cc. Protocol:
// docs/design/exchange.md; design: docs/design/cuda.md.
#pragma once

#include <cstdint>

#include "gpu_worker/lane_wait.h"
#include "gpu_worker/lane_work.h"
#include "gpu_worker/row_pick.h"
#include "kernels/cuda/window.h"

struct CUstream_st;

namespace lode::cuda {

// Moments of a layer, device clock in ns. kBell and kAnswered are 0 when the layer rang no bell.
// kPlanned to kWait is the time of the device's own lanes and the shared expert.
// kPulled: the last staged piece has come; 0 when the layer staged nothing.
enum class LayerMark : uint32_t { kBell = 0, kPlanned = 1, kWait = 2, kAnswered = 3, kPulled = 4 };
inline constexpr uint32_t kLayerMarks = 5;

// What the lanes leave behind: zeroed when a window begins, copied to the host when it ends.
struct LaneReport {
  LaneFault fault;
  uint32_t row_lookups[kWindowRowsMax][kLanes];
  uint32_t by_layer[kLayersMax][kLanes];
  uint64_t marks[kLayersMax][kLayerMarks];
  uint64_t began_ns, ended_ns;  // device clock, first kernel and last
};

// What exists twice, by layer parity. Device memory.
struct LaneParity {
  DeviceLists lists;
  const float** table;  // [row * used + order] -> result vector
  float* results;       // [row * used + order][hidden], of hits and pulls
  uint64_t* tag;        // of the job that was rung; 0: none
};

// Constants of a captured graph.
struct LaneConstants {
  LaneShape shape;
  WindowBlock* block;
  const LaneWindow* window;
  LaneReport* report;
  const LayerPlace* places;    // [layers]
  const uint16_t* residency;   // [layers][experts]
  LaneParity parity[2];
  Staging staging;             // one for both parities: a layer's copies follow the last one's use
  uint64_t* answered;          // newest tag whose wait is over, however it ended
  // The exchange segment as the device sees it (host memory, registered).
  uint8_t* exchange;
  uint64_t bell, abort_window, workers, worker_stride;  // offsets of words and lines
  uint64_t line_ack, line_status, line_error_row, line_progress;
  uint64_t jobs[2], acts[2], results[2];
  uint64_t act_row_bytes;
};

// One form of the activations for the CPU workers: rows of `bytes` (a multiple of 16) at `from`,
// `stride` apart, go to `offset` of each row's slot in the exchange.
struct ActForm {
  const uint8_t* from;
  uint64_t stride;
  uint32_t bytes, offset;
};
inline constexpr uint32_t kActFormsMax = 2;  // gate and up

// Zeroes the report and the parities' tags.
void LaunchBegin(CUstream_st* stream, const LaneConstants& c);
// The routed ids of a layer's rows, ids[row * stride + order]: in its RoutedRows, or, in benchmarks,
// in a list that replaces the router's choice.
struct RoutedIds {
  const uint16_t* ids;
  uint32_t stride;
};
inline RoutedIds IdsOf(const RoutedRow* rows) {
  return {rows->ids, sizeof(RoutedRow) / sizeof(uint16_t)};
}
// Plan, list, table, job, activations, bell, in one kernel.
void LaunchPlan(CUstream_st* stream, const LaneConstants& c, uint32_t layer, uint32_t n_rows,
                const RoutedIds& routed, const ActForm* forms, uint32_t n_forms);
// The staged pull lane: copies of one part of every listed piece, by few blocks with enough loads in
// flight to fill the link. bytes_max: of that part of any piece of the layer. Sets kPulled.
struct CopyShape {
  uint32_t blocks, threads, loads;  // loads: 16 bytes each, in flight per thread; 2, 4 or 8
};
enum class StagedPart : uint32_t { kGateUp = 0, kDown = 1 };
void LaunchStagedCopy(CUstream_st* stream, const LaneConstants& c, uint32_t layer, StagedPart part,
                      uint64_t bytes_max, const CopyShape& shape);
// Waits for every worker's acknowledgement of the layer's job, if it has one; for measurements.
void LaunchWait(CUstream_st* stream, const LaneConstants& c, uint32_t layer);
// The same as the prologue of the combination, in routing order: y = sum of weights[k] * vector k,
// then the gated shared expert. Vectors of the device's own lanes are loaded before the wait.
struct AnswerArgs {
  const RoutedRow* routed;   // of the layer
  const float* shared;       // [row][hidden]
  const float* shared_gate;  // [row]
  float* y;                  // [row][hidden]
};
void LaunchAnswer(CUstream_st* stream, const LaneConstants& c, uint32_t layer, uint32_t n_rows,
                  const AnswerArgs& args);
// stamps[index] = device clock.
void LaunchStamp(CUstream_st* stream, uint64_t* stamps, uint32_t index);

// Start-up probe: reads the listed pieces of host memory as the pull lane does. bytes: of every
// piece, a multiple of 16. sink: device memory, one word per block of kProbeBlocks.
inline constexpr uint32_t kProbeBlocks = 48;
void LaunchProbe(CUstream_st* stream, const uint8_t* const* pieces, uint32_t n, uint64_t bytes,
                 uint32_t* sink);

// Whether launches may start before the one ahead has ended (kernels/cuda/platform.h); returns what
// was set. Off for launches whose branch of a graph has just split off or come together.
bool SetLaunchOverlap(bool on);

// The end of a window. Host addresses are pinned and device-readable.
struct EndCopies {
  const WindowBlock* block;
  const float* logits;  // device, [row][vocab]
  float* host_logits;   // [row][vocab]; rows with needs_logits that want them whole
  const RowWants* wants;  // [row], pinned
  uint32_t vocab;
  const LaneReport* report;
  LaneReport* host_report;
  const RoutedRow* routed;  // device; n_routed rows of RoutedRow
  RoutedRow* host_routed;
  uint32_t n_routed;
  const uint64_t* stamps;  // null: not timed
  uint64_t* host_stamps;
  uint32_t n_stamps;
  const LaneWindow* window;
  uint32_t* arrived;        // device
  uint64_t* host_not_finite;  // WindowBlock::not_finite
  uint64_t* done;  // host: LaneWindow::sequence, stored (release) last of all
};
void LaunchEnd(CUstream_st* stream, const EndCopies& e, uint32_t n_rows);

}  // namespace lode::cuda
