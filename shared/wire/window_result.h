// GPU worker -> daemon: what a window did. A POD in the result ring of the window segment. Steps 9 and 10.
#pragma once

#include <cstdint>
#include <type_traits>

#include "shared/base/limits.h"

namespace lode {

enum class Lane : uint32_t { kHit = 0, kPull = 1, kCpu = 2 };
inline constexpr uint32_t kLanes = 3;

enum class WindowStatus : uint32_t {
  kOk = 0,
  kAborted = 1,        // the daemon's abort word, or a bounded wait ended: nothing committed; `error` says who and where
  kNotFinite = 2,      // a non-finite activation: error.layer and error.row name it; that row's sequence must fail
  kBadPlan = 3,        // plan refused: error.detail = PlanError
};

enum class Stage : uint32_t {
  kEmbed, kHyper, kDeltaNet, kAttention, kPle, kRouter, kHit, kPull, kShared, kCpuWait, kCombine, kHead, kSample, kDraft,
  kCount,
};
inline constexpr uint32_t kStages = static_cast<uint32_t>(Stage::kCount);

struct TopLogprob { int32_t token; float logprob; };

struct RowResult {
  int32_t token;            // the row's own pick; -1 when it picked none
  float logprob;            // of `token`, natural log, before temperature and filters
  float target_logprob;     // of RowPlan::target
  int32_t argmax;           // highest logit, lowest id on ties; -1 without logits
  uint32_t n_top;
  uint32_t lookups[kLanes]; // this row's routed (layer, expert) pairs by lane
  uint64_t logits_hash;     // XXH3-64 of the row's logits (vocab floats); 0 when not asked
  TopLogprob top[kLogprobsMax];  // falling logit, then rising id
};

struct WindowError {
  uint32_t layer, row, worker, detail;
};

struct WindowResult {
  uint64_t window;
  uint32_t generation;
  uint32_t device;
  WindowStatus status;
  uint32_t n_rows;
  WindowError error;
  RowResult rows[kWindowRowsMax];
  // Per WindowPlan::seqs entry.
  uint32_t proposed_accepts[kWindowRowsMax];           // rows of the sequence that hold under "draft equals the row before's pick"
  uint32_t n_drafts[kWindowRowsMax];
  int32_t drafts[kWindowRowsMax][kDraftsMax];          // guesses for the next window
  float draft_p[kWindowRowsMax][kDraftsMax];
  // Distinct (layer, expert) pairs of the window by lane, and bytes of weights each lane read.
  uint64_t lookups[kLanes];
  uint64_t bytes[kLanes];
  uint64_t lane_ns[kLanes];   // busy time of each lane, summed over layers
  uint64_t device_ns;         // first to last kernel of the window's graph by the device's clock; 0 on the cpu device
  uint64_t answer_ns;         // of it bell to answer, over all layers: the CPU lane and what ringing costs
  uint16_t layer_lookups[kLayersMax][kLanes];  // `lookups` of each layer
  uint64_t window_ns;         // plan taken -> result published, drafting included
  uint64_t draft_ns;          // of it behind the picks: catching up and guessing
  uint32_t draft_passes;      // of the draft head: 1 for catching up and first guesses, 1 for each further depth
  uint32_t reserved;
  uint64_t stage_ns[kStages];
  uint64_t tier_swaps, tier_upload_bytes;  // policy work done at this window's border
  uint64_t resident_experts, resident_bytes;
};
static_assert(std::is_trivially_copyable_v<WindowResult>);

// Routed ids of a traced window, by falling probability; layers beyond the model's are not written.
struct RoutingTrace {
  uint16_t ids[kWindowRowsMax][kLayersMax][kExpertsUsedMax];
};

}  // namespace lode
